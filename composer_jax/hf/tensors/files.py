"""Safetensors files: read by byte range, written tensor by tensor.

The `safetensors` library judges every header (sizes, overlaps, dtypes); data
go through `pread` into our own buffers instead of its memory map, whose pages
would count as this process's memory, and out through `pwrite`, since the
library writes whole files from memory.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import blake3
import ml_dtypes
import numpy as np
import safetensors

from composer_jax.core import files

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
METADATA = '__metadata__'

# What this package computes with; other dtypes are only carried along.
DTYPES: dict[str, np.dtype] = {
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
  'F32': np.dtype(np.float32),
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
  'I32': np.dtype(np.int32),
  'I64': np.dtype(np.int64),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Bytes moved at once where nothing else sets a size.
BLOCK_BYTES = 2**25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Raw:
  """A tensor as a file holds it.

  Attributes:
    file: its file's name, without a folder.
    dtype: as the header spells it.
    start: of its first byte in the file.
  """

  name: str
  file: str
  dtype: str
  shape: tuple[int, ...]
  start: int
  num_bytes: int


def render_header(header: dict[str, Any]) -> str:
  """Returns the text of a header, padded, as the library writes it."""
  text = json.dumps(header, separators=(',', ':'), ensure_ascii=False)
  return text + ' ' * (-len(text.encode()) % 8)


def head(text: str) -> bytes:
  """Returns the bytes before the data."""
  data = text.encode()
  return len(data).to_bytes(8, 'little') + data


def _parse(data: bytes, path: pathlib.Path) -> tuple[str, Any]:
  """Returns a JSON text and its value; no key may be there twice."""

  def unique(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
      keys = [key for key, _ in pairs]
      twice = next(key for key in keys if keys.count(key) > 1)
      raise ValueError(f'{twice!r} is there twice')
    return found

  try:
    # Not read_text, which changes the ends of lines.
    text = data.decode()
    return text, json.loads(text, object_pairs_hook=unique)
  except ValueError as error:
    raise ValueError(f'{path} is not valid JSON ({error}).') from error


def new_header(
  tensors: Iterable[tuple[str, str, tuple[int, ...], int]],
  metadata: dict[str, str] | None,
) -> dict[str, Any]:
  """Lays (name, dtype, shape, bytes) out one behind the other."""
  header: dict[str, Any] = {} if metadata is None else {METADATA: metadata}
  end = 0
  for name, dtype, shape, num_bytes in tensors:
    entry = {'dtype': dtype, 'shape': list(shape)}
    header[name] = {**entry, 'data_offsets': [end, end := end + num_bytes]}
  return header


def read_fully(descriptor: int, into: memoryview, offset: int) -> int:
  """Fills `into` from a file; returns the bytes read, fewer at its end."""
  done = 0
  while done < len(into):
    count = os.preadv(descriptor, [into[done:]], offset + done)
    if not count:
      break
    done += count
  return done


def write_fully(descriptor: int, data: memoryview, offset: int) -> None:
  done = 0
  while done < len(data):
    done += os.pwrite(descriptor, data[done:], offset + done)


def as_bytes(values: np.ndarray) -> memoryview:
  """Views a contiguous array, also of dtypes without a buffer, as bytes."""
  return values.reshape(-1).view(np.uint8).data


class Folder:
  """The safetensors files of one folder, whose headers are sound.

  Attributes:
    path: of the folder.
    headers: {file: header}, in the order of the files' names.
    header_texts: {file: text}, where it is not what `render_header` gives.
    tensors: {name: Raw}, file by file in the order of their bytes.
    index: text of the sharded index; None for a single file.
  """

  def __init__(
    self, path: str | os.PathLike, names: Iterable[str] | None = None
  ):
    """Reads and checks all headers, of the files named or of the index.

    Raises:
      ValueError: names the file, and the tensor where there is one.
      OSError: a file cannot be read.
    """
    self.path = pathlib.Path(path)
    self._descriptors: dict[str, int] = {}
    self._hashes: dict[str, str] = {}
    self._starts: dict[str, int] = {}
    self.header_texts: dict[str, str] = {}
    self.index, places = None, {}
    if names is None:
      self.index, places = _read_index(self.path)
      names = sorted(set(places.values())) or [SINGLE]
    for name in names:
      if not (self.path / name).is_file():
        tensor = next((t for t, file in places.items() if file == name), '')
        raise ValueError(
          f'{self.path / INDEX} says that {tensor} is in {name}, and there is '
          f'no such file in {self.path}; copy it there.'
        )
    self.headers = {name: self._read_header(name) for name in names}
    self.tensors: dict[str, Raw] = {}
    for name in self.headers:
      self._add(name)
    if places:
      self._compare(places)

  def _read_header(self, name: str) -> dict[str, Any]:
    path = self.path / name
    try:
      with safetensors.safe_open(path, framework='np'):
        pass
    except safetensors.SafetensorError as error:
      raise ValueError(
        f'{path} is not a whole safetensors file ({error}); fetch it again.'
      ) from error
    with path.open('rb') as file:
      data = file.read(int.from_bytes(file.read(8), 'little'))
    self._starts[name] = 8 + len(data)
    self._hashes[name] = blake3.blake3(data).hexdigest()
    text, header = _parse(data, path)
    if text != render_header(header):
      self.header_texts[name] = text
    return header

  def _add(self, name: str) -> None:
    header = {k: v for k, v in self.headers[name].items() if k != METADATA}
    for tensor in sorted(header, key=lambda k: header[k]['data_offsets']):
      if tensor in self.tensors:
        raise ValueError(
          f'{tensor} is in both {self.tensors[tensor].file} and {name} of '
          f'{self.path}; keep one of them.'
        )
      entry = header[tensor]
      first, last = entry['data_offsets']
      self.tensors[tensor] = Raw(
        name=tensor,
        file=name,
        dtype=entry['dtype'],
        shape=tuple(entry['shape']),
        start=self._starts[name] + first,
        num_bytes=last - first,
      )

  def _compare(self, places: dict[str, str]) -> None:
    """Raises unless index and headers agree."""
    for tensor, file in places.items():
      found = self.tensors.get(tensor)
      if found is None or found.file != file:
        where = f'{found.file} holds it' if found else 'no file holds it'
        raise ValueError(
          f'{self.path / INDEX} says that {tensor} is in {file}, but {where}.'
        )
    for tensor, raw in self.tensors.items():
      if tensor not in places:
        raise ValueError(
          f'{self.path / raw.file} holds {tensor}, which {INDEX} does not name.'
        )

  def fingerprint(self) -> dict[str, Any]:
    """Returns what tells these files from any others.

    Two finetunes of a model have equal sizes and headers, hence the places and
    times too.
    """
    found = {}
    for name, digest in self._hashes.items():
      path = (self.path / name).resolve()
      status = path.stat()
      found[name] = [str(path), status.st_size, status.st_mtime_ns, digest]
    return found

  def read_bytes(self, raw: Raw, start: int, into: memoryview) -> None:
    """Fills `into` with bytes of a tensor, from its byte `start` on."""
    if raw.file not in self._descriptors:
      path = self.path / raw.file
      self._descriptors[raw.file] = os.open(path, os.O_RDONLY)
    descriptor = self._descriptors[raw.file]
    if read_fully(descriptor, into, raw.start + start) < len(into):
      raise ValueError(
        f'{self.path / raw.file} ended within {raw.name}: it has changed since '
        'its header was read.'
      )

  def read(self, raw: Raw, start: int, stop: int) -> np.ndarray:
    """Returns elements `start:stop` of a tensor, flat."""
    values = np.empty(stop - start, DTYPES[raw.dtype])
    self.read_bytes(raw, start * values.itemsize, as_bytes(values))
    return values

  def close(self) -> None:
    for descriptor in self._descriptors.values():
      os.close(descriptor)
    self._descriptors.clear()

  def __enter__(self) -> 'Folder':
    return self

  def __exit__(self, *unused) -> None:
    self.close()


def _read_index(path: pathlib.Path) -> tuple[str | None, dict[str, str]]:
  """Returns the text of the index and {tensor: file}; none of a single file."""
  if not (path / INDEX).is_file():
    if not (path / SINGLE).is_file():
      raise ValueError(
        f'{path} holds neither {INDEX} nor {SINGLE}; it must be the folder of '
        'a Hugging Face checkpoint in the safetensors format.'
      )
    return None, {}
  text, found = _parse((path / INDEX).read_bytes(), path / INDEX)
  places = found.get('weight_map') if isinstance(found, dict) else None
  if not isinstance(places, dict) or not places:
    raise ValueError(f'{path / INDEX} has no weight_map of tensors to files.')
  for tensor, file in places.items():
    if not isinstance(file, str) or pathlib.PurePath(file).name != file:
      raise ValueError(
        f'{path / INDEX} says that {tensor} is in {file!r}, which is not the '
        'name of a file beside it.'
      )
  return text, places


class SafetensorsWriter:
  """A safetensors file that takes its tensors in any order, in pieces.

  The file is under its own name from the start: its folder, or the caller's
  rename, must say when it is whole.
  """

  def __init__(
    self,
    path: str | os.PathLike,
    header: dict[str, Any],
    text: str | None = None,
  ):
    """Begins a file; `text` is that of the header, None the library's."""
    self._path = pathlib.Path(path)
    self._header = header
    first = head(render_header(header) if text is None else text)
    self._start = len(first)
    self._left = sum(
      entry['data_offsets'][1] - entry['data_offsets'][0]
      for name, entry in header.items()
      if name != METADATA
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    self._descriptor = os.open(path, flags, 0o666)
    write_fully(self._descriptor, memoryview(first), 0)

  def write(self, name: str, data: memoryview, start: int = 0) -> None:
    """Writes bytes of a tensor, from its byte `start` on, each once."""
    first, last = self._header[name]['data_offsets']
    assert start + len(data) <= last - first, name
    write_fully(self._descriptor, data, self._start + first + start)
    self._left -= len(data)

  def close(self) -> None:
    """Makes the file survive a power cut; every byte must be there."""
    assert not self._left, (self._path, self._left)
    os.fsync(self._descriptor)
    os.close(self._descriptor)


def sync_tree(folder: pathlib.Path) -> None:
  """Makes everything in a folder survive a power cut."""
  for parent, _, names in os.walk(folder):
    for name in names:
      with open(os.path.join(parent, name), 'rb') as file:
        os.fsync(file.fileno())
    files.fsync_directory(pathlib.Path(parent))


def blocks(folder: Folder, raw: Raw) -> Iterator[tuple[int, memoryview]]:
  """Yields (start, bytes) of a tensor of whatever dtype, in one buffer."""
  buffer = memoryview(bytearray(min(raw.num_bytes, BLOCK_BYTES)))
  for start in range(0, raw.num_bytes, BLOCK_BYTES):
    block = buffer[: raw.num_bytes - start]
    folder.read_bytes(raw, start, block)
    yield start, block
