"""Chooses and opens the sandbox in which tests judge the code of a policy."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

from composer_jax.core import files, seams
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
) -> Iterator[seams.Runner]:
  """Opens the runner of a run's tests; closed on exit.

  Args:
    level: isolation, in place of that of the options.
    images: folder of a task set; '' for tasks that bring their files.
    requirements: distributions that the set's test suites import.
  """
  if level == 'static':
    yield runners.StaticRunner()
    return
  sandbox = sandboxes.open_sandbox(
    level,
    options.limits(),
    allow_unsafe=options.allow_unsafe,
    size=options.workers,
    images=pathlib.Path(images).resolve() if images else None,
    packages=[*options.packages, *requirements],
  )
  with contextlib.closing(sandbox):
    yield sandbox


def settle(
  workdir: pathlib.Path,
  options: sandbox_options.SandboxOptions,
  open_level: Callable[[str], contextlib.AbstractContextManager[seams.Runner]],
  *,
  needs_execution: bool,
  probe: Callable[[], list[tuple[str, bool, str]]] = sandboxes.probe,
) -> str:
  """Returns the isolation level of a run, decided before any training.

  Where no isolation works, tasks that can be judged by form are, and no
  generated code is executed. The level is kept in the workdir: a resumed run
  must not change its judge.

  Args:
    open_level: level -> runner, to try a level that the options ask for.
    needs_execution: true if the tasks cannot be judged by form.
    probe: returns (level, true if it works here, reason) of every level.

  Raises:
    ValueError: the level that was asked for does not work here, or none does.
  """
  path = workdir / _CHOSEN
  if path.exists():
    return files.read_json(path)['level']
  if options.level != 'auto':
    level = options.level
    with open_level(level):
      pass  # An error comes now rather than after pretraining.
  else:
    probed = probe()
    usable = [n for n, works, _ in probed if works and n != 'rlimits']
    level = usable[0] if usable else 'static'
    report = progress.teller('sandbox')
    for name, works, why in probed:
      report(f'{name}: {"works" if works else "not here"}: {why}')
    if level == 'static' and needs_execution:
      raise ValueError(
        'The tasks of this run execute code of the policy, and no isolation '
        'works here: ' + '; '.join(f'{name}: {why}' for name, _, why in probed)
      )
    if level == 'static':
      report(
        'No isolation here, so no generated code is executed: the tasks are '
        'judged by form (verifier tasks). For real execution use Linux with '
        'user namespaces allowed (sysctl kernel.unprivileged_userns_clone=1; '
        'on Ubuntu 23.10 and later '
        'kernel.apparmor_restrict_unprivileged_userns=0; or a container '
        'started with --privileged), with bubblewrap where there is one.'
      )
    else:
      report(f'code is judged in {level}')
  files.write_json(path, {'level': level})
  return level
