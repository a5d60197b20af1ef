"""A command that is forked does what one in a new process does."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import programs

# Programs for -c; this file runs them as a module.
HERE = """
import json, os, sys
import jax
from composer_jax.core import trees
main = sys.modules['__main__']
print(json.dumps([
  __name__, getattr(main.__spec__, 'name', None), sys.argv[1:], sys.path[0],
  os.getcwd(), sys.stdin.read(), sorted(os.environ.items()),
  os.getsid(0) == os.getpid() or os.getppid() == int(os.environ['PARENT']),
]))
print('beside it', file=sys.stderr)
"""
JAX = """
import os
os.environ['JAX_PLATFORMS'] = 'cpu'
import jax
c = jax.config
print(jax.devices(), c.jax_platforms, c.jax_compilation_cache_dir)
print(c.jax_persistent_cache_min_compile_time_secs, c.jax_enable_x64)
print(c.jax_traceback_in_locations_limit, c.jax_default_matmul_precision)
"""
THREADS = """
import atexit, threading, time
atexit.register(print, 'at exit')
threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()
print('main', end=' ')
"""


def both(code, *arguments, **options):
  """Returns what a fork and a new process do: exit code, stdout, stderr."""
  ends = [
    run(['-c', code, *arguments], **options)
    for run in (programs._run, programs._run_fresh)
  ]
  return [(end.returncode, end.stdout, end.stderr) for end in ends]


def pid_of_a_fork():
  parent = programs.run_code('import os; print(os.getppid())')
  return int(parent.stdout)


@pytest.mark.parametrize(
  'code, exit_code, words',
  [
    ('print("fine")', 0, 'fine'),
    ('import sys; sys.exit()', 0, ''),
    ('import sys; print("out"); sys.exit(7)', 7, 'out'),
    ('import sys; sys.exit("error: so it is")', 1, 'error: so it is'),
    ('def f(): 1 / 0\nprint("first")\nf()', 1, 'ZeroDivisionError'),
    ('try: 1 / 0\nexcept OSError: 0\nfinally: {}[3]', 1, 'KeyError: 3'),
    ('f(', 1, 'SyntaxError'),
    ('import os; os.kill(os.getpid(), 9)', -signal.SIGKILL, ''),
    ('import os; os._exit(5)', 5, ''),
    ('raise KeyboardInterrupt', -signal.SIGINT, 'KeyboardInterrupt'),
    (THREADS, 0, 'main thread\nat exit'),
    ('import composer_jax.nowhere', 1, "No module named 'composer_jax.now"),
  ],
)
def test_outputs_and_exit_codes_are_those_of_a_process(code, exit_code, words):
  fork, fresh = both(code)
  assert fork == fresh
  assert fork[0] == exit_code and words in fork[1] + fork[2]


def test_a_module_that_is_absent_is_named():
  for name in ('experiments.none', 'none', 'experiments'):
    fork, fresh = programs.run(name), programs.run_fresh(name)
    assert fork.returncode == fresh.returncode == 1
    assert fork.stderr == fresh.stderr and name in fork.stderr


def test_a_main_is_that_of_a_process():
  env = os.environ | {'PARENT': str(os.getpid())}
  fork, fresh = (
    run(__name__, 'one', '--two=3', env=env)
    for run in (programs.run, programs.run_fresh)
  )
