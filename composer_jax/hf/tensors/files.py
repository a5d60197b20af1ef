"""Reads safetensors files by byte range and writes them tensor by tensor.

The `safetensors` library checks every header (sizes, overlaps, dtypes). Values
are read with `pread` instead of its memory map, whose pages would count as this
process's memory, and written with `pwrite`, since the library writes whole
files from memory.
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

# Dtypes that can be read as values; tensors of others are only carried along.
DTYPES: dict[str, np.dtype] = {
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
  'F32': np.dtype(np.float32),
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
  'I32': np.dtype(np.int32),
  'I64': np.dtype(np.int64),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_BLOCK_BYTES = 2**25  # moved at once where nothing else sets a size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Raw:
  """A tensor in a file; `dtype` is that of the header, `start` a byte."""

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
  """Returns the bytes of a file before its tensors, given the header's text."""
  data = text.encode()
  return len(data).to_bytes(8, 'little') + data


def new_header(
  tensors: Iterable[tuple[str, str, tuple[int, ...], int]],
  metadata: dict[str, str] | None,
) -> dict[str, Any]:
  """Returns the header of a file of consecutive tensors.

  Args:
    tensors: (name, dtype, shape, bytes) of each tensor, in the file's order.
    metadata: content of `__metadata__`; None leaves it out.
  """
  header: dict[str, Any] = {} if metadata is None else {METADATA: metadata}
  end = 0
  for name, dtype, shape, num_bytes in tensors:
    entry = {'dtype': dtype, 'shape': list(shape)}
    header[name] = {**entry, 'data_offsets': [end, end := end + num_bytes]}
  return header


def write_fully(descriptor: int, data: memoryview, offset: int) -> None:
  done = 0
  while done < len(data):
    done += os.pwrite(descriptor, data[done:], offset + done)


def as_bytes(values: np.ndarray) -> memoryview:
  """Views a contiguous array, also of dtypes without a buffer, as bytes."""
  return values.reshape(-1).view(np.uint8).data


class Folder:
  """The safetensors files of one folder, with checked headers.

  Attributes:
    headers: {file: header}, in the order of the files' names.
    header_texts: {file: text} of headers that differ from `render_header`.
    tensors: {name: Raw}, file by file in the order of their bytes.
    index: text of the sharded index; None for a single file.
  """

  def __init__(
    self, path: str | os.PathLike, names: Iterable[str] | None = None
  ):
    """Reads the headers of some files, or of all that the index names.

    A ValueError names the file and the tensor that are damaged.
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
    for tensor, file in places.items():
      raw = self.tensors.get(tensor)
      if raw is None or raw.file != file:
        where = f'{raw.file} holds it' if raw else 'no file holds it'
        raise ValueError(
          f'{self.path / INDEX} says that {tensor} is in {file}, but {where}.'
        )

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
    # Not read_text, which changes the ends of lines.
    text = data.decode()
    header = json.loads(text)
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

  def fingerprint(self) -> dict[str, Any]:
    """Returns path, size, time and hash of the header of each file.

    Two finetunes of a model have equal sizes and headers; paths and times tell
    them apart.
    """
    described = {}
    for name, digest in self._hashes.items():
      path = (self.path / name).resolve()
      status = path.stat()
      described[name] = [str(path), status.st_size, status.st_mtime_ns, digest]
    return described

  def read_bytes(self, raw: Raw, start: int, into: memoryview) -> None:
    """Fills `into` with bytes of a tensor, from its byte `start` on."""
    if raw.file not in self._descriptors:
      path = self.path / raw.file
      self._descriptors[raw.file] = os.open(path, os.O_RDONLY)
    descriptor, done = self._descriptors[raw.file], 0
    while done < len(into):
      count = os.preadv(descriptor, [into[done:]], raw.start + start + done)
      if not count:
        raise ValueError(
          f'{self.path / raw.file} ended within {raw.name}: it has changed '
          'since its header was read.'
        )
      done += count

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
  """Returns the text of the index and {tensor: file}, both empty if none."""
  if not (path / INDEX).is_file():
    if not (path / SINGLE).is_file():
      raise ValueError(
        f'{path} holds neither {INDEX} nor {SINGLE}; it must be the folder of '
        'a Hugging Face checkpoint in the safetensors format.'
      )
    return None, {}
  try:
    text = (path / INDEX).read_bytes().decode()
    index = json.loads(text)
  except ValueError as error:
    raise ValueError(f'{path / INDEX} is not valid JSON ({error}).') from error
  places = index.get('weight_map') if isinstance(index, dict) else None
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
  """Writes a safetensors file whose tensors come in any order, in pieces.

  The file has its own name from the start; the caller has to show by a rename,
  of the file or of its folder, that it is whole.

  Attributes:
    tensors: {name: first and last offset}, in the order of the header.
  """

  def __init__(
    self,
    path: str | os.PathLike,
    header: dict[str, Any],
    text: str | None = None,
  ):
    """Creates the file.

    Args:
      path: file to write; an old one is replaced.
      text: text of that header; None is the text that the library writes.
    """
    places = {n: e['data_offsets'] for n, e in header.items() if n != METADATA}
    self.tensors: dict[str, list[int]] = places
    self._path = pathlib.Path(path)
    start = head(render_header(header) if text is None else text)
    self._start = len(start)
    self._left = sum(last - first for first, last in places.values())
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    self._descriptor = os.open(path, flags, 0o666)
    write_fully(self._descriptor, memoryview(start), 0)

  def write(self, name: str, data: memoryview, start: int = 0) -> None:
    """Writes bytes of a tensor, from its byte `start` on; each byte once."""
    first, last = self.tensors[name]
    assert start + len(data) <= last - first, name
    write_fully(self._descriptor, data, self._start + first + start)
    self._left -= len(data)

  def close(self) -> None:
    """Syncs the file to the disk; every byte must have been written."""
    assert not self._left, (self._path, self._left)
    os.fsync(self._descriptor)
    os.close(self._descriptor)


def sync_tree(folder: pathlib.Path) -> None:
  for parent, _, names in os.walk(folder):
    for name in names:
      with open(os.path.join(parent, name), 'rb') as file:
        os.fsync(file.fileno())
    files.fsync_directory(pathlib.Path(parent))


def blocks(folder: Folder, raw: Raw) -> Iterator[tuple[int, memoryview]]:
  """Yields (start, bytes) of a tensor of any dtype; the buffer is reused."""
  buffer = memoryview(bytearray(min(raw.num_bytes, _BLOCK_BYTES)))
  for start in range(0, raw.num_bytes, _BLOCK_BYTES):
    block = buffer[: raw.num_bytes - start]
    folder.read_bytes(raw, start, block)
    yield start, block
