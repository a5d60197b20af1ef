"""Seconds until a guest of the micro VM is ready, and milliseconds in it.

  python -m benchmarks.sandbox_microvm

JSON lines: the accelerator that works; booting; saving a guest with its memory;
restoring it; programs in a box, cold and warm.
"""

import collections
import contextlib
import json
import pathlib
import statistics
import tempfile
import time

from composer_jax.sandbox import base
from composer_jax.sandbox import packages as gathering
from composer_jax.sandbox.remote.microvm import image, machine

_LIMITS = base.Limits(
    wall_s=30.0, cpu_s=20.0, memory_bytes=256 << 20, processes=16,
    file_bytes=4 << 20, output_bytes=1 << 16,
)  # fmt: skip
_BOOTS, _RESTORES, _RUNS = 3, 10, 20
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
  times = collections.defaultdict(list)
  with tempfile.TemporaryDirectory() as folder:
    saved = pathlib.Path(folder, 'guest')
    for _ in range(_BOOTS):
      start = time.perf_counter()
      guest = machine.MicroVM(_LIMITS, packages=packages)
      times['boot'].append(time.perf_counter() - start)
      guest.close()
    guest = machine.MicroVM(_LIMITS, packages=packages)
    guest.open('').close()  # saved while the zygote of boxes runs
    start = time.perf_counter()
    guest.save(saved)
    times['save'].append(time.perf_counter() - start)
    size = (saved / 'state').stat().st_size
    for _ in range(_RESTORES):
      start = time.perf_counter()
      again = machine.MicroVM(_LIMITS, saved=saved)
      times['restore'].append(time.perf_counter() - start)
      again.close()
    _say('boot', times['boot'])
    _say('save', times['save'], megabytes=size >> 20)
    _say('restore', times['restore'])
    with machine.MicroVM(_LIMITS, saved=saved) as sandbox:
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
