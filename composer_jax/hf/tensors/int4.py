"""Packs trained weights as the int4 of compressed-tensors (Kimi K2).

A word of `weight_packed` has eight codes of four bits, the first lowest, each
eight above its value; `weight_scale` has a bfloat16 scale for every 32 columns.
The arithmetic is that of the policy's own rounding (`numerics.formats`), so
that a file holds what rollouts have sampled with.
"""

import jax
import ml_dtypes
import numpy as np

from composer_jax.core import rounding
from composer_jax.hf.tensors import files
from composer_jax.numerics import formats

_GROUP = formats.BLOCKS['int4']


def packed(
  masters: np.ndarray, before: files.Folder, names: list[str]
) -> dict[str, np.ndarray]:
  """Returns codes and scales of float32 masters [rows, columns], by name.

  Args:
    before: stored tensors, whose bytes stay in groups of the same values.
    names: names of the stored codes, scales and shape.
  """
  height, columns = masters.shape
  parts = _quantised(masters)
  stored = [before.tensors[name] for name in names[:2]]
  words, scales = (before.read(raw, 0, _size(raw)) for raw in stored)
  old_bytes = words.view(np.uint8).reshape(height, -1, _GROUP // 2)
  old_scales = scales.reshape(height, -1)
  # Eight above the value: the fourth bit, which is that of the sign, turns.
  new_bytes = np.asarray(parts['codes']).reshape(old_bytes.shape) ^ 0x88
  new_scales = np.asarray(parts['scales'])
  same = _values(new_bytes, new_scales) == _values(old_bytes, old_scales)
  same = same.all(-1, keepdims=True)
  codes = np.where(same, old_bytes, new_bytes)
  scales = np.where(same[..., 0], old_scales, new_scales)
  return {names[0]: np.ascontiguousarray(codes), names[1]: scales}


@jax.jit
def _quantised(masters):
  # As `decoder.policy` rounds them, and `experts.encode` codes these values.
  axes = formats.last(masters)
  values = formats.rounded(masters, 'int4', axes, True)
  return formats.pack(rounding.rounded(values, 'bfloat16'), 'int4', axes)


def _values(codes, scales):
  pairs = np.stack([codes & 15, codes >> 4], -1).astype(np.float32) - 8
  groups = pairs.reshape(*codes.shape[:2], _GROUP)
  products = groups * scales.astype(np.float32)[..., None]
  return products.astype(ml_dtypes.bfloat16)


def _size(raw):
  return int(np.prod(raw.shape))
