"""A step that overflows its buffers changes nothing and is repeated."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.core import batches
from composer_jax.parallel import exchange, topology
from composer_jax.train import buckets, lm_loss, placement
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step
from tests.rl import replayed

MEAN = 100
BUCKETS = (1.0, 1.25, 2.0)
WORST = 400


def rows_of(bucket):
  return WORST if bucket is None else int(MEAN * bucket)


def batch_of(*needs, index=0):
  """Returns a batch whose layers' exchanges need these numbers of rows."""
  needs_BT = np.array([needs], np.int32)
  zeros = np.zeros_like(needs_BT)
  return batches.LMBatch(
    tokens_BT=needs_BT,
    segment_ids_BT=zeros,
    positions_BT=zeros + index,
    loss_weights_BT=zeros.astype(np.float32),
  )


def fresh():
  return train_state.TrainState(
    step=jnp.int32(0),
    params={'x': jnp.arange(4.0)},
    selection_bias={},
    opt_state=jnp.ones(3),
  )


class Programs:
  """Compiled steps of a model in which every batch has an effect of its own.

  An exchange that overflows poisons the state. What later layers need is then
  unknown: here zero rows.
  """

  def __init__(self):
    self.made = []
    self.calls = []
    self._jitted = {}

  def __call__(self, bucket):
    if bucket not in self._jitted:
      self.made.append(bucket)
      step = functools.partial(self._step, rows_of(bucket))
      self._jitted[bucket] = jax.jit(step, donate_argnums=0)

    def call(state, batch, is_due):
      self.calls.append((bucket, int(batch.positions_BT[0, 0])))
      return self._jitted[bucket](state, batch, is_due)

    return call

  @staticmethod
  def _step(capacity, state, batch, is_due):
    before, needed_M = state, batch.tokens_BT[0]
    over_M = jnp.cumsum(needed_M > capacity)
    needed_M = jnp.where(over_M - (needed_M > capacity) > 0, 0, needed_M)
    poison = jnp.where(over_M[-1] > 0, jnp.nan, 0.0)
    index = batch.positions_BT[0, 0]
    state = state.replace(
      step=state.step + 1,
      params=jax.tree.map(lambda x: x * 1.5 + index + poison, state.params),
      opt_state=state.opt_state + poison,
    )
    nothing = jnp.float32(0)
    stats = lm_loss.LossStats(
      loss=index + poison,
      aux_loss=nothing,
      z_loss=nothing,
      loss_weight=nothing,
      num_tokens=jnp.int32(0),
      load_ME=jnp.zeros((1, 1), jnp.int32),
      exchanged=exchange.ExchangeStats(
        needed_rows=needed_M, capacity=jnp.full_like(needed_M, capacity)
      ),
    )
    update = train_step.UpdateStats(grad_norm=nothing, update_norm=nothing)
    is_done = is_due & exchange.fits(stats.exchanged)
    choose = lambda new, old: jnp.where(is_done, new, old)
    state = jax.tree.map(choose, state, before)
    return state, train_step.StepMetrics(loss=stats, update=update), is_done


def run(needs, bucket_sizes=BUCKETS, size=None):
  """Trains on batches with these needs.

  Returns:
    State, losses, programs and retries.
  """
  programs, retries, losses = Programs(), [], []
  size = size or buckets.BucketSize(bucket_sizes, rows_of)
  step = buckets.BucketedStep(programs, size, retries.append)
  state, sent = fresh(), []
  for index, layers in enumerate(needs):
    state, sent_step = step(state, batch_of(*layers, index=index), index + 1)
    sent.append(sent_step)
  state = step.settle(state)
  losses = [float(s.metrics.loss.loss) for s in sent]
  return jax.device_get(state), losses, programs, retries


ADVERSARIAL = [
  [[90, 90], [90, 399], [90, 90]],  # between steps that fit
  [[399, 90], [399, 90], [399, 90]],  # one after another, the first too
  [[90, 90], [90, 90], [399, 90]],  # the last
  [[201, 400]],  # a second overflow hides behind the first
]


@pytest.mark.parametrize('needs', ADVERSARIAL)
def test_overflow_leaves_the_state_of_the_worst_case(needs):
  state, losses, _, retries = run(needs)
  want, want_losses, _, _ = run(needs, bucket_sizes=())
  jax.tree.map(np.testing.assert_array_equal, state, want)
  assert losses == want_losses == list(range(len(needs)))
  assert retries and all(r.needed > r.capacity for r in retries)


def test_the_repeated_step_takes_the_smallest_bucket_that_fits():
  _, _, programs, retries = run(
    [[90], [301], [90]], bucket_sizes=(1.0, 3.0, 3.5)
  )
  assert not retries  # It begins with the largest below the worst case.
  assert programs.calls == [(3.5, 0), (3.5, 1), (3.5, 2)]
  _, _, programs, (retry,) = run([[90], [101], [90]], bucket_sizes=(1.0,))
  # The third was dispatched before the overflow of the second was read.
  assert programs.calls == [(1.0, 0), (1.0, 1), (1.0, 2), (None, 1), (1.0, 2)]
  assert retry == buckets.Retry(
    step=2, needed=101, capacity=100, bucket=1.0, next_bucket=None
  )
  assert str(retry) == (
    'step 2: 101 rows did not fit 100 of the 1x bucket; repeated with '
    'worst-case'
  )


def test_buckets_shrink_late_and_grow_at_once():
  size = buckets.BucketSize(BUCKETS, rows_of)
  chosen = []
  for needed in [99] * 45 + [120] + [99] * 21:
    chosen.append(size.now)
    size.saw(needed)
  assert chosen == [2.0] * 20 + [1.0] * 26 + [1.25] * 20 + [1.0]


@pytest.mark.parametrize('stop', [5, 22, 25, 30])
def test_a_run_that_goes_on_takes_the_buckets_of_one_that_never_stopped(stop):
  needs = [[99]] * 23 + [[399]] + [[120]] * 30

  def calls(size, needs):
    return [bucket for bucket, _ in run(needs, size=size)[2].calls]

  size = buckets.BucketSize(BUCKETS, rows_of)
  calls(
    size, needs[:stop]
  )  # A checkpoint settles the steps that are still running.
  state = json.loads(json.dumps(size.get_state()))
  again = buckets.BucketSize(BUCKETS, rows_of)
  again.set_state(state)
  assert calls(again, needs[stop:]) == calls(size, needs[stop:])
  assert size.get_state() == again.get_state()
  # A saved state of other buckets or another mesh is ignored.
  other_size = buckets.BucketSize((1.0, 3.0), rows_of)
  before = other_size.get_state()
  other_size.set_state(state)
  assert other_size.get_state() == before


def test_programs_are_made_when_they_are_needed():
  _, _, programs, _ = run([[90]] * 3)
  assert programs.made == [2.0]


def test_more_than_the_worst_case_is_a_bug_that_stops():
  with pytest.raises(AssertionError, match='401 rows exceed .*400'):
    run([[401]])


def test_without_buckets_a_step_is_called_as_it_is():
  def program(bucket):
    assert bucket is None
    return lambda state, batch: (state + 1, batch)

  step = buckets.BucketedStep(program, None, print)
  state, sent = step(1, 'metrics', 1)
  assert (step.settle(state), sent.metrics) == (2, 'metrics')


CONFIG = dataclasses.replace(
  replayed.CONFIGS['gqa_softmax'],
  moe=dataclasses.replace(
    replayed.CONFIGS['gqa_softmax'].moe, router='sigmoid'
  ),
)
OPTIMIZER = optax.sgd(0.1)


@functools.cache
def on_mesh():
  """Returns a placement of context 2 and 8 expert shards, and its programs."""
  where = placement.build(
    CONFIG,
    mesh=topology.make_mesh(2, 2, 2),
    options=placement.ParallelOptions(transport='ragged_a2a'),
  )

  @functools.cache
  def program(bucket):
    step = train_step.make(
      CONFIG,
      OPTIMIZER,
      plan=where.plan_of(bucket),
      bias_rate=0.0,
      accumulate=2,
      places=where.variables['params'],
    )
    return jax.jit(step, donate_argnums=0, compiler_options=replayed.OPTIONS)

  return where, program


def tokens(seed):
  rng = np.random.default_rng(seed)
  segments_BT = np.ones((8, 8), np.int32)
  segments_BT[1, 5:] = 0
  positions_BT = np.tile(np.arange(8, dtype=np.int32), (8, 1))
  return batches.LMBatch(
    tokens_BT=rng.integers(0, replayed.V, (8, 8), dtype=np.int32),
    segment_ids_BT=segments_BT,
    positions_BT=positions_BT,
    loss_weights_BT=(segments_BT * (positions_BT > 0)).astype(np.float32),
  )


def train_on_mesh(bucket_sizes, bias_E):
  """Trains two steps with unbalanced routers.

  Returns:
    State, retries, and metrics of the last step.
  """
  where, program = on_mesh()
  variables = jax.tree.map(np.copy, replayed.variables(CONFIG))
  variables['selection_bias']['moe_layers']['moe']['bias'][:] = bias_E
  # Capacities are those of a microbatch: 4 rows of 8 tokens.
  size = buckets.BucketSize(
    bucket_sizes, lambda bucket: where.rows_of(bucket, 4, 8)
  )
  retries = []
  step = buckets.BucketedStep(program, size, retries.append)
  state = jax.jit(lambda v: train_state.create(v, OPTIMIZER))(
    jax.device_put(variables, where.variables)
  )
  for index in range(2):
    state, sent = step(state, where.put(tokens(index)), index + 1)
  state = step.settle(state)
  return jax.device_get(state), retries, jax.device_get(sent.metrics)


@pytest.mark.parametrize(
  'bias_E, next_bucket',
  [
    ([9, 0, 0, 9, 0, 0, 0, 0], None),  # All tokens go to two shards' experts.
    ([0] * 8, 3.75),
  ],
)
def test_adversarial_load_trains_as_with_the_worst_case(bias_E, next_bucket):
  # A bucket of half the mean is too small for any load.
  state, retries, metrics = train_on_mesh((0.5,), bias_E)
  want, no_retries, want_metrics = train_on_mesh((), bias_E)
  assert no_retries == [] and [r.step for r in retries] == [1, 2]
  jax.tree.map(np.testing.assert_array_equal, state, want)
  assert metrics.loss.loss == want_metrics.loss.loss
  if next_bucket is None:
    # Every token goes to both experts.
    stats = metrics.loss.exchanged
    np.testing.assert_array_equal(stats.needed_rows, stats.capacity)
  else:
    state, retries, _ = train_on_mesh((next_bucket,), bias_E)
    assert retries == []
    jax.tree.map(np.testing.assert_array_equal, state, want)
