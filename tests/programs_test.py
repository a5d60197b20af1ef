"""A command that is forked does what one in a new process does."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import programs

THREADS = """
import atexit, threading, time
atexit.register(print, 'at exit')
threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()
print('main', end=' ')
"""
WHO = """
import os, sys
import jax
main = sys.modules['__main__']
print(__name__, getattr(main.__spec__, 'name', None), sys.argv, sys.path)
print(sorted(name for name in main.__dict__ if name[0] != '_'))
print(os.getcwd(), repr(sys.stdin.read()), sorted(os.environ.items()))
print(sorted(n for n in sys.modules if n.startswith('experiments')))
"""
JAX = """
import os
os.environ['JAX_PLATFORMS'] = 'cpu'
import jax
c = jax.config
print(len(jax.devices()), c.jax_platforms, c.jax_compilation_cache_dir)
print(c.jax_enable_x64, c.jax_persistent_cache_min_compile_time_secs)
print(c.jax_traceback_in_locations_limit, jax.numpy.arange(3.0).dtype)
"""


def both(code, *arguments, **options):
  """Returns what a fork and a new process do: exit code, stdout, stderr."""
  ends = [
    run(['-c', code, *arguments], **options)
    for run in (programs._run, programs._run_fresh)
  ]
  return [(end.returncode, end.stdout, end.stderr) for end in ends]


@pytest.mark.parametrize(
  'code, exit_code, words',
  [
    ('import sys; sys.exit()', 0, ''),
    ('import sys; print("out"); sys.exit(7)', 7, 'out'),
    ('import sys; sys.exit("error: so it is")', 1, 'error: so it is'),
    ('def f(): 1 / 0\nprint("first")\nf()', 1, 'ZeroDivisionError'),
    ('try: 1 / 0\nexcept ArithmeticError: {}[3]', 1, 'KeyError: 3'),
    ('f(', 1, 'SyntaxError'),
    ('raise KeyboardInterrupt', -signal.SIGINT, 'KeyboardInterrupt'),
    ('import os; os.kill(os.getpid(), 9)', -signal.SIGKILL, ''),
    ('import composer_jax.none', 1, "No module named 'composer_jax.none'"),
    (THREADS, 0, 'main thread\nat exit'),
  ],
)
def test_outputs_and_exit_code_are_those_of_a_process(code, exit_code, words):
  fork, fresh = both(code)
  assert fork == fresh
  assert fork[0] == exit_code and words in fork[1] + fork[2]


@pytest.mark.parametrize('module', ['none', 'experiments', 'experiments.none'])
def test_a_module_that_cannot_run_is_named(module):
  fork, fresh = programs.run(module), programs.run_fresh(module)
  assert fork.returncode == fresh.returncode == 1
  assert fork.stderr == fresh.stderr and f'{module}' in fork.stderr


@pytest.mark.slow
def test_a_main_sees_its_own_arguments_environment_and_folder():
  env = os.environ | {'SAID': 'yes', 'XLA_FLAGS': ''}
  fork, fresh = both(WHO, 'one', '--two=3', env=env)
  assert fork == fresh
  assert "['-c', 'one', '--two=3']" in fork[1] and "('SAID', 'yes')" in fork[1]
  fork, fresh = both(WHO)
  assert fork == fresh and 'SAID' not in fork[1]


@pytest.mark.slow
def test_a_module_that_runs_is_called_main():
  fork, fresh = (
    run(__name__, WHO) for run in (programs.run, programs.run_fresh)
  )
  assert fork.stdout.startswith(f'__main__ {__name__} ')
  assert fork.stdout == fresh.stdout and fork.stderr == fresh.stderr == ''


@pytest.mark.slow
def test_variables_of_jax_take_effect(tmp_path):
  others = {k: v for k, v in os.environ.items() if not k.startswith('JAX_')}
  env = others | {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=3',
    'JAX_COMPILATION_CACHE_DIR': str(tmp_path),
    'JAX_ENABLE_X64': '1',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '2.5',
    'JAX_TRACEBACK_IN_LOCATIONS_LIMIT': '4',
    # The program sets another.
    'JAX_PLATFORMS': 'nothing',
  }
  fork, fresh = both(JAX, env=env)
  assert fork == fresh
  expected = ['3', 'cpu', str(tmp_path), 'True', '2.5', '4', 'float64']
  assert fork[1].split() == expected
  # The next fork has none of them.
  fork = programs.run_code(JAX, env=others | {'XLA_FLAGS': ''})
  assert fork.stdout.split()[:4] == ['1', 'cpu', 'None', 'False']
  assert fork.stdout.split()[-1] == 'float32'


@pytest.mark.parametrize('name', ['PYTHONHASHSEED', 'OMP_NUM_THREADS'])
def test_what_a_fork_cannot_change_starts_a_process(name):
  code = 'import os; print(os.getppid(), hash("a"))'
  forks = {both(code)[0][1] for _ in range(2)}
  assert len(forks) == 1
  assert f'{os.getpid()} ' not in forks.pop()
  fork, fresh = both(code, env=os.environ | {name: '1'})
  assert fork[1].split()[0] == fresh[1].split()[0] == f'{os.getpid()}'


def test_another_folder_starts_a_process_there(tmp_path):
  fork, fresh = both(
    'import os; print(os.getcwd(), os.getppid())', cwd=tmp_path
  )
  assert fork == fresh
  assert fork[1].split() == [str(tmp_path), f'{os.getpid()}']


def test_a_command_that_hangs_is_killed_and_the_next_one_runs():
  code = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'
  with pytest.raises(subprocess.TimeoutExpired):
    programs.run_code(code, timeout_s=0.5)
  assert programs.run_code('print(3)').stdout == '3\n'


@pytest.mark.slow
def test_imports_are_kept():
  code = 'import sys; print("wave" in sys.modules)'
  assert programs.run_code(code).stdout == 'False\n'
  assert programs.run_code(code, imports=['wave']).stdout == 'True\n'
  assert programs.run_code(code).stdout == 'True\n'


PARENT = """
import sys
from tests import programs
programs.run_code(sys.argv[1], sys.argv[2], imports=())
"""
HANG = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()} {os.getppid()}\\n')
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_outlives_a_killed_parent(tmp_path):
  path = tmp_path / 'pids'
  with subprocess.Popen(
    [sys.executable, '-c', PARENT, HANG, str(path)], cwd=programs.ROOT
  ) as parent:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith('\n')):
      assert time.monotonic() < deadline and parent.poll() is None
      time.sleep(0.02)
    left = [psutil.Process(int(pid)) for pid in path.read_text().split()]
    parent.kill()
  _, alive = psutil.wait_procs(left, timeout=30)
  assert all(p.status() == psutil.STATUS_ZOMBIE for p in alive)


if __name__ == '__main__':
  exec(sys.argv[1])


def test_a_command_that_ended_before_its_id_was_read_is_no_hang():
  programs.run_code('')  # The zygote has its imports.
  shared = programs._shared()
  answer, shared._answer = (
    shared._answer,
    lambda: (time.sleep(0.3), answer())[1],
  )
  try:
    assert programs.run_code('', timeout_s=20).returncode == 0
  finally:
    shared._answer = answer
