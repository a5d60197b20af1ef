"""Chooses and opens the sandbox in which tests judge the code of a policy."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

from composer_jax.core import files, seams
from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandboxes
from composer_jax.sandbox import options as sandbox_options
from composer_jax.tasks.list_functions import runners
from composer_jax.telemetry import progress

_CHOSEN = 'sandbox.json'  # In the workdir.


@contextlib.contextmanager
def open_runner(
  options: sandbox_options.SandboxOptions,
  level: str,
  *,
  images: str = '',
  requirements: Sequence[str] = (),
  folders: Sequence[str] = (),
) -> Iterator[seams.Runner]:
  """Opens the runner of a run's tests; closed on exit.

  Args:
    level: isolation, in place of that of the options.
    images: folder of a task set; '' for tasks that bring their files.
    requirements: distributions that the set's test suites import.
    folders: folders of the workspace that programs look for at the root.
  """
  if level == 'static':
    yield runners.StaticRunner()
    return
  sandbox = sandboxes.open_sandbox(
    level,
    options.limits(),
    allow_unsafe=options.allow_unsafe and level == 'rlimits',
    size=options.workers,
    images=pathlib.Path(images).resolve() if images else None,
    packages=[*options.packages, *requirements],
    folders=folders,
  )
  with contextlib.closing(sandbox):
    yield sandbox


def settle(
  workdir: pathlib.Path,
  options: sandbox_options.SandboxOptions,
  open_level: Callable[[str], contextlib.AbstractContextManager[seams.Runner]],
  *,
  needs_execution: bool,
) -> str:
  """Returns the isolation level of a run, decided before any training.

  Where no isolation works, tasks that can be judged by form are, and no
  generated code is executed. The level is kept in the workdir: a resumed run
  must not change its judge.

  Args:
    open_level: level -> runner, to try the level that the options ask for.
    needs_execution: true if the tasks cannot be judged by form.

  Raises:
    ValueError: the level that was asked for does not work here, or none does.
  """
  path = workdir / _CHOSEN
  if path.exists():
    return files.read_json(path)['level']
  report = progress.teller('sandbox')
  try:
    # An error comes now rather than after pretraining.
    with open_level(options.level) as runner:
      level = runner.level
    report(f'code is judged in {level}')
  except base.NoSandbox as error:
    if options.level != 'auto':
      raise
    if needs_execution:
      raise ValueError(
        f'The tasks of this run execute code of the policy, and {error}'
      ) from error
    level = 'static'
    report(
      f'{error} No generated code is executed: the tasks are judged by form '
      '(verifier tasks). Linux allows user namespaces by sysctl '
      'kernel.unprivileged_userns_clone=1; on Ubuntu 23.10 and later by '
      'kernel.apparmor_restrict_unprivileged_userns=0; in a container that is '
      'started with --privileged.'
    )
  files.write_json(path, {'level': level})
  return level
