"""Feed-forward layers: one dense MLP, and a mixture of routed ones."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from composer_jax.kernels import grouped_matmul
from composer_jax.models import config as model_config
from composer_jax.models import parameters, router
from composer_jax.parallel import exchange


@jax.custom_vjp
def swiglu(gate_up: jax.Array) -> jax.Array:
  """Returns silu(gate) * up of the two halves of the last axis."""
  gate, up = jnp.split(gate_up, 2, axis=-1)
  return jax.nn.silu(gate) * up


def _swiglu_forward(gate_up):
  return swiglu(gate_up), gate_up


def _swiglu_backward(gate_up, d_out):
  # One pass that keeps nothing but its input; the derived gradient pads both
  # halves to full width and adds them.
  gate, up = jnp.split(gate_up, 2, axis=-1)
  sigmoid = jax.nn.sigmoid(gate)
  d_gate = d_out * up * sigmoid * (1 + gate * (1 - sigmoid))
  return (jnp.concatenate([d_gate, d_out * gate * sigmoid], axis=-1),)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def expert_mlp(
  weights: dict[str, jax.Array], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
  """SwiGLU of rows sorted by expert: two grouped matmuls."""
  gate_up_ED2F, down_EFD = weights['gate_up'], weights['down']
  num_experts, embed_dim = gate_up_ED2F.shape[:2]
  both_YF = grouped_matmul.grouped_matmul(
    rows_YD, gate_up_ED2F.reshape(num_experts, embed_dim, -1), group_sizes_E
  )
  hidden_YF = swiglu(both_YF)
  return grouped_matmul.grouped_matmul(hidden_YF, down_EFD, group_sizes_E)


def _initializer(scale: float, in_axis: int, batch_axis=()):
  return nn.initializers.variance_scaling(
    scale,
    'fan_in',
    'truncated_normal',
    in_axis=in_axis,
    out_axis=-1,
    batch_axis=batch_axis,
  )


class DenseMLP(nn.Module):
  """SwiGLU (Shazeer 2020): down(silu(gate x) * up x)."""

  config: model_config.ModelConfig
  ffw_dim: int

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    c = self.config
    # Gate and up are one product; their axis is a batch axis to the optimizer,
    # which sees two matrices.
    gate_up_D2F = parameters.create(
      self,
      'gate_up',
      _initializer(1.0, 0, (1,)),
      ('embed', 'gate_up', 'ffw'),
      (c.embed_dim, 2, self.ffw_dim),
    ).astype(x_BTD.dtype)
    down_FD = parameters.create(
      self,
      'down',
      _initializer(0.5 / c.num_layers, 0),
      ('ffw', 'embed'),
      (self.ffw_dim, c.embed_dim),
    ).astype(x_BTD.dtype)
    both_BTF = x_BTD @ gate_up_D2F.reshape(c.embed_dim, -1)
    return swiglu(both_BTF) @ down_FD


class MoE(nn.Module):
  """Routed experts plus shared ones."""

  config: model_config.ModelConfig
  plan: exchange.ExchangePlan | None = None

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    valid_BT: jax.Array,
    replay_BTA: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array, router.LayerStats]:
    """Returns y_BTD, the int32 ids_BTA used, and the layer's statistics."""
    c, moe = self.config, self.config.moe
    gates_BTA, ids_BTA, stats = self._route(x_BTD, valid_BT, replay_BTA)
    gate_up_ED2F = parameters.create(
      self,
      'gate_up',
      _initializer(1.0, 1, (0, 2)),
      ('expert', 'embed', 'gate_up', 'ffw'),
      (moe.num_experts, c.embed_dim, 2, moe.ffw_dim),
    )
    down_EFD = parameters.create(
      self,
      'down',
      _initializer(0.5 / c.num_layers, 1, (0,)),
      ('expert', 'ffw', 'embed'),
      (moe.num_experts, moe.ffw_dim, c.embed_dim),
    )
    weights = {'gate_up': gate_up_ED2F, 'down': down_EFD}
    weights = jax.tree.map(lambda w: w.astype(x_BTD.dtype), weights)
    with jax.named_scope('experts'):
      y_BTD = exchange.exchange(
        expert_mlp,
        weights,
        x_BTD,
        ids_BTA,
        gates_BTA,
        valid_BT,
        plan=self.plan,
      )
    if moe.num_shared:
      width = moe.num_shared * moe.ffw_dim
      y_BTD += DenseMLP(c, width, name='shared')(x_BTD)
    return y_BTD, ids_BTA, stats

  def _route(self, x_BTD, valid_BT, replay_BTA):
    moe = self.config.moe
    # 'route', not 'expert': the router must not pick up the experts' sharding.
    router_DE = parameters.create(
      self,
      'router',
      _initializer(1.0, 0),
      ('embed', 'route'),
      (x_BTD.shape[-1], moe.num_experts),
    )
    bias_E: Any = None
    if moe.router == 'sigmoid':
      bias_E = self.variable(
        'selection_bias',
        'bias',
        nn.with_logical_partitioning(jnp.zeros, ('route',)),
        (moe.num_experts,),
      ).value
    with jax.named_scope('route'):
      # float32: a rounding in a logit may flip a discrete choice. Accelerators
      # take bfloat16 or TF32 for float32 products unless told otherwise.
      logits_BTE = jnp.einsum(
        'BTD,DE->BTE',
        x_BTD.astype(jnp.float32),
        router_DE.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
      )
      return router.route(
        logits_BTE,
        config=moe,
        valid_BT=valid_BT,
        bias_E=bias_E,
        replay_BTA=replay_BTA,
      )
