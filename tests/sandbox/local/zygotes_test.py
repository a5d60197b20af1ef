"""Laws of the calls: results, limits, restarts, nothing left behind."""

import concurrent.futures
import contextlib
import dataclasses
import glob
import logging
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from tests.sandbox import conftest

DOUBLE = {'m.py': 'def f(x): return [x, x]'}


def zygote_processes(host=None):
  """pids of the zygotes of a host process (this one) and of their calls."""
  pids = set()
  mark = f'"host_pid": {host or os.getpid()},'.encode()
  for path in glob.glob('/proc/[0-9]*/cmdline'):
    try:
      if mark in pathlib.Path(path).read_bytes():
        pids.add(int(path.split('/')[2]))
    except (FileNotFoundError, ProcessLookupError):
      continue
  return pids


def test_returns_values_and_errors_in_order(sandbox):
  result = sandbox.call(
      {'p/__init__.py': '', 'p/m.py': 'def f(x, y): return {"q": [x / y]}'},
      'p.m', 'f', [[1, 2], [1, 0], [1]],
  )  # fmt: skip
  assert result.status == 'ok' and result.level == sandbox.level
  assert result.value[0] == ['ok', {'q': [0.5]}]
  assert result.value[1] == ['raised', 'ZeroDivisionError: division by zero']
  assert result.value[2][0] == 'raised' and 'TypeError' in result.value[2][1]


@pytest.mark.parametrize('expression', [
    '(1, 2)', '{1}', 'float("nan")', '1 << 5000', 'chr(0xD800)',
    '{1: 2}', 'type("A", (int,), {})(3)',
    'type("E", (), {"__eq__": lambda *a: True})()', 'object',
])  # fmt: skip
def test_values_that_are_not_json_exactly_count_as_errors(run, expression):
  result = run(f'def f(): return {expression}', whole=True)
  assert result.status == 'ok' and result.value[0][0] == 'raised'


def test_a_self_containing_list_is_an_error(run):
  result = run('def f():\n  a = []\n  a.append(a)\n  return a', whole=True)
  assert 'nested deeper' in result.value[0][1]


def test_errors_at_import_reach_every_argument(sandbox):
  result = sandbox.call({'m.py': 'def f(:'}, 'm', 'f', [[1], [2]])
  assert [x[0] for x in result.value] == ['raised', 'raised']
  assert 'SyntaxError' in result.value[0][1]
  missing = sandbox.call({'m.py': ''}, 'm', 'f', [[1]])
  assert 'AttributeError' in missing.value[0][1]


def test_each_call_starts_fresh(run):
  text = """
    import os, sys, pathlib
    def f(secret):
      seen = getattr(sys, 'mark', None), sorted(os.listdir('.'))
      sys.mark = secret
      pathlib.Path('left').write_text('x')
      frames, frame = [], sys._getframe().f_back
      while frame:
        frames.append(repr(frame.f_locals))
        frame = frame.f_back
      return [seen[0], seen[1], ('fir' + 'st') in ''.join(frames)]
  """
  text = textwrap.dedent(text)
  assert run(text, 'first') == [None, ['m.py'], True]
  assert run(text, 'second') == [None, ['m.py'], False]


def test_a_file_of_the_workspace_wins_over_a_loaded_module(sandbox):
  files = {'json.py': 'def f(): return 7'}
  assert sandbox.call(files, 'json', 'f', [[]]).value == [['ok', 7]]


def test_a_hang_ends_at_the_wall_limit(run_short):
  text = """
    import signal, time
    def f():
      for number in set(signal.Signals) - {9, 19}:
        signal.signal(number, signal.SIG_IGN)
      while True: time.sleep(9)
  """
  result = run_short(textwrap.dedent(text), whole=True)
  assert result.status == 'timeout' and 'wall limit' in result.error
  assert conftest.SHORT.wall_s <= result.wall_s < 5


def test_processor_time_is_bounded_before_the_wall():
  limits = dataclasses.replace(conftest.LIMITS, wall_s=30, cpu_s=1)
  burn = {'m.py': 'def f():\n  while True: pass'}
  with sandbox_open.open_sandbox('auto', limits, allow_unsafe=True) as sandbox:
    result = sandbox.call(burn, 'm', 'f', [[]])
  assert result.status == 'timeout' and 'CPU limit' in result.error
  assert result.wall_s < 20


def test_memory_of_one_process_is_bounded(run):
  result = run('def f(): return len(bytearray(1 << 30))', whole=True)
  assert result.value == [['raised', 'MemoryError: ']]


@pytest.mark.parametrize('level', base.LEVELS)
def test_memory_of_all_processes_is_bounded(level):
  text = """
    import os, select, signal
    def f():
      for _ in range(4):
        if not os.fork():
          held = bytearray(b'x') * (40 << 20)
          os.write(out, b'.')
          signal.pause()
      ready = 0
      while ready < 4 and os.waitpid(-1, os.WNOHANG) == (0, 0):
        if select.select([read], [], [], 0.01)[0]:
          ready += len(os.read(read, 1))
      return ready
    read, out = os.pipe()
  """
  limits = dataclasses.replace(conftest.LIMITS, memory_bytes=96 << 20)
  with conftest.open_or_skip(level, limits=limits) as sandbox:
    if sandbox.about['cgroup'] == 'none':
      return  # only each process has a limit
    files = {'m.py': textwrap.dedent(text)}
    result = sandbox.call(files, 'm', 'f', [[]])
    # One of the four is killed before all hold their share, or the call is.
    assert result.status == 'killed' or result.value[0][1] < 4
    assert sandbox.call(DOUBLE, 'm', 'f', [[1]]).status == 'ok'


def test_files_are_bounded(run_isolated):
  text = """
    import errno
    def f():
      try:
        open('big', 'wb').write(bytes(2 << 20))
      except OSError as error:
        first = errno.errorcode[error.errno]
      try:
        for index in range(64):
          open(f'{index}', 'wb').write(bytes(100_000))
      except OSError as error:
        return [first, errno.errorcode[error.errno]]
  """
  names = run_isolated(textwrap.dedent(text))
  assert names[0] in ('EFBIG', 'ENOSPC') and names[1] == 'ENOSPC'


def test_a_fork_bomb_stops_at_the_process_limit(run, sandbox):
  text = """
    import os, time
    def f():
      made = 0
      try:
        while made < 400:
          if not os.fork():
            time.sleep(60)
          made += 1
      except BlockingIOError:
        pass
      return made
  """
  if sandbox.about['uid'] is None and sandbox.about['cgroup'] == 'none':
    return  # root without another uid to become: no limit holds
  before = zygote_processes()
  made = run(textwrap.dedent(text))
  assert 1 <= made <= conftest.LIMITS.processes + 4
  assert zygote_processes() <= before


def test_output_is_read_to_the_end_and_kept_to_the_cap(run):
  text = 'def f():\n  for _ in range(40): print("x" * 50_000)\n  return 1'
  result = run(text, whole=True)
  assert result.value == [['ok', 1]]
  assert len(result.stdout) == conftest.LIMITS.output_bytes


def test_a_flood_that_does_not_end_is_killed(run_short):
  result = run_short('def f():\n  while True: print("x" * 9999)', whole=True)
  assert result.status == 'timeout'
  assert len(result.stdout) == conftest.LIMITS.output_bytes


def test_a_result_over_the_cap_is_no_result(run):
  result = run('def f(): return "x" * 100_000', whole=True)
  assert result.status == 'exit' and 'fills 65536 bytes' in result.error
  assert run('def f(): return 1') == 1


def test_a_daemon_does_not_survive(run):
  text = """
    import os, signal, time
    def f():
      read, write = os.pipe()
      if not os.fork():
        os.setsid()
        if os.fork():
          os._exit(0)
        for number in set(signal.Signals) - {9, 19}:
          signal.signal(number, signal.SIG_IGN)
        os.write(write, b'x')
        time.sleep(600)
      return len(os.read(read, 1))
  """
  before = zygote_processes()
  assert run(textwrap.dedent(text)) == 1
  assert zygote_processes() <= before


@pytest.mark.parametrize('text, status', [
    ('import os; os._exit(0)', 'exit'),
    ('import sys; sys.exit(0)', 'exit'),
    ('import os\ndef f(): os._exit(0)', 'exit'),
    ('import os\ndef f(): os.abort()', 'killed'),
    ('import os\ndef f(): os.kill(os.getpid(), 9)', 'killed'),
    ('import os\ndef f(): os.closerange(0, 99)', 'exit'),
    ('print(\'[["ok", 1]]\')\nimport os\nos._exit(0)', 'exit'),
    ('import os\ndef f(): os.write(3, b"[[1, 2]]")', 'exit'),
    ('import os\ndef f(): os.write(3, b"[" * 60_000)', 'exit'),
])  # fmt: skip
def test_an_end_without_a_result_is_never_ok(run, text, status):
  assert run(text, whole=True).status == status


def test_file_names_stay_in_the_workspace(sandbox):
  for name in ('../m.py', '/m.py', 'a/../../m.py'):
    with pytest.raises(ValueError, match='stay in the workspace'):
      sandbox.call({name: ''}, 'm', 'f', [[]])


def _traces():
  mounts = pathlib.Path('/proc/self/mounts').read_text()
  name = f'composer-sandbox-{os.getpid()}-*'
  groups = glob.glob(f'/sys/fs/cgroup/**/{name}', recursive=True)
  scratch = glob.glob(f'{tempfile.gettempdir()}/composer-{os.getpid()}-*')
  descriptors = len(os.listdir('/proc/self/fd'))
  return mounts, sorted(groups), sorted(scratch), descriptors


@pytest.mark.parametrize('level', base.LEVELS)
def test_a_hundred_calls_leave_nothing(level):
  before, processes = _traces(), zygote_processes()
  sandbox = conftest.open_or_skip(level, size=2)
  with sandbox, concurrent.futures.ThreadPoolExecutor(4) as threads:
    calls = [
      threads.submit(sandbox.call, DOUBLE, 'm', 'f', [[index]])
      for index in range(100)
    ]
    for index, call in enumerate(calls):
      assert call.result().value == [['ok', [index, index]]]
  sandbox.close()
  with pytest.raises(ValueError, match='closed'):
    sandbox.call(DOUBLE, 'm', 'f', [[1]])
  assert _traces() == before
  assert zygote_processes() <= processes


def _kill_all(pids):
  for pid in pids:
    with contextlib.suppress(ProcessLookupError):  # the others die with it
      os.kill(pid, signal.SIGKILL)


@pytest.fixture
def own():
  before = zygote_processes()
  with sandbox_open.open_sandbox(
    'auto', conftest.LIMITS, allow_unsafe=True
  ) as sandbox:
    yield sandbox, before


def test_a_dead_zygote_is_replaced_and_the_call_repeated(own, caplog):
  sandbox, before = own
  _kill_all(zygote_processes() - before)
  with caplog.at_level(logging.WARNING):
    assert sandbox.call(DOUBLE, 'm', 'f', [[1]]).value == [['ok', [1, 1]]]
  assert 'zygote of boxes failed' in caplog.text


def test_a_restarted_zygote_runs_where_the_pool_was_opened(own):
  sandbox, before = own
  text = """
    import os
    def f():
      return [sorted(os.sched_getaffinity(0)), os.getpriority(0, 0)]
  """
  files = {'m.py': textwrap.dedent(text)}
  first = sandbox.call(files, 'm', 'f', [[]]).value
  assert first[0][1][0] == sorted(os.sched_getaffinity(0))
  zygotes = zygote_processes() - before

  def from_a_thread_that_yields():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if not os.getuid():  # others could not take the lower priority back
      os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    _kill_all(zygotes)
    return sandbox.call(files, 'm', 'f', [[]]).value

  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    assert threads.submit(from_a_thread_that_yields).result() == first
  assert not zygote_processes() & zygotes


def test_two_failures_are_infrastructure_not_a_verdict(own, monkeypatch):
  sandbox, before = own
  _kill_all(zygote_processes() - before)
  with monkeypatch.context() as patch:
    patch.setattr(sys, '_base_executable', '/nonexistent/python')
    result = sandbox.call(DOUBLE, 'm', 'f', [[1]])
  assert result.status == 'infrastructure' and result.value is None
  assert 'nonexistent' in result.error
  assert sandbox.call(DOUBLE, 'm', 'f', [[1]]).value == [['ok', [1, 1]]]


def test_zygotes_die_with_a_host_that_was_killed():
  script = """
    import sys, threading, time
    from composer_jax.sandbox import open as sandbox_open
    from tests.sandbox import conftest
    s = sandbox_open.open_sandbox('auto', conftest.LIMITS, allow_unsafe=True)
    loop = {'m.py': 'import time\\ndef f(): time.sleep(60)'}
    threading.Thread(target=s.call, args=(loop, 'm', 'f', [[]])).start()
    time.sleep(0.1)
    print('ready', flush=True)
  """
  host = subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(script)],
      stdout=subprocess.PIPE, env={**os.environ, 'PYTHONPATH': os.getcwd()},
  )  # fmt: skip
  assert host.stdout.readline() == b'ready\n'
  assert zygote_processes(host.pid) - {host.pid}
  host.kill()
  host.wait()
  host.stdout.close()
  deadline = time.monotonic() + 120
  while zygote_processes(host.pid) and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not zygote_processes(host.pid)
