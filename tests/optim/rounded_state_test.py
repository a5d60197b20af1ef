"""Masters and moments in bfloat16 with stochastic rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.core import rounding
from composer_jax.optim import groups, layerwise
from composer_jax.train import state as train_state

GRID = jnp.float32(2**-7)  # between neighbours in [1, 2)


def test_the_mean_over_all_random_words_is_the_value_itself():
  values = jnp.float32([1 + GRID / 3, -1.5, 3.14159, -1e-30, 0.0, 6e4, -0.1])
  words = jnp.arange(2**16, dtype=jnp.uint16)
  rounded = np.stack(
    [
      np.asarray(rounding._carried(jnp.full(2**16, x), words), np.float64)
      for x in values
    ]
  )
  np.testing.assert_array_equal(rounded.mean(1), np.asarray(values, np.float64))
  for x, outcomes in zip(np.asarray(values), rounded, strict=True):
    # Both neighbours, or the value alone where bfloat16 has it.
    assert outcomes.min() <= x <= outcomes.max()
    assert len(np.unique(outcomes)) <= 2


def test_it_depends_on_the_key_alone_and_keeps_what_is_not_finite():
  x = jnp.float32([jnp.inf, -jnp.inf, jnp.nan, 1.001])
  have, again, other = (
    rounding.stochastic(jax.random.key(k), x) for k in (0, 0, 1)
  )
  wide = lambda a: np.asarray(a.astype(jnp.float32))
  np.testing.assert_array_equal(wide(have), wide(again))
  np.testing.assert_array_equal(wide(have)[:3], x[:3])
  many = jnp.full(1000, 1.001, jnp.float32)
  draws = [rounding.stochastic(jax.random.key(k), many) for k in range(2)]
  assert (draws[0] != draws[1]).any() and other.dtype == jnp.bfloat16


def test_steps_too_small_for_bfloat16_add_up():
  """To nearest, each of them would be lost."""
  params = {'w': jnp.ones(4096, jnp.bfloat16)}
  updates = {'w': jnp.full(4096, GRID / 64)}

  def body(step, params):
    return groups.apply_updates(params, updates, step)

  after = jax.lax.fori_loop(0, 32, body, params)['w']
  assert optax.apply_updates(params, updates)['w'].max() == 1
  # Half a step of the grid; the standard error is 0.5 / sqrt(4096) of it.
  moved = (after.astype(jnp.float32) - 1).mean() / GRID
  assert moved == pytest.approx(0.5, abs=5 * 0.5 / 64)


@pytest.mark.slow
def test_moments_follow_those_of_float32():
  options = dict(name='adam', warmup_steps=1, decay_steps=1, weight_decay=0.0)
  params = {'w': jnp.linspace(-1, 1, 512).reshape(2, 256)}
  axes = {'w': jax.sharding.PartitionSpec('embed', 'ffw')}

  def train(state):
    transform = groups.optimizer(
      groups.OptimizerOptions(state=state, **options),
      params=params,
      axes=axes,
      total_steps=100,
    )
    made = train_state.create({'params': params}, transform, dtype=state)
    assert {x.dtype.name for x in jax.tree.leaves(made.params)} == {state}

    def body(step, carry):
      now, opt_state = carry
      noise = jax.random.normal(jax.random.key(step), (2, 256))
      updates, opt_state = transform.update(
        {'w': 1 + 0.1 * noise}, opt_state, now, step=step
      )
      if isinstance(updates, layerwise.Moved):
        return updates.params, opt_state
      return groups.apply_updates(now, updates, step), opt_state

    return jax.lax.fori_loop(0, 60, body, (made.params, made.opt_state))

  (narrow, moments), (wide, wide_moments) = train('bfloat16'), train('float32')
  # Each moves by the sum of its rates up to the noise of rounding.
  moved = wide['w'] - params['w']
  error = (narrow['w'].astype(jnp.float32) - wide['w']).mean()
  assert abs(error) < 0.02 * abs(moved.mean())
  adam, wide_adam = (
    optax.tree.get(m, 'mu')['w'] for m in (moments, wide_moments)
  )
  assert adam.dtype == jnp.bfloat16 and wide_adam.dtype == jnp.float32
  np.testing.assert_allclose(
    adam.astype(jnp.float32).mean(), wide_adam.mean(), rtol=2e-3
  )


def test_muon_keeps_float32():
  with pytest.raises(
    ValueError, match="be 'float32' with Muon.*got 'bfloat16'"
  ):
    groups.OptimizerOptions(name='muon', state='bfloat16')
