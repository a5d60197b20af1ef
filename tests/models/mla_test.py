"""The two forms of latent attention are equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels.attention import grouped_query
from composer_jax.models import mla, rope
from tests.kernels.attention import reference
from tests.models import decoder_test

CONFIG = decoder_test.CONFIGS['mla']
B, T, S, N, H, J, C, W = 2, 5, 7, 3, 4, 2, 6, 5


@pytest.fixture(scope='module')
def inputs():
  random = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(random.normal(size=shape), jnp.float32)

  start_BT = random.integers(0, S - 1, (B, T))
  visible = grouped_query.Visible(
    jnp.asarray(start_BT), jnp.asarray(random.integers(start_BT + 1, S + 1))
  )
  query = (normal(B, T, N, H), normal(B, T, N, J))
  latent = (normal(B, S, C), normal(B, S, J))
  weights = {'key_up': normal(C, N, H), 'value_up': normal(C, N, W)}
  return (query, latent, weights), visible


def _by_hand(query, latent, weights, mask_BTS, scale):
  """One token, one head at a time."""
  (q_BTNH, q_BTNJ), (c_BSC, k_BSJ) = query, latent
  up_CNH, value_CNW = weights['key_up'], weights['value_up']
  out_BTNW = np.zeros((B, T, N, W))
  for b, t, n in np.ndindex(B, T, N):
    keys_SH = c_BSC[b] @ up_CNH[:, n]
    scores_S = scale * (keys_SH @ q_BTNH[b, t, n] + k_BSJ[b] @ q_BTNJ[b, t, n])
    weights_S = np.where(mask_BTS[b, t], np.exp(scores_S), 0)
    values_SW = c_BSC[b] @ value_CNW[:, n]
    out_BTNW[b, t, n] = weights_S / weights_S.sum() @ values_SW
  return out_BTNW


def test_absorbed_equals_naive_in_value_and_gradient(inputs):
  arrays, visible = inputs
  d_out = jax.random.normal(jax.random.key(1), (B, T, N, W))

  def naive(query, latent, weights):
    return mla.attend(weights, query, latent, visible, CONFIG)[0]

  def absorbed(query, latent, weights):
    query = jnp.concatenate(mla.for_pages(weights, query, CONFIG), axis=-1)
    keys_BS1X = jnp.concatenate(latent, axis=-1)[:, :, None]
    out_BTNC, _ = grouped_query.attend(
      query, keys_BS1X, latent[0][:, :, None], visible, scale=1.0
    )
    return mla.from_pages(weights, out_BTNC)

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_gradients(form, arrays):
    out, pull = jax.vjp(lambda a: form(*a), arrays)
    return out, pull(d_out)

  naive = value_and_gradients(naive, arrays)
  absorbed = value_and_gradients(absorbed, arrays)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), absorbed, naive
  )
  mask_BTS = np.asarray(reference.as_mask(visible, S))
  scale = rope.softmax_scale(H + J, CONFIG.rope)
  with jax.default_matmul_precision('highest'):
    want = _by_hand(*jax.tree.map(np.asarray, arrays), mask_BTS, scale)
  np.testing.assert_allclose(naive[0], want, atol=2e-5)
