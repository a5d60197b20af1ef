"""Serving forward: the decoder by other means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models import config as config_lib
from composer_jax.models import decoder
from composer_jax.rollout import forward


@pytest.mark.parametrize('router', ['softmax', 'sigmoid'])
def test_chunks_over_the_cache_equal_the_decoder_without_one(router):
  config = config_lib.ModelConfig(
      vocab_size=40,
      embed_dim=16,
      num_layers=3,
      num_dense_layers=1,
      dense_ffw_dim=24,
      num_heads=4,
      num_kv_heads=2,
      head_dim=8,
      rope_theta=1e4,
      norm_eps=1e-6,
      tie_embeddings=router == 'softmax',
      remat=False,
      compute_dtype='float32',
      moe=config_lib.MoEConfig(
          num_experts=4,
          num_active=2,
          ffw_dim=8,
          num_shared=1,
          router=router,
          renormalize=True,
          routed_scale=1.5,
          aux_loss_weight=0.0,
      ),
  )
  variables = decoder.init(config, jax.random.key(0))
  if router == 'sigmoid':
    variables['selection_bias'] = jax.tree.map(
        lambda x: x + jnp.arange(4.0) * 0.02, variables['selection_bias']
    )
  batch, length, chunk = 3, 12, 5
  tokens_BT = jax.random.randint(jax.random.key(1), (batch, length), 0, 40)
  positions_BT = jnp.broadcast_to(jnp.arange(length), (batch, length))
  want = decoder.Decoder(config).apply(
      variables, tokens_BT, jnp.ones_like(tokens_BT), positions_BT
  )
  weights = forward.unstack(variables, config)
  cache = forward.empty_cache(config, batch, 16)
  step = jax.jit(forward.forward, static_argnames='config')
  hidden, routes = [], []
  for start in range(0, length, chunk):
    # The last chunk is part padding, which must leave no trace.
    index = jnp.arange(start, start + chunk)
    valid_BT = jnp.broadcast_to(index < length, (batch, chunk))
    hidden_BTD, ids_MBTA, cache = step(
        weights,
        cache,
        tokens_BT[:, jnp.minimum(index, length - 1)],
        valid_BT,
        jnp.broadcast_to(index, (batch, chunk)),
        config=config,
    )
    hidden.append(hidden_BTD)
    routes.append(ids_MBTA)
  # Sums in another order; values are of order one.
  np.testing.assert_allclose(
      jnp.concatenate(hidden, 1)[:, :length], want.hidden_BTD, atol=2e-5
  )
  np.testing.assert_array_equal(
      jnp.concatenate(routes, 2)[:, :, :length], want.expert_ids_MBTA
  )
  assert not cache.values[0][:, :, length:].any()
  assert not cache.keys[-1][..., length:].any()


def test_bfloat16_weights_are_widened_exactly_and_copied():
  config = config_lib.ModelConfig(
      vocab_size=8,
      embed_dim=8,
      num_layers=1,
      num_dense_layers=0,
      dense_ffw_dim=8,
      num_heads=1,
      num_kv_heads=1,
      head_dim=4,
      rope_theta=1e4,
      norm_eps=1e-6,
      tie_embeddings=True,
      remat=False,
      compute_dtype='float32',
      moe=config_lib.MoEConfig(
          num_experts=2,
          num_active=1,
          ffw_dim=4,
          num_shared=0,
          router='softmax',
          renormalize=False,
          routed_scale=1.0,
          aux_loss_weight=0.0,
      ),
  )
  policy = decoder.policy(decoder.init(config, jax.random.key(0)))
  weights = forward.unstack(policy, config)
  embedding_VD = weights.outer['params']['embedding']
  assert embedding_VD.dtype == jnp.float32
  np.testing.assert_array_equal(
      embedding_VD.astype(jnp.bfloat16), policy['params']['embedding']
  )
  for leaf in jax.tree.leaves(policy):
    leaf.delete()
  for leaf in jax.tree.leaves(weights):
    assert np.isfinite(leaf).all()
