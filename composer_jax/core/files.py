"""Atomic writes of files, JSON, and the lock of a workdir."""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

# Names of the files that `write_atomic` leaves behind when it is killed.
_TEMPORARY = re.compile(r'\..+\.[0-9a-f]{16}\.tmp')


def fsync_directory(path: pathlib.Path) -> None:
  """Makes a rename inside `path` survive a power cut."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_atomic(path: str | os.PathLike, data: bytes) -> None:
  """Writes a file whole or not at all; an OSError leaves the previous one."""
  path = pathlib.Path(path)
  try:
    with writing(path) as file:
      file.write(data)
  except OSError as error:
    raise OSError(
      error.errno,
      f'Cannot write {len(data)} bytes ({error.strerror}); the previous '
      'content, if any, is untouched. Free space or choose another '
      '--workdir, --out or --store',
      str(path),
    ) from error
  fsync_directory(path.parent)


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[BinaryIO]:
  """Opens a file that gets its name only when the block ends without an error.

  The rename survives a power cut after `fsync_directory` of the parent.
  """
  path = pathlib.Path(path)
  temporary = path.with_name(f'.{path.name}.{secrets.token_hex(8)}.tmp')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not mkstemp, whose files only their owner may read.
    with open(temporary, 'xb') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink()
    raise


@contextlib.contextmanager
def alone(workdir: str | os.PathLike) -> Iterator[None]:
  """Holds the lock of a workdir; the kernel frees it however a run ends.

  Child processes, such as a rollout worker in the same workdir, do not inherit
  the lock.

  Raises:
    ValueError: another process, which is named, holds the lock.
    OSError: the workdir cannot be made or locked.
  """
  workdir = pathlib.Path(workdir)
  path = workdir / 'lock'
  with contextlib.ExitStack() as stack:
    try:
      workdir.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(path.open('a'))
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      file.truncate(0)
      file.write(f'{os.getpid()} on {platform.node()}')
      file.flush()
    except BlockingIOError as error:
      raise ValueError(
        f'Another process ({path.read_text() or "just started"}) runs in '
        f'workdir {workdir}. Wait until it ends or stop it, or choose another '
        '--workdir or --out.'
      ) from error
    except OSError as error:
      raise OSError(
        error.errno,
        f'Cannot lock the workdir ({error.strerror}); choose another --workdir '
        'or --out',
        str(path),
      ) from error
    stack.callback(file.truncate, 0)
    yield


def sweep(
  folder: str | os.PathLike, older_than_s: float | None = None
) -> list[pathlib.Path]:
  """Deletes temporary files and folders that killed processes left behind.

  Args:
    folder: root of the search. Nothing else may write there unless an age is
      given.
    older_than_s: least age of what is deleted, since a live writer may use
      younger files and folders; None deletes all.
  """
  deleted: list[pathlib.Path] = []
  may_vanish = older_than_s is not None  # A live writer renames its files.
  # Not rglob, which fails when a folder is deleted during the search.
  for parent, folders, names in os.walk(folder):
    for name in filter(_TEMPORARY.fullmatch, [*folders, *names]):
      path = pathlib.Path(parent, name)
      if older_than_s is not None:
        try:
          age_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:
          continue
        if age_s < older_than_s:
          continue
      if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=may_vanish)
        folders.remove(name)
      else:
        path.unlink(missing_ok=may_vanish)
      deleted.append(path)
  return deleted


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes JSON with sorted keys, so that equal values give equal bytes."""
  text = json.dumps(value, indent=1, sort_keys=True) + '\n'
  write_atomic(path, text.encode())


def read_json(path: str | os.PathLike) -> Any:
  """Reads JSON; raises a ValueError with the path of a damaged file."""
  text = pathlib.Path(path).read_bytes()
  try:
    return json.loads(text)
  except ValueError as error:
    raise ValueError(f'{path} is not valid JSON ({error}).') from error


def flatten(value: Any, prefix: str = '') -> dict[str, Any]:
  """Returns {'a.b.c': leaf} of nested JSON; lists and {} are leaves."""
  if not isinstance(value, dict) or not value:
    return {prefix: value}
  leaves = {}
  for key, inner in value.items():
    leaves |= flatten(inner, f'{prefix}.{key}' if prefix else str(key))
  return leaves


def sha256(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()
