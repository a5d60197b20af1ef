"""Scans a stack of equal layers over a packed batch.

On a mesh a layer is one `jax.shard_map` (`parallel.shards`), which gathers the
layer's weights first; its backward pass recomputes what the config says and
scatters the weights' gradients to their shards. With 'ahead' in `remat_saves`
a layer's weights are gathered beside the layer before, and its gradients are
scattered there in the backward pass, so that products hide both.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from composer_jax.core import platforms
from composer_jax.kernels.attention import grouped_query as attention_kernel
from composer_jax.models import config as model_config
from composer_jax.models import layer as layer_stages
from composer_jax.parallel import exchange, shards

_MOST_UNROLLED = 8


class Context(flax.struct.PyTreeNode, kw_only=True):
  """Inputs that all layers share."""

  cos_sin: tuple[jax.Array, jax.Array]
  visible: attention_kernel.Visible
  segment_ids_BT: jax.Array
  own_BT: jax.Array | None = None  # see `Cached`
  draws_BT: jax.Array | None = None  # see `exchange.exchange`
  is_measured: bool = flax.struct.field(pytree_node=False, default=False)


class Cached(flax.struct.PyTreeNode, kw_only=True):
  """Cache entries of tokens that other weights consumed before.

  Attributes:
    own_BT: true where the pass computes a token's entry itself.
    entries: two arrays [L, B, T, ...] of each stack, by name; None for none.
  """

  own_BT: jax.Array
  entries: dict[str, Any] | None = None


class LayerOutput(flax.struct.PyTreeNode, kw_only=True):
  """Results of a layer beside activations; only mixtures have all fields."""

  expert_ids: Any = None  # uint16 [B, T, A]
  agrees: Any = None  # bool [B, T], see `router.agrees`
  kept: Any = None  # the layer's cache entries; None without a `Cached`
  stats: Any = None  # MixtureStats, stacked over shards
  max_logits: Any  # [N], stacked over shards; None if not measured


def run(
  name: str,
  stacked: dict[str, Any],
  x_BTD: jax.Array,
  context: Context,
  given: tuple[jax.Array | None, Any],
  *,
  config: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
  within: str = '',
) -> tuple[jax.Array, LayerOutput]:
  """Returns x_BTD after a stack, and the results of each layer.

  `stacked` are the stack's variables by collection, layers leading, and `given`
  its routes to replay and cache entries (`Cached`), or None. `within` starts
  the names of collections that are not the decoder's own ('mtp/').
  """
  specs = {
    k: shards.specs_of(plan, f'{within}{k}/{name}', tree)
    for k, tree in stacked.items()
  }
  # Without the leading layer axis, which the scan consumes.
  specs = jax.tree.map(
    lambda spec: P(*spec[1:]), specs, is_leaf=lambda x: isinstance(x, P)
  )
  count = len(jax.tree.leaves(stacked)[0])
  following: Any = None
  gather: Any = None
  if plan is not None and 'ahead' in config.remat_saves and count > 1:
    following, gather, stacked, specs = _apart(stacked, specs, config, plan)
  stacked, in_specs, owned = shards.lend(stacked, specs, plan)

  def layer(variables, ahead, x_BTD, context, given, place):
    is_precise, draw = place
    if draw is not None:
      context = context.replace(draws_BT=context.draws_BT + draw)
    variables = owned(variables)
    whole = layer_stages.whole(variables, specs, config, plan)
    whole = _merged(jax.tree.map(lambda x: x[0], ahead), whole)
    variables = {**variables, 'params': whole}
    run = lambda c: _layer(variables, x_BTD, context, given, c, plan)
    if is_precise is None:
      return run(config)
    precise = config.precise()
    return jax.lax.cond(is_precise, lambda: run(precise), lambda: run(config))

  if config.remat:
    # A recomputed choice of experts could differ by rounding.
    saves = {'routes', *config.remat_saves}
    policy = jax.checkpoint_policies.save_only_these_names(*saves)
    layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
  where, apart = shards.tokens_spec(plan), shards.stacked_spec(plan)
  output = LayerOutput(
    expert_ids=where, agrees=where, kept=where, stats=apart, max_logits=apart
  )
  per_shard = shards.per_shard(
    layer,
    plan,
    in_specs=(in_specs, apart, where, where, where, P()),
    out_specs=(where, output),
  )

  def body(carry, sliced):
    x_BTD, ahead = carry
    variables, later, given, place = sliced
    # Depends on no activation, and nothing in this layer on it.
    later = later and gather(later)
    x_BTD, output = per_shard(variables, ahead, x_BTD, context, given, place)
    return (x_BTD, later), output

  draws = None  # Of layers, which add to those of tokens.
  if context.draws_BT is not None:
    draws = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(0x85EBCA6B)
  xs = (stacked, following, given, (_precise(name, config), draws))
  with jax.named_scope(name):
    ahead = None
    if following is not None:
      # The first layer follows the last, so that all layers are alike.
      ahead = gather(jax.tree.map(lambda x_M: x_M[-1], following))
    unroll = _unroll(count, config, plan)
    (x_BTD, _), outputs = jax.lax.scan(body, (x_BTD, ahead), xs, unroll=unroll)
  return x_BTD, outputs


def _apart(stacked, specs, config, plan):
  """Returns what is gathered ahead apart from what is not.

  Returns:
    The weights that follow each layer's, a function of one layer of them that
    gathers, and the other variables with their specs. Each device has gathered
    weights of its own, lest their gradients are summed before they are
    scattered.
  """

  def split(tree, is_ahead):
    def has(name):
      return is_ahead != (name in layer_stages.EXPERT_ARRAYS)

    params = dict(tree['params'])
    moe = {k: v for k, v in params.pop('moe', {}).items() if has(k)}
    params = params if is_ahead else {}
    return {'params': {**params, 'moe': moe} if moe else params}

  dense, dense_specs = split(stacked, True), split(specs, True)
  dense, in_specs, owned = shards.lend(dense, dense_specs, plan)

  def gather(variables):
    variables = owned(variables)
    whole = layer_stages.whole(variables, dense_specs, config, plan)
    return shards.stacked(whole)

  gather = shards.per_shard(
    gather, plan, in_specs=(in_specs,), out_specs=shards.stacked_spec(plan)
  )
  following = jax.tree.map(lambda x_M: jnp.roll(x_M, -1, axis=0), dense)
  rest = ({**tree, **split(tree, False)} for tree in (stacked, specs))
  return following, gather, *rest


def _merged(ahead, whole):
  """Returns a layer's weights, of which some may have been gathered ahead."""
  if ahead is None:
    return whole
  moe = {**ahead.get('moe', {}), **whole.get('moe', {})}
  return {**ahead, 'moe': moe} if moe else ahead


def _precise(name, config):
  """Returns which layers of a stack stay in bf16; None if all are alike."""
  if name != 'moe_layers' or not (
    config.precision.first or config.precision.last
  ):
    return None
  return jnp.array([config.is_precise(i) for i in range(config.num_moe_layers)])


def _unroll(length, config, plan):
  """Returns the number of layers in the body of the scan.

  On a CPU a loop copies every layer's weights and residuals, a tenth of a train
  step. Recomputation needs the loop, or the compiler would merge both passes.
  On TPUs two layers in a body hid no more transfers (Kimi K2 on 512 v5p).
  """
  is_small = length <= _MOST_UNROLLED and plan is None
  is_small = is_small and not config.remat
  return length if is_small and platforms.current() == 'cpu' else 1


def _layer(variables, x_BTD, context, given, config, plan):
  params = variables['params']
  replay_BTA, entry = given
  query, kept = layer_stages.attention_inputs(
    params, x_BTD, context.cos_sin, config
  )
  if entry is not None:
    own = lambda x: jnp.expand_dims(context.own_BT, range(2, x.ndim))
    one, two = (jnp.where(own(x), x, entry[i]) for i, x in enumerate(kept))
    kept = one, two
  tokens_BT = (query, x_BTD, context.visible, context.segment_ids_BT)
  tokens_BT = (*tokens_BT, replay_BTA, context.draws_BT)
  rest = functools.partial(_rest, variables, kept, context, config, plan)
  chunks = plan.chunks if plan is not None and 'moe' in params else 1
  piece = lambda x: jnp.split(x, chunks, axis=1) if chunks > 1 else [x]
  leaves, tree = jax.tree.flatten(tokens_BT)
  pieces = zip(*map(piece, leaves), strict=True)
  parts = [rest(*tree.unflatten(leaves)) for leaves in pieces]
  x_BTD, output = parts[0] if chunks == 1 else _joined(parts)
  output = output.replace(
    stats=shards.stacked(output.stats),
    max_logits=shards.stacked(output.max_logits),
  )
  if context.own_BT is not None:
    output = output.replace(kept=kept)
  return x_BTD, output


def _rest(variables, kept, context, config, plan, query, x_BTD, *tokens_BT):
  """Returns what `_layer` does, of some tokens, behind keys of all."""
  params = variables['params']
  visible, segment_ids_BT, replay_BTA, draws_BT = tokens_BT
  out_BTN, max_logits_N = layer_stages.attend(
    params,
    query,
    kept,
    (visible, segment_ids_BT),
    config,
    plan,
    is_measured=context.is_measured,
  )
  output = LayerOutput(max_logits=max_logits_N)
  if 'ffw' in params:
    return layer_stages.dense(params, x_BTD, out_BTN, config), output
  x_BTD, (ids_BTA, agrees_BT), stats = layer_stages.mixture(
    params,
    variables.get('selection_bias', {}).get('moe', {}).get('bias'),
    (x_BTD, out_BTN, segment_ids_BT != 0, replay_BTA),
    config,
    plan=plan,
    draws_BT=draws_BT,
  )
  expert_ids = ids_BTA.astype(jnp.uint16)
  return x_BTD, output.replace(
    expert_ids=expert_ids, agrees=agrees_BT, stats=stats
  )


def _joined(parts):
  """Returns the results of consecutive tokens as those of all."""
  x_BTD, outputs = zip(*parts, strict=True)
  rows = lambda *xs: jnp.concatenate(xs, axis=1)
  largest = lambda *xs: functools.reduce(jnp.maximum, xs)
  output = LayerOutput(
    expert_ids=rows(*(o.expert_ids for o in outputs)),
    agrees=rows(*(o.agrees for o in outputs)),
    max_logits=jax.tree.map(largest, *(o.max_logits for o in outputs)),
    stats=layer_stages.MixtureStats(
      jax.tree.map(lambda *xs: sum(xs), *(o.stats.router for o in outputs)),
      jax.tree.map(largest, *(o.stats.rounds for o in outputs)),
    ),
  )
  return rows(*x_BTD), output
