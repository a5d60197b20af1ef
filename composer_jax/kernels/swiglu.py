"""SwiGLU (Shazeer 2020) of gate and up in one array, with its gradient."""

import jax
import jax.numpy as jnp

from composer_jax.core import rounding


@jax.custom_vjp
def swiglu(gate_up: jax.Array) -> jax.Array:
  """Returns silu(gate) * up of the two halves of the last axis."""
  # In float32 and rounded once, whatever XLA fuses it with.
  gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
  return rounding.rounded(jax.nn.silu(gate) * up, gate_up.dtype)


def gradient(gate_up: jax.Array, d_out: jax.Array) -> jax.Array:
  """Returns d_gate_up in one pass, where JAX would pad both halves and add."""
  gate, up = jnp.split(gate_up, 2, axis=-1)
  sigmoid = jax.nn.sigmoid(gate)
  d_gate = d_out * up * sigmoid * (1 + gate * (1 - sigmoid))
  return jnp.concatenate([d_gate, d_out * gate * sigmoid], axis=-1)


swiglu.defvjp(
  lambda gate_up: (swiglu(gate_up), gate_up),
  lambda gate_up, d_out: (gradient(gate_up, d_out),),
)
