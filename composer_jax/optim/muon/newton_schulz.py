"""Orthogonalises matrices by a fixed number of Newton-Schulz steps.

Maps X = U S V^T to about U V^T with matrix products only. Only
`orthogonalize_split`, which shares a matrix among devices, uses a mesh.

A matrix is p x q with p <= q (a tall one is transposed first). A step is
X <- a X + (b A + c A^2) X with A = X X^T, which maps each singular value s to
a s + b s^3 + c s^5. The standard order updates X in each step, in 4 p^2 q +
2 p^3 operations; the other iterates on the p x p Gram matrix and applies the
result to X at each restart (Zhang, Amsel, Chen, Dao, 2026).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout

from composer_jax.core import checks

Triple = tuple[float, float, float]  # a, b, c of a step

# Least q / p for which the Gram iteration needs fewer operations.
GRAM_RATIO = 1.5
# Steps between restarts of the Gram iteration. In bfloat16 three overshoot on
# matrices of rank p / 2 (singular values of 2); two do not.
_GRAM_STEPS = 2

# Polar Express (arXiv 2505.16932) is fitted to singular values up to 1; it is
# stretched to 1.02, as rounding lifts those of a normalised matrix above 1.
_SAFETY = 1.02
_POLAR_EXPRESS = (
  (8.28721201814563, -23.595886519098837, 17.300387312530933),
  (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
  (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
  (3.3184196573706015, -2.488488024314874, 0.51004894012372),
  (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)

# A list may be here if its composed polynomial stays above zero on (0, 1.02],
# is finite at 1.02 and exceeds 0.5 at 1, the response to a rank-1 momentum.
# Published lists that fail: Emerging-Optimizers' 'aol' (-0.99 at 1: an expert
# that saw one token would climb its gradient), the cubic of arXiv 2606.00371,
# CANS (arXiv 2506.10935) and Polar Express with less safety.
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
  'polar_express': tuple(
    (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS
  ),
  # KellerJordan/Muon, the default of optax and torch.
  'keller': ((3.4445, -4.7750, 2.0315),) * 5,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
  """Options of the orthogonalisation.

  Attributes:
    coefficients: 'polar_express', which brings singular values into 0.86-1.12,
      or 'keller', the first list of Muon, into 0.68-1.20.
    method: 'auto', the Gram iteration where it is cheaper (by a fifth where a
      matrix is 3.5 times as long as wide), or 'standard'.
    dtype: dtype of products' operands, which accumulate in float32, and of
      exchanged data: 'bfloat16', 'float32' or 'auto' (float32 on CPUs only).
    deterministic: true for one matrix after the other and none shared by
      devices, which gives the same bits on every mesh; slower on accelerators.
  """

  coefficients: str = 'polar_express'
  method: str = 'auto'
  dtype: str = 'auto'
  deterministic: bool = False

  def __post_init__(self):
    checks.one_of(self, 'coefficients', tuple(COEFFICIENTS))
    checks.one_of(self, 'method', ('auto', 'standard'))
    checks.one_of(self, 'dtype', ('auto', 'bfloat16', 'float32'))
    checks.boolean(self, 'deterministic')

  @property
  def triples(self) -> tuple[Triple, ...]:
    return COEFFICIENTS[self.coefficients]

  @property
  def segments(self) -> tuple[tuple[Triple, ...], ...]:
    """Triples between the restarts of the Gram iteration."""
    triples, step = self.triples, _GRAM_STEPS
    return tuple(triples[i : i + step] for i in range(0, len(triples), step))

  def is_gram(self, p: int, q: int) -> bool:
    """True if a p x q matrix, either side longer, uses the Gram iteration."""
    return self.method == 'auto' and max(p, q) >= GRAM_RATIO * min(p, q)

  def resolved(self, platform: str | None = None) -> Self:
    """Replaces an 'auto' dtype by that of a platform (None: the default)."""
    if self.dtype != 'auto':
      return self
    is_cpu = (platform or jax.default_backend()) == 'cpu'
    dtype = 'float32' if is_cpu else 'bfloat16'
    return dataclasses.replace(self, dtype=dtype)


def flops(p: int, q: int, options: NewtonSchulz) -> int:
  """Returns the operations of one matrix, two per multiply-add."""
  p, q = sorted((p, q))
  if not options.is_gram(p, q):
    return len(options.triples) * (4 * p * p * q + 2 * p**3)
  return sum(
    4 * p * p * q + 2 * p**3 * gram_products(len(segment))
    for segment in options.segments
  )


def gram_products(steps: int) -> int:
  """Returns the p x p products of a segment, beside its Gram matrix and X.

  One a step for Z, two for the next Gram matrix in all but the last step, one
  for Q in all but the first.
  """
  return steps + 3 * (steps - 1)


def orthogonalize(x: jax.Array, options: NewtonSchulz) -> jax.Array:
  """Orthogonalises each matrix of [..., rows, columns], in the options' dtype.

  Zero stays zero; NaN and infinity turn all of their matrix, and no other, into
  NaN. Entries are divided by the largest before the norm, since squares vanish
  below 1e-19.
  """
  options = options.resolved()
  is_tall = x.shape[-2] > x.shape[-1]
  if is_tall:  # f(X^T) = f(X)^T, and A is smaller on the short side.
    x = x.swapaxes(-1, -2)
  stack = x.reshape(-1, *x.shape[-2:])
  together = functools.partial(orthogonalize_together, options=options)

  def one_by_one(stack):
    # XLA inlines a loop of one matrix. The barriers keep surrounding operations
    # from changing the bits of its products.
    barrier = lax.optimization_barrier
    alone = lambda matrix: barrier(together(barrier(matrix)))
    stack = layout.with_layout_constraint(
      stack, layout.Layout(major_to_minor=(0, 1, 2))
    )
    return barrier(lax.map(alone, stack))

  if options.deterministic:
    result = one_by_one(stack)
  else:
    # A CPU gains nothing from batched products, and one matrix fits its cache.
    result = lax.platform_dependent(stack, cpu=one_by_one, default=together)
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

  For parts of matrices, `maximum` and `total` combine the largest entries and
  the sums of squares of the parts.
  """
  x = x.astype(jnp.float32)
  largest = maximum(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
  x = x / jnp.where(largest == 0, 1.0, largest)
  squares = total(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
  return x / jnp.sqrt(jnp.where(squares == 0, 1.0, squares))


def product(x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies matrices of one dtype, accumulating in float32."""
  # By default TPUs and GPUs would round float32 operands.
  precision = 'highest' if x.dtype == jnp.float32 else None
  return jnp.matmul(
    x, y, precision=precision, preferred_element_type=jnp.float32
  )


def rounded_sum(a: float, x: jax.Array, y: jax.Array, dtype) -> jax.Array:
  """Returns a x + y, rounded once."""
  return (a * x.astype(jnp.float32) + y).astype(dtype)


def gram_polynomial(gram: jax.Array, b: float, c: float) -> jax.Array:
  """Returns b A + c A^2, rounded once to A's dtype."""
  # Both terms use the rounded A; mixing in the unrounded one is less exact.
  return rounded_sum(b, gram, c * product(gram, gram), gram.dtype)


def _gram(x: jax.Array, options: NewtonSchulz) -> jax.Array:
  """Iterates on R = X X^T, applying the result after each segment."""
  dtype = x.dtype
  for (a, b, c), *others in options.segments:
    r = product(x, x.mT).astype(dtype)
    z = gram_polynomial(r, b, c)
    # X is multiplied by scale I + q. With the identity inside of q, rounding to
    # bfloat16 changes the response to a rank-1 momentum by 15 %.
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
    x = rounded_sum(scale, x, product(q, x), dtype)
  return x


def index_groups(size: int, k: int) -> list[list[int]]:
  """Returns the subgroups of k consecutive indices of `size` devices."""
  return [list(range(i, i + k)) for i in range(0, size, k)]


def as_bits(
  collective: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
  """Applies a collective to bits, as XLA:CPU would widen bfloat16."""
  if x.dtype != jnp.bfloat16:
    return collective(x)

  def move_bits(x):
    moved = collective(lax.bitcast_convert_type(x, jnp.uint16))
    return lax.bitcast_convert_type(moved, jnp.bfloat16)

  return lax.platform_dependent(x, cpu=move_bits, default=collective)


def split_flops(p: int, q: int, k: int, options: NewtonSchulz) -> int:
  """Returns one device's operations on one p x q matrix split k ways."""
  rows, columns = -(-p // k), -(-q // k)
  return len(options.triples) * (4 * p * p * columns + 2 * p * p * rows)


def split_collectives(
  p: int, k: int, options: NewtonSchulz, num: int = 1
) -> tuple[tuple[str, int], ...]:
  """Returns the collectives of `orthogonalize_split` in order of execution.

  Each is (kind, bytes into one of k devices), of `num` matrices at once.
  """
  # Sums are of float32, 4 bytes each.
  entries = num * (k - 1) * -(-p // k) * p
  gather = ('all-gather', entries * jnp.dtype(options.dtype).itemsize)
  step = (('reduce-scatter', entries * 4), gather, gather)
  # An all-reduce is a reduce-scatter and an all-gather.
  norm = ('all-reduce', 2 * num * 4 * (k - 1) // k)
  return (norm, norm) + step * len(options.triples)


def orthogonalize_split(
  x_npq: jax.Array,
  options: NewtonSchulz,
  *,
  axes: tuple[str, ...],
  index_groups: Sequence[Sequence[int]],
) -> jax.Array:
  """Orthogonalises matrices of which this device has some of the columns.

  Runs inside `shard_map` with check_vma=False. Each of k devices has q/k
  columns of the same p x q matrices, p <= q, in any partition, padded by zeros.
  In each step of the standard iteration all products are shared evenly:

    1. a device multiplies its columns with themselves; a reduce-scatter adds
       these p x p matrices and leaves it p/k rows of A = X X^T;
    2. after an all-gather of the rounded rows, it computes its rows of
       b A + c A^2;
    3. after an all-gather of these, it updates its columns.

  Args:
    options: options with a resolved dtype.
    index_groups: indices along `axes`, major to minor, that share matrices.

  Returns:
    Orthogonalised columns of this device, in the dtype of the options.
  """
  k, p = len(index_groups[0]), x_npq.shape[-2]
  assert p <= k * x_npq.shape[-1], 'the longer side is to be in columns'
  among = dict(axis_name=axes, axis_index_groups=index_groups)

  def gathered(rows):
    whole = as_bits(
      lambda rows: lax.all_gather(rows, **among, axis=1, tiled=True), rows
    )
    return whole[:, :p]

  x = normalized(
    x_npq,
    maximum=lambda v: lax.pmax(v, **among),
    total=lambda v: lax.psum(v, **among),
  ).astype(options.dtype)
  for a, b, c in options.triples:
    with jax.named_scope('split_step'):
      partial = product(x, x.mT)
      # Blocks of rows are the leading dimension: XLA's TPU compiler turns other
      # reduce-scatters into all-reduces, and rounds before it adds.
      blocks = jnp.pad(partial, ((0, 0), (0, -p % k), (0, 0)))
      blocks = blocks.reshape(len(x), k, -1, p).swapaxes(0, 1)
      rows = lax.psum_scatter(blocks, **among).astype(x.dtype)
      squares = product(rows, gathered(rows))
      polynomial = gathered(rounded_sum(b, rows, c * squares, x.dtype))
      update = product(polynomial, x)
      x = rounded_sum(a, x, update, x.dtype)
  return x
