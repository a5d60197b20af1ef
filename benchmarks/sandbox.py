"""Milliseconds of sandboxed calls, programs and fresh repositories.

  python -m benchmarks.sandbox [--quick]

One JSON line per case and level that works here. `ours` and `peer` are medians
of milliseconds, taken in turn; `spread` is how far the 95th percentile of ours
lies above its median. The peer and limit of a program are fork and exec of the
interpreter without isolation; the peer of a suite is the same suite run
directly. Other fields of a line concern one level.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import interleaved
from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open

_LIMITS = base.Limits(
    wall_s=20.0, cpu_s=20.0, memory_bytes=512 << 20, processes=32,
    file_bytes=16 << 20, output_bytes=1 << 16,
)  # fmt: skip
_FILES = {
  'package/__init__.py': '',
  'package/stats.py': 'def total(values):\n  return sum(values)\n',
}
_QUICK = '--quick' in sys.argv
_TIMES = 20 if _QUICK else 100
_NUM_FILES, _FILE_BYTES = 400, 10_240
_TEST = 'def test_one():\n  assert 1 + 1 == 2\n'
_PYTEST = ('-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'test_one.py')
_NO_PLUGINS = {'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}
_PEERS = {
  'bare_pytest_p50_ms': 'pytest started by itself',
  'fork_exec_p50_ms': 'fork and exec of the interpreter',
}
# Goals: median milliseconds of a level that isolates.
_GOALS = {
  'call': 15.0,
  'python -c pass': 25.0,
  'pytest, one test, warm': 60.0,
  'fresh copy of a repository': 1.0,
}
# Properties of a sandbox on which the numbers depend.
_TOLD = ('seccomp', 'cgroup', 'uid', 'overlay', 'proc')


def _percentiles(milliseconds: list[float]) -> dict[str, float]:
  ordered = sorted(milliseconds)
  return {
    f'p{percent}_ms': round(ordered[len(ordered) * percent // 100], 2)
    for percent in (50, 95)
  }


def _timed(call: Callable[[], object]) -> float:
  start = time.perf_counter()
  call()
  return 1e3 * (time.perf_counter() - start)


def _in_turn(
  calls: dict[str, Callable[[], object]], times: int
) -> dict[str, float]:
  """Returns p50 and p95 of the first call and p50 of others, run in turns."""
  milliseconds: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(times):
    for name, call in calls.items():
      milliseconds[name].append(_timed(call))
  first, *others = milliseconds
  return _percentiles(milliseconds[first]) | {
    f'{name}_p50_ms': _percentiles(milliseconds[name])['p50_ms']
    for name in others
  }


def _bare(python: str, *arguments: str, **more) -> Callable[[], object]:
  def run():
    subprocess.run(
        [python, *arguments], check=True, stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL, **more,
    )  # fmt: skip

  return run


def _make_images(top: pathlib.Path) -> None:
  for index in range(_NUM_FILES):
    path = top / 'repository' / f'part{index % 20}' / f'module{index}.py'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'# text\n' * (_FILE_BYTES // 7))
  (top / 'tiny').mkdir()
  (top / 'tiny' / 'test_one.py').write_text(_TEST)


def _succeed(box: base.Box, command: base.Command) -> None:
  result = box.run(command)
  assert result.exit_code == 0, result


def _rows(sandbox, images: pathlib.Path):
  """Yields name and numbers of each measurement."""
  floor = getattr(sys, '_base_executable', None) or sys.executable
  start_python = base.Command(argv=('python', '-c', 'pass'))
  warm_python = base.Command(argv=('-c', 'pass'), warm=True)
  pytest = base.Command(argv=_PYTEST, warm=True, environment=_NO_PLUGINS)

  def call():
    arguments = [[[1, 2, 3]], [[]], [[5]]]
    result = sandbox.call(_FILES, 'package.stats', 'total', arguments)
    assert result.value == [['ok', 6], ['ok', 0], ['ok', 5]], result

  bare = _bare(floor, '-I', '-S', '-c', 'pass')
  yield 'call', _in_turn({'': call, 'fork_exec': bare}, _TIMES)
  with sandbox.open('tiny') as box:
    _succeed(box, pytest)
    true = base.Command(argv=('true',))
    yield 'python -c pass', _in_turn({
        'sandboxed': lambda: _succeed(box, start_python),
        'fork_exec': bare, 'sandboxed_true': lambda: _succeed(box, true),
        'warm': lambda: _succeed(box, warm_python),
    }, _TIMES)  # fmt: skip
    plain = _bare(
        sys.executable, '-I', *_PYTEST, cwd=images / 'tiny',
        env={**os.environ, **_NO_PLUGINS, 'PYTHONDONTWRITEBYTECODE': '1'},
    )  # fmt: skip
    yield (
      'pytest, one test, warm',
      _in_turn(
        {'sandboxed': lambda: _succeed(box, pytest), 'bare_pytest': plain},
        _TIMES // 4,
      ),
    )
  boxes = [sandbox.open('repository')]
  fresh = _in_turn(
    {'': lambda: boxes.append(sandbox.open('repository'))}, _TIMES
  )
  # A box that was written to, as in an episode.
  boxes[0].write('part0/module0.py', b'changed')
  compared = _in_turn({'': boxes[0].changes}, _TIMES)
  closed = _percentiles([_timed(box.close) for box in boxes])
  files = {'files': _NUM_FILES, 'megabytes': _NUM_FILES * _FILE_BYTES / 1e6}
  for name, numbers in {
      'fresh copy': fresh, 'changes': compared, 'close': closed,
  }.items():  # fmt: skip
    yield f'{name} of a repository', numbers | files
  for name, command in (('python -c pass', start_python), ('pytest', pytest)):
    rate = _throughput(sandbox, command)
    yield f'throughput of two threads, {name}', {'runs_per_s': rate}


def _throughput(sandbox, command: base.Command) -> float:
  """Returns runs a second of a command, in fresh boxes by two threads."""

  def one(_):
    with sandbox.open('tiny') as box:
      _succeed(box, command)

  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    start = time.perf_counter()
    list(threads.map(one, range(_TIMES)))
    return round(_TIMES / (time.perf_counter() - start), 1)


def _line(level: str, row: str, numbers: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields that every benchmark prints."""
  is_time = 'p50_ms' in numbers
  ours = numbers['p50_ms' if is_time else 'runs_per_s']
  peer_key = next((key for key in _PEERS if key in numbers), '')
  peer = numbers.get(peer_key)
  goal = _GOALS.get(row) if level != 'rlimits' else None
  return {
    'benchmark': 'sandbox',
    'case': f'{row}: {level}',
    'against': _PEERS.get(peer_key, ''),
    'ours': ours,
    'peer': peer,
    'unit': 'ms' if is_time else 'runs/s',
    'ratio': round(ours / peer, 3) if peer else None,
    'spread': [round(numbers['p95_ms'] / ours - 1, 3)]
    if is_time and ours
    else [],
    'limit': numbers.get('fork_exec_p50_ms'),
    'goal': 'none' if goal is None else f'<= {goal:g} ms',
    'met': goal is None or ours <= goal,
    'command': f'python -m benchmarks.sandbox{" --quick" * _QUICK}',
    'machine': interleaved.machine_name(),
  }


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    images = pathlib.Path(folder)
    _make_images(images)
    for level in base.LEVELS:
      try:
        opened = sandbox_open.open_sandbox(
            level, _LIMITS, allow_unsafe=True, size=2, images=images,
            packages=('pytest',),
        )  # fmt: skip
      except ValueError as error:
        print(json.dumps({'sandbox': level, 'skipped': str(error)}))
        continue
      with opened as sandbox:
        for row, numbers in _rows(sandbox, images):
          about: dict[str, Any] = sandbox.about
          details = {name: about.get(name) for name in _TOLD}
          line = _line(level, row, numbers) | numbers | details
          line['load'] = round(os.getloadavg()[0], 1)
          print(json.dumps(line), flush=True)


if __name__ == '__main__':
  main()
