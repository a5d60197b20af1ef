"""Which policy is the teacher of a run that resumes from a checkpoint."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.models import decoder
from composer_jax.pipeline import reinforce
from composer_jax.telemetry import writer as writers
from composer_jax.train.checkpoints import export, manager
from configs.composer import tiny
from tests.pipeline import runs


def spec_of(teacher):
  config = tiny.get_config('smoke')
  config.mesh = dict(replica=1, fsdp=1, context=1)
  config.hints.loss.teacher = teacher
  return wiring.spec_of(config.to_dict())


def moved(tree, by):
  return jax.tree.map(lambda x: x + by, tree)


@pytest.mark.parametrize('teacher', ['frozen', 'ema'])
def test_a_resumed_run_has_the_teacher_that_it_had(teacher, tmp_path):
  """A frozen teacher is the SFT policy, not that of the checkpoint."""
  spec = spec_of(teacher)
  shapes, _ = decoder.abstract(spec.model)
  rng = np.random.default_rng(0)
  sft = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes
  )
  export.save(tmp_path, 'sft', 1, sft)
  with (
    writers.Writer(tmp_path, tensorboard=False) as writer,
    contextlib.closing(
      manager.Checkpoints(tmp_path / 'c', keep=2)
    ) as checkpoints,
  ):
    job = runs.job(spec, tmp_path, writer)
    began = reinforce.prepare(job, checkpoints).state
    followed = moved(began.teacher, 0.25)
    later = dataclasses.replace(
      began,
      step=began.step + 1,
      params=moved(began.params, 1.0),
      teacher=followed,
    )
    checkpoints.save(1, later)
    checkpoints.wait()
    start = reinforce.prepare(job, checkpoints)
  assert int(start.state.step) == 1
  jax.tree.map(np.testing.assert_array_equal, start.state.params, later.params)
  if teacher == 'ema':
    assert start.teacher is None and followed
    expected, read = followed, start.state.teacher
  else:
    assert not followed
    as_served = jax.tree.map(
      lambda x: x.astype(jnp.bfloat16).astype(x.dtype), sft['params']
    )
    expected, read = as_served, start.teacher['params']
  jax.tree.map(np.testing.assert_array_equal, read, expected)
