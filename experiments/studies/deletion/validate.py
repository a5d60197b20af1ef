"""Asks of every task of a set again whether it holds, in fresh boxes.

  python -m experiments.studies.deletion.validate --tasks=runs/tasks

Adds a line to --results for each task that it does not hold yet, or holds as it
was in another set, so that the same command resumes after a kill: tests of the
feature that fail without it ('null') and pass with the original ('gold'), other
tests that pass without and with it, files with a copy of what was deleted, by
windows of tokens ('leaks') and by the shape of definitions ('shapes'), the
share of those windows that the rest of the code has too, and what describes it
in the prompt. Two tasks that delete definitions alike but for names are
listed at the end.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import random
import time
from collections.abc import Iterable

from absl import flags

from composer_jax.core import files
from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandboxes
from composer_jax.tasks.deletion import candidates, edit, leaks
from composer_jax.tasks.grading import suites
from composer_jax.tasks.repository import task_set
from experiments import start

_TASKS = flags.DEFINE_string(
  'tasks', 'runs/tasks', 'Folder that make_tasks wrote.'
)
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'validity.jsonl'),
  'File of one line a task; a task that it holds is not asked again.',
)
_MOST = flags.DEFINE_integer(
  'most', 0, 'Number of tasks to ask, drawn at random; 0 asks all.'
)
_LIMITS = base.Limits(
  wall_s=3000.0,
  cpu_s=600.0,
  memory_bytes=2 << 30,
  processes=64,
  file_bytes=64 << 20,
  output_bytes=16 << 20,
)


def _digest(task: task_set.RepositoryTask) -> str:
  text = json.dumps(dataclasses.asdict(task), sort_keys=True)
  return files.sha256(text.encode())[:16]


# The tasks of a package change few of its files.
@functools.lru_cache(maxsize=4000)
def _definitions(data: bytes) -> frozenset[str]:
  """Hashes of the definitions' shapes, none if the file does not parse."""
  try:
    text = data.decode()
    names = [s.name for s in edit.symbols('', text)]
  except ValueError:
    return frozenset()
  return _hashes(edit.shape(text, name) for name in names)


def _hashes(shapes: Iterable[str]) -> frozenset[str]:
  return frozenset(files.sha256(shape.encode()) for shape in shapes)


def _check(
  task: task_set.RepositoryTask, root: pathlib.Path, sandbox: base.Sandbox
) -> dict:
  image = root / task.image
  row: dict = {
    'task_id': task.task_id,
    'digest': _digest(task),
    'package': task.package,
    'held_out': task.held_out,
    'proved_by': task.provenance['proved_by'],
  }
  for name, changes in (('null', task.view()), ('gold', task.restored())):
    for path in task.test_paths:
      changes[path] = (image / path).read_bytes()
    result = suites.run_fresh(
      sandbox,
      task.image,
      changes,
      task.task_id,
      arguments=('-q', '--tb=no'),
      ids=(*task.fail_to_pass, *task.guards),
      source_roots=task.source_roots,
    )
    row[name] = [result.passed(task.fail_to_pass), len(task.fail_to_pass)]
    row[f'{name}_guards'] = [
      result.passed(task.pass_to_pass),
      len(task.pass_to_pass),
    ]
    row[f'{name}_status'] = result.status
  contents = {
    p.relative_to(image).as_posix(): p.read_bytes()
    for p in image.rglob('*')
    if p.is_file()
  }
  view = {**contents, **task.view()}
  visible = {p: d for p, d in view.items() if d is not None}
  shapes = _hashes(candidates.shapes(task.deleted, task.solution))
  row['shapes'] = sorted(
    p
    for p, d in visible.items()
    if p.endswith('.py') and shapes & _definitions(d)
  )
  pieces = [
    '\n'.join(task.solution[d.path].split('\n')[s.start - 1 : s.stop])
    for d in task.deleted
    for s in edit.symbols(d.path, task.solution[d.path])
    if d.symbol in ('', s.name)
  ]
  left = [
    d.decode('utf-8', 'replace') for p, d in visible.items() if p[-3:] == '.py'
  ]
  row['leaks'] = list(leaks.scan(visible, pieces, left))
  row['copied'] = round(leaks.copied_share(pieces, left), 3)
  row['described'] = task.provenance['described_by']
  return row


def main() -> None:
  tasks = task_set.load(_TASKS.value)
  path = pathlib.Path(_RESULTS.value)
  lines = path.read_text().splitlines() if path.exists() else []
  rows = {row['task_id']: row for row in map(json.loads, lines)}
  digests = {task.task_id: _digest(task) for task in tasks.tasks}
  requires = {
    r for p in tasks.packages.values() for r in p.facts.get('requires', ())
  }
  sandbox = sandboxes.open_sandbox(
    'auto', _LIMITS, images=tasks.root, packages=('pytest', *sorted(requires))
  )
  chosen = list(tasks.tasks)
  if _MOST.value:
    chosen = random.Random(0).sample(chosen, min(_MOST.value, len(chosen)))
  with path.open('a') as file:
    for task in chosen:
      known = rows.get(task.task_id, {})
      if known.get('digest') != digests[task.task_id]:
        begin = time.monotonic()
        row = _check(task, tasks.root, sandbox)
        rows[task.task_id] = row
        file.write(json.dumps(row) + '\n')
        file.flush()
        print(f'{task.task_id} {time.monotonic() - begin:.1f} s', flush=True)
  sandbox.close()
  used = collections.defaultdict(list)
  for task in tasks.tasks:
    for shape in candidates.shapes(task.deleted, task.solution):
      used[shape].append(task.task_id)
  every = [rows[t.task_id] for t in chosen]
  print(f'{len(every)} tasks')
  for name, fault in (
    ('gold', lambda r: r['gold'][0] < r['gold'][1]),
    ('gold guards', lambda r: r['gold_guards'][0] < r['gold_guards'][1]),
    ('null', lambda r: r['null'][0] > 0),
    ('null guards', lambda r: r['null_guards'][0] < r['null_guards'][1]),
    ('leaks', lambda r: r['leaks']),
    ('shapes', lambda r: r['shapes']),
    ('undescribed', lambda r: not r['described']),
  ):
    print(name, [r['task_id'] for r in every if fault(r)])
  print('alike', [ids for ids in used.values() if len(ids) > 1])


if __name__ == '__main__':
  start.run(main)
