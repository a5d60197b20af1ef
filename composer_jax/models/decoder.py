"""The one model that samples and trains.

Routing is an argument and a result of the forward pass, layer-major, so it
rides through the layer scan and through recomputation unchanged.
"""

import functools
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.core import batches
from composer_jax.models import attention, experts, mla, norm, parameters
from composer_jax.models import config as model_config
from composer_jax.models import layer as layer_stages
from composer_jax.parallel import exchange

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
  """

  hidden_BTD: jax.Array
  expert_ids_MBTA: jax.Array
  stats: batches.RouteStats
  max_logits_LN: jax.Array | None = None


class Context(flax.struct.PyTreeNode, kw_only=True):
  """What every layer reads and none changes."""

  cos_sin: tuple[jax.Array, jax.Array]
  mask_BTS: jax.Array
  segment_ids_BT: jax.Array
  is_measured: bool = flax.struct.field(pytree_node=False)


class DenseLayer(nn.Module):
  """Attention and a dense feed-forward, each on a normalised residual."""

  config: model_config.ModelConfig
  plan: exchange.ExchangePlan | None = None

  @nn.compact
  def __call__(self, x_BTD, context):
    c = self.config
    params = _attention_parameters(self)
    ffw = experts.DenseParameters(c, c.dense_ffw_dim, name='ffw')
    params = layer_stages.prepare(params | {'ffw': ffw()}, c)
    x_BTD, out_BTN, max_logits_N = _attend(self, params, x_BTD, context)
    return layer_stages.dense(params, x_BTD, out_BTN, c), max_logits_N


class MoELayer(nn.Module):
  """Attention and a mixture of experts, each on a normalised residual."""

  config: model_config.ModelConfig
  plan: exchange.ExchangePlan | None = None

  @nn.compact
  def __call__(self, x_BTD, context, replay_BTA):
    c = self.config
    params = _attention_parameters(self)
    moe, bias_E = experts.Parameters(c, name='moe')()
    params = layer_stages.prepare(params | {'moe': moe}, c)
    x_BTD, out_BTN, max_logits_N = _attend(self, params, x_BTD, context)
    valid_BT = context.segment_ids_BT != 0
    x_BTD, ids_BTA, stats = layer_stages.mixture(
      params,
      bias_E,
      (x_BTD, out_BTN, valid_BT, replay_BTA),
      c,
      plan=self.plan,
    )
    return x_BTD, (ids_BTA.astype(jnp.uint16), stats, max_logits_N)


def _attention_parameters(module):
  c = module.config
  return {
    'attention_norm': norm.scale_of('attention_norm', c.embed_dim),
    'attention': _ATTENTIONS[c.attention.kind](c, name='attention')(),
    'ffw_norm': norm.scale_of('ffw_norm', c.embed_dim),
  }


def _attend(module, params, x_BTD, context):
  c, plan = module.config, module.plan
  x_BTD = exchange.constrain(x_BTD, plan)
  query, kept = layer_stages.attention_inputs(params, x_BTD, context.cos_sin, c)
  out_BTN, max_logits_N = layer_stages.attend(
    params,
    query,
    kept,
    (context.mask_BTS, context.segment_ids_BT),
    c,
    plan,
    is_measured=context.is_measured,
  )
  return x_BTD, out_BTN, max_logits_N


class Decoder(nn.Module):
  """Embedding, dense layers, mixture-of-experts layers, final norm.

  Attributes:
    config: what to build.
    plan: where experts lie; None on one device.
  """

  config: model_config.ModelConfig
  plan: exchange.ExchangePlan | None = None

  @nn.compact
  def __call__(
    self,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    positions_BT: jax.Array,
    *,
    expert_ids_MBTA: jax.Array | None = None,
    with_max_logits: bool = False,
  ) -> DecoderOutput:
    """Runs the layers over a packed batch.

    Args:
      tokens_BT: int32.
      segment_ids_BT: int32; 0 marks padding, which reaches no expert.
      positions_BT: int32 within the document.
      expert_ids_MBTA: routes to replay; None routes afresh.
      with_max_logits: whether to measure the attention's logits; a program
        that does not ask does nothing for them.

    Raises:
      ValueError: batch-invariant numerics on a mesh.
    """
    c = self.config
    _check_numerics(c, self.plan)
    x_BTD = self._embed(tokens_BT)
    context = Context(
      cos_sin=layer_stages.angles(positions_BT, c),
      mask_BTS=attention.packed_mask(segment_ids_BT),
      segment_ids_BT=segment_ids_BT,
      is_measured=with_max_logits,
    )
    first, max_logits = c.num_dense_layers, []
    if first:
      dense = _scan(DenseLayer, c, first)(c, self.plan, name='dense_layers')
      x_BTD, max_logits_LN = dense(x_BTD, context)
      max_logits.append(max_logits_LN)
    moe = _scan(MoELayer, c, c.num_moe_layers)(c, self.plan, name='moe_layers')
    x_BTD, (ids_MBTA, stats, max_logits_MN) = moe(
      x_BTD, context, expert_ids_MBTA
    )
    max_logits.append(max_logits_MN)
    scale_D = norm.scale_of('final_norm', c.embed_dim)['scale']
    return DecoderOutput(
      hidden_BTD=layer_stages.final_norm(scale_D, x_BTD, c),
      expert_ids_MBTA=ids_MBTA,
      stats=batches.RouteStats(
        load_ME=stats.load_E,
        aux_loss_M=stats.aux_loss,
        z_loss_M=stats.z_loss,
        replay_agreement_M=stats.replay_agreement,
        replay_replaced_M=stats.replay_replaced,
        no_route_M=stats.no_route,
      ),
      max_logits_LN=jnp.concatenate(max_logits) if with_max_logits else None,
    )

  def _embed(self, tokens_BT):
    c = self.config
    normal = nn.initializers.normal(0.02)
    embedding_VD = parameters.create(
      self,
      'embedding',
      normal,
      ('vocab', 'embed'),
      (c.vocab_size, c.embed_dim),
    )
    if not c.tie_embeddings:
      # Made here, used by `models.head`: one tree holds all parameters.
      parameters.create(
        self,
        'unembedding',
        normal,
        ('embed', 'vocab'),
        (c.embed_dim, c.vocab_size),
      )
    embedding_VD = exchange.gather_weight(
      embedding_VD.astype(c.compute_dtype), self.plan
    )
    return embedding_VD[tokens_BT]


def _check_numerics(config, plan):
  if config.numerics == 'batch_invariant' and plan is not None:
    raise ValueError(
      "numerics 'batch_invariant' needs one device, not a mesh of "
      f'{plan.mesh.size} ({dict(plan.mesh.shape)}): the order of a sum over '
      'devices depends on how many they are. Use a mesh of one, or numerics '
      "'fast'."
    )


def _scan(layer, config, length):
  num_scanned = 0 if layer is DenseLayer else 1
  if config.remat:
    layer = nn.remat(layer, prevent_cse=False)
  return nn.scan(
    layer,
    variable_axes={'params': 0, 'selection_bias': 0},
    split_rngs={'params': True},
    in_axes=(nn.broadcast,) + (0,) * num_scanned,
    length=length,
    metadata_params={nn.PARTITION_NAME: 'layer'},
  )


def _boxed_init(config: model_config.ModelConfig, key: jax.Array) -> Variables:
  zeros_BT = jnp.zeros((1, 1), jnp.int32)
  return dict(Decoder(config).init(key, zeros_BT, zeros_BT, zeros_BT))


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
