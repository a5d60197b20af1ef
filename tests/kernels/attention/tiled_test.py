"""Attention in tiles equals the whole softmax, wherever documents begin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels.attention import (
  grouped_query,
)
from composer_jax.kernels.attention import (
  tiled as tiled_attention,
)
from composer_jax.models import attention as model_attention
from tests.kernels.attention import reference

B, T, N = 2, 75, 4


@pytest.fixture(scope='module')
def segments_BT():
  # One document over two key blocks, one that begins within a block, padding.
  lengths = [[40, 30, 5], [3, 64, 8]]
  ids = [np.repeat([1, 2, 0], row) for row in lengths]
  return jnp.asarray(np.stack(ids), jnp.int32)


def whole(query, kept, segments_BT):
  visible = model_attention.visible_of(segments_BT)
  first, second = kept
  if isinstance(query, tuple):
    query = jnp.concatenate(query, axis=-1)
    second = first[:, :, None]
    first = jnp.concatenate(kept, axis=-1)[:, :, None]
  return grouped_query.attend(
    query, first, second, visible, scale=1.0, backend=reference.whole
  )[0]


def tiled(query, kept, segments_BT):
  visible = model_attention.visible_of(segments_BT)
  return tiled_attention.attend_packed(query, kept, visible)[0]


@pytest.mark.parametrize('kind', ['grouped', 'latent'])
def test_values_and_gradients_equal_the_whole_softmax(kind, segments_BT):
  random = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(random.normal(size=(B, T, *shape)), jnp.float32)

  if kind == 'grouped':
    query, kept = normal(N, 8), (normal(2, 8), normal(2, 8))
  else:
    query, kept = (normal(N, 6), normal(N, 2)), (normal(6), normal(2))
  weight_BT11 = jnp.asarray(segments_BT != 0)[..., None, None]

  def outputs(attend):
    def run(query, kept):
      return attend(query, kept, segments_BT) * weight_BT11

    out, pull = jax.vjp(run, query, kept)
    return out, pull(jnp.cos(out))

  results = jax.jit(lambda: (outputs(tiled), outputs(whole)))()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
    *results,
  )
