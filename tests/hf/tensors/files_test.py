"""Safetensors by byte range: the library's values, and no damage unnamed."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from composer_jax.hf.tensors import cast, files
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
  with files.Folder(folder) as found:
    assert found.tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
      raw = found.tensors[name]
      assert raw.shape == array.shape
      for start, stop in ((0, array.size), (array.size // 3, array.size)):
        np.testing.assert_array_equal(
          found.read(raw, start, stop), array.reshape(-1)[start:stop]
        )


def test_files_written_in_pieces_are_the_librarys(tmp_path):
  safetensors.numpy.save_file(ARRAYS, tmp_path / 'theirs', {'format': 'pt'})
  with files.Folder(tmp_path, ['theirs']) as theirs:
    order = list(theirs.tensors.values())
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
  assert (tmp_path / 'ours').read_bytes() == (tmp_path / 'theirs').read_bytes()


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
      _edit_index(lambda places: places.pop('a.weight')),
      f'{FILES[0]} holds a.weight, which {files.INDEX} does not name',
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
  with files.Folder(folder) as found:
    raw = found.tensors['d.weight']
    _cut(folder)
    with pytest.raises(ValueError, match=f'{FILES[1]} ended within d.weight'):
      found.read(raw, 0, 5)


@pytest.mark.parametrize('dtype', [ml_dtypes.bfloat16, np.float16])
def test_every_half_comes_back_from_float32(dtype):
  values = np.arange(2**16, dtype=np.uint16).view(dtype)
  wide = cast.cast(values, np.dtype(np.float32))
  with np.errstate(invalid='ignore'):
    is_number = ~np.isnan(values)
  np.testing.assert_array_equal(
    wide[is_number], values[is_number].astype(np.float32)
  )
  back = cast.cast(wide, np.dtype(dtype))
  np.testing.assert_array_equal(back.view(np.uint16), values.view(np.uint16))


def test_numbers_are_rounded_and_lost_payloads_stay_nan():
  bits = np.array([0x7F800001, 0xFF800001, 0x3F808000, 0x3F818000], np.uint32)
  half = cast.cast(bits.view(np.float32), checkpoints.BFLOAT16)
  expected = [0x7FC0, 0xFFC0, 0x3F80, 0x3F82]
  np.testing.assert_array_equal(half.view(np.uint16), expected)
  half = cast.cast(bits.view(np.float32), checkpoints.FLOAT16)
  expected = [0x7E00, 0xFE00, 0x3C04, 0x3C0C]
  np.testing.assert_array_equal(half.view(np.uint16), expected)
