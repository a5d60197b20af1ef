"""Grouped matmul on NVIDIA GPUs by Pallas kernels, compiled by Triton.

They compile without a device. One program of the grid multiplies a block of
`kernels.grouped.schedule.blocks` by one tile of its group's matrix; programs
past the last block return at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from composer_jax.core import platforms
from composer_jax.kernels.grouped import schedule

_ROWS = 128
_WIDTH = 128
_CONTRACTED = 64
_SMALLEST = 16
_PARAMETERS = triton.CompilerParams(num_warps=8, num_stages=4)


def multiply(
  lhs_YD: jax.Array,
  rhs_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  transposed: bool = False,
) -> jax.Array:
  """Returns rows times their group's matrix; rows past the groups are unset."""
  num_rows, dim = lhs_YD.shape
  width = rhs_EDF.shape[1 if transposed else 2]
  rows = _rows(num_rows)
  tile, step = _tile(width, _WIDTH), _tile(dim, _CONTRACTED)
  blocks = schedule.blocks(group_sizes_E, num_rows, rows)
  *pieces, total = (x.astype(jnp.int32) for x in blocks)
  kernel = functools.partial(
    _multiply_kernel, rows=rows, tile=tile, step=step, transposed=transposed
  )
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((num_rows, width), lhs_YD.dtype),
    # Programs of one block share its rows in cache.
    grid=(width // tile, len(pieces[0])),
    compiler_params=_PARAMETERS,
    interpret=platforms.current() != 'gpu',
    name='grouped_multiply',
  )(*pieces, total[None], lhs_YD, rhs_EDF)


def _multiply_kernel(*refs, rows, tile, step, transposed):
  group_P, start_P, rows_P, total_1, lhs_YD, rhs_EDF, out_YF = refs
  i = pl.program_id(1)
  columns = pl.ds(pl.program_id(0) * tile, tile)

  @pl.when(i < total_1[0])
  def _():
    group, start = group_P[i], start_P[i]
    inside_b1 = (jnp.arange(rows) < rows_P[i])[:, None]
    here = pl.ds(start, rows)

    def body(k, sum_bF):
      along = pl.ds(k * step, step)
      rows_bD = triton.load(lhs_YD.at[here, along], mask=inside_b1, other=0.0)
      at = (columns, along) if transposed else (along, columns)
      weight = triton.load(rhs_EDF.at[(group, *at)])
      return sum_bF + triton.dot(rows_bD, weight, trans_b=transposed)

    zero_bF = jnp.zeros((rows, tile), jnp.float32)
    sum_bF = jax.lax.fori_loop(0, lhs_YD.shape[1] // step, body, zero_bF)
    triton.store(
      out_YF.at[here, columns], sum_bF.astype(out_YF.dtype), mask=inside_b1
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
  dim, width = lhs_YD.shape[1], d_out_YF.shape[1]
  tiles = _tile(dim, _ROWS), _tile(width, _WIDTH)
  stop_E = jnp.cumsum(group_sizes_E).astype(jnp.int32)
  kernel = functools.partial(
    _groups_kernel, tiles=tiles, step=min(_CONTRACTED, _rows(len(lhs_YD)))
  )
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((len(stop_E), dim, width), jnp.float32),
    grid=(width // tiles[1], dim // tiles[0], len(stop_E)),
    compiler_params=_PARAMETERS,
    interpret=platforms.current() != 'gpu',
    input_output_aliases={} if sums is None else {4: 0},
    name='grouped_multiply_groups',
  )(
    stop_E - group_sizes_E,
    stop_E,
    lhs_YD,
    d_out_YF,
    *(() if sums is None else (sums,)),
  )


def _groups_kernel(start_E, stop_E, lhs_YD, d_out_YF, *sums, tiles, step):
  *before, d_rhs_EDF = sums
  group = pl.program_id(2)
  start, stop = start_E[group], stop_E[group]
  rows = pl.ds(pl.program_id(1) * tiles[0], tiles[0])
  columns = pl.ds(pl.program_id(0) * tiles[1], tiles[1])

  def body(k, sum_DF):
    at = start + k * step
    here = pl.ds(at, step)
    inside_b1 = (at + jnp.arange(step) < stop)[:, None]
    load = functools.partial(triton.load, mask=inside_b1, other=0.0)
    rows_bD = load(lhs_YD.at[here, rows])
    d_bF = load(d_out_YF.at[here, columns])
    return sum_DF + triton.dot(rows_bD, d_bF, trans_a=True)

  count = (stop - start + step - 1) // step
  sum_DF = jnp.zeros(tiles, jnp.float32)
  if before:
    sum_DF = triton.load(before[0].at[group, rows, columns])
  sum_DF = jax.lax.fori_loop(0, count, body, sum_DF)
  triton.store(
    d_rhs_EDF.at[group, rows, columns], sum_DF.astype(d_rhs_EDF.dtype)
  )


def _rows(num_rows: int) -> int:
  """Returns the rows of a block; tensor cores need at least 16."""
  return min(_ROWS, max(_SMALLEST, pl.next_power_of_2(num_rows)))


def _tile(size: int, most: int) -> int:
  """Returns the largest power of two up to `most` that divides `size`."""
  tile = min(size & -size, most)
  if tile < _SMALLEST:
    raise ValueError(
      f'grouped_matmul on a GPU needs widths that {_SMALLEST} divides, not '
      f'{size}; the next is {-(-size // _SMALLEST) * _SMALLEST}.'
    )
  return tile
