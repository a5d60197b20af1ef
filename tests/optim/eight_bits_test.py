"""Moments of eight bits: errors, their mean, and Adam with them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.optim import eight_bits, groups

# Codes from a number to its double, and the smallest share above zero.
SPACING = {'int8': (8, 2 ** (-126 / 8)), 'uint8': (10, 2 ** (-254 / 10))}


def _values(dtype):
  """Two rows of two blocks, over many powers of two, with both ends."""
  powers = jax.random.uniform(jax.random.key(0), (2, 4096), maxval=30.0)
  x = jnp.exp2(-powers).at[:, :2].set(jnp.float32([0.0, 1e-30]))
  x *= jnp.float32([[1e-12], [1e6]])
  return x if dtype == 'uint8' else x.at[:, ::3].multiply(-1)


@pytest.mark.parametrize('dtype', SPACING)
def test_a_number_is_one_of_its_two_nearest_codes(dtype):
  x = _values(dtype)
  coded = eight_bits.encode(jax.random.key(1), {'w': x}, dtype)
  assert coded['codes']['w'].dtype == dtype
  assert coded['scales']['w'].shape == (2, 2)
  have = np.asarray(eight_bits.decode(coded)['w'])
  largest = np.abs(x).reshape(2, 2, -1).max(-1)
  np.testing.assert_array_equal(coded['scales']['w'], largest)
  doubling, smallest = SPACING[dtype]
  floor = np.repeat(largest * smallest, 2048, axis=1)
  error = np.abs(have - x)
  # Rounding of a few operations beside the spacing.
  spacing = (2 ** (1 / doubling) - 1) * np.abs(x)
  assert (error <= np.maximum(spacing, floor) * 1.0001).all()
  assert (np.sign(have) == np.sign(x))[np.abs(x) > floor].all()
  # No divisor is lost: above zero stays above zero.
  assert (x[have == 0] == 0).all() or dtype == 'int8'


@pytest.mark.parametrize('dtype', SPACING)
def test_the_mean_of_many_roundings_is_the_number(dtype):
  x = jnp.float32([1.0, 0.77, 0.031, 3e-4])
  if dtype == 'int8':
    x = x.at[2].set(-1e-5)  # below the smallest code
  mean = np.mean(
    [
      eight_bits.decode(eight_bits.encode(jax.random.key(k), rows, dtype))
      for k, rows in enumerate(jnp.tile(x, (8, 512, 1)))
    ],
    axis=(0, 1),
  )
  # Five standard errors of 4,096 draws, at most half the spacing each.
  spacing = np.maximum(0.091 * np.abs(x), 2 ** (-126 / 8))
  assert (np.abs(mean - x) <= 5 * 0.5 * spacing / 64).all()


def test_random_numbers_depend_on_key_and_place_alone():
  x = {'a': jnp.full(999, 0.9), 'b': jnp.full(999, 0.9)}
  x = jax.tree.map(lambda leaf: leaf.at[0].set(1), x)
  one, same, other = (
    eight_bits.encode(jax.random.key(k), x, 'int8')['codes'] for k in (0, 0, 1)
  )
  jax.tree.map(np.testing.assert_array_equal, one, same)
  assert (one['a'] != other['a']).any() and (one['a'] != one['b']).any()


def test_what_is_not_finite_does_not_come_back_finite():
  x = jnp.ones(8).at[3].set(jnp.nan)
  back = eight_bits.decode(eight_bits.encode(jax.random.key(0), x, 'uint8'))
  assert not np.isfinite(back).any()


def _descend(dtype, steps=300):
  """Minimises a quadratic whose curvatures are a thousand apart."""
  scales = jnp.logspace(-1.5, 1.5, 256)
  transform = optax.chain(
    groups.scale_by_adam(0.9, 0.95, 1e-12, dtype),
    optax.scale_by_learning_rate(optax.linear_schedule(2e-2, 0.0, steps)),
  )

  @jax.jit
  def descend(x):
    def body(step, carry):
      x, state = carry
      noise = jax.random.normal(jax.random.key(step), x.shape)
      updates, state = transform.update(scales * (x + 0.1 * noise), state)
      return x + updates, state

    return jax.lax.fori_loop(0, steps, body, (x, transform.init(x)))

  return descend(jnp.ones(256))


def test_adam_converges_with_them_as_without():
  (have, state), (want, _) = _descend('int8'), _descend('float32')
  assert state[0].mu['codes'].dtype == jnp.int8
  assert state[0].nu['codes'].dtype == jnp.uint8
  rms = [float(jnp.sqrt(jnp.square(x).mean())) for x in (have, want)]
  assert rms[1] < 0.05  # of the one it began at
  assert rms[0] < 1.2 * rms[1]


def test_the_error_of_one_step_is_bounded():
  """A step divides a mean by a root, both off by their codes' spacing."""
  # No square is below the smallest code.
  g = jax.random.uniform(jax.random.key(0), (4, 256), minval=0.01, maxval=1.0)
  steps = []
  for dtype in ('int8', 'float32'):
    transform = groups.scale_by_adam(0.9, 0.95, 0.0, dtype)
    _, state = transform.update(g, transform.init(g))
    updates, _ = transform.update(g, state)
    steps.append(updates)
  # Of the second step's moments, 0.9 / 1.9 and 0.95 / 1.95 were rounded.
  mean = (2 ** (1 / 8) - 1) * 0.9 / 1.9
  root = 0.5 * (2 ** (1 / 10) - 1) * 0.95 / 1.95
  np.testing.assert_allclose(*steps, rtol=1.01 * (mean + root))
