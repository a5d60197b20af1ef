"""The RL stage with its trainer on a mesh, its engine on one device."""

import dataclasses

import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.pipeline import reinforce, stages
from composer_jax.pipeline import spec as specs
from composer_jax.telemetry import writer as writers
from tests.pipeline import runs, sync_equality_test

spec = sync_equality_test.spec
tokenizer = sync_equality_test.tokenizer

MESH = specs.Mesh(replica=1, fsdp=2, context=2)


def on_mesh(spec):
  return dataclasses.replace(
    spec,
    layout='hsdp',
    rl=dataclasses.replace(spec.rl, mesh=MESH, steps=2, decay_steps=1),
  )


def test_its_mesh_is_of_the_first_devices(spec, tmp_path):
  job = runs.job(on_mesh(spec), tmp_path, writer=None)
  placed = job.rl_placement
  assert dict(placed.mesh.shape) == dataclasses.asdict(MESH)
  assert [d.id for d in placed.mesh.devices.flat] == [0, 1, 2, 3]
  assert placed.expert_shards == 4
  assert placed.plan.sequence_order == 'zigzag'
  # The packing balances what each block of rows holds.
  shape = job.spec.batch_shape()
  places = placed.batch.addressable_devices_indices_map((shape.rows, 4))
  blocks = {(i.start, i.stop) for i, _ in places.values()}
  half = shape.rows // 2
  assert shape.shards == 2 and blocks == {(0, half), (half, shape.rows)}
  assert job.single.plan is None
  assert placed.lines[:2] == (
    'mesh: replica 1, fsdp 2, context 2; layout hsdp',
    'tokens of a row: zigzag over the context shards',
  )
  assert placed.lines[2].startswith('transport ')


@pytest.mark.slow
def test_a_trainer_on_a_mesh_agrees_with_the_engine(spec, tokenizer, tmp_path):
  """The default gate stops a step whose mismatch is above rounding."""
  mesh_spec = on_mesh(spec)
  assert mesh_spec.rl.gate.action == 'stop'
  with sync_equality_test.opened(tmp_path, mesh_spec, tokenizer) as job:
    before = trees.flatten_names(stages.load_variables(job, 'sft', job.single))
    reinforce.reinforce(job)
    variables = trees.flatten_names(
      stages.load_variables(job, 'rl', job.single)
    )
  rows = [r for r in writers.read(tmp_path) if r['stage'] == 'rl']
  assert [r['step'] for r in rows] == [1, 2]
  for row in rows:
    assert row['tokens_exact'] > 0
    assert row['mismatch_kl_exact'] < 1e-9 < row['grad_norm']
  assert any(np.any(before[name] != variables[name]) for name in before)
