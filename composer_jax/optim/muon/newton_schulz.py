"""Orthogonalises matrices by a fixed number of Newton-Schulz steps.

Maps X = U S V^T to about U V^T with matrix products only, the step that makes
Muon out of momentum. Pure and local: knows nothing of parameters, roles or
meshes; `newton_schulz_split` shares one matrix among devices.

A matrix is p x q with p <= q (a tall one is transposed first). Two orders of
the same arithmetic: 'standard' updates X in each step, 4 p^2 q + 2 p^3
operations; 'gram' iterates on the p x p Gram matrix and applies the result to
X at each restart (Zhang, Amsel, Chen, Dao, 2026), cheaper where q >= 1.5 p.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import layout

from composer_jax.optim.muon import coefficients

# From here on gram with a restart every two steps needs fewer operations.
GRAM_RATIO = 1.5
# In bfloat16 three steps without a restart overshoot on deficient matrices
# (singular values of 2 where rank is p / 2); two never do.
_GRAM_STEPS = 2
# More steps than these are asked for precision, of which the bfloat16 Gram
# matrices of a rank-1 momentum lose 3 %.
_GRAM_PRECISE_STEPS = 5

# The record's field of that name hides the module in its body.
_LEAST_SAFETY = coefficients.LEAST_SAFETY
_Triples = tuple[coefficients.Triple, ...]

_DTYPES = ('bfloat16', 'float32')


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
  """How to orthogonalise.

  Attributes:
    coefficients: a list of `coefficients.NAMES`.
    steps: None for the list's own number; polar_express with 6 is precise to
      1.5 % where 5 leave singular values in 0.86-1.12.
    safety: of polar_express, see `coefficients.triples`.
    method: 'standard', 'gram', or 'auto': gram where it is cheaper, as good,
      and restarts keep it stable.
    restarts: steps after which gram applies its result and starts anew.
    dtype: of the operands of matrix products, which accumulate in float32:
      'bfloat16', 'float32' or 'auto', bfloat16 but on CPUs. A program compiled
      for another platform than this process's must say it.
    gram_dtype: of the iterated Gram matrices; None: as dtype.
    deterministic: one matrix after the other, so that no bit of a result
      depends on what else is in the batch. CPUs always do so.
  """

  coefficients: str = 'polar_express'
  steps: int | None = None
  safety: float = _LEAST_SAFETY
  method: str = 'auto'
  restarts: tuple[int, ...] = (2, 4)
  dtype: str = 'auto'
  gram_dtype: str | None = None
  deterministic: bool = False

  def __post_init__(self):
    _ = self.triples
    if self.method not in ('auto', 'standard', 'gram'):
      raise ValueError(
        f"Newton-Schulz method {self.method!r} is not 'auto', 'standard' or "
        "'gram'."
      )
    if self.dtype not in ('auto', *_DTYPES):
      raise ValueError(
        f"Newton-Schulz dtype {self.dtype!r} is not 'auto' or one of {_DTYPES}."
      )
    if self.gram_dtype not in (None, *_DTYPES):
      raise ValueError(
        f'gram_dtype {self.gram_dtype!r} is not None or one of {_DTYPES}.'
      )
    ascends = all(a < b for a, b in itertools.pairwise((0, *self.restarts)))
    if not ascends:
      raise ValueError(
        f'restarts {self.restarts} must ascend from 1: each is the number of '
        'steps done before it.'
      )

  @property
  def triples(self) -> _Triples:
    """The (a, b, c) of each step."""
    return coefficients.triples(self.coefficients, self.steps, self.safety)

  @property
  def segments(self) -> tuple[_Triples, ...]:
    """The triples between the restarts of gram."""
    triples = self.triples
    inner = [r for r in self.restarts if r < len(triples)]
    bounds = itertools.pairwise((0, *inner, len(triples)))
    return tuple(triples[start:end] for start, end in bounds)

  def is_gram(self, p: int, q: int) -> bool:
    """Whether a p x q matrix, either side longer, takes the gram method."""
    if self.method != 'auto':
      return self.method == 'gram'
    if max(map(len, self.segments)) > _GRAM_STEPS:
      return False
    is_precise = len(self.triples) > _GRAM_PRECISE_STEPS
    if is_precise and self.gram_dtype != 'float32':
      return False
    return max(p, q) >= GRAM_RATIO * min(p, q)


def resolved(
  options: NewtonSchulz, platform: str | None = None
) -> NewtonSchulz:
  """Replaces an 'auto' dtype by a platform's, None for this process's."""
  dtype = options.dtype
  if dtype == 'auto':
    is_cpu = (platform or jax.default_backend()) == 'cpu'
    dtype = 'float32' if is_cpu else 'bfloat16'
  return dataclasses.replace(options, dtype=dtype)


def standard_flops(p: int, q: int, steps: int = 5) -> int:
  """Returns the operations of the standard method, two per multiply-add."""
  p, q = sorted((p, q))
  return steps * (4 * p * p * q + 2 * p**3)


def flops(p: int, q: int, options: NewtonSchulz) -> int:
  """Returns the operations of one matrix's products, as `orthogonalize`'s."""
  p, q = sorted((p, q))
  if not options.is_gram(p, q):
    return standard_flops(p, q, len(options.triples))
  total = 0
  for segment in options.segments:
    # The Gram matrix and the application; then one product for Z, two for the
    # next Gram matrix in all but the last step, one for Q in all but the first.
    products = len(segment) + 3 * (len(segment) - 1)
    total += 4 * p * p * q + 2 * p**3 * products
  return total


def orthogonalize(x: jax.Array, options: NewtonSchulz) -> jax.Array:
  """Orthogonalises each matrix of a stack.

  Zero stays zero; NaN and infinity turn the whole of their matrix, and no
  other, into NaN. Dividing by the largest entry before the norm makes the
  result independent of the gradient's scale: squares alone vanish below 1e-19.

  Args:
    x: [..., rows, columns]; every leading axis is a batch axis.
    options: see `NewtonSchulz`.

  Returns:
    The same shape, in the operands' dtype.
  """
  options = resolved(options)
  is_tall = x.shape[-2] > x.shape[-1]
  if is_tall:  # f(X^T) = f(X)^T, and A is smaller on the short side.
    x = x.swapaxes(-1, -2)
  stack = x.reshape(-1, *x.shape[-2:])

  def one_by_one(stack):
    # A loop of one matrix is no loop to XLA. The barriers keep what surrounds
    # it (a transpose, the slices of a loop) from changing its products, and so
    # its bits.
    barrier = jax.lax.optimization_barrier

    def alone(matrix):
      return barrier(orthogonalize_together(barrier(matrix), options))

    stack = layout.with_layout_constraint(
      stack, layout.Layout(major_to_minor=(0, 1, 2))
    )
    return barrier(jax.lax.map(alone, stack))

  def together(stack):
    return orthogonalize_together(stack, options)

  if options.deterministic:
    result = one_by_one(stack)
  else:
    # By the platform compiled for. A CPU gains nothing from a batched product,
    # and one matrix at a time stays in its cache.
    result = jax.lax.platform_dependent(stack, cpu=one_by_one, default=together)
  result = result.reshape(x.shape)
  return result.swapaxes(-1, -2) if is_tall else result


def orthogonalize_together(x: jax.Array, options: NewtonSchulz) -> jax.Array:
  """Orthogonalises [..., p, q], p <= q, by resolved options."""
  x = normalized(x).astype(options.dtype)
  if options.is_gram(*x.shape[-2:]):
    return _gram(x, options)
  for a, b, c in options.triples:
    polynomial = gram_polynomial(product(x, x.mT).astype(x.dtype), b, c)
    x = rounded_sum(a, x, product(polynomial, x), x.dtype)
  return x


def normalized(
  x: jax.Array,
  *,
  maximum: Callable[[jax.Array], jax.Array] = lambda v: v,
  total: Callable[[jax.Array], jax.Array] = lambda v: v,
) -> jax.Array:
  """Scales each matrix to a Frobenius norm of 1, in float32.

  Args:
    x: matrices, or parts of them.
    maximum: joins the largest entries of all parts.
    total: adds up the squares of all parts.
  """
  x = x.astype(jnp.float32)
  largest = maximum(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
  x = x / jnp.where(largest == 0, 1.0, largest)
  squares = total(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
  return x / jnp.sqrt(jnp.where(squares == 0, 1.0, squares))


def product(x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies matrices of one dtype, accumulating in float32."""
  # The highest precision is what float32 means: TPUs and GPUs would round.
  precision = 'highest' if x.dtype == jnp.float32 else None
  return jnp.matmul(
    x, y, precision=precision, preferred_element_type=jnp.float32
  )


def rounded_sum(a: float, x: jax.Array, y: jax.Array, dtype) -> jax.Array:
  """Returns a x + y, rounded once."""
  return (a * x.astype(jnp.float32) + y).astype(dtype)


def gram_polynomial(gram: jax.Array, b: float, c: float) -> jax.Array:
  """Returns b A + c A^2, rounded once to A's dtype."""
  # Both terms from the rounded A: mixing in the unrounded one is less exact.
  return rounded_sum(b, gram, c * product(gram, gram), gram.dtype)


def _gram(x: jax.Array, options: NewtonSchulz) -> jax.Array:
  """Iterates on R = X X^T, restarting as the options say."""
  dtype = jnp.dtype(options.gram_dtype or options.dtype)
  for (a, b, c), *others in options.segments:
    r = product(x, x.mT).astype(dtype)
    z = gram_polynomial(r, b, c)
    # X is to be multiplied by scale I + q. With the identity in q, its rounding
    # would put the response to a rank-1 momentum 15 % off in bfloat16.
    scale, q = a, z
    for next_a, b, c in others:
      y = rounded_sum(a, r, product(r, z), dtype)
      r = rounded_sum(a, y, product(z, y), dtype)
      z = gram_polynomial(r, b, c)
      a = next_a
      # (scale I + q) (a I + z), less its multiple of the identity.
      sums = a * q.astype(jnp.float32) + scale * z.astype(jnp.float32)
      q = (sums + product(q, z)).astype(dtype)
      scale *= a
    x = rounded_sum(scale, x, product(q.astype(x.dtype), x), x.dtype)
  return x
