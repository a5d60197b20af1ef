"""The trainer computes with the policy: its masters rounded to bfloat16.

What rollout serves and bundles carry is the bfloat16 cast of the float32
masters, so the trainer's forward pass must use the same values, while its
gradient and its updates act on the masters (straight-through).
"""

from typing import Any

import jax


@jax.custom_jvp
def _rounded(x: jax.Array) -> jax.Array:
  # Not astype(bfloat16).astype(float32): XLA may drop such a pair of
  # conversions (xla_allow_excess_precision), and its transpose would round the
  # gradient. 8 and 7 bits are those of bfloat16.
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


@_rounded.defjvp
def _rounded_jvp(primals, tangents):
  return _rounded(*primals), tangents[0]


def straight_through(params: Any) -> Any:
  """Rounds each parameter to the bfloat16 grid, keeping dtype and gradient."""
  with jax.named_scope('policy_values'):
    return jax.tree.map(_rounded, params)
