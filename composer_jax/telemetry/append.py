"""Files that grow by whole records, or say that they cannot."""

import contextlib
import errno
import os
import pathlib


class AppendFile:
  """Appends records to a file, each whole or not at all.

  Unbuffered, so that a record is one write: a kill tears at most that, and
  nothing is left to be written, hence to fail, when the file is closed.
  """

  def __init__(self, path: pathlib.Path, what: str, *, cure: str = ''):
    """Opens the file, which may exist; makes its parents.

    Errors call a record `what`, and name a `cure` beside free space and another
    workdir.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    self._path = path
    self._what = what
    self._cure = f'Free space{cure} or choose another --workdir'
    self._file = open(path, 'ab', buffering=0)  # noqa: SIM115

  def append(self, data: bytes) -> None:
    """Appends one record.

    Raises:
      OSError: it did not fit, with the path; the file is as it was.
    """
    start = self._file.seek(0, os.SEEK_END)
    try:
      written = self._file.write(data)
      if written == len(data):
        return
      # A disk that fills up takes a part.
      number = errno.ENOSPC
      what = f'Only {written} of {len(data)} bytes of {self._what} fitted'
    except OSError as error:
      number = error.errno
      what = f'Cannot append {self._what} ({error.strerror})'
    # The error to tell is the one that brought us here.
    with contextlib.suppress(OSError):
      self._file.truncate(start)
    what += f'; what is there already is untouched. {self._cure}'
    raise OSError(number, what, str(self._path))

  def cut_torn_line(self) -> None:
    """Drops what follows the last line break: a kill tore that line."""
    self._file.truncate(self._path.read_bytes().rfind(b'\n') + 1)

  def sync(self) -> None:
    """Returns once everything appended would survive a power cut."""
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()
