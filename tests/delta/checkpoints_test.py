"""What bundles become is a checkpoint that orbax alone reads, and compared."""

import os
import pathlib

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from composer_jax.core import trees
from composer_jax.delta import checkpoints
from composer_jax.delta.format import identity
from tests.delta import bundles


def random_bits(dtype, shape):
  dtype = np.dtype(dtype)
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
  return (bits & (dtype == np.bool_ or 255)).view(dtype)[..., 0]


@pytest.fixture(scope='module')
def arrays():
  embed = random_bits(ml_dtypes.bfloat16, (24, 64))
  embed[0, :4] = [np.nan, -0.0, np.inf, 1e-40]
  return {
    'params/embed': embed,
    'params/empty': np.zeros((3, 0), np.float32),
    'params/scalar': np.array(3, ml_dtypes.bfloat16),
    'selection_bias': random_bits(np.float64, (2, 3)),
  } | {
    f'dtypes/{name}': random_bits(dtype, (5, 7))
    for name, dtype in identity.DTYPES.items()
    if name not in ('uint4', 'int4')
  }


@pytest.fixture(scope='module')
def folder(arrays, tmp_path_factory):
  made = tmp_path_factory.mktemp('orbax') / 'made'
  checkpoints.write(arrays, made)
  return made


def same(found, wanted):
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
    assert np.asarray(found[name]).tobytes() == array.tobytes(), name


def test_orbax_alone_reads_the_tree_back(arrays, folder):
  with ocp.StandardCheckpointer() as reader:
    found = reader.restore(folder, checkpoints.read_plain(folder))
  wanted = {name: array for name, array in arrays.items() if array.size}
  same(trees.flatten_names(found), wanted)
  same(trees.flatten_names(checkpoints.read_plain(folder)), wanted)


def test_what_was_written_is_compared(arrays, folder):
  checkpoints.verify(folder, bundles.from_arrays(arrays))
  other = arrays['selection_bias'].copy()
  other.view(np.uint64)[1, 2] ^= 1
  changed = bundles.from_arrays(arrays | {'selection_bias': other})
  with pytest.raises(ValueError, match='made: selection_bias is not what was'):
    checkpoints.verify(folder, changed)


def test_a_flipped_bit_passes_orbax_and_is_found(tmp_path):
  """Why what is written is compared: orbax restores it and says nothing."""
  arrays = {'x': random_bits(ml_dtypes.bfloat16, (24, 64))}
  held = bundles.from_arrays(arrays)
  checkpoints.write(arrays, tmp_path / 'made')
  files = [p for p in (tmp_path / 'made').rglob('*') if p.is_file()]
  path = max(files, key=os.path.getsize)
  data, wrong = bytearray(path.read_bytes()), 0
  for at in range(len(data) // 2, len(data) // 2 + 8):
    data[at] ^= 1
    path.write_bytes(data)
    try:
      found = checkpoints.read_plain(tmp_path / 'made')['x']
    except ValueError:
      found = None  # The compression or a checksum noticed.
    if found is not None and found.tobytes() != arrays['x'].tobytes():
      wrong += 1
      with pytest.raises(ValueError, match='x is not what was written'):
        checkpoints.verify(tmp_path / 'made', held)
    data[at] ^= 1
  assert wrong > 0


def test_errors_name_the_cure(tmp_path):
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'file').touch()
  one = np.ones(1)
  with pytest.raises(ValueError, match='full is not empty.* Name another'):
    checkpoints.write({'x': one}, tmp_path / 'full')
  for names in (('a/b', 'a.b'), ('a', 'a/b'), ('a/b', 'a')):
    with pytest.raises(ValueError, match='rename one'):
      checkpoints.write(dict.fromkeys(names, one), tmp_path / 'made')
  with pytest.raises(ValueError, match='x is uint4, which orbax cannot write'):
    checkpoints.write({'x': one.astype(ml_dtypes.uint4)}, tmp_path / 'made')
  assert not pathlib.Path(tmp_path / 'made').exists()


def test_orbax_warns_of_nothing(tmp_path, caplog):
  checkpoints.write({'x': np.ones(3)}, tmp_path / 'made')
  assert caplog.records == []
