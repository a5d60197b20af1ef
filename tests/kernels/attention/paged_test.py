"""Attention over pages: pages past a row's end change no bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels.attention import paged

BATCH, PAGE = 3, 4


def _array(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


CASES = {
  'grouped': (
    _array(0, BATCH, PAGE, 4, 8),
    (_array(1, 12, 2, 8, PAGE), _array(2, 12, 2, PAGE, 8)),
  ),
  'latent': (
    (_array(0, BATCH, PAGE, 3, 6), _array(1, BATCH, PAGE, 3, 2)),
    (_array(2, 12, PAGE, 6), _array(3, 12, PAGE, 2)),
  ),
}


@pytest.mark.parametrize('name', CASES)
def test_fewer_blocks_see_less_and_more_change_no_bit(name):
  query, pools = CASES[name]
  pages = np.random.default_rng(0).permutation(12)[: 3 * BATCH]
  tables_BP = jnp.asarray(pages.reshape(BATCH, 3), jnp.int32)
  positions_BT = jnp.broadcast_to(jnp.arange(PAGE), (BATCH, PAGE))
  run = jax.jit(functools.partial(paged.attend, query, pools, tables_BP))
  outputs = [
    np.asarray(run(positions_BT, num_blocks=blocks)) for blocks in (0, 1, 3)
  ]
  np.testing.assert_array_equal(outputs[1], outputs[2])
  assert np.isfinite(outputs[0]).all() and not np.allclose(
    outputs[0], outputs[1]
  )
