"""Products of activations with a weight whose contracted axes lead.

That layout is the law of this module rather than a choice per call. On XLA:CPU
a product of 2 to 8 rows with weights [D, F] reads them at twice the speed of
one with [F, D] (44 to 58 against 19 to 25 GB/s in cache on an EPYC core, 19 to
23 against 12 in memory). For one row the two are equal, and so they are from
some 64 rows on and on accelerators. Who decodes with a tied table [V, D]
therefore wants a copy of it as [D, V] (`rollout.forward`).

Nothing else beat the plain product at 1 to 64 rows: not padding rows, column
blocks, a product per row or per half of the rows, the transposed product, nor
multiplying and summing.

The gradient of a float32 weight is written out on CPU. There XLA multiplies
x w and d w^T at some 200 GFLOP/s (YNNPACK) but x^T d by another library, which
reaches 14 (a router) to 200, and may transpose d, the wide one, in memory:
together a third of a train step. A transposed copy of x puts all on the fast
path.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.core import platforms, rounding


def linear(
  x: jax.Array,
  weight: jax.Array,
  *,
  num_contracted: int = 1,
  dtype: Any = None,
  precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
  """Contracts the last axes of x with the first ones of the weight.

  The product is summed in float32 and rounded once.

  Args:
    x: activations [..., D] or [..., N, H].
    weight: in the dtype of x, [D, ...] or [N, H, ...].
    num_contracted: how many axes.
    dtype: of the result; None means x's.
    precision: on accelerators.
  """
  both_wide = x.dtype == weight.dtype == jnp.float32
  if both_wide and dtype is None and platforms.current() == 'cpu':
    return _wide_product(x, weight, num_contracted, precision)
  return _product(x, weight, num_contracted, precision, dtype)


def weight_gradient(x_ZD: jax.Array, d_ZF: jax.Array) -> jax.Array:
  """Returns x^T d in float32, on the fast path of the backend."""
  if platforms.current() != 'cpu':
    return jnp.dot(x_ZD.T, d_ZF, preferred_element_type=jnp.float32)
  # One barrier keeps XLA from making x once more, element by element in the
  # transposed order, one from folding the transposition into the product.
  x_DZ = jax.lax.optimization_barrier(jax.lax.optimization_barrier(x_ZD).T)
  return jnp.dot(x_DZ, d_ZF, preferred_element_type=jnp.float32)


def _product(x, weight, num_contracted, precision, dtype=None):
  last = tuple(range(x.ndim - num_contracted, x.ndim))
  dims = ((last, tuple(range(num_contracted))), ((), ()))
  return rounding.rounded(
    jax.lax.dot_general(x, weight, dims, precision, dtype)
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _wide_product(x, weight, num_contracted, precision):
  return _product(x, weight, num_contracted, precision)


def _wide_backward(num_contracted, precision, residuals, d_out):
  x, weight = residuals
  num_rows = x.ndim - num_contracted
  # Made once, in the layout that both products read.
  d_out = jax.lax.optimization_barrier(d_out)
  wide = tuple(range(num_rows, d_out.ndim))
  columns = wide, tuple(range(num_contracted, weight.ndim))
  d_x = jax.lax.dot_general(d_out, weight, (columns, ((), ())), precision)
  # Contracted axes before rows, without joining any: rows may be sharded.
  order = (*range(num_rows, x.ndim), *range(num_rows))
  x = jax.lax.optimization_barrier(x.transpose(order))
  rows = (tuple(range(num_contracted, x.ndim)), tuple(range(num_rows)))
  d_weight = jax.lax.dot_general(x, d_out, (rows, ((), ())), precision)
  return d_x, d_weight


_wide_product.defvjp(lambda *args: (_product(*args), args[:2]), _wide_backward)
