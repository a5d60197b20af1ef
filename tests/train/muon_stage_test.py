"""A stage with Muon learns the same on every mesh, with all of its options.

The tests run the programs of `loop.run`, without checkpoints.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from composer_jax.optim import groups
from composer_jax.optim.muon import plan as muon_plan
from composer_jax.parallel import layouts, topology
from composer_jax.plan import muon_model
from composer_jax.plan.hlo import overlap
from composer_jax.train import loop, placement
from tests.train import loop_test

MODEL = dataclasses.replace(loop_test.MODEL, num_dense_layers=0)
# Below the largest logits of initial weights, so that QK-clip acts at once.
TAU = 0.01
# Options of Muon with which all meshes give the same results.
VARIANTS = groups.MuonChoices(
  qk_clip=TAU,
  roles=(('router', 'embed->route'), ('query', 'embed->heads,head_dim')),
)
PLAIN = groups.MuonChoices()

CASES = [
  *itertools.product(
    (PLAIN, VARIANTS), ((2, 2, 2), (1, 4, 2)), ('hsdp', 'data_parallel')
  )
]


def batch(seed):
  """Returns four rows, one for each batch shard of the meshes."""
  halves = [loop_test.random_batch(2 * seed + i) for i in (0, 1)]
  return jax.tree.map(lambda *rows: np.concatenate(rows), *halves)


class Run(NamedTuple):
  """Metrics, plan and compiled step of a stage."""

  metrics: list[Any]
  plan: muon_plan.MuonPlan
  text: str

  @property
  def losses(self):
    return [float(step.loss.loss) for step in self.metrics]


def train(choices, mesh=(1, 1, 1), layout='hsdp', batches=range(4)):
  options = dataclasses.replace(
    loop_test.OPTIONS,
    batch_size=4,
    optimizer=dataclasses.replace(loop_test.OPTIONS.optimizer, muon=choices),
  )
  placed = placement.build(
    MODEL,
    mesh=topology.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))]),
    layout=layouts.BY_NAME[layout],
  )
  programs = loop.make_programs(options, MODEL, placed)
  state = programs.first_state(loop_test.initial_variables(MODEL))
  rows = [placed.put(batch(seed)) for seed in batches]
  # For a few steps compiling takes most of the time.
  step = programs.step.lower(state, rows[0]).compile(
    {'xla_backend_optimization_level': 0}
  )
  metrics = []
  for row in rows:
    state, actual = step(state, row)
    metrics.append(jax.device_get(actual))
  return Run(metrics, programs.muon, step.as_text())


# Compiled once for all comparisons.
alone = functools.cache(train)


def collectives_of_muon(text):
  """Returns {kind: (number, bytes into a device)} of a compiled step."""
  actual = {}
  for collective in overlap.read(text, dynamic_trips=1).collectives:
    if '/muon/' in collective.scope:
      number, size = actual.get(collective.kind, (0, 0))
      actual[collective.kind] = (
        number + collective.count,
        size + collective.count * collective.bytes,
      )
  return actual


def planned(plan):
  actual = {}
  for group in plan.groups:
    for kind, number, size in muon_model.collectives(group):
      before = actual.get(kind, (0, 0))
      actual[kind] = before[0] + number, before[1] + size
  return actual


@pytest.mark.slow
@pytest.mark.parametrize('choices, mesh, layout', CASES)
def test_a_mesh_learns_what_one_device_learns(choices, mesh, layout):
  actual, expected = train(choices, mesh, layout), alone(choices)
  # Sums of the forward pass run in another order.
  np.testing.assert_allclose(actual.losses, expected.losses, atol=1e-4)
  for metrics, expected_metrics in zip(
    actual.metrics, expected.metrics, strict=True
  ):
    np.testing.assert_allclose(
      metrics.update.update_norm, expected_metrics.update.update_norm, rtol=1e-3
    )
    if choices.qk_clip:
      np.testing.assert_allclose(
        metrics.loss.max_logits_LN,
        expected_metrics.loss.max_logits_LN,
        rtol=1e-2,
      )
    else:
      assert metrics.loss.max_logits_LN is None
  assert actual.losses[-1] < actual.losses[0]
  assert collectives_of_muon(actual.text) == planned(actual.plan)
  assert actual.plan.devices == 8 and not collectives_of_muon(expected.text)


@pytest.mark.slow
def test_logits_are_held_where_they_are_clipped():
  steps = alone(VARIANTS).metrics
  (first, *_, last) = (step.loss.max_logits_LN for step in steps)
  attention = MODEL.attention
  assert first.shape == (MODEL.num_layers, attention.num_heads)
  assert first.min() > 2 * TAU
  # The logits belong to another batch and to weights updated after the clip.
  assert last.max() < 2 * TAU
