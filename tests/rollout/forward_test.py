"""The engine's forward pass over pages equals the decoder's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.rollout import forward
from configs.models import kimi_k2, qwen3_30b_a3b

BATCH, LENGTH, PAGE = 3, 11, 4
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
MOE = {
  'num_experts': 4,
  'num_active': 2,
  'ffw_dim': 8,
  'num_shared': 1,
  'num_groups': 1,
  'num_active_groups': 1,
  'renormalize': True,
  'routed_scale': 1.5,
  'aux_loss_weight': 0.0,
  'z_loss_weight': 0.0,
}
# Compiling takes a third of the time.
OPTIONS = {'xla_backend_optimization_level': 0}
NO_SCALES = {'mscale': None, 'mscale_all_dim': None}


@pytest.fixture(
  scope='module',
  params=[(GROUPED, 'softmax'), (LATENT, 'sigmoid')],
  ids=['grouped', 'latent'],
)
def setup(request, make_config, make_variables):
  """A config, its weights for serving, and the decoder's whole pass."""
  attention, router = request.param
  config = make_config(
    moe=MOE | {'router': router},
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
  tokens_BT = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, 40)
  positions_BT = jnp.broadcast_to(jnp.arange(LENGTH), tokens_BT.shape)
  want = jax.jit(decoder.Decoder(config).apply, compiler_options=OPTIONS)(
    variables, tokens_BT, jnp.ones_like(tokens_BT), positions_BT
  )
  return config, forward.unstack(variables, config), tokens_BT, want


@pytest.fixture(scope='module')
def step():
  return jax.jit(
    forward.forward, static_argnames='config', compiler_options=OPTIONS
  )


def consume(step, setup, cache, tables_BP, chunks, first=0):
  """Consumes tokens from `first` on in chunks of these lengths, padded."""
  config, weights, tokens_BT, _ = setup
  batch = tokens_BT.shape[0]
  hidden, routes, start = [], [], first
  for chunk in chunks:
    # Positions past the end are padding, which must change nothing.
    index = jnp.arange(start, start + chunk)
    hidden_BTD, ids_MBTA, cache = step(
      weights,
      cache,
      tokens_BT[:, jnp.minimum(index, LENGTH - 1)],
      jnp.broadcast_to(index < LENGTH, (batch, chunk)),
      jnp.broadcast_to(index, (batch, chunk)),
      tables_BP,
      config=config,
    )
    hidden.append(hidden_BTD[:, : LENGTH - start])
    routes.append(ids_MBTA[:, :, : LENGTH - start])
    start += chunk
  return jnp.concatenate(hidden, 1), jnp.concatenate(routes, 2), cache


def check(have, want, start=0):
  hidden_BTD, ids_MBTA = have
  # float32 sums run in another order; values are of order one.
  np.testing.assert_allclose(hidden_BTD, want.hidden_BTD[:, start:], atol=2e-5)
  np.testing.assert_array_equal(ids_MBTA, want.expert_ids_MBTA[:, :, start:])


def shuffled(seed=0):
  """Returns tables of three pages a row, shuffled, from a pool of twelve."""
  pages = np.random.default_rng(seed).permutation(12)[: 3 * BATCH]
  return jnp.asarray(pages.reshape(BATCH, 3), jnp.int32)


def in_order(cache, tables_BP):
  """Yields each pool, and its pages laid out by the tables as [B, S, ...]."""
  for first, second in cache:
    if first.ndim == 4:
      first, second = first.transpose(0, 3, 1, 2), second.transpose(0, 2, 1, 3)
    for pool in (first, second):
      array = np.asarray(pool)[np.asarray(tables_BP)]
      yield pool, array.reshape(array.shape[0], -1, *array.shape[3:])


# One token at a time, a chunk with padding at its end, and a mixture.
@pytest.mark.parametrize('chunks', [(5, 5, 5), (5, 1, 1, 5, 1)])
def test_chunks_over_shuffled_pages_equal_the_decoder(setup, step, chunks):
  config, *_, want = setup
  tables_BP = shuffled()
  cache = forward.empty_cache(config, 12, PAGE)
  *have, cache = consume(step, setup, cache, tables_BP, chunks)
  check(have, want)
  unused_pages = np.setdiff1d(np.arange(12), tables_BP)
  for pool, kept_BS in in_order(cache, tables_BP):
    assert np.abs(kept_BS[:, :LENGTH]).min() > 0
    assert not kept_BS[:, LENGTH:].any()
    assert not np.asarray(pool)[unused_pages].any()


def test_rows_share_pages_and_continue_on_copies(setup, step):
  config, weights, tokens_BT, want = setup
  # All rows have row 0's first six tokens: a page and a half.
  tokens_BT = tokens_BT.at[:, :6].set(tokens_BT[0, :6])
  alone = consume(
    step,
    (config, weights, tokens_BT, want),
    forward.empty_cache(config, 12, PAGE),
    shuffled(),
    (5, 5, 5),
  )
  cache = forward.empty_cache(config, 12, PAGE)
  own_B3 = shuffled(1)
  tables_BP = own_B3.at[:, 0].set(own_B3[0, 0])
  cache = _consume_row(step, setup, cache, own_B3[:1], 6)
  # Each row copies the half page; page 12 does not exist.
  cache = forward.copy_pages(
    cache,
    jnp.full(BATCH + 1, own_B3[0, 1]),
    jnp.append(own_B3[:, 1], 12),
    jnp.full(BATCH + 1, 6 - PAGE),
  )
  *have, _ = consume(
    step, (config, weights, tokens_BT, want), cache, tables_BP, (5, 5), 6
  )
  for actual, expected, axis in zip(have, alone, (1, 2), strict=False):
    expected = jnp.moveaxis(expected, axis, 0)[6:]
    np.testing.assert_allclose(
      jnp.moveaxis(actual, axis, 0), expected, atol=2e-5
    )


def _consume_row(step, setup, cache, tables_1P, length):
  config, weights, tokens_BT, _ = setup
  index = jnp.arange(length)[None]
  *_, cache = step(
    weights,
    cache,
    tokens_BT[:1, :length],
    jnp.ones((1, length), bool),
    index,
    tables_1P,
    config=config,
  )
  return cache


def test_cleared_pages_hold_no_nan(setup, step):
  config, *_, want = setup
  tables_BP = shuffled()
  cache = jax.tree.map(
    lambda pool: jnp.full_like(pool, jnp.nan),
    forward.empty_cache(config, 12, PAGE),
  )
  # Page 12 does not exist.
  cache = forward.zero_pages(cache, jnp.append(tables_BP.reshape(-1), 12))
  *have, cache = consume(step, setup, cache, tables_BP, (5, 5, 5))
  check(have, want)
  unused_pages = np.setdiff1d(np.arange(12), tables_BP)
  for pool, _ in in_order(cache, tables_BP):
    assert np.isnan(np.asarray(pool)[unused_pages]).all()


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


@pytest.mark.parametrize(
  'module, expected',
  [
    # 2 * 4 heads of 128 and two bytes in 48 layers; 512 + 64 in 61.
    (qwen3_30b_a3b, 98_304),
    (kimi_k2, 70_272),
  ],
)
def test_a_token_of_the_cache_has_the_bytes_of_its_attention(module, expected):
  fields = module.get_config().to_dict()
  config = model_config.ModelConfig.from_dict(fields)
  pools = jax.eval_shape(lambda: forward.empty_cache(config, 1, 1))
  sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(pools)]
  assert config.compute_dtype == 'bfloat16' and sum(sizes) == expected
