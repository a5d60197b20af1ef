"""Products of activations with a weight whose contracted axes lead.

That layout is the law of this module rather than a choice per call. On XLA:CPU
a product of 2 to 8 rows with weights [D, F] reads them at twice the speed of
one with [F, D] (44 to 58 against 19 to 25 GB/s in cache on an EPYC core, 19 to
23 against 12 in memory). For one row the two are equal, and so they are from
some 64 rows on and on accelerators. Who decodes with a tied table [V, D]
therefore wants a copy of it as [D, V] (`rollout.forward`).

Nothing else beat the plain product at 1, 2, 4, 8, 16 or 64 rows: not padding
rows, column blocks, a product per row or per half of the rows, the transposed
product, nor multiplying and summing.
"""

import jax

from composer_jax.core import rounding


def linear(
  x: jax.Array, weight: jax.Array, *, num_contracted: int = 1
) -> jax.Array:
  """Contracts the last axes of x with the first ones of the weight.

  Args:
    x: activations [..., D] or [..., N, H].
    weight: in the dtype of x, [D, ...] or [N, H, ...].
    num_contracted: how many axes.

  Returns:
    The product in x's dtype, summed in float32 and rounded once.
  """
  last = tuple(range(x.ndim - num_contracted, x.ndim))
  first = tuple(range(num_contracted))
  y = jax.lax.dot_general(x, weight, ((last, first), ((), ())))
  return rounding.rounded(y)
