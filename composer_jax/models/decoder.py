"""The one model that samples and trains.

Guided path, 9 of 10; next: `models.router`.

Routing is an argument and a result of the forward pass, layer-major, so it
rides through the layer scan and through recomputation unchanged. Variables are
made from a table (`models.parameters`); computing is functions of their tree,
which on a mesh run inside of shards (`parallel.shards`), a stage at a time:
embedding, stacks of like layers (`models.stacks`), final norm.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from composer_jax.core import batches
from composer_jax.models import attention, parameters, router, stacks
from composer_jax.models import config as model_config
from composer_jax.models import layer as layer_stages
from composer_jax.parallel import exchange, shards

Variables = dict[str, Any]


class DecoderOutput(flax.struct.PyTreeNode, kw_only=True):
  """What a forward pass returns.

  Attributes:
    hidden_BTD: after the final norm; `models.head` turns it into logits.
    expert_ids_MBTA: uint16 experts used.
    max_logits_LN: float32, each layer's and head's largest scaled attention
      logit over the tokens of the batch; None unless asked for.
    exchanged: what each layer's exchange needed and had, of the shard that
      needed most, int32 [M]; None in batch-invariant numerics.
  """

  hidden_BTD: jax.Array
  expert_ids_MBTA: jax.Array
  stats: batches.RouteStats
  max_logits_LN: jax.Array | None = None
  exchanged: exchange.ExchangeStats | None = None


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Embedding, dense layers, mixture-of-experts layers, final norm."""

  config: model_config.ModelConfig
  plan: exchange.ExchangePlan | None = None

  def apply(
    self,
    variables: Variables,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    positions_BT: jax.Array,
    *,
    expert_ids_MBTA: jax.Array | None = None,
    with_max_logits: bool = False,
  ) -> DecoderOutput:
    """Runs the layers over a packed batch.

    Args:
      variables: of `init`.
      tokens_BT: int32.
      segment_ids_BT: int32; 0 marks padding, which reaches no expert.
      positions_BT: int32 within the document.
      expert_ids_MBTA: routes to replay; None routes afresh.
      with_max_logits: whether to measure the attention's logits.

    Raises:
      ValueError: batch-invariant numerics on a mesh, or a batch that does not
        divide over it.
    """
    c, plan = self.config, self.plan
    _check_numerics(c, plan)
    shards.check_tokens(plan, tokens_BT.shape)
    tokens = (tokens_BT, segment_ids_BT, positions_BT)
    x_BTD, context = _embed(variables, tokens, c, plan)
    context = context.replace(is_measured=with_max_logits)
    outputs = []
    for name in c.stacks:
      stack = {k: tree[name] for k, tree in variables.items() if name in tree}
      replay_MBTA = expert_ids_MBTA if name == 'moe_layers' else None
      x_BTD, output = stacks.run(
        name, stack, x_BTD, context, replay_MBTA, config=c, plan=plan
      )
      outputs.append(output)
    hidden_BTD = _final_norm(variables, x_BTD, c, plan)
    # A decoder ends in experts, whose fields are all there: [M, shards, ...],
    # added up or compared once for all layers.
    ids_MBTA, stats = outputs[-1].expert_ids, outputs[-1].stats
    sums_M = jax.tree.map(lambda x: x.sum(1), stats.router)
    max_logits_LN = None
    if with_max_logits:
      tops = [output.max_logits.max(1) for output in outputs]
      max_logits_LN = jnp.concatenate(tops)
    return DecoderOutput(
      hidden_BTD=hidden_BTD,
      expert_ids_MBTA=ids_MBTA,
      stats=router.statistics(sums_M, c.moe),
      max_logits_LN=max_logits_LN,
      exchanged=jax.tree.map(lambda x: x.max(1), stats.exchange),
    )


def _embed(variables, tokens, config, plan):
  """Returns x_BTD and what all layers read."""
  table_VD = variables['params']['embedding']
  spec = shards.specs_of(plan, 'params/embedding', table_VD)

  def stage(table_VD, tokens_BT, segment_ids_BT, positions_BT):
    x_BTD = shards.look_up(
      table_VD, tokens_BT, spec, dtype=config.compute_dtype
    )
    context = stacks.Context(
      cos_sin=layer_stages.angles(positions_BT, config),
      visible=attention.visible_in_shard(segment_ids_BT, plan),
      segment_ids_BT=segment_ids_BT,
    )
    return x_BTD, context

  where = shards.tokens_spec(plan)
  stage = shards.per_shard(
    stage, plan, in_specs=(spec, where, where, where), out_specs=where
  )
  return stage(table_VD, *tokens)


def _final_norm(variables, x_BTD, config, plan):
  where = shards.tokens_spec(plan)
  stage = shards.per_shard(
    lambda scale_D, x_BTD: layer_stages.final_norm(scale_D, x_BTD, config),
    plan,
    in_specs=(P(), where),
    out_specs=where,
  )
  return stage(variables['params']['final_norm']['scale'], x_BTD)


def _check_numerics(config, plan):
  if config.numerics == 'batch_invariant' and plan is not None:
    raise ValueError(
      "numerics 'batch_invariant' needs one device, not a mesh of "
      f'{plan.mesh.size} ({dict(plan.mesh.shape)}): the order of a sum over '
      'devices depends on how many they are. Use a mesh of one, or numerics '
      "'fast'."
    )


def _boxed_init(config: model_config.ModelConfig, key: jax.Array) -> Variables:
  table = parameters.decoder_table(config)
  return dict(parameters.module_of(table).init(key))


def init(config: model_config.ModelConfig, key: jax.Array) -> Variables:
  """Returns {'params', 'selection_bias' (sigmoid router only)}, float32.

  Trace it under `jax.jit(..., out_shardings=...)` to create shards in place.
  """
  return nn.meta.unbox(_boxed_init(config, key))


@functools.lru_cache(maxsize=16)
def abstract(config: model_config.ModelConfig) -> tuple[Variables, Variables]:
  """Returns the variables as shapes, and their logical axes as specs.

  Cached, since tracing takes a third of a second; do not change the result.
  """
  boxed = jax.eval_shape(
    functools.partial(_boxed_init, config), jax.random.key(0)
  )
  return nn.meta.unbox(boxed), nn.get_partition_spec(boxed)


def policy(variables: Variables) -> Variables:
  """Returns the policy that the float32 masters stand for: their bf16 cast.

  Rollout serves it and bundles carry it; the selection bias stays float32. On
  CPU compute with `.astype(float32)` of it, which changes no value.
  """
  cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16), variables['params'])
  return {**variables, 'params': cast}
