"""Seconds until a guest of the micro VM is ready, and milliseconds in it.

  python -m benchmarks.sandbox_microvm

JSON lines: the accelerator that works; booting; programs in a box, cold and
warm.
"""

import contextlib
import json
import statistics
import time

from composer_jax.sandbox import base
from composer_jax.sandbox import packages as gathering
from composer_jax.sandbox.remote.microvm import image, machine

_LIMITS = base.Limits(
    wall_s=30.0, cpu_s=20.0, memory_bytes=256 << 20, processes=16,
    file_bytes=4 << 20, output_bytes=1 << 16,
)  # fmt: skip
_BOOTS, _RUNS = 3, 20
_TEST = b'def test_sum():\n  assert sum([1, 2]) == 3\n'
_PROGRAMS = {
  'python -c pass': base.Command(argv=('python', '-c', 'pass')),
  'warm pytest': base.Command(
    argv=('-m', 'pytest', '-q', '-p', 'no:cacheprovider'), warm=True
  ),
}


def _say(row: str, seconds: list[float], **more) -> None:
  ordered = sorted(seconds)
  print(
    json.dumps(
      {
        'row': row,
        'p50_ms': round(1e3 * statistics.median(ordered), 1),
        'max_ms': round(1e3 * ordered[-1], 1),
        'count': len(ordered),
        **more,
      }
    ),
    flush=True,
  )


def main() -> None:
  try:
    accelerator, reason = machine.choose_accelerator()
    image.find_kernel()
  except ValueError as error:
    print(json.dumps({'row': 'microvm', 'skipped': str(error)}))
    return
  print(json.dumps({'row': 'accelerator', 'is': accelerator, 'why': reason}))
  packages = gathering.gather(('pytest',))
  # The first boot makes the disk.
  machine.MicroVM(_LIMITS, packages=packages).close()
  boots = []
  for _ in range(_BOOTS):
    start = time.perf_counter()
    guest = machine.MicroVM(_LIMITS, packages=packages)
    boots.append(time.perf_counter() - start)
    guest.close()
  _say('boot', boots)
  with machine.MicroVM(_LIMITS, packages=packages) as sandbox:
    with contextlib.closing(sandbox.open('', {'test_a.py': _TEST})) as box:
      for name, command in _PROGRAMS.items():
        seconds = []
        for _ in range(_RUNS):
          start = time.perf_counter()
          result = box.run(command)
          seconds.append(time.perf_counter() - start)
          assert (result.status, result.exit_code) == ('ok', 0), result
        _say(name, seconds)


if __name__ == '__main__':
  main()
