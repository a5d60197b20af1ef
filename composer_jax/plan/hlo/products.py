"""Counts the operations of one product: a dot, a convolution or a kernel.

The text of a program does not show the inside of a kernel (Pallas, Mosaic,
Triton). Its operations are those of the cost estimate it was traced with. For
the kernels of `composer_jax.kernels` they otherwise follow from the shapes, as
if every row of a buffer were in use and queries met the keys up to themselves.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from composer_jax.plan.hlo import text

# Targets of custom calls that are kernels; others move data or annotate.
_KERNEL = r'tpu_custom_call|mosaic|triton|pallas'


class Product(NamedTuple):
  """A product of `flops` operations, two per multiply-add; None if unknown.

  A kernel has a name and no sides; other products have sides and no name.
  `sizes` are those of all dimensions of a kernel's operands.
  """

  flops: float | None
  lhs: list[int]
  rhs: list[int]
  out: list[int]
  kernel: str = ''
  sizes: frozenset[int] = frozenset()


def product(
  instruction: text.Instruction, computation: text.Computation
) -> Product | None:
  """Returns the product that an instruction computes; None if it is none."""
  if instruction.operation not in ('dot', 'convolution', 'custom-call'):
    return None
  out = list(text.arrays(instruction.shape)[0].dims)
  if instruction.operation == 'custom-call':
    target = instruction.target()
    if re.search(_KERNEL, target):
      return _kernel(instruction, computation, out)
    if not re.search('gemm|matmul', target):
      return None
  shapes = [computation[n].shape for n in instruction.operands[:2]]
  lhs, rhs = (list(text.arrays(shape)[0].dims) for shape in shapes)
  if instruction.operation == 'convolution':
    return Product(2.0 * _taps(instruction, lhs, rhs, out), lhs, rhs, out)
  # A custom call prints the dimensions in its JSON, a dot as attributes.
  contracted = re.search(
    r'"?lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]',
    instruction.rest,
  )
  if contracted is None:
    raise ValueError(
      f'The product {instruction.name} states no contracted dimensions in a '
      'form that this reader knows.'
    )
  sizes = [lhs[int(n)] for n in re.findall(r'\d+', contracted.group(1))]
  flops = 2.0 * math.prod(out) * math.prod(sizes)
  return Product(flops, lhs, rhs, out)


def _kernel(
  instruction: text.Instruction, computation: text.Computation, out: list[int]
) -> Product:
  cost = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.rest)
  scope = instruction.scope().removesuffix('/pallas_call')
  name = scope.rsplit('/', 1)[-1] or instruction.name
  flops = float(cost.group(1)) if cost else None
  arrays = [
    array
    for operand in instruction.operands
    for array in text.arrays(computation[operand].shape)
  ]
  if flops is None and name in _BY_SHAPES:
    dims = [array.dims for array in arrays if array.dtype[0] in 'bf']
    flops = _BY_SHAPES[name](dims, tuple(out))
  sizes = frozenset(size for array in arrays for size in array.dims)
  return Product(flops, [], [], out, name, sizes)


_Dims = tuple[int, ...]


def _grouped(operands: list[_Dims], out: _Dims) -> float:
  """Counts [Y, D] times [E, D, F], or [Y, D] and [Y, F] into [E, D, F].

  The sizes of the three, without E, multiply to (Y D F)^2.
  """
  arrays = [*operands[:2], out]
  groups = next(dims[0] for dims in arrays if len(dims) == 3)
  return 2.0 * math.sqrt(math.prod(map(math.prod, arrays)) // groups)


def _attended(keys: int, values: int) -> Callable[[list[_Dims], _Dims], float]:
  """Counts products of all queries with half of the keys.

  Args:
    keys: number of products that are as wide as a key [B, S, K, H].
    values: number of products that are as wide as a value [B, S, K, W].
  """

  def count(operands: list[_Dims], out: _Dims) -> float:
    del out
    (b, t, n, h), (_, s, _, _), (*_, w) = operands[:3]
    return float(b * t * n * s * (keys * h + values * w))

  return count


_BY_SHAPES: dict[str, Callable[[list[_Dims], _Dims], float]] = {
  'grouped_multiply': _grouped,
  'grouped_multiply_groups': _grouped,
  'forward_kernel': _attended(1, 1),  # Scores; outputs.
  'queries_kernel': _attended(2, 1),  # Scores, d_q; d_weights.
  'keys_kernel': _attended(2, 2),  # Scores, d_k; d_weights, d_v.
}


def _taps(
  instruction: text.Instruction, lhs: list[int], rhs: list[int], out: list[int]
) -> float:
  """Counts the multiplications of a convolution, without those of padding.

  The TPU compiler writes every product as a convolution, with the batch as a
  spatial dimension so dilated that each result sees one element.
  """
  labels = text.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.rest)
  sides = zip(labels.groups(), (lhs, rhs, out), strict=True)
  inputs, window, results = (
    dict(zip(names, sizes, strict=True)) for names, sizes in sides
  )
  total = float(results['b'] * results['f'] * window['i'])
  printed = re.search(r'window=\{([^}]*)\}', instruction.rest)
  words = re.findall(r'(\w+)=(\S+)', printed.group(1) if printed else '')
  for place, label in enumerate(sorted(filter(str.isdigit, inputs))):
    # Padding is printed as 'low_high'; only its low side shifts elements.
    given = {k: int(v.split('x')[place].split('_')[0]) for k, v in words}
    first = np.arange(results[label]) * given.get('stride', 1)
    offset = np.arange(window[label]) * given.get('rhs_dilate', 1)
    at = np.add.outer(first - given.get('pad', 0), offset)
    dilation = given.get('lhs_dilate', 1)
    # Pairs of a result and a place of the window that see an element.
    sees = (at % dilation == 0) & (at >= 0) & (at < inputs[label] * dilation)
    total *= int(np.count_nonzero(sees))
  return total
