"""The one model that samples and trains.

Guided path, 9 of 10; next: `models.router`.

Routes are an argument and a result of the forward pass, layer-major, so that
the layer scan and recomputation keep them unchanged. The stages (embedding,
stacks of equal layers in `models.stacks`, final norm) are functions of a tree
of variables (`models.parameters`), on a mesh inside of `parallel.shards`.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from composer_jax.core import batches, trees
from composer_jax.models import (
  adapters,
  attention,
  experts,
  parameters,
  router,
  stacks,
)
from composer_jax.models import config as model_config
from composer_jax.models import layer as layer_stages
from composer_jax.parallel import exchange, shards

Variables = dict[str, Any]


class DecoderOutput(flax.struct.PyTreeNode, kw_only=True):
  """Result of a forward pass.

  Attributes:
    hidden_BTD: hidden states after the final norm, for `models.head`.
    expert_ids_MBTA: uint16 experts used.
    agrees_MBT: false where a recorded route is not the router's own choice.
    entries: cache entries after the pass, by stack; None each if not `cached`.
    max_logits_LN: float32 largest scaled attention logit of each layer and
      head; None if not measured.
    rounds_M: int32 rounds of each layer's exchange; None if no token travels.
  """

  hidden_BTD: jax.Array
  expert_ids_MBTA: jax.Array
  agrees_MBT: jax.Array
  stats: batches.RouteStats
  max_logits_LN: jax.Array | None = None
  rounds_M: jax.Array | None = None
  entries: dict[str, Any] | None = None


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
    cached: stacks.Cached | None = None,
    with_max_logits: bool = False,
  ) -> DecoderOutput:
    """Runs the layers over a packed batch.

    Args:
      segment_ids_BT: int32 documents; 0 is padding, which reaches no expert.
      positions_BT: int32 positions within the documents.
      expert_ids_MBTA: routes to replay; None routes every token afresh.
      cached: cache entries of tokens that other weights consumed; None if
        these weights consume all, and no entries are returned.
      with_max_logits: true to measure the attention's logits.

    Raises:
      ValueError: the batch does not divide over the mesh.
    """
    c, plan = self.config, self.plan
    shards.check_tokens(plan, tokens_BT.shape)
    tokens = (tokens_BT, segment_ids_BT, positions_BT)
    x_BTD, context = embed(variables, tokens, c, plan)
    context = context.replace(is_measured=with_max_logits)
    if c.precision.draws and 'backward' in variables:
      draws_BT = _draws(variables['backward']['step'], *tokens)
      context = context.replace(draws_BT=draws_BT)
    entries: Any = {}
    if cached is not None:
      context = context.replace(own_BT=cached.own_BT)
      entries = cached.entries or {}
    outputs = []
    for name in c.stacks:
      stack = {k: tree[name] for k, tree in variables.items() if name in tree}
      replay_MBTA = expert_ids_MBTA if name == 'moe_layers' else None
      given = replay_MBTA, entries.get(name)
      x_BTD, output = stacks.run(
        name, stack, x_BTD, context, given, config=c, plan=plan
      )
      outputs.append(output)
    hidden_BTD = final_norm(variables, x_BTD, c, plan)
    # The last stack has experts; its statistics are [M, shards, ...].
    last, stats = outputs[-1], outputs[-1].stats
    sums_M = jax.tree.map(lambda x: x.sum(1), stats.router)
    max_logits_LN = None
    if with_max_logits:
      tops = [output.max_logits.max(1) for output in outputs]
      max_logits_LN = jnp.concatenate(tops)
    return DecoderOutput(
      hidden_BTD=hidden_BTD,
      expert_ids_MBTA=last.expert_ids,
      agrees_MBT=last.agrees,
      stats=router.statistics(sums_M, c.moe),
      max_logits_LN=max_logits_LN,
      rounds_M=jax.tree.map(lambda x: x.max(1), stats.rounds),
      entries={n: o.kept for n, o in zip(c.stacks, outputs, strict=True)},
    )


def _draws(step, tokens_BT, segment_ids_BT, positions_BT):
  """Returns a uint32 of each token, the same on every mesh.

  It depends on the step, and on the token's row, document and position.
  """
  # The sum tells microbatches apart; sums of integers have no order.
  row_B = tokens_BT.astype(jnp.uint32).sum(1)
  place_B = jnp.arange(len(row_B))

  def draw(row, place, segment, position):
    key = jax.random.key(step, impl='threefry2x32')
    for data in (row, place, segment, position):
      key = jax.random.fold_in(key, data)
    return jax.random.bits(key)

  draw_T = jax.vmap(draw, (None, None, 0, 0))
  return jax.vmap(draw_T)(row_B, place_B, segment_ids_BT, positions_BT)


def embed(
  variables: Variables,
  tokens: tuple[jax.Array, jax.Array, jax.Array],
  config: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
) -> tuple[jax.Array, stacks.Context]:
  """Returns x_BTD and the context of all layers.

  `tokens` are tokens_BT, segment_ids_BT and positions_BT.
  """
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


def final_norm(
  variables: Variables,
  x_BTD: jax.Array,
  config: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
) -> jax.Array:
  """Returns hidden_BTD, from which `models.head` makes logits."""
  where = shards.tokens_spec(plan)
  stage = shards.per_shard(
    lambda scale_D, x_BTD: layer_stages.final_norm(scale_D, x_BTD, config),
    plan,
    in_specs=(P(), where),
    out_specs=where,
  )
  return stage(variables['params']['final_norm']['scale'], x_BTD)


def _boxed_init(config: model_config.ModelConfig, key: jax.Array) -> Variables:
  table = parameters.decoder_table(config)
  variables = dict(parameters.module_of(table).init(key))
  if config.adapters.enabled:
    frozen = jax.tree.map(lambda p: p.astype(jnp.bfloat16), variables['params'])
    variables |= {'params': frozen, 'adapters': _boxed_adapters(config, key)}
  if config.mtp is not None:
    variables['mtp'] = _boxed_heads(config, key)
  return variables


def _boxed_heads(config, key):
  table = parameters.mtp_table(config)
  return dict(parameters.module_of(table).init(jax.random.fold_in(key, 2)))


def _boxed_adapters(config, key):
  table = adapters.table(config)
  return parameters.module_of(table).init(jax.random.fold_in(key, 1))['params']


def init(config: model_config.ModelConfig, key: jax.Array) -> Variables:
  """Returns {'params', 'selection_bias' (sigmoid router only)}, float32.

  A model with adapters also has these, and its parameters are bfloat16. One
  with heads has 'mtp', variables of their own (`models.mtp`). Trace it under
  `jax.jit(..., out_shardings=...)` to create shards in place.
  """
  return nn.meta.unbox(_boxed_init(config, key))


def init_adapters(config: model_config.ModelConfig, key: jax.Array) -> Any:
  """Returns float32 adapters that change nothing yet."""
  return nn.meta.unbox(_boxed_adapters(config, key))


def init_heads(config: model_config.ModelConfig, key: jax.Array) -> Variables:
  """Returns float32 variables of new heads, the entry 'mtp' of `init`."""
  return nn.meta.unbox(_boxed_heads(config, key))


def trained(variables: Variables) -> str:
  """Returns the collection that training moves: adapters, if there are any."""
  return 'adapters' if 'adapters' in variables else 'params'


def without_base(variables: Variables) -> Variables:
  """Leaves out frozen parameters, which no bundle or checkpoint repeats."""
  frozen = {'params'} - {trained(variables)}
  return {k: tree for k, tree in variables.items() if k not in frozen}


@functools.lru_cache(maxsize=16)
def abstract(config: model_config.ModelConfig) -> tuple[Variables, Variables]:
  """Returns the variables' shapes and logical axes, which are cached."""
  boxed = jax.eval_shape(
    functools.partial(_boxed_init, config), jax.random.key(0)
  )
  return nn.meta.unbox(boxed), nn.get_partition_spec(boxed)


def policy(
  variables: Variables, config: model_config.ModelConfig | None = None
) -> Variables:
  """Returns the policy's variables: the bfloat16 cast of the masters.

  Rollout serves it and bundles carry it. The selection bias stays float32.
  Frozen parameters are left out. Experts are rounded to the format of the
  config first, and are its codes if that says so; None takes variables that are
  rounded already.
  """
  name = trained(variables)
  masters = trees.on_device(variables[name])
  if config is not None:
    masters = experts.in_format(masters, config)
  cast = lambda tree: jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree)
  served = {**without_base(variables), name: cast(masters)}
  if 'mtp' in variables:
    heads = variables['mtp']
    served['mtp'] = {**heads, 'params': cast(heads['params'])}
  if config is not None and config.precision.codes:
    return experts.encode(served, config)
  return served
