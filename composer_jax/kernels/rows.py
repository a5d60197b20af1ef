"""Computing that sees one token at a time, in tiles where bits must not depend.

A product of 40 rows and the same product of 1,000 rows are different programs:
other kernels, other orders of summation, other last bits. In 'batch_invariant'
numerics every stretch of row-wise computing is therefore one loop over tiles of
TILE rows, whose body is the same program whoever calls it, prefill, decode or
training. What a row gets then depends on the row alone, as long as no row's
place within a tile matters. `tests/rollout/invariant_test.py` holds the whole
model to that on CPU.

How the body stays the same:
- barriers at both its ends keep the compiler from fusing it with its
  surroundings, moving work out of the loop, or choosing layouts inside;
- the trip count is opaque and at least two, since a loop of one turn would be
  dissolved into its surroundings;
- callers bring parameters in one dtype, converted outside.

What another backend must promise to join: products of TILE rows whose order of
summation depends on shapes and dtypes only, not on the row's place and not on
other work of the device (no split over K that follows the occupancy, no
atomics), and the same code for one loop body in every program (autotuning off
or its results pinned). Two backends agree with themselves only.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TILE = 16


def map_rows(
  fn: Callable[[Any, Any], Any], params: Any, rows: Any, *, numerics: str
) -> Any:
  """Returns fn(params, rows) for a function that treats each row by itself.

  Args:
    fn: (params, tree of [B, T, ...]) -> tree of [B, T, ...]. It must close
      over no arrays.
    params: what all rows share.
    rows: tree of arrays [B, T, ...], not empty.
    numerics: 'fast' calls fn once; 'batch_invariant' calls it on tiles
      [1, TILE, ...] one after the other. The gradient is the whole function's
      either way: it need not be invariant, and so costs the same.
  """
  if numerics == 'fast':
    return fn(params, rows)
  return _tiled(fn, params, rows)


def opaque(value: int) -> jax.Array:
  """Returns a constant that the compiler does not see."""
  return jax.lax.optimization_barrier(jnp.int32(value))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(fn, params, rows):
  batch, length = jax.tree.leaves(rows)[0].shape[:2]
  num_rows = batch * length
  num_tiles = max(2, -(-num_rows // TILE))

  def to_tiles(array_BT):
    array_Z = array_BT.reshape(num_rows, *array_BT.shape[2:])
    # Repeated rather than zeros, for which a row may be undefined.
    pad = [(0, num_tiles * TILE - num_rows)] + [(0, 0)] * (array_Z.ndim - 1)
    array_Z = jnp.pad(array_Z, pad, mode='edge')
    return array_Z.reshape(num_tiles, 1, TILE, *array_Z.shape[1:])

  def body(i, out):
    tile = jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tiles
    )
    result = jax.lax.optimization_barrier(
      fn(*jax.lax.optimization_barrier((params, tile)))
    )
    return jax.tree.map(
      lambda o, r: jax.lax.dynamic_update_index_in_dim(o, r, i, 0), out, result
    )

  tiles = jax.tree.map(to_tiles, rows)
  shapes = jax.eval_shape(fn, params, jax.tree.map(lambda x: x[0], tiles))
  out = jax.tree.map(
    lambda s: jnp.zeros((num_tiles, *s.shape), s.dtype), shapes
  )
  out = jax.lax.fori_loop(0, opaque(num_tiles), body, out)

  def from_tiles(array):
    array_Z = array.reshape(num_tiles * TILE, *array.shape[3:])[:num_rows]
    return array_Z.reshape(batch, length, *array_Z.shape[1:])

  return jax.tree.map(from_tiles, out)


def _tiled_backward(fn, residuals, d_out):
  _, pull = jax.vjp(fn, *residuals)
  return pull(d_out)


_tiled.defvjp(lambda fn, *args: (_tiled(fn, *args), args), _tiled_backward)
