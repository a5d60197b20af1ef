"""Starts the command lines that users type, most without the cost of imports.

`run` gives what `run_fresh` gives, which starts a process, from a fork of one
that has imported the libraries (`zygote.py`). Every main has a test that uses
`run_fresh` or starts a process itself.
"""

import atexit
import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

# What most mains import: JAX, flax, optax, orbax and most of this project.
IMPORTS = (
  'jax',
  'composer_jax.wiring',
  'composer_jax.pipeline.reinforce',
  'composer_jax.pipeline.stages',
  'composer_jax.plan.muon',
  'composer_jax.plan.params',
  'composer_jax.report.document',
)
ROOT = pathlib.Path(__file__).resolve().parent.parent
# For a command that hangs; on a busy machine one takes minutes.
TIMEOUT_S = 600
# Beginnings of variables that are read before a fork could set them: when
# Python starts, or when a library is imported.
AT_START = (
  *('PYTHON', 'LANG', 'LC_', 'LD_', 'DYLD_', 'MALLOC_'),
  *('OMP_', 'OPENBLAS_', 'MKL_', 'NUMBA_', 'TF_CPP_', 'MPL'),
)


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
  return {k: v for k, v in env.items() if k.startswith(AT_START)}


class Zygote:
  """Forks commands, one at a time, from a process that has the imports.

  Attributes:
    pid: process id of the process from which all commands are forked.
    environment: environment of that process.
  """

  def __init__(self, *prefix: str):
    # A fork sets the variables of JAX itself, from none.
    self.environment = {
      k: v for k, v in os.environ.items() if not k.startswith('JAX_')
    }
    self._requests, theirs = socket.socketpair()
    with theirs:
      self._process = subprocess.Popen(
        [*prefix, sys.executable, '-m', 'tests.zygote'],
        cwd=ROOT,
        env=self.environment,
        stdin=theirs,
        # So that Ctrl-C reaches this process only.
        start_new_session=True,
      )
    # Without a buffer: `select` sees what was not read.
    self._answers = self._requests.makefile('rb', buffering=0)
    self.pid = self._process.pid

  def _answer(self) -> int:
    line = self._answers.readline()
    if not line:
      raise RuntimeError('tests.zygote ended; its error is in stderr.')
    return int(line)

  def start(
    self,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    out: int,
    err: int,
    imports: Sequence[str] = IMPORTS,
  ) -> int:
    """Starts a command and returns its process id, which leads a session.

    Args:
      command: arguments of Python: -m, a module and its arguments, or -c, code
        and its arguments.
      env: environment of the command.
      out: descriptor of its standard output.
      err: descriptor of its standard error.
      imports: libraries that the zygote imports before it forks, and keeps.
    """
    request = dict(command=command, env=dict(env), imports=imports)
    line = json.dumps(request).encode() + b'\n'
    sent = socket.send_fds(self._requests, [line], [out, err])
    self._requests.sendall(line[sent:])
    return self._answer()

  def exit_code(self, timeout_s: float | None = None) -> int:
    """Waits for the last command to end and returns its exit code."""
    if not select.select([self._requests], [], [], timeout_s)[0]:
      raise TimeoutError
    return self._answer()

  def close(self) -> None:
    self._answers.close()
    self._requests.close()
    self._process.wait(timeout=TIMEOUT_S)


@contextlib.contextmanager
def zygote(*prefix: str) -> Iterator[Zygote]:
  """Starts a Zygote by the command `prefix`, which must exec it."""
  started = Zygote(*prefix)
  try:
    yield started
  finally:
    started.close()


@functools.cache
def _shared() -> Zygote:
  """The zygote of this process, which ends with it, however it ends."""
  started = Zygote()
  atexit.register(started.close)
  return started


def _run(
  command: Sequence[str],
  *,
  env: Mapping[str, str] | None = None,
  cwd: pathlib.Path = ROOT,
  imports: Sequence[str] = IMPORTS,
  timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess:
  env = os.environ if env is None else env
  shared = _shared()
  # Elsewhere the project's modules might not be found, or be others.
  if cwd != ROOT or _at_start(env) != _at_start(shared.environment):
    return _run_fresh(command, env=env, cwd=cwd, timeout_s=timeout_s)
  # Pipes, since a command may limit the size of files.
  outputs, writers = [], []
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for _ in range(2):
      reader, writer = os.pipe()
      writers.append(writer)
      outputs.append(pool.submit(_read, reader))
    out, err = writers
    try:
      pid = shared.start(command, env=env, out=out, err=err, imports=imports)
    finally:
      os.close(out)
      os.close(err)
    try:
      code = shared.exit_code(timeout_s)
    except BaseException as error:
      os.killpg(pid, signal.SIGKILL)
      shared.exit_code()
      if isinstance(error, TimeoutError):
        raise subprocess.TimeoutExpired(command, timeout_s) from None
      raise
  return subprocess.CompletedProcess(
    command, code, *(output.result() for output in outputs)
  )


def _read(descriptor: int) -> str:
  with open(descriptor) as file:
    return file.read()


def _run_fresh(
  command: Sequence[str],
  *,
  env: Mapping[str, str] | None = None,
  cwd: pathlib.Path = ROOT,
  timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, *command],
    cwd=cwd,
    # Not None: libraries of C set variables that os.environ does not have.
    env=os.environ if env is None else env,
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=timeout_s,
  )


def run(module: str, *arguments: str, **options) -> subprocess.CompletedProcess:
  """Runs `python -m MODULE ARGUMENTS`; its outputs are texts.

  Options are `env`, `cwd`, `timeout_s` and `imports`, what the zygote imports
  before it forks, unless it has it.
  """
  return _run(['-m', module, *arguments], **options)


def run_fresh(
  module: str, *arguments: str, **options
) -> subprocess.CompletedProcess:
  """Runs the same in a new process, as a user does."""
  return _run_fresh(['-m', module, *arguments], **options)


def run_code(
  code: str, *arguments: str, **options
) -> subprocess.CompletedProcess:
  """Runs `python -c CODE ARGUMENTS` as `run` does a module."""
  return _run(['-c', code, *arguments], **options)
