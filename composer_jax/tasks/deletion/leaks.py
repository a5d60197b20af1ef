"""Finds copies of deleted code in files of any kind.

Contents are searched whatever a file is called: also inside archives,
compressed streams, base64 and SQLite databases (mypy's cache is one). A run of
the same identifiers and literals betrays the code anywhere, however it is laid
out or called: as code, in comments, in text or in text with escapes. Single
names and constants count only in binary files, where they come from a compiler
or an index: people write about code too. There, all names close to each other
count as well, however short.
"""

import ast
import binascii
import bz2
import contextlib
import functools
import gzip
import io
import itertools
import lzma
import re
import sqlite3
import tarfile
import textwrap
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping

from composer_jax.tasks import source as python_source

_WINDOW = 16  # tokens in a row that are no coincidence
_FEW = 6  # tokens that suffice where the code has no more
_DISTINCT = 5
_MIN_STREAM = 6  # bytes
_MIN_NAME = 8
_TO_SPACE = bytes(
  x if chr(x).isalnum() and x < 128 or x == 95 else 32 for x in range(256)
)
# Documentation and comments of deleted code may be quoted; signatures are in
# the prompt.
_PROSE = re.compile(
  rb'[rbuRBU]{0,2}("""|' + rb"''')" + rb'.*?\1|(?:^|(?<=\s))#[^\n]*', re.S
)
_SIGNATURE = re.compile(rb'\b(?:def|class)\s+\w+[^:\n]*')
_BASE64 = re.compile(rb'(?:[A-Za-z0-9+/_-]{20,}+\r?\n?)+[A-Za-z0-9+/_-]*={0,2}')
_PACKED = (b'\x1f\x8b', b'BZh', b'\xfd7zXZ', b'PK\x03\x04', b'\x78')
_NEAR = 512  # bytes around the names of a compiled function
_MAX_DEPTH = 3
_MAX_PART, _MAX_BYTES = 4 << 20, 16 << 20  # of one file, unpacked
_MAX_CACHED = 1 << 18
_MAX_STREAMS = 200
_ERRORS = (
    OSError, EOFError, ValueError, RuntimeError, NotImplementedError, KeyError,
    zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError,
    sqlite3.Error,
)  # fmt: skip


def copied_share(deleted: Iterable[str], left: Iterable[str]) -> float:
  """Share of the deleted code's windows that the remaining texts hold too."""
  left = list(left)
  windows = set().union(*map(_windows, deleted))
  copied = sum(_stands(window, left) for window in windows)
  return copied / len(windows) if windows else 0.0


def _stands(window: bytes, texts: Iterable[str]) -> bool:
  return any(window in _stream_of(text.encode()) for text in texts)


def _windows(text: str) -> set[bytes]:
  """Runs of tokens of the code; all of them where there are few."""
  tokens = _stream_of(text.encode()).split()
  size = min(_WINDOW, max(_FEW, len(tokens)))
  runs = (tokens[i : i + size] for i in range(len(tokens) - size + 1))
  return {b' %s ' % b' '.join(r) for r in runs if len({*r}) >= _DISTINCT}


def _stream_of(data: bytes) -> bytes:
  """The identifiers and literals of code, between spaces."""
  return (_cached if len(data) < _MAX_CACHED else _tokens)(data)


def _streams(data: bytes) -> Iterator[bytes]:
  """Yields the stream of code, and those of all that is written in it."""
  yield _stream_of(data)
  yield _tokens(data, is_code=False)
  if b'\\' in data:
    data = data.replace(b'\\\\', b'\0')
    for escape in (b'\\n', b'\\r', b'\\t'):
      data = data.replace(escape, b' ')
    yield _tokens(data.replace(b'\0', b'\\'), is_code=False)


def _tokens(data: bytes, is_code: bool = True) -> bytes:
  if is_code:
    data = _PROSE.sub(b' ', data)
  code = _SIGNATURE.sub(b' ', data)
  words = code.translate(_TO_SPACE)
  while b'  ' in words:  # a split would make a list of millions
    words = words.replace(b'  ', b' ')
  return b' %s ' % words.strip()


_cached = functools.lru_cache(maxsize=1024)(_tokens)


@functools.lru_cache(maxsize=1024)
def _words(text: str) -> set[str]:
  """Names and numbers too long to occur by chance."""
  return {
    w
    for w in re.findall(r'[A-Za-z_][A-Za-z0-9_]+|\d{6,}', text)
    if len(w) >= _MIN_NAME and not w.startswith('__')
  }


def _names(text: str) -> set[bytes]:
  """All names in a piece of code, as compiled files hold them."""
  text = textwrap.dedent(text)
  names: set[str] = set()
  for source in (text, f'def f():\n{textwrap.indent(text, " ")}'):
    with contextlib.suppress(SyntaxError, ValueError):
      for node in ast.walk(python_source.parse(source)):
        for field in ('id', 'attr', 'arg'):
          names.add(getattr(node, field, None) or '')
      break
  return {bytes([len(n)]) + n.encode() for n in names if 0 < len(n) < 256}


def _holds(data: bytes, names: set[bytes], size: int) -> bool:
  """True if all the names stand within so many bytes."""
  if len(names) < _FEW or not all(name in data for name in names):
    return False
  starts = range(0, len(data), size)
  near = (data[start : start + 2 * size] for start in starts)
  return any(all(name in part for name in names) for part in near)


def scan(
  files: Mapping[str, bytes], deleted: Iterable[str], left: Iterable[str]
) -> tuple[str, ...]:
  """Paths of the files that hold a copy, unpacked where they are packed.

  Args:
    files: contents to search, by path.
    deleted: pieces of deleted code.
    left: texts of the package and its tests that stay; their contents are no
      secret.
  """
  deleted, left = list(deleted), list(left)
  windows = set().union(*map(_windows, deleted))
  windows = {window for window in windows if not _stands(window, left)}
  names = set().union(*map(_words, deleted)) - set().union(*map(_words, left))
  words = [name.encode() for name in names]
  secret = [text for text in deleted if windows & _windows(text)]
  compiled = [(_names(text), _NEAR + 4 * len(text)) for text in secret]

  def is_copy(is_text: bool, part: bytes) -> bool:
    for stream in _streams(part):
      if any(window in stream for window in windows):
        return True
    return not is_text and (
      any(word in part for word in words)
      or any(_holds(part, *names) for names in compiled)
    )

  return tuple(
    path
    for path, data in sorted(files.items())
    if any(is_copy(*part) for part in _parts(data))
  )


def _parts(data: bytes) -> Iterator[tuple[bool, bytes]]:
  """Yields the content itself and all it unpacks to, each after `is_text`."""
  is_text = _is_text(data)
  yield is_text, data
  budget = _MAX_BYTES
  for part in _unpacked(data, 0):
    budget -= len(part)
    if budget < 0:
      break
    yield is_text and _is_text(part), part
  if is_text:
    return
  for encoding in ('utf-16-le', 'utf-16-be'):
    yield False, data.decode(encoding, 'replace').encode()


def _is_text(data: bytes) -> bool:
  try:
    return '\0' not in data.decode()
  except UnicodeDecodeError:
    return False


def _unpacked(data: bytes, depth: int) -> Iterator[bytes]:
  if depth < _MAX_DEPTH:
    for part in _layers(data):
      yield part
      yield from _unpacked(part, depth + 1)


def _layers(data: bytes) -> Iterator[bytes]:
  """Yields what each format that the bytes may have unpacks them to."""
  layers = [_deflated(data), _based(data)]
  if data.startswith(b'SQLite format 3\0'):
    layers.append(_sqlite(data))
  if b'PK\x03\x04' in data[: 1 << 16]:
    layers.append(_zip(data))
  if data[257:262] == b'ustar':
    layers.append(_tar(data))
  for magic, opener in (
    (b'\x1f\x8b', gzip.open),
    (b'BZh', bz2.open),
    (b'\xfd7zXZ', lzma.open),
  ):
    if data.startswith(magic):
      layers.append(_stream(data, opener))
  for layer in layers:
    with contextlib.suppress(*_ERRORS):  # until the format is damaged
      yield from layer


def _based(data: bytes) -> Iterator[bytes]:
  for match in itertools.islice(_BASE64.finditer(data), _MAX_STREAMS):
    run = match[0].translate(bytes.maketrans(b'-_', b'+/'), b'\r\n=')
    run = run[: len(run) - (len(run) % 4 == 1)]
    part = binascii.a2b_base64(run + b'=' * (-len(run) % 4))
    if part.startswith(_PACKED) or _is_text(part):
      yield part


def _sqlite(data: bytes) -> Iterator[bytes]:
  """Yields the columns of each table: pages split long values, rows do not."""
  connection = sqlite3.connect(':memory:')
  try:
    connection.deserialize(data)
    connection.text_factory = bytes
    tables = connection.execute(
      "SELECT name FROM sqlite_master WHERE type = 'table'"
    ).fetchall()
    for (name,) in tables:
      quoted = name.decode('utf-8', 'replace').replace('"', '""')
      rows = connection.execute(f'SELECT * FROM "{quoted}"')
      yield b'\n'.join(v for row in rows for v in row if isinstance(v, bytes))
  finally:
    connection.close()


def _zip(data: bytes) -> Iterator[bytes]:
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    for info in archive.infolist():
      if not info.is_dir():
        with archive.open(info) as file:
          yield file.read(_MAX_PART)


def _tar(data: bytes) -> Iterator[bytes]:
  with tarfile.open(fileobj=io.BytesIO(data)) as archive:
    for member in archive:
      file = archive.extractfile(member) if member.isreg() else None
      if file is not None:
        yield file.read(_MAX_PART)


def _stream(data: bytes, opener) -> Iterator[bytes]:
  with opener(io.BytesIO(data)) as file:
    yield file.read(_MAX_PART)


def _deflated(data: bytes) -> Iterator[bytes]:
  """Yields zlib streams anywhere within, as git objects and pickles hold."""
  matches = re.finditer(rb'\x78[\x01\x5e\x9c\xda]', data)
  for match in itertools.islice(matches, _MAX_STREAMS):
    try:
      part = zlib.decompressobj().decompress(data[match.start() :], _MAX_PART)
    except zlib.error:
      continue
    if len(part) >= _MIN_STREAM:
      yield part
