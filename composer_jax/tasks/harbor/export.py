"""Writes deletion tasks as Harbor task directories, for other runners.

The directory builds an image by the usual means (`environment/Dockerfile`), and
its verifier begins with a fresh one: the agent's sources are the only artefact.
The verifier runs the hidden tests, as every runner of Harbor's can; it is not
the grader of this library, which also asks the solution from outside
(`tasks.grading`). Train on tasks of family 'deletion', and export to compare.
"""

import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.core import files
from composer_jax.tasks.repository import task_set

ORGANISATION = 'composer_jax'
_OWNED = (
  'Tests and their configuration belong to the grader: do not change them.'
)
_WORKDIR = '/app'
_MAX_NAME = 100

_TEST = """#!/bin/bash
# Puts the tests in place and writes rewards by name.
cp -R /tests/files/. /app/
cd /app && python /tests/run.py
"""
_SOLVE = """#!/bin/bash
cp -R /solution/files/. /app/
"""
_RUN = '''"""Runs the tests of the feature and those that guard the rest."""

import json
import os
import subprocess
import sys

with open('/tests/suite.json') as file:
  suite = json.load(file)
roots = [os.path.join('/app', root) for root in suite['source_roots']]
environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(roots)}


def passes(ids):
  command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider']
  # A file of arguments: there may be more ids than a command can hold.
  with open('/tmp/ids', 'w') as file:
    file.write('\\n'.join([*suite['arguments'], *ids]))
  return not ids or not subprocess.run(
    [*command, '@/tmp/ids'], env=environment, timeout=suite['timeout_s']
  ).returncode


try:
  rewards = {name: float(passes(ids)) for name, ids in suite['ids'].items()}
except subprocess.TimeoutExpired:
  rewards = dict.fromkeys(suite['ids'], 0.0)
rewards['reward'] = float(all(rewards.values()))
with open('/logs/verifier/reward.json', 'w') as file:
  json.dump(rewards, file)
'''


def export(
  tasks: task_set.TaskSet, chosen: Sequence[task_set.RepositoryTask], out: Any
) -> list[pathlib.Path]:
  """Writes a directory for each task; returns the directories.

  Raises:
    ValueError: two tasks would have one directory.
  """
  paths = []
  for task in chosen:
    folder = pathlib.Path(out) / _name(task)
    if folder in paths:
      raise ValueError(f'Two tasks would be written to {folder}.')
    requires = tasks.packages[task.package].facts.get('requires', ())
    image = {
      path.relative_to(tasks.root / task.image).as_posix(): path.read_bytes()
      for path in sorted((tasks.root / task.image).rglob('*'))
      if path.is_file()
    }
    for path, data in _directory(task, image, requires).items():
      (folder / path).parent.mkdir(parents=True, exist_ok=True)
      files.write_atomic(folder / path, data)
    paths.append(folder)
  return paths


def _name(task: task_set.RepositoryTask) -> str:
  name = task.task_id.removeprefix(f'{task_set.FAMILY}/')
  name = re.sub(r'[^A-Za-z0-9._-]+', '_', name).strip('._-')
  if len(name) > _MAX_NAME:
    name = f'{name[:_MAX_NAME]}-{files.sha256(task.task_id.encode())[:16]}'
  return name


def _directory(
  task: task_set.RepositoryTask,
  image: Mapping[str, bytes],
  requires: Sequence[str],
) -> dict[str, bytes]:
  """Returns the files of a task directory."""
  view = {**image, **task.view()}
  shown = {p: d for p, d in view.items() if d is not None}
  tests = {p: image[p] for p in task.test_paths if p in image}
  suite = {
    'ids': {
      'feature': list(task.fail_to_pass),
      'guards': list(task.guards),
    },
    'arguments': list(task.test_arguments),
    'source_roots': list(task.source_roots),
    'timeout_s': task.timeout_s,
  }
  texts = {
    'task.toml': _toml(task),
    'instruction.md': f'{task.prompt}\n\n{_OWNED}\n',
    'environment/Dockerfile': _dockerfile(requires),
    'tests/test.sh': _TEST,
    'tests/run.py': _RUN,
    'tests/suite.json': json.dumps(suite, indent=2),
    'solution/solve.sh': _SOLVE,
  }
  return {
    **{name: text.encode() for name, text in texts.items()},
    **{f'environment/app/{path}': data for path, data in shown.items()},
    **{f'tests/files/{path}': data for path, data in tests.items()},
    **{
      f'solution/files/{path}': text.encode()
      for path, text in task.solution.items()
    },
  }


def _dockerfile(requires: Sequence[str]) -> str:
  version = f'{sys.version_info.major}.{sys.version_info.minor}'
  names = ' '.join(dict.fromkeys(['pytest', *requires]))
  return (
    f'FROM python:{version}-slim\n'
    f'RUN pip install --no-cache-dir {names}\n'
    f'WORKDIR {_WORKDIR}\n'
    f'COPY app {_WORKDIR}\n'
  )


def _toml(task: task_set.RepositoryTask) -> str:
  # JSON's texts and numbers are TOML's, but for characters beyond the first
  # plane, which ASCII would spell as two.
  text = lambda value: json.dumps(str(value), ensure_ascii=False)
  timeout_s = 2 * task.timeout_s + 60
  return f"""schema_version = "1.4"

artifacts = [{{ source = "{_WORKDIR}", exclude = ["__pycache__"] }}]

[task]
name = {text(f'{ORGANISATION}/{_name(task)}')}
description = {text(f'Restores what was deleted from {task.package}.')}

[metadata]
task_id = {text(task.task_id)}
tier = {text(task.tier)}
package = {text(f'{task.package} {task.version}')}
licence = {text(task.licence)}
difficulty = {task.difficulty:.6g}

[verifier]
timeout_sec = {timeout_s:g}
environment_mode = "separate"

[agent]
timeout_sec = 3600.0

[environment]
network_mode = "no-network"
cpus = 1
memory_mb = 2048
"""
