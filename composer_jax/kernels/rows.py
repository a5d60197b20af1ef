"""Row-wise functions, in fixed tiles where bits must not depend on the batch.

Products of 40 rows and of 1,000 rows are different programs with other orders
of summation and other last bits. In 'batch_invariant' numerics, row-wise
functions therefore run as a loop over tiles of TILE rows, whose body is the
same program in prefill, decode and training: a row's result depends on the row
alone. `tests/rollout/invariant_test.py` checks whole models on CPU.

The body stays the same program because
- barriers at both ends keep the compiler from fusing it with other operations,
  moving work out of the loop or choosing layouts inside;
- the trip count is opaque and at least two, since a loop of one trip would be
  inlined;
- callers convert parameters to one dtype outside;
- results are one array. Of several, XLA leaves out what a program does not use,
  and sums the others in another order.

Another backend qualifies if its order of summation in products of TILE rows
depends on shapes and dtypes only (no atomics, no split over K that follows the
occupancy), and if one loop body compiles to the same code in every program
(autotuning off or pinned). Bits are equal within a backend, not between two.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import flatten_util

TILE = 16


def map_rows(
  fn: Callable[[Any, Any], Any], params: Any, rows: Any, *, numerics: str
) -> Any:
  """Returns fn(params, rows) for a row-wise function.

  The gradient is that of one whole call, since it need not be invariant.

  Args:
    fn: row-wise function (params, tree of [B, T, ...]) -> tree of [B, T, ...],
      which closes over no arrays; its integers are below 2^24.
    params: arrays that all rows share.
    rows: tree of arrays [B, T, ...], not empty.
    numerics: 'fast' calls fn once; 'batch_invariant' calls it on one tile
      [1, TILE, ...] after another.
  """
  if numerics == 'fast':
    return fn(params, rows)
  return _tiled(fn, params, rows)


def opaque(value: int) -> jax.Array:
  """Returns a constant whose value the compiler does not know."""
  return jax.lax.optimization_barrier(jnp.int32(value))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(fn, params, rows):
  batch, length = jax.tree.leaves(rows)[0].shape[:2]
  num_rows = batch * length
  num_tiles = max(2, -(-num_rows // TILE))

  def to_tiles(array_BT):
    array_Z = array_BT.reshape(num_rows, *array_BT.shape[2:])
    # Padded with the last row, since fn may be undefined for zeros.
    pad = [(0, num_tiles * TILE - num_rows)] + [(0, 0)] * (array_Z.ndim - 1)
    array_Z = jnp.pad(array_Z, pad, mode='edge')
    return array_Z.reshape(num_tiles, 1, TILE, *array_Z.shape[1:])

  def body(i, out_NW):
    tile = jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tiles
    )
    result = jax.lax.optimization_barrier(
      fn(*jax.lax.optimization_barrier((params, tile)))
    )
    results_W, _ = flatten_util.ravel_pytree((result, jnp.float32(0)))
    return jax.lax.dynamic_update_index_in_dim(out_NW, results_W, i, 0)

  tiles = jax.tree.map(to_tiles, rows)
  shapes = jax.eval_shape(fn, params, jax.tree.map(lambda x: x[0], tiles))
  zeros = jax.tree.map(jnp.zeros_like, shapes)
  # Beside a number of float32, which holds all others exactly.
  zeros_W, from_words = flatten_util.ravel_pytree((zeros, jnp.float32(0)))
  out_NW = jnp.zeros((num_tiles, zeros_W.size), zeros_W.dtype)
  out_NW = jax.lax.fori_loop(0, opaque(num_tiles), body, out_NW)

  def from_tiles(array):
    array_Z = array.reshape(num_tiles * TILE, *array.shape[3:])[:num_rows]
    return array_Z.reshape(batch, length, *array_Z.shape[1:])

  return jax.tree.map(from_tiles, jax.vmap(from_words)(out_NW)[0])


def _tiled_backward(fn, residuals, d_out):
  _, pull = jax.vjp(fn, *residuals)
  return pull(d_out)


_tiled.defvjp(lambda fn, *args: (_tiled(fn, *args), args), _tiled_backward)
