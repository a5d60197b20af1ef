"""Serving forward: the decoder by other means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models import decoder
from composer_jax.rollout import forward

GROUPED = {
  'kind': 'gqa',
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 8,
  'qk_norm': 'head',
  'qkv_bias': True,
  'out_bias': True,
}
LATENT = {
  'kind': 'mla',
  'num_heads': 3,
  'q_lora_dim': 10,
  'kv_lora_dim': 6,
  'nope_dim': 4,
  'rope_dim': 2,
  'value_dim': 5,
  'latent_norm_eps': 1e-6,
}
YARN = {
  'factor': 4.0,
  'original_max_len': 8,
  'beta_fast': 2.0,
  'beta_slow': 0.5,
  'mscale': 1.0,
  'mscale_all_dim': 0.7,
  'truncate': True,
}
NO_SCALES = {'mscale': None, 'mscale_all_dim': None}


@pytest.mark.parametrize(
  'attention,router', [(GROUPED, 'softmax'), (LATENT, 'sigmoid')]
)
def test_chunks_over_the_cache_equal_the_decoder_without_one(
  attention, router, make_config, make_variables
):
  moe = {
    'num_experts': 4,
    'num_active': 2,
    'ffw_dim': 8,
    'num_shared': 1,
    'router': router,
    'num_groups': 1,
    'num_active_groups': 1,
    'renormalize': True,
    'routed_scale': 1.5,
    'aux_loss_weight': 0.0,
    'z_loss_weight': 0.0,
  }
  config = make_config(
    moe=moe,
    tie_embeddings=router == 'softmax',
    attention=attention,
    rope={
      'theta': 100.0,
      'interleaved': attention is LATENT,
      'yarn': YARN if attention is LATENT else YARN | NO_SCALES,
    },
  )
  variables = make_variables(config, 0)
  assert ('selection_bias' in variables) == (router == 'sigmoid')
  batch, length, chunk = 3, 12, 5
  tokens_BT = jax.random.randint(jax.random.key(1), (batch, length), 0, 40)
  positions_BT = jnp.broadcast_to(jnp.arange(length), (batch, length))
  want = jax.jit(decoder.Decoder(config).apply)(
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
  for first, second in cache.layers:
    if attention is GROUPED:
      # [B, K, H, S] and [B, K, S, H].
      first, second = first.transpose(0, 3, 1, 2), second.transpose(0, 2, 1, 3)
    for kept_BS in (first, second):
      assert np.abs(kept_BS[:, :length]).min() > 0
      assert not kept_BS[:, length:].any()


def test_bfloat16_weights_are_widened_exactly_and_copied(
  make_config, make_variables
):
  config = make_config()
  policy = decoder.policy(jax.device_put(make_variables(config, 0)))
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
