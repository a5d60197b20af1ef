"""Makes folders that appear whole: filled beside their place, then moved.

One process at a time fills the partial folder. The same command continues what
a killed one left there; a folder of that name with any other content is refused
and never deleted.
"""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

from composer_jax.core import files
from composer_jax.train.checkpoints import manager

_LOCK = 'lock'  # name of the lock of `files.alone`


def check_absent(out: pathlib.Path) -> None:
  """Raises a ValueError if the name is taken, even by a dangling link."""
  if os.path.lexists(out):
    raise ValueError(f'{out} exists; choose another --out, or delete it.')


def check_ours(partial: pathlib.Path, is_ours: Callable[[str], bool]) -> None:
  """Raises a ValueError if the partial folder holds a name that is not ours."""
  names = os.listdir(partial) if partial.is_dir() else []
  others = sorted(n for n in names if n != _LOCK and not is_ours(n))
  if others:
    raise ValueError(
      f'{partial} is where this would be made, and it holds {others[0]!r}, '
      'which is not from here. Move that folder, or choose another --out.'
    )


def check_space(partial: pathlib.Path, needed: int) -> None:
  """Raises an OSError unless so many bytes are free, before any is written."""
  parent = next(p for p in partial.parents if p.exists())
  free = shutil.disk_usage(parent).free
  if free < needed:
    raise OSError(
      errno.ENOSPC,
      f'This needs {needed} bytes more and {free} are free; free space or '
      'choose another --out',
      str(parent),
    )


@contextlib.contextmanager
def alone(partial: pathlib.Path, out: pathlib.Path) -> Iterator[None]:
  """Holds the partial folder's lock; an error of a full disk gets its cure."""
  with files.alone(partial):
    try:
      # Another process may have finished it just before.
      check_absent(out)
      yield
    except (OSError, ValueError, RuntimeError) as error:
      number = manager.full_disk(error)
      if number is None:
        raise
      raise OSError(
        number,
        f'{out.name} could not be written ({os.strerror(number)}); free space '
        'and run the same command',
        str(partial),
      ) from error
    finally:
      if partial.is_dir() and os.listdir(partial) == [_LOCK]:
        (partial / _LOCK).unlink()
        partial.rmdir()


def place(folder: pathlib.Path, out: pathlib.Path) -> None:
  """Moves a folder, whose files are synced to the disk, to its final place."""
  (folder / _LOCK).unlink(missing_ok=True)
  os.replace(folder, out)
  files.fsync_directory(out.parent)
