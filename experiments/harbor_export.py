"""Writes a set of deletion tasks as Harbor task directories.

  python -m experiments.harbor_export --tasks=runs/tasks --out=runs/harbor

Any runner of Harbor's can play them; here, tasks.family='harbor' does.
"""

from absl import flags

from experiments import files_main

_TASKS = flags.DEFINE_string('tasks', 'runs/tasks', 'Folder of a task set.')
_OUT = flags.DEFINE_string('out', 'runs/harbor', 'Folder of the directories.')
_COUNT = flags.DEFINE_integer('count', 0, 'Number of tasks; 0 writes all.')


def run() -> None:
  from composer_jax.tasks.harbor import export
  from composer_jax.tasks.repository import task_set

  tasks = task_set.load(_TASKS.value)
  chosen = tasks.tasks[: _COUNT.value or None]
  paths = export.export(tasks, chosen, _OUT.value)
  print(f'{len(paths)} task directories in {_OUT.value}')


if __name__ == '__main__':
  files_main.main(run)
