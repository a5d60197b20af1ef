"""Times two functions turn by turn, and prints one JSON line.

Turns alternate, so that a machine that slows down slows both. On a CPU the
process is pinned to one core and its CPU seconds are counted, so that other
processes hardly show; on an accelerator the wall clock counts.
"""

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from composer_jax.telemetry import machine

_SIDE = 768  # side of the matrices whose product measures the peak


# As in run.sh. XLA allocates the temporaries of a step as one block and frees
# it. glibc maps the block anew each time and the kernel zeroes it: for 384 MB
# 65 ms of a step of 0.34 s with pages of 4 KiB, and 10 ms with huge pages.
_TUNABLES = 'glibc.malloc.hugetlb=1'


def set_allocator() -> None:
  """Restarts the process with the allocator as `run.sh` sets it.

  This holds for all that is timed, peers and their processes too. Settings of
  the caller win.
  """
  if sys.platform == 'linux' and 'GLIBC_TUNABLES' not in os.environ:
    os.environ['GLIBC_TUNABLES'] = _TUNABLES
    os.execv(sys.executable, sys.orig_argv)


def pin_to_one_core() -> None:
  """Pins the process; call it before JAX starts threads, which stay put."""
  flags = os.environ.get('XLA_FLAGS', '')
  os.environ['XLA_FLAGS'] = f'{flags} --xla_cpu_multi_thread_eigen=false'
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def need_accelerator(name: str, *, is_tiny: bool) -> None:
  """Ends the program if it is not tiny and JAX has a CPU only."""
  import jax

  device = jax.devices()[0]
  if device.platform == 'cpu' and not is_tiny:
    raise SystemExit(
      f'benchmarks.{name} needs an accelerator, but JAX has '
      f'{device.device_kind!r} only; --tiny runs the code on it.'
    )


def _uses_accelerator() -> bool:
  """True if the benchmark has loaded JAX and JAX has an accelerator."""
  jax = sys.modules.get('jax')
  return jax is not None and jax.default_backend() != 'cpu'


def machine_name() -> str:
  """Returns the processor, its cores or the accelerator, and JAX's version."""
  name = platform.processor() or platform.machine()
  try:
    with open('/proc/cpuinfo') as file:
      names = [x for x in file if x.startswith('model name')]
    name = names[0].split(':')[1].strip() if names else name
  except OSError:
    pass
  jax = sys.modules.get('jax')
  cores = machine.usable_cores()
  where = 'one core' if cores == 1 else f'{cores} cores'
  if jax is None:
    return f'{name}, {where}'
  if _uses_accelerator():
    where = jax.devices()[0].device_kind
  return f'{name}, {where}, jax {jax.__version__}'


def clock() -> Callable[[], float]:
  """Returns the clock that counts: the wall's with an accelerator."""
  return time.perf_counter if _uses_accelerator() else time.process_time


def rates(
  ours: Callable[[], float],
  peer: Callable[[], float],
  rounds: int,
  *,
  before: Callable[[], Any] = lambda: None,
) -> tuple[list[float], list[float]]:
  """Runs both functions in turn; each returns the units of work that it did.

  Args:
    ours: function that is measured.
    peer: function that it is compared with.
    rounds: counted rounds; one warm-up round comes before them.
    before: function that prepares each round, off the clock.

  Returns:
    Units per second of each round, of ours and of the peer.
  """
  now = clock()
  rates_of_both: tuple[list[float], list[float]] = ([], [])
  for turn in range(rounds + 1):
    before()
    for function, into in zip((ours, peer), rates_of_both, strict=True):
      start = now()
      units = function()
      if turn:
        into.append(units / (now() - start))
  return rates_of_both


def peak() -> float:
  """Returns operations per second: a data sheet's, or a measured product's.

  The product is measured by the same clock as all else, so that neighbours of
  this process do not lower it.
  """
  import jax
  import jax.numpy as jnp

  from composer_jax.telemetry import mfu

  known = mfu.peak_flops(jax.devices()[0].device_kind)
  if known:
    return known
  multiply = jax.jit(jnp.dot)
  matrix = jnp.ones((_SIDE, _SIDE))

  def run() -> float:
    jax.block_until_ready(multiply(matrix, matrix))
    return 2.0 * _SIDE**3

  return max(max(values) for values in rates(run, run, 9))


def _rounded(value: float | None) -> float | None:
  return None if value is None else float(f'{value:.4g}')


def spread(values: list[float]) -> float:
  """Returns the distance from least to most, over the median."""
  return (max(values) - min(values)) / statistics.median(values)


def report(
  name: str,
  case: str,
  rates: tuple[list[float], list[float]],
  *,
  against: str = '',
  limit: float | None,
  goal: str,
  met: Callable[[float, float], bool],
  unit: str = 'tokens/s',
  note: str = '',
) -> dict[str, Any]:
  """Prints the line of one case, with the medians of both.

  Args:
    name: name of the benchmark.
    case: claim in a few words. Cases of one claim have the same words before a
      colon; the table of README.md joins those of one peer, goal and unit.
    rates: our figures and the peer's, as from `rates`; the peer's are empty if
      there is no peer.
    against: name of the peer.
    limit: rate if every useful operation ran at the device's peak, or another
      bound; None if no bound is known.
    goal: goal in words; 'none' keeps the line out of the table.
    met: function (ours, ratio) -> true if the goal is met; the ratio is NaN
      without a peer.
    unit: unit of the figures.
    note: further figures of the case in words.
  """
  ours = statistics.median(rates[0])
  peer = statistics.median(rates[1]) if rates[1] else None
  ratio = None if peer is None else ours / peer
  line = {
    'benchmark': name,
    'case': case,
    'against': against,
    'ours': _rounded(ours),
    'peer': _rounded(peer),
    'unit': unit,
    'ratio': _rounded(ratio),
    'spread': [round(spread(values), 3) for values in rates if values],
    'limit': _rounded(limit),
    'goal': goal,
    'met': bool(met(ours, math.nan if ratio is None else ratio)),
    'command': ' '.join(['python', '-m', f'benchmarks.{name}', *sys.argv[1:]]),
    'machine': machine_name(),
    **({'note': note} if note else {}),
  }
  print(json.dumps(line), flush=True)
  return line
