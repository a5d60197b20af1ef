"""Products of activations with weights whose contracted axes come first.

On XLA:CPU a product of 2 to 8 rows reads weights [D, F] at twice the speed of
[F, D]; else and on accelerators the layouts are equally fast. An engine copies
a tied table [V, D] to [D, V] therefore (`rollout.forward`). Up to 64 rows the
plain product beat padded rows, column blocks and products per row.

On CPU the gradient of a float32 weight x^T d is written out. XLA multiplies x w
and d w^T by YNNPACK, and x^T d by a library that is slow on some processors: on
an EPYC core a third of a train step, on a Xeon nothing. A transposed copy of x
puts all three on the fast path.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.core import platforms, rounding


class Adapted(flax.struct.PyTreeNode):
  """A frozen weight with a low-rank adapter: weight + a b.

  With contracted axes D and others F, the arrays are [D, F], [D, R] and [R, F],
  after equal leading axes if there are several weights.
  """

  weight: Any
  a: Any
  b: Any


def linear(
  x: jax.Array,
  weight: jax.Array | Adapted,
  *,
  num_contracted: int = 1,
  dtype: Any = None,
  precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
  """Contracts the last axes of x with the first axes of the weight.

  The product is summed in float32 and rounded once.

  Args:
    x: activations [..., D] or [..., N, H].
    weight: weight [D, ...] or [N, H, ...] in the dtype of x. The product of an
      adapter is added to that of the frozen weight, never to the weight.
    dtype: dtype of the result; None means that of x.
    precision: precision of the product on accelerators.
  """
  if isinstance(weight, Adapted):
    how = dict(dtype=dtype, precision=precision)
    y = linear(x, weight.weight, num_contracted=num_contracted, **how)
    low = linear(
      x, weight.a, num_contracted=num_contracted, precision=precision
    )
    return rounding.rounded(y + linear(low, weight.b, **how))
  is_float32 = x.dtype == weight.dtype == jnp.float32
  if is_float32 and dtype is None and platforms.current() == 'cpu':
    return _float32_product(x, weight, num_contracted, precision)
  return _product(x, weight, num_contracted, precision, dtype)


def weight_gradient(x_ZD: jax.Array, d_ZF: jax.Array) -> jax.Array:
  """Returns x^T d in float32 by the fastest product of the platform."""
  if platforms.current() != 'cpu':
    return jnp.dot(x_ZD.T, d_ZF, preferred_element_type=jnp.float32)
  # The inner barrier keeps XLA from recomputing x element by element in the
  # transposed order, the outer one from folding the transposition away.
  x_DZ = jax.lax.optimization_barrier(jax.lax.optimization_barrier(x_ZD).T)
  return jnp.dot(x_DZ, d_ZF, preferred_element_type=jnp.float32)


def _product(x, weight, num_contracted, precision, dtype=None):
  last = tuple(range(x.ndim - num_contracted, x.ndim))
  dims = ((last, tuple(range(num_contracted))), ((), ()))
  product = jax.lax.dot_general(x, weight, dims, precision, dtype)
  return rounding.rounded(product)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _float32_product(x, weight, num_contracted, precision):
  return _product(x, weight, num_contracted, precision)


def _float32_backward(num_contracted, precision, residuals, d_out):
  x, weight = residuals
  num_rows = x.ndim - num_contracted
  # Computed once, in the layout that both products read.
  d_out = jax.lax.optimization_barrier(d_out)
  last = tuple(range(num_rows, d_out.ndim))
  columns = last, tuple(range(num_contracted, weight.ndim))
  d_x = jax.lax.dot_general(d_out, weight, (columns, ((), ())), precision)
  # Contracted axes before rows. Axes stay apart, since rows may be sharded.
  order = (*range(num_rows, x.ndim), *range(num_rows))
  x = jax.lax.optimization_barrier(x.transpose(order))
  rows = (tuple(range(num_contracted, x.ndim)), tuple(range(num_rows)))
  d_weight = jax.lax.dot_general(x, d_out, (rows, ((), ())), precision)
  return d_x, d_weight


_float32_product.defvjp(
  lambda *args: (_product(*args), args[:2]), _float32_backward
)
