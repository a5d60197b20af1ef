"""Every loss against float64 and closed forms, in packed and sharded rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import batches
from composer_jax.rl import policy_loss

NAMES = tuple(policy_loss.BOUNDS)
# Wide enough that no sequence-level loss drops all sequences below.
BOUNDS = {'sequence_mask': (0.8, 1.25), 'gspo': (0.95, 1.05)}
B, T = 4, 16
each = pytest.mark.parametrize('name', NAMES)


def options(name, **fields):
  bounds = fields.pop('bounds', BOUNDS.get(name, ()))
  return policy_loss.LossOptions(name=name, bounds=bounds, **fields)


def reference(o, train, rollout, advantages, weights, segments):
  """Returns (loss, gradient) by the formulas in float64, token by token."""
  loss, grad = 0.0, np.zeros(train.shape)
  for b, t in np.ndindex(train.shape):
    if not weights[b, t]:
      continue
    ratio, a = np.exp(train[b, t] - rollout[b, t]), advantages[b, t]
    mine = (segments[b] == segments[b, t]) & (weights[b] > 0)
    mean = np.exp((train[b] - rollout[b])[mine].mean())
    low, high = o.range or (None, None)
    if o.name in ('grpo', 'dapo', 'gspo'):
      r = mean if o.name == 'gspo' else ratio
      objective = min(r * a, min(max(r, low), high) * a)
      weight = r if objective == r * a else 0.0
    else:
      weight = min(ratio, o.ratio_cap)
      if o.name == 'sequence_mask':
        weight *= low <= mean <= high
      elif o.name == 'icepop':
        weight = ratio * (low <= ratio <= high)
      elif o.name == 'cispo':
        weight = min(max(ratio, low), high)
      objective = weight * a * train[b, t]
    loss -= objective
    grad[b, t] = -weight * a
  return loss, grad


@pytest.fixture(scope='module')
def tokens():
  """Rows of three sequences of several lengths, and padding."""
  rng = np.random.default_rng(3)
  segments = np.repeat([[1] * 5 + [2] * 3 + [3] * 6 + [0] * 2], B, 0)
  train = -rng.exponential(1.0, (B, T))
  return {
    'train': train,
    # Some sequences drift as a whole, single tokens far.
    'rollout': train
    + rng.normal(0, 0.1, (B, 4))[np.arange(B)[:, None], segments]
    + rng.normal(0, 0.7, (B, T)) * (rng.random((B, T)) < 0.4),
    'advantages': rng.normal(0, 1, (B, 4))[np.arange(B)[:, None], segments],
    'weights': ((rng.random((B, T)) < 0.7) & (segments > 0)).astype(float),
    'segments': segments,
  }


def batch_of(t):
  return batches.RLBatch(
    tokens_BT=jnp.zeros(t['train'].shape, jnp.int32),
    segment_ids_BT=jnp.int32(t['segments']),
    positions_BT=jnp.zeros(t['train'].shape, jnp.int32),
    loss_weights_BT=jnp.float32(t['weights']),
    rollout_logprobs_BT=jnp.float32(t['rollout']),
    advantages_BT=jnp.float32(t['advantages']),
    temperatures_BT=jnp.ones(t['train'].shape),
  )


@functools.partial(jax.jit, static_argnums=0)
def run(o, train_BT, batch):
  return jax.value_and_grad(
    lambda x: policy_loss.loss(x, -x, batch, o), has_aux=True
  )(train_BT)


def call(o, t):
  return run(o, jnp.float32(t['train']), batch_of(t))[0]


def gradient(o, t):
  return np.asarray(run(o, jnp.float32(t['train']), batch_of(t))[1])


@each
def test_loss_and_gradient_equal_float64(tokens, name):
  loss, grad = reference(options(name), *tokens.values())
  np.testing.assert_allclose(call(options(name), tokens)[0], loss, rtol=2e-5)
  actual = gradient(options(name), tokens)
  np.testing.assert_allclose(actual, grad, rtol=2e-5, atol=1e-6)
  # The bounds act on some of the tokens, not on all.
  dropped = float(call(options(name), tokens)[1].dropped)
  unbound = name in ('tis', 'cispo')
  assert unbound == (dropped == 0) and dropped < tokens['weights'].sum()


@pytest.mark.parametrize('cap', [1.0, 2.0, 100.0])
def test_the_ratio_is_truncated_at_its_cap(tokens, cap):
  o = options('tis', ratio_cap=cap)
  _, stats = call(o, tokens)
  ratio = np.exp(tokens['train'] - tokens['rollout'])
  want = -np.minimum(ratio, cap) * tokens['advantages'] * tokens['weights']
  np.testing.assert_allclose(gradient(o, tokens), want, rtol=1e-5, atol=1e-6)
  assert stats.truncated == ((ratio >= cap) * tokens['weights']).sum()


@each
def test_at_ratio_one_all_are_the_plain_policy_gradient(tokens, name):
  fresh = {**tokens, 'rollout': np.float32(tokens['train'])}
  plain = np.float32(-tokens['advantages'] * tokens['weights'])
  np.testing.assert_array_equal(
    gradient(options(name, bounds=()), fresh), plain
  )
  assert call(options(name, bounds=()), fresh)[1].dropped == 0


@pytest.mark.parametrize(
  'name, ratio, advantage, weight',
  [
    # Clipped only on the side that the advantage pushes to.
    ('dapo', 1.3, 1.0, 0.0),
    ('dapo', 1.3, -1.0, 1.3),
    ('dapo', 0.7, 1.0, 0.7),
    ('dapo', 0.7, -1.0, 0.0),
    # Clip-higher: DAPO still raises a token where GRPO does not.
    ('dapo', 1.25, 1.0, 1.25),
    ('grpo', 1.25, 1.0, 0.0),
    ('gspo', 1.0003, 1.0, 1.0003),
    ('gspo', 1.0005, 1.0, 0.0),
    ('gspo', 0.9996, -1.0, 0.0),
    # Losses that clip by the ratio alone.
    ('icepop', 5.1, 1.0, 0.0),
    ('icepop', 5.1, -1.0, 0.0),
    ('icepop', 0.4, 1.0, 0.0),
    ('icepop', 4.9, 1.0, 4.9),
    ('cispo', 1.5, 1.0, 1.28),
    ('cispo', 1.5, -1.0, 1.28),
    ('cispo', 0.1, 1.0, 0.1),
    ('sequence_mask', 1.02, 1.0, 0.0),
    ('sequence_mask', 1.005, -1.0, 1.005),
    ('tis', 3.0, -1.0, 2.0),
  ],
)
def test_which_tokens_keep_a_gradient_by_side(name, ratio, advantage, weight):
  ones = np.ones((B, T))
  t = {
    'train': -ones,
    'rollout': -ones - np.log(ratio),
    'advantages': advantage * ones,
    'weights': ones,
    'segments': ones,
  }
  want = -weight * advantage * ones
  actual = gradient(options(name, bounds=()), t)
  np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-7)


@each
def test_gradient_of_a_token_does_not_depend_on_the_length(name):
  def grad(length):
    ones = np.ones((B, T))
    short = np.where(np.arange(T) < length, ones, 0.0)
    t = {'train': -ones, 'rollout': -1.0001 * ones, 'advantages': ones}
    o = options(name, bounds=())
    return gradient(o, {**t, 'weights': short, 'segments': short})

  np.testing.assert_allclose(grad(3)[0, 0], grad(T)[0, 0], rtol=1e-6)
  assert grad(3)[0, 0] < -0.9


@each
def test_packing_changes_nothing(tokens, name):
  """A sequence has the same gradient among others as alone."""
  mine = tokens['segments'] == 3
  alone = {k: np.where(mine, v, 0) for k, v in tokens.items()}
  packed = np.where(mine, gradient(options(name), tokens), 0)
  actual = gradient(options(name), alone)
  np.testing.assert_allclose(actual, packed, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('axes', [(4, 2), (2, 4)])
@pytest.mark.parametrize('name', ['tis', 'gspo', 'sequence_mask', 'dapo'])
def test_sharded_rows_give_the_same(tokens, name, axes):
  """Rows over one axis and their tokens over the other, in any order."""
  mesh = jax.make_mesh(axes, ('fsdp', 'context'), (AxisType.Auto,) * 2)
  places = np.random.default_rng(0).permutation(T)  # as zigzag order does
  moved = {k: v[:, places] for k, v in tokens.items()}
  sharding = NamedSharding(mesh, P('fsdp', 'context'))
  batch = jax.device_put(batch_of(moved), sharding)
  train = jax.device_put(jnp.float32(moved['train']), sharding)
  (loss, stats), grad = run(options(name), train, batch)
  want, want_stats = call(options(name), tokens)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  np.testing.assert_allclose(
    grad, gradient(options(name), tokens)[:, places], rtol=1e-5, atol=1e-6
  )
  assert stats.dropped == want_stats.dropped


def test_stats_add_up_over_microbatches(tokens):
  _, batch_stats = call(options('icepop'), tokens)
  rows = np.arange(B)[:, None]
  parts = [
    call(
      options('icepop'), {**tokens, 'weights': tokens['weights'] * (rows == i)}
    )
    for i in range(B)
  ]
  for name in ('num_tokens', 'entropy', 'truncated', 'dropped'):
    total = sum(float(getattr(stats, name)) for _, stats in parts)
    np.testing.assert_allclose(total, getattr(batch_stats, name), rtol=1e-5)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'name': 'ppo'}, r"name must be one of .*'tis'.* got 'ppo'"),
    ({'ratio_cap': 0.5}, r'ratio_cap must be at least 1; got 0\.5'),
    ({'bounds': (0.5, 2.0)}, r"mean nothing to 'tis'"),
    ({'name': 'dapo', 'bounds': (1.1, 2.0)}, r'bounds .* got \(1\.1, 2\.0\)'),
    ({'name': 'dapo', 'bounds': (0.5,)}, r'bounds .* got \(0\.5,\)'),
  ],
)
def test_impossible_options_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    policy_loss.LossOptions(**fields)
