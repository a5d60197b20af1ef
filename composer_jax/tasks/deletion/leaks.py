"""Finds copies of deleted code in files, whatever the files are.

It looks at bytes, not at endings: inside archives, compressed streams and
SQLite databases (mypy's cache is one), too. Source lines betray the code
anywhere. Names and constants are everywhere in what people write about code;
in a file that is no text they come from a compiler or an index.
"""

import bz2
import dataclasses
import functools
import gzip
import io
import lzma
import re
import sqlite3
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping

_WINDOW = 5  # lines; so many in a row are no coincidence
_FEW = 3  # lines that are enough where the code has no more
_MIN_LINE = 6  # characters
_MIN_WINDOW = 60
_MIN_NAME = 8
_MAX_DEPTH = 3
_MAX_BYTES = 64 << 20  # of one file, unpacked
_MAX_STREAMS = 200
_ERRORS = (
    OSError, EOFError, ValueError, RuntimeError, NotImplementedError, KeyError,
    zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError,
    sqlite3.Error,
)  # fmt: skip
_ARTEFACTS = re.compile(
  r'(^|/)(\.git|\.hg|\.svn|__pycache__|\.(mypy|ruff|pytest)_cache|\.hypothesis|'
  r'\.tox|\.nox|site-packages|[^/]+\.egg-info)(/|$)'
  r'|\.(py[co]|class|jar|whl|egg|orig|rej|sw[op])$|~$|(^|/)\.coverage[^/]*$'
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeakMarks:
  """What gives deleted code away.

  Attributes:
    windows: a few lines of it in a row, spaces left out.
    words: names and constants that stand nowhere else in the package.
  """

  windows: frozenset[bytes]
  words: frozenset[bytes]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
  """Where deleted code can be found.

  Attributes:
    kind: 'lines', 'words' or 'artefact'.
    where: 'text' or through what it was found, such as 'zip:a.py'.
  """

  path: str
  kind: str
  where: str
  detail: str


def marks_of(deleted: Iterable[str], left: Iterable[str]) -> LeakMarks:
  """What may stand nowhere any more.

  Args:
    left: texts of the package and its tests that stay: what is in them too is
      no secret.
  """
  left = list(left)
  known = set().union(*map(_words, left))
  windows: set[bytes] = set()
  words: set[str] = set()
  for text in deleted:
    words |= _words(text) - known
    windows |= _windows(text)
  return LeakMarks(
    windows=frozenset(w for w in windows if not _stands(w, left)),
    words=frozenset(w.encode() for w in words),
  )


def copied_share(deleted: Iterable[str], left: Iterable[str]) -> float:
  """The share of the deleted lines that stand in a row in what is left, too."""
  left = list(left)
  windows = set().union(*map(_windows, deleted))
  found = sum(_stands(window, left) for window in windows)
  return found / len(windows) if windows else 0.0


def _stands(window: bytes, texts: Iterable[str]) -> bool:
  return any(window in _normal(text.encode()) for text in texts)


def _windows(text: str) -> set[bytes]:
  """Lines of code in a row, each without spaces, joined by newlines."""
  lines = [re.sub(r'\s+', '', line) for line in text.split('\n')]
  lines = [x for x in lines if len(x) >= _MIN_LINE and not x.startswith('#')]
  size = min(_WINDOW, max(_FEW, len(lines)))
  found = {'\n'.join(lines[i : i + size]) for i in range(len(lines) - size + 1)}
  return {w.encode() for w in found if len(w) >= _MIN_WINDOW}


@functools.lru_cache(maxsize=1024)
def _normal(data: bytes) -> bytes:
  """Text as `_windows` has it: short lines and comments are no obstacle."""
  lines = (re.sub(rb'\s+', b'', line) for line in data.split(b'\n'))
  return b'\n'.join(
    line for line in lines if len(line) >= _MIN_LINE and line[:1] != b'#'
  )


@functools.lru_cache(maxsize=1024)
def _words(text: str) -> set[str]:
  """Names and numbers of a length that does not occur by chance."""
  return {
    w
    for w in re.findall(r'[A-Za-z_][A-Za-z0-9_]+|\d{6,}', text)
    if len(w) >= _MIN_NAME and not w.startswith('__')
  }


def scan(files: Mapping[str, bytes], marks: LeakMarks) -> tuple[Leak, ...]:
  """Looks for marks in all files, unpacked where they are packed.

  What caches, compilers and editors leave is a leak, whatever it holds.
  """
  found: list[Leak] = []
  for path, data in sorted(files.items()):
    if _ARTEFACTS.search(path):
      found.append(Leak(path=path, kind='artefact', where='path', detail=path))
    for where, part in _parts(data):
      leak = _leak(path, where, part, marks)
      if leak is not None:
        found.append(leak)
        break
  return tuple(found)


def _leak(path: str, where: str, data: bytes, marks: LeakMarks) -> Leak | None:
  normal = _normal(data)
  for window in sorted(marks.windows):
    if window in normal:
      detail = window.split(b'\n')[0].decode('utf-8', 'replace')
      return Leak(path=path, kind='lines', where=where, detail=detail)
  if where != 'text':
    for word in sorted(marks.words):
      if word in data:
        return Leak(path=path, kind='words', where=where, detail=word.decode())
  return None


def _parts(data: bytes) -> Iterator[tuple[str, bytes]]:
  """The content itself, then everything that can be got out of it."""
  budget = [_MAX_BYTES]
  is_text = b'\0' not in data
  if is_text:
    try:
      data.decode()
    except UnicodeDecodeError:
      is_text = False
  yield ('text' if is_text else 'binary'), data
  if not is_text:
    yield from _unpacked(data, '', 0, budget)
    for encoding in ('utf-16-le', 'utf-16-be'):
      yield encoding, data.decode(encoding, 'replace').encode()


def _unpacked(
  data: bytes, prefix: str, depth: int, budget: list[int]
) -> Iterator[tuple[str, bytes]]:
  if depth >= _MAX_DEPTH:
    return
  for name, part in _layers(data):
    budget[0] -= len(part)
    if budget[0] < 0:
      return
    where = f'{prefix}{name}'
    yield where, part
    yield from _unpacked(part, f'{where}/', depth + 1, budget)


def _layers(data: bytes) -> Iterator[tuple[str, bytes]]:
  if data.startswith(b'SQLite format 3\0'):
    yield from _tried(_sqlite, data)
  if b'PK\x03\x04' in data[: 1 << 16]:
    yield from _tried(_zip, data)
  if data[257:262] == b'ustar':
    yield from _tried(_tar, data)
  for name, magic, opener in (
    ('gzip', b'\x1f\x8b', gzip.open),
    ('bz2', b'BZh', bz2.open),
    ('xz', b'\xfd7zXZ', lzma.open),
  ):
    if data.startswith(magic):
      yield from _tried(_stream, data, name, opener)
  yield from _deflated(data)


def _tried(layer, data: bytes, *args) -> Iterator[tuple[str, bytes]]:
  """What a layer gives until its format turns out to be damaged."""
  try:
    yield from layer(data, *args)
  except _ERRORS:
    return


def _sqlite(data: bytes) -> Iterator[tuple[str, bytes]]:
  """All columns of all tables: pages split long values, rows do not."""
  connection = sqlite3.connect(':memory:')
  try:
    connection.deserialize(data)
    connection.text_factory = bytes
    tables = connection.execute(
      "SELECT name FROM sqlite_master WHERE type = 'table'"
    ).fetchall()
    for (name,) in tables:
      quoted = name.decode('utf-8', 'replace').replace('"', '""')
      parts = []
      for row in connection.execute(f'SELECT * FROM "{quoted}"'):
        parts += [value for value in row if isinstance(value, bytes)]
      yield f'sqlite:{quoted}', b'\n'.join(parts)
  finally:
    connection.close()


def _zip(data: bytes) -> Iterator[tuple[str, bytes]]:
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    for info in archive.infolist():
      if not info.is_dir() and info.file_size <= _MAX_BYTES:
        with archive.open(info) as file:
          yield f'zip:{info.filename}', file.read(_MAX_BYTES)


def _tar(data: bytes) -> Iterator[tuple[str, bytes]]:
  with tarfile.open(fileobj=io.BytesIO(data)) as archive:
    for member in archive:
      file = archive.extractfile(member) if member.isreg() else None
      if file is not None:
        yield f'tar:{member.name}', file.read(_MAX_BYTES)


def _stream(data: bytes, name: str, opener) -> Iterator[tuple[str, bytes]]:
  with opener(io.BytesIO(data)) as file:
    yield name, file.read(_MAX_BYTES)


def _deflated(data: bytes) -> Iterator[tuple[str, bytes]]:
  """zlib streams anywhere within, as git's objects and pickles hold them."""
  for count, match in enumerate(re.finditer(rb'\x78[\x01\x5e\x9c\xda]', data)):
    if count >= _MAX_STREAMS:
      return
    try:
      part = zlib.decompressobj().decompress(data[match.start() :], _MAX_BYTES)
    except zlib.error:
      continue
    if len(part) >= _MIN_LINE:
      yield f'zlib@{match.start()}', part
