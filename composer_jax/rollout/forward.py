"""The decoder for serving: the same layers, unrolled, with a paged KV cache.

`models.decoder` scans stacked layers over a packed batch. This module calls
the same functions layer by layer, with two pools of pages per layer that all
sessions of an engine share; the caller's tables assign pages to rows
(`kernels.attention.paged`). `tests/rollout/forward_test.py` compares the two.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.core import trees
from composer_jax.kernels.attention import paged, tiled
from composer_jax.models import config as config_lib
from composer_jax.models import decoder, experts, head, layer
from composer_jax.numerics import formats, grids
from composer_jax.parallel import exchange


class Weights(flax.struct.PyTreeNode, kw_only=True):
  """Decoder variables, one tree per layer, dense layers first.

  `outer` holds the other variables, as `models.head` expects them. `stacked`
  holds the parameters that a layer's tree lacks: see `shared`. `heads` has a
  tree for each head of `models.mtp` in an engine that drafts by them.
  """

  outer: decoder.Variables
  layers: tuple[decoder.Variables, ...]
  stacked: decoder.Variables = dataclasses.field(default_factory=dict)
  heads: tuple[decoder.Variables, ...] = ()


# For each layer two pools of pages: keys [pages, K, H, page] and values
# [pages, K, page, H] of grouped-query attention, or latents [pages, page, C]
# and rotated keys [pages, page, J] of latent attention.
#
# A token at position s of a row lies at place s % page of the page that the
# row's table names at s // page. A query at position p sees the positions
# s <= p, so pages can be handed to another row without being cleared, unless
# they hold values that are not finite (`zero_pages`): zero times NaN is NaN.
Cache = tuple[paged.Pools, ...]


def shared(
  variables: decoder.Variables, config: config_lib.ModelConfig
) -> Weights:
  """Returns frozen weights that are the caller's own arrays, never a copy.

  A program takes its layers' slices of them.
  """
  outer = dict(variables['params'])
  stacked = {name: outer.pop(name) for name in config.stacks}
  layers = ({},) * config.num_layers
  return Weights(outer={'params': outer}, layers=layers, stacked=stacked)


def _layers(weights):
  shared = [
    {'params': jax.tree.map(lambda x, i=i: x[i], stack)}
    for stack in weights.stacked.values()
    for i in range(len(jax.tree.leaves(stack)[0]))
  ] or [{}] * len(weights.layers)
  return map(operator.or_, weights.layers, shared)


def unstack(
  variables: decoder.Variables,
  config: config_lib.ModelConfig,
  *,
  is_sharded: bool = False,
  base: Weights | None = None,
) -> Weights:
  """Splits stacked layers; `compute_dtype` float32 widens bfloat16 weights.

  Widening is exact, and doing it here spares every step the conversion. The
  arrays are copies, so the caller may donate its own to the next train step.

  For fast numerics on one CPU device, which read these faster, each expert
  becomes an array (`kernels.expert_rows`), and a tied embedding gets a copy
  with the embedding axis first (`kernels.linear`).

  Codes of experts stay as they are. Frozen weights are those of `base` if that
  is given: the same arrays.
  """
  widen = config.compute_dtype == 'float32'

  def copy(name, x):
    is_widened = widen and x.dtype == jnp.bfloat16
    is_widened &= name.rpartition('/')[2] not in formats.PARTS
    return jnp.array(x, jnp.float32 if is_widened else x.dtype, copy=True)

  variables = trees.map_names(copy, variables)
  outer, layers = dict(variables.get('params', {})), []
  for name, length in config.stacks.items():
    stack = {k: tree[name] for k, tree in variables.items() if name in tree}
    layers += [experts.layer_of(stack, i, config) for i in range(length)]
    outer.pop(name, None)
  heads = []
  if 'mtp' in variables and config.mtp is not None:
    stack = {k: tree['layers'] for k, tree in variables['mtp'].items()}
    cut = lambda i: jax.tree.map(lambda x: x[i], stack)
    heads = list(map(cut, range(config.mtp.depth)))
  on_cpu = jax.default_backend() == 'cpu'
  is_split = base is None or not base.stacked
  if config.numerics == 'fast' and on_cpu and not is_sharded and is_split:
    layers = [_split_experts(layer) for layer in layers]
    heads = [_split_experts(head) for head in heads]
    if config.tie_embeddings and outer:
      outer['unembedding'] = outer['embedding'].T.copy()
  if base is not None:
    pairs = zip(base.layers, layers, strict=True)
    layers = tuple({**old, **new} for old, new in pairs)
    return base.replace(layers=layers, heads=tuple(heads))
  return Weights(
    outer={'params': outer}, layers=tuple(layers), heads=tuple(heads)
  )


def _split_experts(variables):
  split = dict(variables)
  for kind in ('params', 'adapters'):
    tree = variables.get(kind, {})
    if 'moe' not in tree:
      continue
    moe = dict(tree['moe'])
    for name in layer.EXPERT_ARRAYS:
      if name in moe:
        leaves, form = jax.tree.flatten(moe[name])
        parts = zip(*map(jnp.unstack, leaves), strict=True)
        moe[name] = tuple(map(form.unflatten, parts))
    split[kind] = {**tree, 'moe': moe}
  return split


def empty_cache(
  config: config_lib.ModelConfig,
  num_pages: int,
  page_size: int,
  dtype: str = '',
  num_heads: int = 0,
) -> Cache:
  """Returns a cache of zeros, with pools of heads behind those of the layers.

  `dtype` '' is that of activations.
  """
  a = config.attention
  if isinstance(a, config_lib.MLAConfig):
    first, second = (page_size, a.kv_lora_dim), (page_size, a.rope_dim)
  else:
    first = (a.num_kv_heads, a.head_dim, page_size)
    second = (a.num_kv_heads, page_size, a.head_dim)

  def pool(shape):
    return jnp.zeros((num_pages, *shape), dtype or config.compute_dtype)

  count = config.num_layers + num_heads
  return tuple((pool(first), pool(second)) for _ in range(count))


@functools.partial(jax.jit, donate_argnums=0)
def copy_pages(
  cache: Cache,
  sources_N: jax.Array,
  destinations_N: jax.Array,
  counts_N: jax.Array,
) -> Cache:
  """Copies the first `counts_N` tokens of pages, in every layer.

  Later tokens of a page become zero. A destination out of range is dropped; the
  cache is donated.
  """

  def copy(pool, token_axis):
    pages = jnp.take(pool, sources_N, axis=0, mode='clip')
    places = jax.lax.broadcasted_iota(jnp.int32, pages.shape, token_axis)
    counts = counts_N.reshape(-1, *[1] * (pages.ndim - 1))
    pages = jnp.where(places < counts, pages, 0)
    return pool.at[destinations_N].set(pages, mode='drop')

  first, second = paged.token_axes(cache[0])
  return tuple((copy(x, first), copy(y, second)) for x, y in cache)


@functools.partial(jax.jit, donate_argnums=0)
def zero_pages(cache: Cache, pages_N: jax.Array) -> Cache:
  """Clears pages in every layer; pages out of range are ignored."""
  return jax.tree.map(lambda pool: pool.at[pages_N].set(0, mode='drop'), cache)


class Places(NamedTuple):
  """Where a chunk's tokens lie in the pools, and what a layer needs of them."""

  valid_BT: jax.Array
  positions_BT: jax.Array
  tables_BP: jax.Array
  pages_BT: jax.Array
  cos_sin: tuple[jax.Array, jax.Array]


def pages_of(
  valid_BT: jax.Array,
  positions_BT: jax.Array,
  tables_BP: jax.Array,
  cache: Cache,
  config: config_lib.ModelConfig,
) -> Places:
  """Looks the pages of a chunk's tokens up; arguments as of `forward`."""
  num_pages, *_, page_size, _ = cache[0][1].shape
  blocks_BT = positions_BT // page_size
  pages_BT = jnp.take_along_axis(tables_BP, blocks_BT, axis=1, mode='clip')
  # Past the end of the pools, where a write is dropped.
  pages_BT = jnp.where(valid_BT, pages_BT, num_pages)
  cos_sin = layer.angles(positions_BT, config)
  return Places(valid_BT, positions_BT, tables_BP, pages_BT, cos_sin)


def run_layer(
  variables: decoder.Variables,
  x_BTD: jax.Array,
  pools: paged.Pools,
  pages: Places,
  *,
  config: config_lib.ModelConfig,
  plan: exchange.ExchangePlan | None,
  apart: bool = False,
) -> tuple[jax.Array, jax.Array | None, paged.Pools]:
  """Runs a decoder layer of either kind over a chunk.

  With `apart`, a token whose key or value is not finite writes zeros and fails
  alone: tokens before it in the chunk get the bits that they get without it.

  Returns:
    x_BTD, expert_ids_BTA (None of a dense layer), and the pools.
  """
  c = config
  page_size = pools[1].shape[-2]
  places = (pages.pages_BT, pages.positions_BT % page_size)
  params = layer.prepare(variables, c)
  query, kept = layer.attention_inputs(
    params, x_BTD, pages.cos_sin, c, is_paged=True
  )
  with jax.named_scope('attention'):
    # Written first: the chunk also attends to its own keys in the pages.
    if pools[0].dtype == jnp.float8_e4m3fn:
      kept = tuple(map(grids.e4m3, kept))  # A cast would not saturate.
    if apart:
      x_BTD, kept = _apart(x_BTD, kept)
    axes = paged.token_axes(pools)
    written: Any = tuple(
      paged.write(pool, new_BT, *places, token_axis=axis)
      for pool, new_BT, axis in zip(pools, kept, axes, strict=True)
    )
    seen = (pages.tables_BP, pages.positions_BT)
    if c.numerics == 'batch_invariant':
      out_BTN = tiled.attend_paged(query, written, *seen, pages.valid_BT)
    else:
      # Pages of the longest row after this chunk. Latent attention uses its
      # absorbed form for context too, although for chunks of some hundred
      # tokens (171 for Kimi K2) and more, expanding keys and values would cost
      # less.
      blocks_BT = pages.positions_BT // page_size
      num_blocks = jnp.where(pages.valid_BT, blocks_BT + 1, 0).max()
      out_BTN = paged.attend(query, written, *seen, num_blocks=num_blocks)
  if 'moe' not in params:
    x_BTD = layer.dense(params, x_BTD, out_BTN, c, is_paged=True)
    return x_BTD, None, written
  x_BTD, (ids_BTA, _), _ = layer.mixture(
    params,
    variables.get('selection_bias', {}).get('moe', {}).get('bias'),
    (x_BTD, out_BTN, pages.valid_BT, None),
    c,
    is_paged=True,
    plan=plan,
  )
  return x_BTD, ids_BTA.astype(jnp.uint16), written


def _apart(x_BTD, kept):
  """Moves what is not finite from cache entries to the token's own state."""

  def is_finite(entry_BT):
    axes = tuple(range(2, entry_BT.ndim))
    return jnp.isfinite(entry_BT).all(axes)

  finite_BT = is_finite(kept[0]) & is_finite(kept[1])
  kept = tuple(
    jnp.where(jnp.expand_dims(finite_BT, range(2, x.ndim)), x, 0) for x in kept
  )
  return jnp.where(finite_BT[..., None], x_BTD, jnp.nan), kept


def forward(
  weights: Weights,
  cache: Cache,
  tokens_BT: jax.Array,
  valid_BT: jax.Array,
  positions_BT: jax.Array,
  tables_BP: jax.Array,
  *,
  config: config_lib.ModelConfig,
  plan: exchange.ExchangePlan | None = None,
  apart: bool = False,
) -> tuple[jax.Array, jax.Array, Cache]:
  """Consumes a chunk [B, T] or a decode step [B, 1].

  Args:
    valid_BT: mask of tokens; padding uses no expert and no place in the cache.
    positions_BT: int32 positions within the session.
    tables_BP: int32 page of each logical page of a row. A page that two rows
      share must not be written by either.
    plan: exchange between expert shards (`layouts.DECODE`); None on one device.
    apart: true for drafts, which may be taken back: see `run_layer`.

  Returns:
    hidden_BTD after the final norm, uint16 expert_ids_MBTA, and the cache,
    whose pools beyond those of the decoder's layers are as they were.
  """
  c = config
  x_BTD = weights.outer['params']['embedding'][tokens_BT]
  x_BTD = x_BTD.astype(c.compute_dtype)
  pages = pages_of(valid_BT, positions_BT, tables_BP, cache, c)
  all_pools, routes = list(cache), []
  for i, variables in enumerate(_layers(weights)):
    m = i - c.num_dense_layers
    x_BTD, ids_BTA, all_pools[i] = run_layer(
      variables,
      x_BTD,
      cache[i],
      pages,
      config=c.precise() if m >= 0 and c.is_precise(m) else c,
      plan=plan,
      apart=apart,
    )
    if ids_BTA is not None:
      routes.append(ids_BTA)
  scale_D = weights.outer['params']['final_norm']['scale']
  hidden_BTD = layer.final_norm(scale_D, x_BTD, c)
  return hidden_BTD, jnp.stack(routes), tuple(all_pools)


def logits(
  weights: Weights, hidden_BTD: jax.Array, config: config_lib.ModelConfig
) -> jax.Array:
  """Returns float32 logits_BTV of the token after each."""
  if 'unembedding' in weights.outer['params']:
    # The model's own, or a copy of its tied table.
    config = dataclasses.replace(config, tie_embeddings=False)
  return head.logits(weights.outer, hidden_BTD, config)
