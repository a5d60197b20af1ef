"""Safetensors by byte range: the library's values, and no damage unnamed."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from composer_jax.hf.tensors import files
from tests.hf import checkpoints

ARRAYS = {
  'a.weight': np.arange(12, dtype=np.float32).reshape(3, 4),
  'b.weight': np.arange(7, dtype=np.float32).astype(ml_dtypes.bfloat16),
  'c.scale': np.array([], np.float32),
  'd.weight': np.arange(5, dtype=np.float16),
}


@pytest.fixture
def folder(tmp_path):
  return checkpoints.write(tmp_path / 'x', {}, ARRAYS, num_files=2)


def test_ranges_are_those_of_the_library(folder):
  with files.Folder(folder) as opened:
    assert opened.tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
      raw = opened.tensors[name]
      assert raw.shape == array.shape
      for start, stop in ((0, array.size), (array.size // 3, array.size)):
        np.testing.assert_array_equal(
          opened.read(raw, start, stop), array.reshape(-1)[start:stop]
        )


def test_files_written_in_pieces_are_the_librarys(tmp_path):
  safetensors.numpy.save_file(ARRAYS, tmp_path / 'reference', {'format': 'pt'})
  with files.Folder(tmp_path, ['reference']) as reference:
    order = list(reference.tensors.values())
  header = files.new_header(
    [(raw.name, raw.dtype, raw.shape, raw.num_bytes) for raw in order],
    {'format': 'pt'},
  )
  writer = files.SafetensorsWriter(tmp_path / 'ours', header)
  for name, array in reversed(ARRAYS.items()):
    data = files.as_bytes(array)
    middle = len(data) // 2
    writer.write(name, data[middle:], middle)
    writer.write(name, data[:middle])
  writer.close()
  assert (tmp_path / 'ours').read_bytes() == (
    tmp_path / 'reference'
  ).read_bytes()


FILES = ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')


def _edit_index(change):
  def damage(folder):
    fields = json.loads((folder / files.INDEX).read_text())
    change(fields['weight_map'])
    (folder / files.INDEX).write_text(json.dumps(fields))

  return damage


def _cut(folder):
  data = (folder / FILES[1]).read_bytes()
  (folder / FILES[1]).write_bytes(data[:-1])


def _garble(folder):
  data = bytearray((folder / FILES[0]).read_bytes())
  data[8] ^= 1  # The brace that opens the header.
  (folder / FILES[0]).write_bytes(data)


def _empty(folder):
  (folder / FILES[0]).write_bytes(b'')


def _repeat(folder):
  (folder / FILES[1]).write_bytes((folder / FILES[0]).read_bytes())


@pytest.mark.parametrize(
  'damage, message',
  [
    (_cut, f'{FILES[1]} is not a whole safetensors file'),
    (_garble, f'{FILES[0]} is not a whole safetensors file'),
    (_empty, f'{FILES[0]} is not a whole safetensors file'),
    (_repeat, f'is in both {FILES[0]} and {FILES[1]}'),
    (
      lambda folder: (folder / FILES[1]).unlink(),
      f'{files.INDEX} says that b.weight is in {FILES[1]}, and there is no',
    ),
    (
      lambda folder: (folder / files.INDEX).unlink(),
      f'holds neither {files.INDEX} nor {files.SINGLE}',
    ),
    (
      lambda folder: (folder / files.INDEX).write_text('{"weight_map": 1}'),
      f'{files.INDEX} has no weight_map',
    ),
    (
      lambda folder: (folder / files.INDEX).write_text('{'),
      f'{files.INDEX} is not valid JSON',
    ),
    (
      _edit_index(lambda places: places.update(z=FILES[0])),
      f'z is in {FILES[0]}, but no file holds it',
    ),
    (
      _edit_index(lambda places: places.update({'a.weight': FILES[1]})),
      f'a.weight is in {FILES[1]}, but {FILES[0]} holds it',
    ),
    (
      _edit_index(lambda places: places.update(z='../z.safetensors')),
      "z is in '../z.safetensors', which is not the name of a file",
    ),
  ],
)
def test_damage_is_named(folder, damage, message):
  damage(folder)
  with pytest.raises(ValueError, match=message):
    files.Folder(folder)


def test_a_file_that_shrinks_while_it_is_read_is_named(folder):
  with files.Folder(folder) as opened:
    raw = opened.tensors['d.weight']
    _cut(folder)
    with pytest.raises(ValueError, match=f'{FILES[1]} ended within d.weight'):
      opened.read(raw, 0, 5)
