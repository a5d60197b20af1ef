"""Compiles the programs of a run for machines that need not exist.

The programs are those of `plan.programs`. The compilers are the real ones
(libtpu, XLA:GPU, XLA:CPU), so memory, collectives and schedule are those of a
run. No array is allocated and no code runs.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from composer_jax.plan import programs

PRINTED = 'printed.txt'  # The compiler's stderr, beside the files it dumps.
# XLA prints this where it can reshard an array only by gathering all of it.
_WARNING = 'Involuntary full rematerialization'
# Messages of programs that do not fit: the size of temporaries, or of all.
_TEMPORARIES = (
  r'temporaries \(([\d.]+)([GM])\) exceeds available HBM \(([\d.]+)'
)
_USED = r'Used ([\d.]+)([GM]) of ([\d.]+)G hbm'
_UNITS = {'G': 1 << 30, 'M': 1 << 20}


class Live(NamedTuple):
  """An array that is allocated when memory is fullest."""

  name: str
  scope: str
  bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """A compiled step; bytes are those of one device.

  Attributes:
    text: scheduled HLO of the program.
    traced: facts from before the compilation.
    seconds: time to compile on this machine.
    has_code: true if the compiler made machine code; false if it was stopped
      at its schedule, or ran out of device memory.
    temporaries: bytes in addition to `traced.arguments`.
    limit: bytes that the compiler allows in all; None if it states no limit.
    error: message of a compiler that ran out of device memory; '' otherwise.
    warnings: the compiler's lines on involuntary rematerialisation.
    live: arrays when memory is fullest, largest first; empty if the compiler
      does not list them.
  """

  text: str
  traced: programs.Traced
  seconds: float
  has_code: bool
  temporaries: int
  limit: int | None
  error: str
  warnings: tuple[str, ...]
  live: tuple[Live, ...]

  @property
  def peak(self) -> int:
    """Bytes in all; results reuse the memory of donated arguments."""
    return sum(self.terms.values())

  @property
  def terms(self) -> dict[str, int]:
    """Bytes of one device by what takes them."""
    given = self.traced.terms | self.traced.beside
    return given | {'temporaries': self.temporaries}


def compile_lowered(
  traced: programs.Traced,
  lowered: Any,
  folder: pathlib.Path,
  compiler_options: dict[str, Any] | None = None,
) -> Compiled:
  """Compiles a lowered step; the empty folder takes what the compiler dumps.

  Want of device memory gives a result without code; another failure raises
  jax.errors.JaxRuntimeError.
  """
  options = {
    **(compiler_options or {}),
    'xla_dump_to': str(folder),
    'xla_dump_hlo_as_text': True,
    'xla_dump_hlo_module_re': 'jit_',
  }
  error, compiled = '', None
  start = time.perf_counter()
  with _stderr(folder / PRINTED):
    try:
      compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as raised:
      error = str(raised)
      if 'RESOURCE_EXHAUSTED' not in error:
        raise
  seconds = time.perf_counter() - start
  if compiled is None:
    text = dumped(folder, 'after_optimizations.txt')
    temporaries, limit = _wanted(error, traced.arguments)
  else:
    text, limit = compiled.as_text(), None
    memory = compiled.memory_analysis()
    # Results that reuse no donated argument need memory in addition.
    temporaries = memory.temp_size_in_bytes + max(
      0, memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
  return Compiled(
    text=text,
    traced=traced,
    seconds=seconds,
    has_code=compiled is not None,
    temporaries=temporaries,
    limit=limit,
    error=error,
    warnings=warnings(folder),
    live=live(folder, text),
  )


def warnings(folder: pathlib.Path) -> tuple[str, ...]:
  lines = (folder / PRINTED).read_text(errors='replace').splitlines()
  return tuple(line for line in lines if _WARNING in line)


def _wanted(error: str, arguments: int) -> tuple[int, int]:
  """Returns the bytes of temporaries and of the limit that an error states.

  The TPU compiler counts arguments among the temporaries.
  """
  for pattern in (_TEMPORARIES, _USED):
    if match := re.search(pattern, error):
      size, unit, limit = match.groups()
      wanted = round(float(size) * _UNITS[unit])
      return max(wanted - arguments, 0), round(float(limit) * _UNITS['G'])
  raise ValueError(
    f"The compiler's error states no sizes that this reader knows: "
    f'{error[:400]}'
  )


def dumped(folder: pathlib.Path, suffix: str) -> str:
  """Returns the text of the largest dump with a suffix; '' if none exists."""
  paths = sorted(folder.glob(f'*{suffix}'), key=lambda p: p.stat().st_size)
  return paths[-1].read_text() if paths else ''


def live(folder: pathlib.Path, text: str) -> tuple[Live, ...]:
  """Returns the arrays when memory is fullest, from the compiler's dumps."""
  _, _, peak = dumped(folder, 'live-range.txt').partition('(peak):\n')
  scopes = dict(
    re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', text, re.M)
  )
  arrays = []
  for line in peak.splitlines():
    match = re.match(r'\s*([\w.-]+)\{[\d,]*\}: (\d+) bytes', line)
    if match is None:
      break
    name, size = match.groups()
    arrays.append(Live(name, scopes.get(name, ''), int(size)))
  return tuple(sorted(arrays, key=lambda array: -array.bytes))


@contextlib.contextmanager
def _stderr(path: pathlib.Path) -> Iterator[None]:
  """Redirects stderr to a file, including what C++ code prints."""
  kept = os.dup(2)
  with path.open('wb') as file:
    os.dup2(file.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(kept, 2)
      os.close(kept)
