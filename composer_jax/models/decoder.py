"""The one model that samples and trains.

Routing is an argument and a result of the forward pass, layer-major, so it
rides through the layer scan and through recomputation unchanged. Parameters are
created by Linen modules; computing is functions of their tree, which on a mesh
run inside of shards (`parallel.shards`), a stage at a time.
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
from composer_jax.models import (
  attention,
  experts,
  mla,
  norm,
  parameters,
  router,
  stacks,
)
from composer_jax.models import config as model_config
from composer_jax.models import layer as layer_stages
from composer_jax.parallel import exchange, shards

Variables = dict[str, Any]

_ATTENTIONS = {'gqa': attention.Parameters, 'mla': mla.Parameters}

# For `jax.jit` of `init` in tests, which compile it often: its many random
# numbers take four seconds, or one with these. A run goes without: its weights
# would differ in the last bit from those of earlier runs of the same seed.
INIT_COMPILER_OPTIONS = {'xla_backend_optimization_level': 0}


class DecoderOutput(flax.struct.PyTreeNode, kw_only=True):
  """What a forward pass returns.

  Attributes:
    hidden_BTD: after the final norm; `models.head` turns it into logits.
    expert_ids_MBTA: uint16 experts used, by MoE layer.
    stats: of the routers.
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


class LayerParameters(nn.Module):
  """Creates the parameters of a layer, of experts or dense."""

  config: model_config.ModelConfig
  is_dense: bool

  @nn.compact
  def __call__(self, carry, _=None):
    c = self.config
    norm.scale_of('attention_norm', c.embed_dim)
    _ATTENTIONS[c.attention.kind](c, name='attention')()
    norm.scale_of('ffw_norm', c.embed_dim)
    if self.is_dense:
      experts.DenseParameters(c, c.dense_ffw_dim, name='ffw')()
    else:
      experts.Parameters(c, name='moe')()
    return carry, None


class Parameters(nn.Module):
  """Creates all variables of a decoder; those of like layers are stacked."""

  config: model_config.ModelConfig

  @nn.compact
  def __call__(self) -> None:
    c = self.config
    normal = nn.initializers.normal(0.02)
    parameters.create(
      self,
      'embedding',
      normal,
      ('vocab', 'embed'),
      (c.vocab_size, c.embed_dim),
    )
    if not c.tie_embeddings:
      parameters.create(
        self,
        'unembedding',
        normal,
        ('embed', 'vocab'),
        (c.embed_dim, c.vocab_size),
      )
    for name in stacks.names(c):
      stack = nn.scan(
        LayerParameters,
        variable_axes={'params': 0, 'selection_bias': 0},
        split_rngs={'params': True},
        length=stacks.lengths(c)[name],
        metadata_params={nn.PARTITION_NAME: 'layer'},
      )
      stack(c, name == 'dense_layers', name=name)(None)
    norm.scale_of('final_norm', c.embed_dim)


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Embedding, dense layers, mixture-of-experts layers, final norm.

  Attributes:
    config: what to compute.
    plan: where variables and tokens lie; None on one device.
  """

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
      with_max_logits: whether to measure the attention's logits; a program
        that does not ask does nothing for them.

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
    for name in stacks.names(c):
      stack = {k: tree[name] for k, tree in variables.items() if name in tree}
      routes = expert_ids_MBTA if name == 'moe_layers' else None
      x_BTD, output = stacks.run(
        name, stack, x_BTD, context, routes, config=c, plan=plan
      )
      outputs.append(output)
    # A decoder ends in experts, whose fields are all there.
    moe: Any = outputs[-1]
    return DecoderOutput(
      hidden_BTD=_final_norm(variables, x_BTD, c, plan),
      expert_ids_MBTA=moe.expert_ids,
      stats=_route_stats(moe.stats.router, c),
      max_logits_LN=_max_logits(outputs) if with_max_logits else None,
      exchanged=jax.tree.map(lambda x: x.max(1), moe.stats.exchange),
    )


def _embed(variables, tokens, config, plan):
  """Returns x_BTD and what all layers read."""
  name = 'embedding'
  table_VD = variables['params'][name]
  spec = shards.specs_of(plan, f'params/{name}', table_VD)

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


def _route_stats(sums, config):
  """Adds the shards' sums [M, shards, ...], once for all layers."""
  sums = jax.tree.map(lambda x: x.sum(1), sums)
  stats = jax.vmap(lambda layer: router.statistics(layer, config.moe))(sums)
  return batches.RouteStats(
    load_ME=stats.load_E,
    aux_loss_M=stats.aux_loss,
    z_loss_M=stats.z_loss,
    replay_agreement_M=stats.replay_agreement,
    replay_replaced_M=stats.replay_replaced,
    no_route_M=stats.no_route,
  )


def _max_logits(outputs):
  return jnp.concatenate([output.max_logits.max(1) for output in outputs])


def _check_numerics(config, plan):
  if config.numerics == 'batch_invariant' and plan is not None:
    raise ValueError(
      "numerics 'batch_invariant' needs one device, not a mesh of "
      f'{plan.mesh.size} ({dict(plan.mesh.shape)}): the order of a sum over '
      'devices depends on how many they are. Use a mesh of one, or numerics '
      "'fast'."
    )


def _boxed_init(config: model_config.ModelConfig, key: jax.Array) -> Variables:
  return dict(Parameters(config).init(key))


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
