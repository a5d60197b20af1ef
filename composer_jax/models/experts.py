"""Feed-forward layers: one dense MLP, and a mixture of routed ones."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.kernels import linear, rows, swiglu
from composer_jax.kernels.grouped import blocked, matmul
from composer_jax.models import config as model_config
from composer_jax.models import parameters, router


def expert_mlp(
  weights: dict[str, jax.Array], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
  """SwiGLU of rows sorted by expert: two grouped matmuls."""
  gate_up_ED2F, down_EFD = weights['gate_up'], weights['down']
  gate_up_EDX = gate_up_ED2F.reshape(*gate_up_ED2F.shape[:2], -1)
  if matmul.chosen() == 'blocked':
    return blocked.grouped_mlp(gate_up_EDX, down_EFD, rows_YD, group_sizes_E)
  both_YX = matmul.grouped_matmul(rows_YD, gate_up_EDX, group_sizes_E)
  both_YX = ad_checkpoint.checkpoint_name(both_YX, blocked.HIDDEN)
  hidden_YF = swiglu.swiglu(both_YX)
  return matmul.grouped_matmul(hidden_YF, down_EFD, group_sizes_E)


@jax.custom_vjp
def expert_mlp_in_tiles(
  weights: dict[str, jax.Array], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
  """`expert_mlp`, with bits of a row that depend on it and its expert alone.

  One product of fixed shape per block of rows, as in `kernels.rows`. The
  gradient is `expert_mlp`'s.
  """

  def block(weights, rows_bD):
    gate_up_D2F, down_FD = weights
    gate_up_DF = gate_up_D2F.reshape(gate_up_D2F.shape[0], -1)
    both_bX = linear.linear(rows_bD, gate_up_DF)
    return linear.linear(swiglu.swiglu(both_bX), down_FD)

  return blocked.map_blocks(
    block,
    (weights['gate_up'], weights['down']),
    rows_YD,
    group_sizes_E,
    block=rows.TILE,
  )


def _in_tiles_forward(weights, rows_YD, group_sizes_E):
  arrays = (weights, rows_YD, group_sizes_E)
  return expert_mlp_in_tiles(*arrays), arrays


def _in_tiles_backward(arrays, d_out_YD):
  _, pull = jax.vjp(expert_mlp, *arrays)
  return pull(d_out_YD)


expert_mlp_in_tiles.defvjp(_in_tiles_forward, _in_tiles_backward)


def _initializer(scale: float, in_axis: int, batch_axis=()):
  return nn.initializers.variance_scaling(
    scale,
    'fan_in',
    'truncated_normal',
    in_axis=in_axis,
    out_axis=-1,
    batch_axis=batch_axis,
  )


class DenseParameters(nn.Module):
  """Creates the parameters of `dense_mlp`."""

  config: model_config.ModelConfig
  ffw_dim: int

  @nn.compact
  def __call__(self) -> dict[str, jax.Array]:
    c = self.config
    # Gate and up are one product; their axis is a batch axis to the optimizer,
    # which sees two matrices.
    gate_up_D2F = parameters.create(
      self,
      'gate_up',
      _initializer(1.0, 0, (1,)),
      ('embed', 'gate_up', 'ffw'),
      (c.embed_dim, 2, self.ffw_dim),
    )
    down_FD = parameters.create(
      self,
      'down',
      _initializer(0.5 / c.num_layers, 0),
      ('ffw', 'embed'),
      (self.ffw_dim, c.embed_dim),
    )
    return {'gate_up': gate_up_D2F, 'down': down_FD}


class Parameters(nn.Module):
  """Creates the parameters of a mixture: router, routed and shared experts."""

  config: model_config.ModelConfig

  @nn.compact
  def __call__(self) -> tuple[dict[str, Any], jax.Array | None]:
    """Returns the parameters and the selection bias, if the router has one."""
    c, moe = self.config, self.config.moe
    params: dict[str, Any] = {}
    # 'route', not 'expert': the router must not pick up the experts' sharding.
    params['router'] = parameters.create(
      self,
      'router',
      _initializer(1.0, 0),
      ('embed', 'route'),
      (c.embed_dim, moe.num_experts),
    )
    bias_E: Any = None
    if moe.router == 'sigmoid':
      bias_E = self.variable(
        'selection_bias',
        'bias',
        nn.with_logical_partitioning(jnp.zeros, ('route',)),
        (moe.num_experts,),
      ).value
    params['gate_up'] = parameters.create(
      self,
      'gate_up',
      _initializer(1.0, 1, (0, 2)),
      ('expert', 'embed', 'gate_up', 'ffw'),
      (moe.num_experts, c.embed_dim, 2, moe.ffw_dim),
    )
    params['down'] = parameters.create(
      self,
      'down',
      _initializer(0.5 / c.num_layers, 1, (0,)),
      ('expert', 'ffw', 'embed'),
      (moe.num_experts, moe.ffw_dim, c.embed_dim),
    )
    if moe.num_shared:
      width = moe.num_shared * moe.ffw_dim
      params['shared'] = DenseParameters(c, width, name='shared')()
    return params, bias_E


def dense_mlp(params: dict[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
  """SwiGLU (Shazeer 2020): down(silu(gate x) * up x)."""
  gate_up_D2F = params['gate_up']
  gate_up_DF = gate_up_D2F.reshape(gate_up_D2F.shape[0], -1)
  hidden_BTF = swiglu.swiglu(linear.linear(x_BTD, gate_up_DF))
  return linear.linear(hidden_BTF, params['down'])


def choose(
  params: dict[str, Any],
  bias_E: jax.Array | None,
  x_BTD: jax.Array,
  replay_BTA: jax.Array | None,
  config: model_config.MoEConfig,
) -> router.Choice:
  """Routes each token."""
  with jax.named_scope('route'):
    # float32: a rounding in a logit may flip a discrete choice. Accelerators
    # take bfloat16 or TF32 for float32 products unless told otherwise.
    logits_BTE = linear.linear(
      x_BTD.astype(jnp.float32),
      params['router'].astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
    )
    return router.choose(
      logits_BTE, config=config, bias_E=bias_E, replay_BTA=replay_BTA
    )
