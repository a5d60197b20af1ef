"""Milliseconds of one sandboxed call, beside starting a bare interpreter.

  python -m benchmarks.sandbox

One JSON line per level that works here; the floor is what a grader pays that
starts a process for each call and isolates nothing.
"""

import json
import subprocess
import sys
import time

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open

_LIMITS = base.Limits(
    wall_s=5.0, cpu_s=5.0, memory_bytes=256 << 20, processes=8,
    file_bytes=1 << 20, output_bytes=1 << 16,
)  # fmt: skip
_FILES = {
  'package/__init__.py': '',
  'package/stats.py': 'def total(values):\n  return sum(values)\n',
}
_CALLS = 200


def _percentiles(milliseconds: list[float]) -> dict[str, float]:
  ordered = sorted(milliseconds)
  return {
    f'p{percent}_ms': round(ordered[len(ordered) * percent // 100], 2)
    for percent in (50, 95)
  }


def _timed(call) -> float:
  start = time.perf_counter()
  call()
  return 1e3 * (time.perf_counter() - start)


def main() -> None:
  python = getattr(sys, '_base_executable', None) or sys.executable
  floor = [python, '-I', '-S', '-c', 'pass']
  times = [
    _timed(lambda: subprocess.run(floor, check=True))
    for _ in range(_CALLS // 4)
  ]
  print(json.dumps({'sandbox': 'bare process', **_percentiles(times)}))
  for level in base.LEVELS:
    try:
      opened = sandbox_open.open_sandbox(level, _LIMITS, allow_unsafe=True)
    except ValueError as error:
      print(json.dumps({'sandbox': level, 'skipped': str(error)}))
      continue
    with opened as sandbox:

      def call(sandbox=sandbox):
        arguments = [[[1, 2, 3]], [[]], [[5]]]
        result = sandbox.call(_FILES, 'package.stats', 'total', arguments)
        assert result.value == [['ok', 6], ['ok', 0], ['ok', 5]], result

      times = [_timed(call) for _ in range(_CALLS)]
      print(json.dumps({
          'sandbox': level, **_percentiles(times), 'calls': _CALLS,
          **sandbox.about,
      }))  # fmt: skip


if __name__ == '__main__':
  main()
