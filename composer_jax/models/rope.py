"""Rotary positions (Su et al. 2021, RoFormer), halves convention."""

import jax
import jax.numpy as jnp


def angles(
  positions_BT: jax.Array, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
  """Returns float32 cos and sin of shape [B, T, 1, H / 2].

  Positions are within the document, so packing leaves them as they were alone.
  """
  fraction = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  angle = positions_BT[..., None, None].astype(jnp.float32) / theta**fraction
  return jnp.cos(angle), jnp.sin(angle)


def rotate(
  x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
) -> jax.Array:
  """Turns the pair (h, h + H/2) by the angle of its position, in float32."""
  cos, sin = cos_sin
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)
