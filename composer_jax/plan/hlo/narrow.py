"""Refuses programs that widen numbers of few bits before they multiply them.

A compiler may take a product of eight bits and multiply 16 without a word. Then
it saves bytes and no time. `check` looks for that in what compilers print: the
program itself, and for kernels, whose inside it does not show, Mosaic's last
stage on TPUs (`--xla_mosaic_dump_to`) and PTX on NVIDIA's GPUs.
"""

import collections
import re
from collections.abc import Iterable

from composer_jax.plan.hlo import products, text

_NARROW = re.compile(r'f8|f4|s4|u4')
# Operations through which a number stays the same, but for a scale.
_THROUGH = (
  *('convert', 'bitcast', 'bitcast-convert', 'copy', 'reshape', 'transpose'),
  *('broadcast', 'multiply', 'slice', 'pad', 'concatenate'),
)
# The format of operands in the matrix unit, e4m3b or e4m3b_to_bf16.
_UNIT = re.compile(r'matmul_data_format<(\w+)>')
# The dtype of both operands of a warp's or a warp group's product.
_PTX = re.compile(r'mma(?:_async)?\.sync\.[\w.]*\.f32\.(\w+)\.\1\b')


class Widened(ValueError):
  """A product of few bits that the compiler made one of more."""


def check(
  program: str, kernels: Iterable[str] = ()
) -> collections.Counter[str]:
  """Returns how many products there are of each format of operands.

  Args:
    program: optimised HLO.
    kernels: texts of kernels, of Mosaic's last stage or in PTX.

  Raises:
    Widened: names the products whose operands had fewer bits before.
  """
  module = text.parse(program)
  counts, widened = collections.Counter(), []
  for name, computation in module.computations.items():
    for instruction in computation.values():
      if instruction.operation == 'custom-call':
        continue  # A kernel, or one that moves data.
      if products.product(instruction, computation) is None:
        continue
      operands = instruction.operands[:2]
      dtypes = [_dtype(computation[n]) for n in operands]
      counts['_'.join(dtypes)] += 1
      for operand, dtype in zip(operands, dtypes, strict=True):
        narrow = _origin(module, name, operand, {})
        if narrow and not _NARROW.match(dtype):
          widened.append(f'{instruction.name} ({narrow} to {dtype})')
          break
  for kernel in kernels:
    for kind, count in _in_kernel(kernel).items():
      counts[kind] += count
      if '_to_' in kind:
        widened.append(f'{count} steps of a kernel ({kind})')
  if widened:
    raise Widened(
      'Products of few bits are widened before they multiply, which saves no '
      f'time: {", ".join(sorted(set(widened)))}. Compile for devices that '
      "multiply these bits, or set precision.products='values'."
    )
  return counts


def _dtype(instruction):
  return text.arrays(instruction.shape)[0].dtype


def _origin(module, name, operand, seen):
  """Returns a dtype of few bits that an operand is made of; '' for none."""
  if (name, operand) in seen:
    return ''
  seen[name, operand] = True
  computation = module.computations[name]
  instruction = computation[operand]
  dtype = _dtype(instruction) if text.arrays(instruction.shape) else ''
  if _NARROW.match(dtype):
    return dtype
  places = []
  if instruction.operation == 'parameter':
    places = [
      (caller, call.operands[int(instruction.literal)])
      for caller, other in module.computations.items()
      for call in other.values()
      if call.operation in ('fusion', 'call') and call.called() == name
    ]
  elif instruction.operation in ('fusion', 'call'):
    inner = instruction.called()
    places = [(inner, text.root(module.computations[inner]).name)]
  elif instruction.operation in _THROUGH:
    places = [(name, n) for n in instruction.operands]
  found = (_origin(module, where, what, seen) for where, what in places)
  return next(filter(None, found), '')


def _in_kernel(kernel: str) -> collections.Counter[str]:
  """Returns the products of a kernel's text by the format of operands."""
  counts = collections.Counter(
    re.findall(r'llo\.vmatmul[^\n]*' + _UNIT.pattern, kernel)
  )
  # Codes that are converted are operands of products of more bits.
  is_widened = re.search(r'\bcvt[\w.]*\.e4m3', kernel)
  for kind in _PTX.findall(kernel):
    counts[f'e4m3_to_{kind}' if is_widened else kind] += 1
  return counts
