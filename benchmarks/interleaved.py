"""Times two ways of doing one thing turn by turn, and prints one JSON line.

Turns alternate, so that a machine that slows down slows both. On a CPU the
process is pinned to one core and its CPU seconds are counted, so that what
else runs there does not show; on an accelerator the wall clock counts.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def pin_to_one_core() -> None:
  """Call it before JAX starts its backend: threads keep what they find."""
  flags = os.environ.get('XLA_FLAGS', '')
  os.environ['XLA_FLAGS'] = f'{flags} --xla_cpu_multi_thread_eigen=false'
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _clock() -> Callable[[], float]:
  import jax

  on_cpu = jax.default_backend() == 'cpu'
  return time.process_time if on_cpu else time.perf_counter


def _machine() -> str:
  import jax

  device = jax.devices()[0]
  name = platform.processor() or platform.machine()
  try:
    with open('/proc/cpuinfo') as file:
      names = [x for x in file if x.startswith('model name')]
    name = names[0].split(':')[1].strip() if names else name
  except OSError:
    pass
  where = 'one core' if device.platform == 'cpu' else device.device_kind
  return f'{name}, {where}, jax {jax.__version__}'


def rates(
  ours: Callable[[], float],
  peer: Callable[[], float],
  rounds: int,
  *,
  before: Callable[[], Any] = lambda: None,
) -> tuple[list[float], list[float]]:
  """Runs both in turn; each returns the units of work that it did.

  Args:
    ours: what is measured.
    peer: what it is measured against.
    rounds: that count; one before them does not.
    before: prepares each round, off the clock.

  Returns:
    Units per second of each round.
  """
  clock = _clock()
  found: tuple[list[float], list[float]] = ([], [])
  for turn in range(rounds + 1):
    before()
    for function, into in zip((ours, peer), found, strict=True):
      start = clock()
      units = function()
      if turn:
        into.append(units / (clock() - start))
  return found


def spread(values: list[float]) -> float:
  """Returns the distance from least to most, over the median."""
  return (max(values) - min(values)) / statistics.median(values)


def report(
  name: str,
  case: str,
  found: tuple[list[float], list[float]],
  *,
  limit: float,
  goal: str,
  met: Callable[[float, float], bool],
  unit: str = 'tokens/s',
) -> dict[str, Any]:
  """Prints the line of one case.

  Args:
    name: the benchmark.
    case: what was run.
    found: of `rates`.
    limit: the rate if every useful operation ran at the device's peak.
    goal: in words.
    met: (ours, ratio) -> whether the goal is met.
    unit: of the rates.
  """
  ours, peer = (statistics.median(values) for values in found)
  line = {
    'benchmark': name,
    'case': case,
    'ours': round(ours, 1),
    'peer': round(peer, 1),
    'unit': unit,
    'ratio': round(ours / peer, 2),
    'spread': [round(spread(values), 3) for values in found],
    'limit': round(limit, 1),
    'goal': goal,
    'met': bool(met(ours, ours / peer)),
    'command': ' '.join(['python', '-m', f'benchmarks.{name}', *sys.argv[1:]]),
    'machine': _machine(),
  }
  print(json.dumps(line), flush=True)
  return line
