"""Makes a set of feature-deletion tasks out of pinned packages.

  python -m experiments.make_tasks --config=configs/tasks/packages.py \
      --out=runs/tasks

`--folders=MY_REPOSITORY` makes tasks of a folder alone, with `--only=semver` of
that package of the config, too. Where none of them is held out, a fifth of the
tasks is, by file, and it prints which. The same command resumes after a kill.
Sdists come from the index that pip is configured with, if it answers in JSON
(PEP 691); put archives of other indices into --archives. A package's code runs
only in the sandbox.
"""

import os
import shutil
import time

from absl import flags

from experiments import files_main, start

_CONFIG = start.define_config(
  'configs/tasks/packages.py',
  'Config file of packages and options.',
  shows_all=True,
)
_OUT = flags.DEFINE_string('out', 'runs/tasks', 'Folder of the task set.')
_ARCHIVES = flags.DEFINE_string(
  'archives', 'runs/sdists', 'Folder of sdists; missing ones are downloaded.'
)
_ONLY = flags.DEFINE_list(
  'only', [], 'Packages of the config; all if empty and no folder is given.'
)
_FOLDERS = flags.DEFINE_list(
  'folders', [], 'Packages on this machine, each as PATH or NAME=PATH.'
)
_HELD_OUT = flags.DEFINE_list(
  'held_out', [], 'Names of folders whose tasks are never trained on.'
)


def run() -> None:
  from composer_jax.corpus import licences
  from composer_jax.sandbox import base
  from composer_jax.sandbox import open as sandboxes
  from composer_jax.tasks.deletion import factory, sdists, workspace

  fields = start.config_fields(_CONFIG)
  place = dict(fields['sandbox'])
  level, workers = place.pop('level'), place.pop('workers')
  limits = base.Limits(**place)
  options = workspace.Options(**fields['options'])
  folders = sdists.of_folders(_FOLDERS.value, _HELD_OUT.value)
  packages = fields['packages'] | folders
  pins = sdists.pins_of(packages, dict.fromkeys([*folders, *_ONLY.value]))
  is_new, begin = not os.path.exists(_OUT.value), time.monotonic()
  tasks = factory.make(
    _OUT.value,
    pins,
    options,
    archives=_ARCHIVES.value,
    open_sandbox=lambda root, needs: sandboxes.open_sandbox(
      level, limits, size=workers, images=root, packages=needs
    ),
    licence_of=licences.of_sdist,
    workers=workers,
    progress=lambda line: print(line, flush=True),
  )
  made = [p for p in tasks.packages.values() if not p.refused]
  if not tasks.tasks:
    if is_new:
      shutil.rmtree(_OUT.value)
    reasons = [
      f'{p.name}: {p.refused or "nothing that could be deleted was tested"} '
      f'{p.detail}'.strip()
      for p in tasks.packages.values()
    ]
    raise ValueError(
      f'No task could be made ({"; ".join(reasons)}). Shorter definitions '
      'count with --config.options.min_lines=1, fewer tests suffice with '
      '--config.options.min_tests=1, and what no docstring describes is taken '
      'with --config.options.examples=0.'
    )
  print(
    f'{len(tasks.tasks)} tasks of {len(made)} packages, '
    f'{len(tasks.packages) - len(made)} refused, in '
    f'{time.monotonic() - begin:.0f} s'
  )


if __name__ == '__main__':
  files_main.main(run)
