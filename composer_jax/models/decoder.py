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
from composer_jax.models import attention, experts, mla, norm, parameters, rope
from composer_jax.models import cache as kv_cache
from composer_jax.models import config as model_config
from composer_jax.parallel import exchange

Variables = dict[str, Any]

_ATTENTIONS = {'gqa': attention.Attention, 'mla': mla.LatentAttention}

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
    cache: with this chunk written, or None when none was given.
  """

  hidden_BTD: jax.Array
  expert_ids_MBTA: jax.Array
  stats: batches.RouteStats
  cache: kv_cache.Cache | None


class Context(flax.struct.PyTreeNode, kw_only=True):
  """What every layer reads and none changes."""

  cos_sin: tuple[jax.Array, jax.Array]
  mask_BTS: jax.Array
  positions_BT: jax.Array
  valid_BT: jax.Array


class DenseLayer(nn.Module):
  """Attention and a dense feed-forward, each on a normalised residual."""

  config: model_config.ModelConfig
  plan: exchange.ExchangePlan | None = None

  @nn.compact
  def __call__(self, carry, context, layer):
    x_BTD, cache = _attend(self, carry, context, layer)
    h_BTD = norm.RMSNorm(self.config.norm_eps, name='ffw_norm')(x_BTD)
    mlp = experts.DenseMLP(self.config, self.config.dense_ffw_dim, name='ffw')
    return (x_BTD + mlp(h_BTD), cache), None


class MoELayer(nn.Module):
  """Attention and a mixture of experts, each on a normalised residual."""

  config: model_config.ModelConfig
  plan: exchange.ExchangePlan | None = None

  @nn.compact
  def __call__(self, carry, context, layer, replay_BTA):
    x_BTD, cache = _attend(self, carry, context, layer)
    h_BTD = norm.RMSNorm(self.config.norm_eps, name='ffw_norm')(x_BTD)
    moe = experts.MoE(self.config, self.plan, name='moe')
    y_BTD, ids_BTA, stats = moe(h_BTD, context.valid_BT, replay_BTA)
    return (x_BTD + y_BTD, cache), (ids_BTA.astype(jnp.uint16), stats)


def _attend(module, carry, context, layer):
  c, plan = module.config, module.plan
  x_BTD, cache = carry
  x_BTD = exchange.constrain(x_BTD, plan)
  h_BTD = norm.RMSNorm(c.norm_eps, name='attention_norm')(x_BTD)
  with jax.named_scope('attention'):
    y_BTD, cache = _ATTENTIONS[c.attention.kind](c, plan, name='attention')(
      h_BTD,
      context.cos_sin,
      context.mask_BTS,
      context.positions_BT,
      cache,
      layer,
    )
  return x_BTD + y_BTD, cache


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
    cache: kv_cache.Cache | None = None,
  ) -> DecoderOutput:
    """Runs the layers over a packed batch, or over a chunk with a cache.

    Args:
      tokens_BT: int32.
      segment_ids_BT: int32; 0 marks padding, which reaches no expert.
      positions_BT: int32 within the document. With a cache, keys are written
        at these; a position past the cache is dropped (padding of a chunk).
      expert_ids_MBTA: routes to replay; None routes afresh.
      cache: of earlier chunks. With it a query sees all slots up to its
        position, whatever the segments say: a row holds one session.
    """
    c = self.config
    x_BTD = self._embed(tokens_BT)
    if cache is None:
      mask_BTS = attention.packed_mask(segment_ids_BT)
    else:
      mask_BTS = attention.cached_mask(positions_BT, cache.max_len)
    context = Context(
      cos_sin=rope.angles(positions_BT, c.attention.rotary_dim, c.rope),
      mask_BTS=mask_BTS,
      positions_BT=positions_BT,
      valid_BT=segment_ids_BT != 0,
    )
    first = c.num_dense_layers
    carry = (x_BTD, cache)
    if first:
      dense = _scan(DenseLayer, c, first)(c, self.plan, name='dense_layers')
      carry, _ = dense(carry, context, jnp.arange(first))
    moe = _scan(MoELayer, c, c.num_moe_layers)(c, self.plan, name='moe_layers')
    (x_BTD, cache), (ids_MBTA, stats) = moe(
      carry, context, jnp.arange(first, c.num_layers), expert_ids_MBTA
    )
    return DecoderOutput(
      hidden_BTD=norm.RMSNorm(c.norm_eps, name='final_norm')(x_BTD),
      expert_ids_MBTA=ids_MBTA,
      stats=batches.RouteStats(
        load_ME=stats.load_E,
        aux_loss_M=stats.aux_loss,
        z_loss_M=stats.z_loss,
        replay_agreement_M=stats.replay_agreement,
      ),
      cache=cache,
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


def _scan(layer, config, length):
  if config.remat:
    layer = nn.remat(layer, prevent_cse=False)
  num_scanned = 1 if layer.__name__.endswith('DenseLayer') else 2
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
