"""What bundles become is a checkpoint that orbax alone reads."""

import pathlib

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from composer_jax.core import trees
from composer_jax.delta import checkpoints
from composer_jax.delta.format import identity


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


def test_errors_name_the_cure(tmp_path):
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'file').touch()
  one = np.ones(1)
  with pytest.raises(ValueError, match='full is not empty; name another'):
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
