"""Keeps stored tensors unchanged for exports: those that no array holds.

Layers for multi-token prediction and vision towers are stored in an import
directory as in the source, in any dtype, quantised or not; and codes and scales
of int4, beside the values that they stand for.
"""

import collections
import os
import pathlib
import re
from collections.abc import Iterable

import blake3

from composer_jax.core import files
from composer_jax.hf.tensors import files as hf_io
from composer_jax.hf.tensors import source as hf_source

FOLDER = 'carried'


def show(source: hf_source.SourceCheckpoint) -> None:
  """Prints the names of carried tensors, a line for each layer or tower."""
  groups: collections.Counter[str] = collections.Counter()
  for name in source.carried:
    layer = re.match(r'model\.layers\.\d+', name.removeprefix(source.prefix))
    start = source.prefix + layer[0] if layer else name.partition('.')[0]
    groups[start] += 1
  for start, count in groups.items():
    print(f'Not modelled, carried along unchanged: {start}.* ({count} tensors)')


def carry(
  source: hf_source.SourceCheckpoint, file: str, folder: pathlib.Path
) -> None:
  """Copies what is kept of one file, with its hashes, unless that exists."""
  tensors = source.folder.tensors
  raws = [tensors[n] for n in source.kept if tensors[n].file == file]
  if not raws or (folder / file).exists():
    return
  folder.mkdir(exist_ok=True)
  temporary = folder / f'.{file}.tmp'
  hashes = {}
  for raw in raws:
    digest = blake3.blake3()
    for _, block in hf_io.blocks(source.folder, raw):
      digest.update(block)
    hashes[raw.name] = digest.hexdigest()
  entries = [(raw.name, raw.dtype, raw.shape, raw.num_bytes) for raw in raws]
  writer = hf_io.SafetensorsWriter(temporary, hf_io.new_header(entries, hashes))
  for raw in raws:
    for start, block in hf_io.blocks(source.folder, raw):
      writer.write(raw.name, block, start)
  writer.close()
  os.replace(temporary, folder / file)
  files.fsync_directory(folder)


def open_carried(out: pathlib.Path, names: Iterable[str]) -> hf_io.Folder:
  """Opens the carried tensors of an import; a ValueError if one is missing."""
  folder = out / FOLDER
  listed = os.listdir(folder) if folder.is_dir() else []
  carried = hf_io.Folder(folder, sorted(n for n in listed if n[0] != '.'))
  for name in names:
    if name not in carried.tensors:
      raise ValueError(
        f'{folder} lacks {name}, which the import carried along; import the '
        'Hugging Face checkpoint again.'
      )
  return carried


def copy(
  carried: hf_io.Folder, name: str, writer: hf_io.SafetensorsWriter
) -> None:
  """Copies a carried tensor to an export; a ValueError if it has changed."""
  raw, digest = carried.tensors[name], blake3.blake3()
  for start, block in hf_io.blocks(carried, raw):
    digest.update(block)
    writer.write(name, block, start)
  hashes = carried.headers[raw.file].get(hf_io.METADATA, {})
  if hashes.get(name) != digest.hexdigest():
    raise ValueError(
      f'{name} in {carried.path / raw.file} has changed since it was imported; '
      'import the Hugging Face checkpoint again.'
    )
