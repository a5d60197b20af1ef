"""Records what a set of tasks holds, and the results of its candidates.

  python -m experiments.studies.deletion.collect --tasks=runs/tasks \
      --cpu_s=SECONDS

Replaces results/. Three kinds of rows: 'setup' once, 'package' for each
package,
'task' for each task.
"""

import os
import pathlib

from absl import flags

from composer_jax.tasks.repository import task_set
from composer_jax.telemetry import machine
from experiments import start
from experiments.studies import results

_TASKS = flags.DEFINE_string(
  'tasks', 'runs/tasks', 'Folder that make_tasks wrote.'
)
_CPU_S = flags.DEFINE_float(
  'cpu_s',
  0.0,
  'CPU seconds of make_tasks and its sandboxes, as a cgroup counted them.',
)
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder to replace.',
)


def main() -> None:
  tasks = task_set.load(_TASKS.value)
  rows: list[results.Row] = [
    {
      'stage': 'setup',
      'step': 0,
      'machine': machine.describe(),
      'cores': os.cpu_count(),
      'cpu_s': _CPU_S.value,
    }
  ]
  rows += [
    {
      'stage': 'package',
      'step': number,
      'name': package.name,
      'version': package.version,
      'licence': package.licence,
      'held_out': package.held_out,
      'refused': package.refused,
      'detail': package.detail,
      **package.facts,
    }
    for number, package in enumerate(tasks.packages.values())
  ]
  rows += [
    {
      'stage': 'task',
      'step': number,
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
    for number, task in enumerate(tasks.tasks)
  ]
  results.write(_RESULTS.value, rows, by=('stage',))


if __name__ == '__main__':
  start.run(main)
