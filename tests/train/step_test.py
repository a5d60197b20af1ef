"""Microbatches give the loss and gradient of their batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.core import batches
from composer_jax.models import placement
from composer_jax.parallel import layouts, shardings, topology
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step
from tests import compiling
from tests.parallel import collectives
from tests.rl import replayed

B, T = 16, 8
# Each microbatch has its own balancing loss; the z-loss adds up.
MODEL = dataclasses.replace(
  replayed.CONFIGS['gqa_softmax'],
  moe=dataclasses.replace(
    replayed.CONFIGS['gqa_softmax'].moe, router='sigmoid', z_loss_weight=0.1
  ),
)
# Plain gradient descent, which adds the negative gradient to the masters.
OPTIMIZER = optax.sgd(1.0)
BIAS_RATE = 0.125


def make_batch():
  """Returns rows of two documents with uneven weights; every 4th is padding."""
  rng = np.random.default_rng(0)
  segments_BT = np.tile(np.array([1, 1, 1, 2, 2, 2, 2, 0], np.int32), (B, 1))
  segments_BT[3::4] = 0
  segments_BT[4, 2:] = 0
  positions_BT = np.tile(np.array([0, 1, 2, 0, 1, 2, 3, 0], np.int32), (B, 1))
  weights_BT = rng.uniform(0, 3, (B, T)) * (segments_BT > 0)
  weights_BT[::2] *= 0.01
  return batches.LMBatch(
    tokens_BT=rng.integers(0, replayed.V, (B, T), dtype=np.int32),
    segment_ids_BT=segments_BT,
    positions_BT=positions_BT,
    loss_weights_BT=(weights_BT * (positions_BT > 0)).astype(np.float32),
  )


@functools.cache
def step_of(accumulate, shape=(1, 1, 1), model=MODEL):
  """Returns (state after, metrics) of one step on a mesh."""
  run, arguments = program(accumulate, shape, model)
  return jax.device_get(run(*arguments))


def program(accumulate, shape, model):
  """Returns the jitted step, and its state and batch."""
  num_devices = int(np.prod(shape))
  mesh = topology.make_mesh(*shape, devices=jax.devices()[:num_devices])
  where = dict(layout=layouts.TRAIN, mesh=mesh)
  places = placement.variable_shardings(model, **where)
  state = train_state.create(
    jax.device_put(replayed.variables(model), places), OPTIMIZER
  )
  step = train_step.make(
    model,
    OPTIMIZER,
    plan=placement.exchange_plan(model, **where),
    bias_rate=BIAS_RATE,
    accumulate=accumulate,
    places=places['params'],
  )
  batch = jax.device_put(make_batch(), shardings.tokens(**where))
  run = jax.jit(step, donate_argnums=0, compiler_options=compiling.QUICKLY)
  return run, (state, batch)


def assert_equal_steps(have, want):
  (after, metrics), (want_after, want_metrics) = have, want
  before = replayed.variables(MODEL)
  # Sums run in another order: some units of the last place of the largest term.
  jax.tree.map(
    lambda a, b, old: np.testing.assert_allclose(
      a - old, b - old, rtol=0, atol=5e-6 * np.abs(b - old).max() + 1e-6
    ),
    after.params,
    want_after.params,
    before['params'],
  )
  stats, want_stats = metrics.loss, want_metrics.loss
  for name in ('loss', 'z_loss', 'loss_weight'):
    np.testing.assert_allclose(
      getattr(stats, name), getattr(want_stats, name), rtol=2e-6, err_msg=name
    )
  np.testing.assert_array_equal(stats.load_ME, want_stats.load_ME)
  assert stats.num_tokens == want_stats.num_tokens
  # Updated once, by the load of the whole batch.
  jax.tree.map(
    np.testing.assert_array_equal,
    after.selection_bias,
    want_after.selection_bias,
  )
  assert after.step == want_after.step == 1


@pytest.mark.parametrize(
  'accumulate', [pytest.param(2, marks=pytest.mark.slow), 4]
)
def test_microbatches_make_the_step_of_the_batch(accumulate):
  assert_equal_steps(step_of(accumulate), step_of(1))


@pytest.mark.slow
def test_microbatches_on_a_mesh_make_the_step_of_the_batch():
  assert_equal_steps(step_of(4, (2, 2, 2)), step_of(1))


def test_the_bias_moves_by_its_rate_once():
  after, metrics = step_of(4)
  load_ME = np.asarray(metrics.loss.load_ME, np.float32)
  sign_ME = np.sign(load_ME.mean(-1, keepdims=True) - load_ME)
  (bias_ME,) = jax.tree.leaves(after.selection_bias)
  (before_ME,) = jax.tree.leaves(replayed.variables(MODEL)['selection_bias'])
  np.testing.assert_allclose(
    bias_ME - before_ME, BIAS_RATE * sign_ME, atol=1e-6
  )


def test_rows_are_divided_where_they_lie():
  where = dict(layout=layouts.TRAIN, mesh=topology.make_mesh(2, 2, 2))
  batch = make_batch()
  places = jax.tree.map(lambda _: shardings.tokens(**where), batch)
  plan = placement.exchange_plan(MODEL, **where)
  split = jax.jit(lambda batch: train_step.split(batch, 2, plan))
  compiled = split.lower(jax.device_put(batch, places)).compile()
  assert not collectives.read(compiled.as_text())
  microbatches = compiled(jax.device_put(batch, places))
  for i in range(2):
    np.testing.assert_array_equal(
      microbatches.tokens_BT[i], batch.tokens_BT[i::2]
    )


@pytest.mark.parametrize(
  'rows, accumulate, shards, nearest',
  [(12, 8, 1, '8 or 16'), (9, 2, 2, '8 or 12'), (1, 4, 2, '8')],
)
def test_rows_that_do_not_divide_are_refused(rows, accumulate, shards, nearest):
  with pytest.raises(
    ValueError,
    match=rf'cpt.batch_size \({rows}\) .*accumulate \({accumulate}\).*'
    rf'\({shards}\) .*; the nearest that does is {nearest}\.',
  ):
    train_step.check_rows(rows, accumulate, shards, 'cpt.batch_size')


def test_a_batch_that_does_not_divide_is_refused():
  batch = jax.tree.map(jnp.asarray, make_batch())
  with pytest.raises(ValueError, match=r'batch_size \(16\) .* is 15'):
    train_step.split(batch, 5, None)
