"""Starts the program of verifiers' environment, and ends with it.

Its socket is a file that nobody else may open: who can speak to an env server
can have it run commands.
"""

import dataclasses
import functools
import json
import os
import pathlib
import queue
import secrets
import subprocess
import tempfile
import threading
import tomllib
from typing import Any

PROGRAM = pathlib.Path(__file__).with_name('env_server.py')
# Variable with the key of the token route. Harnesses do not see it: verifiers
# hides what has this in its name from what it runs as `subprocess`.
KEY = 'COMPOSER_JAX_API_KEY'
_START_S = 300.0
_TABLES = ('env', 'select')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedTask:
  """A task of a taskset; `data` is what its env server takes."""

  task_id: str
  prompt: str
  data: dict[str, Any]


def read_config(path: str) -> dict[str, Any]:
  """Reads the tables `env` and `select` of a config of `vf-eval`.

  Raises:
    ValueError: it is no TOML, or says what the run decides.
  """
  try:
    config = tomllib.loads(pathlib.Path(path).read_text())
  except (OSError, ValueError) as error:
    raise ValueError(
      f'--config.tasks.folder ({path!r}) must be the TOML file of an '
      f'environment of verifiers: {error}.'
    ) from error
  if others := sorted(config.keys() - set(_TABLES)):
    raise ValueError(
      f'{path} sets {others}, which the run decides; only the tables '
      '[env] and [select] are taken.'
    )
  match config:
    case {'env': {'taskset': {'id': str(name)}}} if name:
      return {'env': config['env'], 'select': config.get('select', {})}
  raise ValueError(f'{path} names no taskset: set `id` in [env.taskset].')


class EnvProgram:
  """A running program, whose output is lines of JSON."""

  def __init__(self, python: str, command: str, asked: dict[str, Any]):
    """Starts it; a ValueError if this Python cannot be run."""
    self.scratch = tempfile.TemporaryDirectory(prefix='composer-jax-env-')
    self.key = secrets.token_urlsafe(32)
    self.address = f'ipc://{self.scratch.name}/server'
    self._python, self._log = python, pathlib.Path(self.scratch.name) / 'log'
    # Beside verifiers may be the uv by which it starts harnesses.
    paths = (str(pathlib.Path(python).parent), os.environ.get('PATH', ''))
    environment = {**os.environ, KEY: self.key, 'PATH': os.pathsep.join(paths)}
    environment.pop('PYTHONPATH', None)
    try:
      with self._log.open('wb') as log:
        self.process = subprocess.Popen(
          [python, '-P', str(PROGRAM), command],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=log,
          env=environment,
        )
    except OSError as error:
      raise ValueError(
        f'--config.tasks.verifiers.python ({python!r}) cannot be run: {error}.'
      ) from error
    self._rows: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    self._is_noise = False
    threading.Thread(target=self._read, daemon=True).start()
    # A dead program says why in its log.
    try:
      assert self.process.stdin is not None
      asked = {**asked, 'address': self.address}
      self.process.stdin.write(f'{json.dumps(asked)}\n'.encode())
      self.process.stdin.flush()
    except BrokenPipeError:
      pass

  def _read(self) -> None:
    assert self.process.stdout is not None
    try:
      for line in self.process.stdout:
        self._rows.put(json.loads(line))
    except ValueError:  # Of a program that is no such Python.
      self._is_noise = True
      self.process.kill()
    self._rows.put(None)

  def next_row(self) -> dict[str, Any] | None:
    """Returns the next row; None at the end of a program that did its work."""
    try:
      row = self._rows.get(timeout=_START_S)
    except queue.Empty:
      self.close()
      raise ValueError(
        f'{PROGRAM.name} said nothing in {_START_S:g} s.'
      ) from None
    if row is None and (self.process.wait() or self._is_noise):
      raise ValueError(self.fault())
    return row

  def fault(self) -> str:
    """Returns why the program ended, in its own words."""
    lines = self._log.read_text(errors='replace').strip().splitlines()
    cure = ''
    if any("No module named 'verifiers" in line for line in lines[-1:]):
      cure = ' Install it there: pip install "verifiers>=0.4" uv.'
    return (
      f'The environment of verifiers, run by {self._python}, ended: '
      f'{lines[-1] if lines else self.process.returncode!r}.{cure}'
    )

  def close(self) -> None:
    """Ends it: a server first closes what its harnesses run."""
    assert self.process.stdin is not None
    try:
      self.process.stdin.close()
      self.process.wait(20)
    except (OSError, subprocess.TimeoutExpired):
      self.process.kill()
      self.process.wait()
    self.scratch.cleanup()


@functools.lru_cache(maxsize=8)
def listed(python: str, path: str, content: str) -> tuple[ListedTask, ...]:
  """Returns the tasks that a config selects, in its order.

  Args:
    content: hash of the config and of the modules beside it.
  """
  folder = str(pathlib.Path(path).absolute().parent)
  program = EnvProgram(python, 'tasks', {**read_config(path), 'folder': folder})
  try:
    tasks = {}
    while (row := program.next_row()) is not None:
      task = ListedTask(**row)
      if task.task_id in tasks:
        raise ValueError(f'{path} has two tasks with the key {task.task_id!r}.')
      tasks[task.task_id] = task
  finally:
    program.close()
  return tuple(tasks.values())


def start(python: str, path: str, env: dict[str, Any]) -> EnvProgram:
  """Starts the env server of a config; blocks until it answers."""
  folder = str(pathlib.Path(path).absolute().parent)
  program = EnvProgram(python, 'serve', {'env': env, 'folder': folder})
  try:
    program.next_row()
  except ValueError:
    program.close()
    raise
  return program
