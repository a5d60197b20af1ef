"""Grouped products of codes of eight bits, with scales, on a TPU v7.

The matrix unit multiplies the E4M3 codes of 128 columns with those of 128 rows
of a matrix. Scales, powers of two, are applied to each such product in float32.
So nothing is widened: `plan.hlo.narrow` proves that of a compiled program. TPUs
before the seventh generation, and Triton of JAX 0.10 on a Hopper GPU, compile
the same product and widen its operands to 16 bits; these are refused.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from composer_jax.core import platforms

BLOCK = 128
# Rows, contracted and other width of a tile; untuned.
_TILE = 512


def check() -> None:
  """Raises a ValueError where codes would be widened before they multiply."""
  kind = platforms.kind()
  if not kind.startswith('tpu7'):
    raise ValueError(
      "precision.products 'codes' multiplies eight bits on a TPU v7 alone; "
      f'on {kind!r} they would be widened to 16 bits, and no kernel here '
      "multiplies NVIDIA's. Set precision.products='values', which multiplies "
      'the same numbers in compute_dtype.'
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
  # Imported on demand, since it takes seconds.
  from jax.experimental.pallas import tpu
  from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

  (lhs_YD, lhs_YC), (rhs_EDF, rhs_ECG) = lhs, rhs
  num_rows, dim, width = *lhs_YD.shape, rhs_EDF.shape[2]
  rows = min(_TILE, -(-num_rows // BLOCK) * BLOCK)
  missing = -num_rows % rows
  lhs_YD, lhs_YC = (
    jnp.pad(x, ((0, missing), (0, 0))) for x in (lhs_YD, lhs_YC)
  )
  along, across = _fitted(dim), _fitted(width)
  count = along // BLOCK
  # Scales lie along the rows of a tile, or its columns.
  lhs_CY1 = lhs_YC.astype(jnp.float32).T[:, :, None]
  rhs_ECF = jnp.repeat(rhs_ECG.astype(jnp.float32), BLOCK, axis=2)
  places, num_tiles = make_group_metadata(
    group_sizes=group_sizes_E,
    m=num_rows + missing,
    tm=rows,
    start_group=jnp.int32(0),
    num_nonzero_groups=len(rhs_EDF),
    visit_empty_groups=False,
  )
  kernel = functools.partial(_kernel, count=count)
  out_YF = pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((num_rows + missing, width), dtype),
    grid_spec=tpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(width // across, num_tiles, dim // along),
      in_specs=[
        pl.BlockSpec((rows, along), lambda j, i, k, at: (at[2][i], k)),
        pl.BlockSpec((count, rows, 1), lambda j, i, k, at: (k, at[2][i], 0)),
        pl.BlockSpec(
          (None, along, across), lambda j, i, k, at: (at[1][i], k, j)
        ),
        pl.BlockSpec(
          (None, count, 1, across), lambda j, i, k, at: (at[1][i], k, 0, j)
        ),
      ],
      out_specs=pl.BlockSpec((rows, across), lambda j, i, k, at: (at[2][i], j)),
      scratch_shapes=[tpu.VMEM((rows, across), jnp.float32)],
    ),
    compiler_params=tpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * num_rows * dim * width,
      bytes_accessed=lhs_YD.size + rhs_EDF.size + 2 * num_rows * width,
      transcendentals=0,
    ),
    interpret=platforms.current() != 'tpu',
    name='coded_multiply',
  )(places, lhs_YD, lhs_CY1, rhs_EDF, rhs_ECF[:, :, None])
  inside_Y = jnp.arange(num_rows) < group_sizes_E.sum()
  return jnp.where(inside_Y[:, None], out_YF[:num_rows], 0)


def _kernel(places, lhs, lhs_scales, rhs, rhs_scales, out, sums, *, count):
  ends_E, group_I, tile_I = places
  i, k = pl.program_id(1), pl.program_id(2)

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
    # A tile may have rows of several groups, which come one after another.
    group = group_I[i]
    rows = jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
    rows += tile_I[i] * out.shape[0]
    is_mine = (rows >= ends_E[group]) & (rows < ends_E[group + 1])
    out[...] = jnp.where(
      is_mine, sums[...], out[...].astype(jnp.float32)
    ).astype(out.dtype)


def _fitted(size: int) -> int:
  """Returns the widest tile that divides a size; 128 must divide it."""
  return next(n for n in (_TILE, 2 * BLOCK, BLOCK) if size % n == 0)
