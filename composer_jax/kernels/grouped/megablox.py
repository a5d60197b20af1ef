"""Grouped matmul on TPU by the megablox kernels that come with JAX."""

from typing import Any

import jax
import jax.numpy as jnp

# Imported by name, since the package's function hides its module `gmm`.
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from composer_jax.core import platforms

# Rows and the two widths of a tile in bfloat16. Two buffers of each array and
# the sum take 10 of a kernel's 16 MiB, or 13 with sums to add to.
_TILE = (512, 1024, 1024)
_GROUPS_TILE = (512, 512, 1024)
_LANES = 128


def multiply(
  lhs_YD: jax.Array,
  rhs_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  transposed: bool = False,
) -> jax.Array:
  """Returns rows times their group's matrix; rows past the groups are unset."""
  width = rhs_EDF.shape[1 if transposed else 2]
  tile = _fitted(_TILE, lhs_YD, width)
  return gmm(
    _padded(lhs_YD, tile[0]),
    rhs_EDF,
    group_sizes_E,
    preferred_element_type=lhs_YD.dtype,
    tiling=tile,
    transpose_rhs=transposed,
    interpret=platforms.current() != 'tpu',
  )


def multiply_groups(
  lhs_YD: jax.Array,
  d_out_YF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  dtype: jax.typing.DTypeLike,
  sums: jax.Array | None = None,
) -> jax.Array:
  """Returns lhs^T d_out of each group, added to `sums` in their memory."""
  tile = _fitted(_GROUPS_TILE, lhs_YD, d_out_YF.shape[1])
  return tgmm(
    # The kernel transposes its operand back.
    _padded(lhs_YD, tile[0]).T,
    _padded(d_out_YF, tile[0]),
    group_sizes_E,
    preferred_element_type=dtype,
    tiling=tile,
    existing_out=sums,
    interpret=platforms.current() != 'tpu',
  )


def _fitted(tile: Any, lhs_YD: jax.Array, width: int) -> tuple[int, int, int]:
  """Returns the tile, smaller for small arrays and for wide items."""
  rows, dim = lhs_YD.shape
  most = (tile[0], tile[1] * 2 // lhs_YD.dtype.itemsize, tile[2])
  fit = lambda size, tile: min(-(-size // _LANES) * _LANES, tile)
  return fit(rows, most[0]), fit(dim, most[1]), fit(width, most[2])


def _padded(array_YD: jax.Array, rows: int) -> jax.Array:
  missing = -len(array_YD) % rows
  return jnp.pad(array_YD, ((0, missing), (0, 0))) if missing else array_YD
