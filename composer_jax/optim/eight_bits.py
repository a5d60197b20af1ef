"""Adam's moments in eight bits a number, after Dettmers et al. 2021.

A block of at most 2,048 numbers of a row shares a float32 scale, its largest
magnitude. A code is the logarithm of a number's share of it, so that relative
errors are alike; the paper's codes are finer near the scale alone. Rounding is
stochastic: changes smaller than the spacing of codes add up.
"""

from typing import Any

import jax
import jax.numpy as jnp

_MOST = 2048
# Codes above zero, and codes from a number to its double, by dtype. First
# moments reach 2^-15.8 of the scale and second ones 2^-25.4.
_CODES = {'int8': (127, 8), 'uint8': (255, 10)}


def encode(key: jax.Array, tree: Any, dtype: str) -> dict[str, Any]:
  """Returns trees of codes, shaped like the arrays, and of blocks' scales.

  Args:
    dtype: 'int8', or for numbers that are at least zero 'uint8', whose codes
      are zero for zero alone: nothing is divided by a root that got lost.
  """
  leaves, form = jax.tree.flatten(tree)
  keys = jax.random.split(key, len(leaves))
  pairs = [_encode(*pair, dtype) for pair in zip(keys, leaves, strict=True)]
  codes, scales = map(form.unflatten, zip(*pairs, strict=True))
  return {'codes': codes, 'scales': scales}


def decode(coded: dict[str, Any]) -> Any:
  """Returns the float32 numbers of `encode`."""
  return jax.tree.map(_decode, coded['codes'], coded['scales'])


def _share(codes, dtype):
  most, doubling = _CODES[dtype]
  share = jnp.exp2((codes.astype(jnp.float32) - most) / doubling)
  return jnp.where(codes == 0, 0, share)


def _encode(key, x, dtype):
  most, doubling = _CODES[dtype]
  block = max(n for n in range(1, _MOST + 1) if x.shape[-1] % n == 0)
  blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)
  scales = jnp.abs(blocks).max(-1, keepdims=True)
  shares = jnp.abs(blocks) / jnp.where(scales == 0, 1, scales)
  below = jnp.floor(most + doubling * jnp.log2(shares))
  below = jnp.clip(below, int(dtype == 'uint8'), most - 1)
  below = jnp.where(shares == 0, 0, below)
  low, high = _share(below, dtype), _share(below + 1, dtype)
  words = jax.random.bits(key, blocks.shape, jnp.uint16).astype(jnp.float32)
  codes = below + (words < (shares - low) / (high - low) * (1 << 16))
  if dtype == 'int8':
    codes *= jnp.sign(blocks)
  return codes.reshape(x.shape).astype(dtype), scales[..., 0]


def _decode(codes, scales):
  share = _share(jnp.abs(codes.astype(jnp.int32)), codes.dtype.name)
  signed = share * jnp.sign(codes)
  blocks = signed.reshape(*scales.shape, -1) * scales[..., None]
  return blocks.reshape(codes.shape)
