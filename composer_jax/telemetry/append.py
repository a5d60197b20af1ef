"""Files that grow by whole records; one that does not fit is an error."""

import contextlib
import errno
import json
import os
import pathlib
from typing import Any


class AppendFile:
  """Appends records to a file, each whole or not at all.

  Unbuffered, so that a record is one write: a kill tears at most that record,
  and closing the file has nothing left to write, so it cannot fail.
  """

  def __init__(self, path: pathlib.Path, what: str, *, cure: str = ''):
    """Opens the file, which may exist; makes its parents.

    Args:
      what: name of a record in errors, such as 'a line of metrics'.
      cure: further cure to name in errors, beginning with a comma.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    self._path, self._what = path, what
    self._cure = f'Free space{cure} or choose another --workdir'
    self._file = open(path, 'ab', buffering=0)  # noqa: SIM115

  def append(self, data: bytes) -> None:
    """Appends a record, or raises an OSError; the file is then as it was."""
    start = self._file.seek(0, os.SEEK_END)
    try:
      written = self._file.write(data)
      if written == len(data):
        return
      # A disk that fills up takes a part.
      number = errno.ENOSPC
      problem = f'Only {written} of {len(data)} bytes of {self._what} fitted'
    except OSError as error:
      number = error.errno
      problem = f'Cannot append {self._what} ({error.strerror})'
    # The error to raise is the first one.
    with contextlib.suppress(OSError):
      self._file.truncate(start)
    message = f'{problem}; what is there already is untouched. {self._cure}'
    raise OSError(number, message, str(self._path))

  def add(self, row: dict[str, Any]) -> None:
    """Appends a row as a line of JSON."""
    self.append(f'{json.dumps(row)}\n'.encode())

  def cut_torn_line(self) -> None:
    """Drops a last line without a line break, which a kill tore."""
    self._file.truncate(self._path.read_bytes().rfind(b'\n') + 1)

  def sync(self) -> None:
    """Returns once everything appended would survive a power cut."""
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()

  def __enter__(self) -> 'AppendFile':
    return self

  def __exit__(self, *_) -> None:
    self.close()
