"""Grouped products of codes of eight bits, on a TPU v7 or a Hopper GPU.

The matrix unit, or wgmma, multiplies the E4M3 codes of 128 columns with those
of 128 rows of a matrix. Scales, powers of two, are applied to each such product
in float32. So nothing is widened: `plan.hlo.narrow` proves that of a compiled
program. TPUs before the seventh generation compile the same product and widen
its operands to 16 bits; these are refused. Interpreted and compiled, not timed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from composer_jax.core import platforms
from composer_jax.kernels.grouped import schedule

BLOCK = 128
# Rows, contracted and other width of a tile of a TPU, and rows of one of wgmma,
# the fewest; untuned.
_TILE, _ROWS = 512, 64
# Parts of the kinds of devices whose kernel multiplies codes.
_KINDS = ('tpu7', 'h100', 'h200')


def check() -> None:
  """Raises a ValueError where codes would be widened before they multiply."""
  kind = platforms.kind()
  if not any(name in kind for name in _KINDS):
    raise ValueError(
      "precision.products 'codes' multiplies eight bits on a TPU v7, an H100 "
      f'or an H200 alone; on {kind!r} they would be widened, or no kernel '
      "multiplies them. Set precision.products='values', which multiplies the "
      'same numbers in compute_dtype.'
    )


def multiply(
  lhs: tuple[jax.Array, jax.Array],
  rhs: tuple[jax.Array, jax.Array],
  group_sizes_E: jax.Array,
  *,
  dtype: jax.typing.DTypeLike,
) -> jax.Array:
  """Returns rows times their group's matrix; rows past the groups are zero.

  Args:
    lhs: float8_e4m3fn codes [Y, D] of rows sorted by group, and their scales
      [Y, D / 128].
    rhs: float8_e4m3fn codes [E, D, F], and their scales [E, D / 128, F / 128].
    dtype: dtype of the result; sums are float32.
  """
  (lhs_YD, lhs_YC), (rhs_EDF, rhs_ECG) = lhs, rhs
  num_rows = len(lhs_YD)
  kernel, rows = _tiles, min(_TILE, -(-num_rows // BLOCK) * BLOCK)
  if platforms.current() == 'gpu':
    kernel, rows = _hopper_tiles, _ROWS
  # Each group's rows begin a tile.
  group_N, from_NR = schedule.places(group_sizes_E, num_rows, rows)
  from_Z = from_NR.ravel()
  to_Y = jnp.full(num_rows, from_Z.size, jnp.int32)
  to_Y = to_Y.at[from_Z].set(jnp.arange(from_Z.size), mode='drop')
  placed = lambda x_Y: x_Y.at[from_Z].get(mode='fill', fill_value=0)
  bytes_ZD = placed(jax.lax.bitcast_convert_type(lhs_YD, jnp.uint8))
  out_ZF = kernel(
    jax.lax.bitcast_convert_type(bytes_ZD, lhs_YD.dtype),
    placed(lhs_YC.astype(jnp.float32)).T,
    rhs_EDF,
    rhs_ECG.astype(jnp.float32),
    group_N.astype(jnp.int32),
    jax.ShapeDtypeStruct((from_Z.size, rhs_EDF.shape[2]), dtype),
  )
  return out_ZF.at[to_Y].get(mode='fill', fill_value=0)


def _tiles(lhs_ZD, lhs_CZ, rhs_EDF, rhs_ECG, group_N, out_type):
  # Imported on demand, since it takes seconds.
  from jax.experimental.pallas import tpu

  num_rows, dim, width = *lhs_ZD.shape, rhs_EDF.shape[2]
  rows, along, across = num_rows // len(group_N), _fitted(dim), _fitted(width)
  count = along // BLOCK
  # Scales lie along the rows of a tile, or its columns.
  rhs_ECF = jnp.repeat(rhs_ECG, BLOCK, axis=2)
  return pl.pallas_call(
    functools.partial(_kernel, count=count),
    out_shape=out_type,
    grid_spec=tpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(width // across, len(group_N), dim // along),
      in_specs=[
        pl.BlockSpec((rows, along), lambda j, i, k, group: (i, k)),
        pl.BlockSpec((count, rows, 1), lambda j, i, k, group: (k, i, 0)),
        pl.BlockSpec(
          (None, along, across), lambda j, i, k, group: (group[i], k, j)
        ),
        pl.BlockSpec(
          (None, count, 1, across), lambda j, i, k, group: (group[i], k, 0, j)
        ),
      ],
      out_specs=pl.BlockSpec((rows, across), lambda j, i, k, group: (i, j)),
      scratch_shapes=[tpu.VMEM((rows, across), jnp.float32)],
    ),
    compiler_params=tpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * num_rows * dim * width,
      bytes_accessed=lhs_ZD.size + rhs_EDF.size + 2 * num_rows * width,
      transcendentals=0,
    ),
    interpret=platforms.current() != 'tpu',
    name='coded_multiply',
  )(group_N, lhs_ZD, lhs_CZ[:, :, None], rhs_EDF, rhs_ECF[:, :, None])


def _kernel(_, lhs, lhs_scales, rhs, rhs_scales, out, sums, *, count):
  k = pl.program_id(2)

  @pl.when(k == 0)
  def _():
    sums[...] = jnp.zeros_like(sums)

  for block in range(count):
    at = pl.ds(block * BLOCK, BLOCK)
    product = jax.lax.dot_general(
      lhs[:, at],
      rhs[at, :],
      (((1,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    sums[...] += product * lhs_scales[block] * rhs_scales[block]

  @pl.when(k == pl.num_programs(2) - 1)
  def _():
    out[...] = sums[...].astype(out.dtype)


def _fitted(size: int) -> int:
  """Returns the widest tile that divides a size; 128 must divide it."""
  return next(n for n in (_TILE, 2 * BLOCK, BLOCK) if size % n == 0)


def _hopper_tiles(lhs_ZD, lhs_CZ, rhs_EDF, rhs_ECG, group_N, out_type):
  # Imported on demand, since it takes seconds.
  from jax.experimental.pallas import mosaic_gpu as gpu

  shape = _ROWS, BLOCK

  def body(lhs, lhs_scales, rhs, rhs_scales, group_N, out, tile):
    n, g = jax.lax.axis_index('tile'), jax.lax.axis_index('width')
    group = group_N[n]

    def step(index, lhs_RB, scales_1R, rhs_BB, sums):
      scales = jax.lax.broadcast_in_dim(scales_1R[0], shape, (0,))
      scales *= rhs_scales[group, index[0], g]
      return sums + _hopper_product(lhs_RB, rhs_BB) * scales

    sums = gpu.emit_pipeline(
      step,
      grid=(lhs.shape[1] // BLOCK,),
      in_specs=[
        gpu.BlockSpec(shape, lambda c: (n, c)),
        gpu.BlockSpec((1, _ROWS), lambda c: (c, n)),
        gpu.BlockSpec((BLOCK, BLOCK), lambda c: (g, c)),
      ],
      max_concurrent_steps=4,
      init_carry=jnp.zeros(shape, jnp.float32),
    )(lhs, lhs_scales, rhs.at[group])
    tile[...] = sums.astype(tile.dtype)
    gpu.commit_smem()
    rows, columns = pl.ds(n * _ROWS, _ROWS), pl.ds(g * BLOCK, BLOCK)
    gpu.copy_smem_to_gmem(tile, out.at[rows, columns])
    gpu.wait_smem_to_gmem(0)

  return gpu.kernel(
    body,
    out_type=out_type,
    grid=(len(group_N), out_type.shape[1] // BLOCK),
    grid_names=('tile', 'width'),
    scratch_types=[gpu.SMEM(shape, out_type.dtype)],
    compiler_params=gpu.CompilerParams(
      lowering_semantics=gpu.LoweringSemantics.Warpgroup
    ),
  )(lhs_ZD, lhs_CZ, rhs_EDF.swapaxes(1, 2), rhs_ECG, group_N)


def _hopper_product(lhs_RB, rhs_BB):
  """Returns a float32 product that contracts both last axes, as wgmma wants."""
  from jax.experimental.pallas import mosaic_gpu as gpu

  def summed(sum_ref):
    gpu.wgmma(sum_ref, lhs_RB, gpu.transpose_ref(rhs_BB, (1, 0)))
    return sum_ref[...]

  return pl.run_scoped(summed, gpu.ACC((_ROWS, BLOCK)))
