"""Runs a stack of like layers over a packed batch: one scan, one shard a layer.

A layer is a function of its variables, the activations and what all layers read
(`Context`). On a mesh it is one `jax.shard_map` (`parallel.shards`), which
gathers the layer's weights first; its backward pass recomputes what the config
says and hands the weights' gradients back to their shards.
"""

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
  """What every layer reads and none changes."""

  cos_sin: tuple[jax.Array, jax.Array]
  visible: attention_kernel.Visible
  segment_ids_BT: jax.Array
  is_measured: bool = flax.struct.field(pytree_node=False, default=False)


class LayerOutput(flax.struct.PyTreeNode, kw_only=True):
  """What a layer says beside its activations; a dense one has no experts."""

  expert_ids: Any = None  # uint16 [B, T, A]
  stats: Any = None  # of the shard's tokens, stacked
  max_logits: Any  # [N] likewise; None unless asked for


def run(
  name: str,
  stacked: dict[str, Any],
  x_BTD: jax.Array,
  context: Context,
  replay_MBTA: jax.Array | None,
  *,
  config: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
) -> tuple[jax.Array, LayerOutput]:
  """Returns x_BTD after all layers of a stack, and what each says.

  `stacked` are its variables, layers leading, by collection.
  """
  specs = {
    k: shards.specs_of(plan, f'{k}/{name}', tree) for k, tree in stacked.items()
  }
  # Without the leading layer axis, which the scan consumes.
  specs = jax.tree.map(
    lambda spec: P(*spec[1:]), specs, is_leaf=lambda x: isinstance(x, P)
  )
  stacked, in_specs, owned = shards.lend(stacked, specs, plan)

  def layer(variables, x_BTD, context, replay_BTA):
    variables = owned(variables)
    whole = layer_stages.whole(
      variables['params'], specs['params'], config, plan
    )
    variables = {**variables, 'params': whole}
    return _layer(variables, x_BTD, context, replay_BTA, config, plan)

  if config.remat:
    # A choice of experts that rounding made anew might be another.
    saves = {'routes', *config.remat_saves}
    policy = jax.checkpoint_policies.save_only_these_names(*saves)
    layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
  where, apart = shards.tokens_spec(plan), shards.stacked_spec(plan)
  output = LayerOutput(expert_ids=where, stats=apart, max_logits=apart)
  per_shard = shards.per_shard(
    layer,
    plan,
    in_specs=(in_specs, where, where, where),
    out_specs=(where, output),
  )

  def body(x_BTD, sliced):
    variables, replay_BTA = sliced
    return per_shard(variables, x_BTD, context, replay_BTA)

  xs = (stacked, replay_MBTA)
  return jax.lax.scan(body, x_BTD, xs, unroll=_unroll(name, config, plan))


def _unroll(name, config, plan):
  """Returns how many layers are compiled as one body.

  On a CPU a loop copies every layer's weights and residuals in and out of their
  stacks, a tenth of a train step. Recomputation needs the loop: without it the
  compiler would merge both passes. Two layers in the body of a TPU's loop gave
  its scheduler no more to hide transfers under (Kimi K2 on 512 v5p).
  """
  length = config.stacks[name]
  is_small = length <= _MOST_UNROLLED and plan is None
  is_small = is_small and not config.remat
  return length if is_small and platforms.current() == 'cpu' else 1


def _layer(variables, x_BTD, context, replay_BTA, config, plan):
  params = variables['params']
  query, kept = layer_stages.attention_inputs(
    params, x_BTD, context.cos_sin, config
  )
  out_BTN, max_logits_N = layer_stages.attend(
    params,
    query,
    kept,
    (context.visible, context.segment_ids_BT),
    config,
    plan,
    is_measured=context.is_measured,
  )
  output = LayerOutput(max_logits=shards.stacked(max_logits_N))
  if 'ffw' in params:
    return layer_stages.dense(params, x_BTD, out_BTN, config), output
  x_BTD, ids_BTA, stats = layer_stages.mixture(
    params,
    variables.get('selection_bias', {}).get('moe', {}).get('bias'),
    (x_BTD, out_BTN, context.segment_ids_BT != 0, replay_BTA),
    config,
    plan=plan,
  )
  expert_ids = ids_BTA.astype(jnp.uint16)
  return x_BTD, output.replace(
    expert_ids=expert_ids, stats=shards.stacked(stats)
  )
