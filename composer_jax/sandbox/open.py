"""Opens the strongest sandbox that works here, or says why none does."""

import logging
import pathlib
import re
import sys
from collections.abc import Sequence

from composer_jax.sandbox import base
from composer_jax.sandbox import packages as gathering
from composer_jax.sandbox.local import process, zygotes

# Names of folders at the root, and those that a sandbox has already.
_FOLDER = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}')
_TAKEN = frozenset({
    'bin', 'boot', 'boxes', 'dev', 'etc', 'images', 'lib', 'lib32', 'lib64',
    'nix', 'packages', 'proc', 'python', 'sbin', 'sys', 'tmp', 'usr', 'var',
    'venv', 'work',
})  # fmt: skip


def _open(
  level: str,
  limits: base.Limits,
  size: int,
  images: pathlib.Path | None = None,
  site_packages: pathlib.Path | None = None,
  folders: Sequence[str] = (),
) -> zygotes.ZygotePool:
  """Opens one level and makes a first call; ValueError if it does not work."""
  if level != 'rlimits' and sys.platform != 'linux':
    raise ValueError(f'namespaces do not exist on {sys.platform}')
  try:
    sandbox = zygotes.ZygotePool(
      level, limits, size, images, site_packages, folders
    )
  except (process.ZygoteError, OSError) as error:
    raise ValueError(f'refused here: {error}') from error
  # Namespaces can be granted and the mounts inside them refused.
  result = sandbox.call({'m.py': 'def f(x): return x'}, 'm', 'f', [[1]])
  if result.status not in ('ok', 'timeout'):  # a busy machine is no refusal
    sandbox.close()
    raise ValueError(f'a first call gave {result.status}: {result.error}')
  return sandbox


def _gathered(packages: Sequence[str] | pathlib.Path) -> pathlib.Path | None:
  if isinstance(packages, pathlib.Path):
    return packages
  return gathering.gather(packages) if packages else None


def _elsewhere(
  level: str,
  limits: base.Limits,
  size: int,
  images: pathlib.Path | None,
  packages: Sequence[str] | pathlib.Path,
) -> base.Sandbox:
  """Opens a sandbox of a machine of its own; only then is it imported."""
  if level == 'microvm':
    from composer_jax.sandbox.remote.microvm import machine

    return machine.MicroVM(
      limits, size=size, images=images, packages=_gathered(packages)
    )
  from composer_jax.sandbox.remote import ray_placement

  return ray_placement.RaySandbox(
      open_sandbox, 'auto', limits, size=size, images=images,
      packages=packages,
  )  # fmt: skip


def check_folders(folders: Sequence[str], preference: str = 'auto') -> None:
  """Raises a ValueError for names that no root of a sandbox can have."""
  for name in folders:
    if not _FOLDER.fullmatch(name) or name in _TAKEN:
      raise ValueError(
        f'the sandbox can have no folder /{name}: a name is one part of a path '
        f'and none of {", ".join(sorted(_TAKEN))}.'
      )
  if folders and preference not in ('auto', 'unshare'):
    raise ValueError(
      f"folders at the root need the sandbox 'unshare', not {preference!r}."
    )


def open_sandbox(
  preference: str,
  limits: base.Limits,
  *,
  allow_unsafe: bool = False,
  size: int = 1,
  images: pathlib.Path | None = None,
  packages: Sequence[str] | pathlib.Path = (),
  folders: Sequence[str] = (),
) -> base.Sandbox:
  """Opens a sandbox.

  Args:
    preference: 'auto' for the strongest of `base.LEVELS` that works, one of
      them, or one of `base.OUTER_LEVELS`.
    limits: limits of each call and program.
    allow_unsafe: true to accept 'rlimits', which keeps code away from neither
      files nor processes of this user: for trusted code only.
    size: number of calls at a time.
    images: folder of the folders that boxes begin as; they may not change
      while the sandbox is open.
    packages: installed distributions that programs in boxes can import, with
      all their dependencies; or a folder that `packages.gather` returned.
    folders: names such as 'app', so that programs find the folder `app` of the
      workspace at /app, too; for level 'unshare' alone.

  Raises:
    base.NoSandbox: no level works, or the one is unsafe and not allowed.
    ValueError: an argument is wrong.
  """
  known = base.LEVELS + base.OUTER_LEVELS
  if preference not in ('auto', *known):
    raise ValueError(
      f"sandbox {preference!r} is not known; use 'auto' or one of {known}."
    )
  if size < 1:
    raise ValueError(f'sandbox size ({size}) must be at least 1.')
  check_folders(folders, preference)
  if images is not None and not images.is_dir():
    raise ValueError(f'sandbox images {images} must be a folder.')
  if preference in base.OUTER_LEVELS:
    try:
      return _elsewhere(preference, limits, size, images, packages)
    except base.SandboxLost as error:
      raise ValueError(f'no sandbox {preference!r} works: {error}') from error
  site_packages = _gathered(packages)
  reasons = []
  for level in base.LEVELS if preference == 'auto' else (preference,):
    if level == 'rlimits' and folders:
      reasons.append('rlimits: it has no root of its own for /app and others')
      continue
    if level == 'rlimits' and not allow_unsafe:
      reasons.append('rlimits: it isolates nothing, refused for untrusted code')
      continue
    try:
      sandbox = _open(level, limits, size, images, site_packages, folders)
    except ValueError as error:
      reasons.append(f'{level}: {error}')
      continue
    if sandbox.about['seccomp'] != 'on':
      logging.warning(
        'Sandbox %s has no seccomp: %s.', level, sandbox.about['seccomp']
      )
    return sandbox
  raise base.NoSandbox(
    f'no sandbox {preference!r} works here ({"; ".join(reasons)}). Allow '
    'user namespaces, or train on tasks that execute no generated code; '
    'allow_unsafe=True is for trusted code only.'
  )
