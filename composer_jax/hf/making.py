"""Folders that appear whole: made beside their place, then moved there.

One process makes one. What a killed one leaves is taken up by the same command,
and known as its own: a folder of that name that holds anything else is nobody's
to delete.
"""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

from composer_jax.core import files
from composer_jax.train.checkpoints import manager

_LOCK = 'lock'  # of `files.alone`


def check_absent(out: pathlib.Path) -> None:
  """Raises if something has the name, be it a link to nothing."""
  if os.path.lexists(out):
    raise ValueError(f'{out} exists; choose another --out, or delete it.')


def check_ours(partial: pathlib.Path, is_ours: Callable[[str], bool]) -> None:
  """Raises if the folder to work in is there and holds anything else."""
  names = os.listdir(partial) if partial.is_dir() else []
  others = sorted(n for n in names if n != _LOCK and not is_ours(n))
  if others:
    raise ValueError(
      f'{partial} is where this would be made, and it holds {others[0]!r}, '
      'which is not from here. Move that folder, or choose another --out.'
    )


def check_space(partial: pathlib.Path, needed: int, what: str) -> None:
  """Raises before anything is written if it would be in vain."""
  parent = next(p for p in partial.parents if p.exists())
  free = shutil.disk_usage(parent).free
  if free < needed:
    raise OSError(
      errno.ENOSPC,
      f'The {what} needs {needed} bytes more and {free} are free; free space '
      'or choose another --out',
      str(parent),
    )


@contextlib.contextmanager
def alone(partial: pathlib.Path, out: pathlib.Path) -> Iterator[None]:
  """Holds the lock of the folder to work in, and leaves no empty one."""
  with files.alone(partial):
    try:
      # Another process may have finished it just before.
      check_absent(out)
      yield
    finally:
      if partial.is_dir() and os.listdir(partial) == [_LOCK]:
        (partial / _LOCK).unlink()
        partial.rmdir()


@contextlib.contextmanager
def explained(what: str, partial: pathlib.Path) -> Iterator[None]:
  """Says of want of space what to do about it."""
  try:
    yield
  except (OSError, ValueError, RuntimeError) as error:
    number = manager.full_disk(error)
    if number is None:
      raise
    raise OSError(
      number,
      f'The {what} could not be written ({os.strerror(number)}); free space '
      'and run the same command',
      str(partial),
    ) from error


def place(folder: pathlib.Path, out: pathlib.Path) -> None:
  """Moves a folder, whose files are on the disk, to where it belongs."""
  (folder / _LOCK).unlink(missing_ok=True)
  os.replace(folder, out)
  files.fsync_directory(out.parent)
