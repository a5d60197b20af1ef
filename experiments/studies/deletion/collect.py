"""Records what sets of tasks hold, and the results of their candidates.

  python -m experiments.studies.deletion.collect --tasks=runs/tasks \
      --cpu_s=SECONDS

Packages of these sets replace what results/ has of them; others stay as they
are, with their processor time. Three kinds of rows: 'setup' once, 'package' for
each package, 'task' for each task.
"""

import os
import pathlib

from absl import flags

from composer_jax.tasks.repository import task_set
from composer_jax.telemetry import machine
from experiments import start
from experiments.studies import results

_TASKS = flags.DEFINE_list(
  'tasks', ['runs/tasks'], 'Folders that make_tasks wrote.'
)
_CPU_S = flags.DEFINE_float(
  'cpu_s',
  0.0,
  'CPU seconds of make_tasks and its sandboxes, as a cgroup counted them.',
)
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder of the results.',
)


def rows_of(root: str) -> list[results.Row]:
  """Returns the rows of one set's packages and tasks, without steps."""
  tasks = task_set.load(root)
  packages = [
    {
      'stage': 'package',
      'name': package.name,
      'version': package.version,
      'licence': package.licence,
      'held_out': package.held_out,
      'refused': package.refused,
      'detail': package.detail,
      **package.facts,
    }
    for package in tasks.packages.values()
  ]
  return packages + [
    {
      'stage': 'task',
      'task_id': task.task_id,
      'package': task.package,
      'tier': task.tier,
      'difficulty': task.difficulty,
      'deleted': len(task.deleted),
      'deleted_lines': task.provenance['deleted_lines'],
      'fail_to_pass': len(task.fail_to_pass),
      'hidden': len(task.hidden),
      'pass_to_pass': len(task.pass_to_pass),
      'collateral': len(task.collateral),
    }
    for task in tasks.tasks
  ]


def _package(row: results.Row) -> str:
  return row.get('package', row.get('name'))


def main() -> None:
  known = results.read(_RESULTS.value)
  made = [row for root in _TASKS.value for row in rows_of(root)]
  again = {_package(row) for row in made}
  before = sum(r['cpu_s'] for r in known if r['stage'] == 'setup')
  setup = {
    'stage': 'setup',
    'machine': machine.describe(),
    'cores': os.cpu_count(),
    'cpu_s': before + _CPU_S.value,
  }
  kept = [
    {k: v for k, v in row.items() if k != 'step'}
    for row in known
    if row['stage'] != 'setup' and _package(row) not in again
  ]
  rows: list[results.Row] = []
  for stage in ('setup', 'package', 'task'):
    group = [r for r in [setup, *kept, *made] if r['stage'] == stage]
    group.sort(key=lambda r: (_package(r) or '', r.get('task_id', '')))
    rows += [{**row, 'step': step} for step, row in enumerate(group)]
  results.write(_RESULTS.value, rows, by=('stage',))


if __name__ == '__main__':
  start.run(main)
