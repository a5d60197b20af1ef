"""Tensors that the model does not have, kept as they are for exports.

Layers for multi-token prediction and vision towers lie in an import directory
as in the source, of any dtype, quantised or not.
"""

import collections
import os
import pathlib
import re

import blake3

from composer_jax.checkpoint import hf_io, hf_source
from composer_jax.core import files

FOLDER = 'carried'


def show(source: hf_source.Source) -> None:
  """Prints what is carried along, a line for each layer or tower."""
  groups: collections.Counter[str] = collections.Counter()
  for name in source.carried:
    layer = re.match(r'model\.layers\.\d+', name.removeprefix(source.prefix))
    start = source.prefix + layer[0] if layer else name.partition('.')[0]
    groups[start] += 1
  for start, count in groups.items():
    print(f'Not modelled, carried along unchanged: {start}.* ({count} tensors)')


def carry(source: hf_source.Source, file: str, folder: pathlib.Path) -> None:
  """Copies what is not modelled of one file, unless that is done.

  The hash of each tensor is in the head of the copy.
  """
  tensors = source.folder.tensors
  raws = [tensors[n] for n in source.carried if tensors[n].file == file]
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
  writer = hf_io.Writer(temporary, hf_io.new_header(entries, hashes))
  for raw in raws:
    for start, block in hf_io.blocks(source.folder, raw):
      writer.write(raw.name, block, start)
  writer.close()
  os.replace(temporary, folder / file)
  files.fsync_directory(folder)


def open_carried(out: pathlib.Path) -> hf_io.Folder:
  """Opens what an import directory carries along."""
  folder = out / FOLDER
  return hf_io.Folder(folder, sorted(p.name for p in folder.iterdir()))


def copy(carried: hf_io.Folder, name: str, writer: hf_io.Writer) -> None:
  """Copies a tensor that is carried along into a file of an export.

  Raises:
    ValueError: it has changed since the import.
  """
  raw, digest = carried.tensors[name], blake3.blake3()
  for start, block in hf_io.blocks(carried, raw):
    digest.update(block)
    writer.write(name, block, start)
  if carried.headers[raw.file][hf_io.METADATA][name] != digest.hexdigest():
    raise ValueError(
      f'{name} in {carried.path / raw.file} has changed since it was imported; '
      'import the Hugging Face checkpoint again.'
    )
