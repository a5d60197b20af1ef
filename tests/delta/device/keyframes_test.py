"""A keyframe is an orbax checkpoint, and its files are read box by box."""

import io
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
import zstandard

from composer_jax.core import trees
from composer_jax.delta import orbax_files, weights_held
from composer_jax.delta.device import keyframes

P = jax.sharding.PartitionSpec
AUTO = jax.sharding.AxisType.Auto
# Small, so that tiny arrays have several files.
CHUNK_BYTES = 512


def bits(array):
  return np.asarray(array).tobytes()


def make_tree():
  random = np.random.default_rng(0)
  embed = random.normal(size=(24, 64)).astype(ml_dtypes.bfloat16)
  embed[0, :4] = [np.nan, -0.0, np.inf, 1e-40]
  return {
    'params': {
      'embed': jnp.asarray(embed),
      'experts': jnp.asarray(random.normal(size=(2, 8, 6, 4)), jnp.float32),
      'norm': jnp.asarray(random.normal(size=7), jnp.float16),
      'scalar': jnp.bfloat16(3),
      'codes': jnp.asarray(random.integers(0, 255, (8, 16)), jnp.uint8),
      'scales': jnp.asarray(random.normal(size=(8, 4)), jnp.float8_e4m3fn),
      'empty': jnp.zeros((3, 0), jnp.float32),
    },
    'selection_bias': random.normal(size=(2, 3)),
  }


MESHES = {
  'one': ((1, 1), {}),
  'eight': ((2, 4), {'embed': P('a', 'b'), 'experts': P(None, ('a', 'b'))}),
  'turned': ((4, 2), {'embed': P('b', 'a'), 'experts': P('b', 'a')}),
  'six': ((3, 2), {'embed': P('a', 'b'), 'experts': P(None, None, 'a')}),
}


def shard(tree, mesh_name):
  sizes, specs = MESHES[mesh_name]
  devices = jax.devices()[: math.prod(sizes)]
  mesh = jax.make_mesh(
    sizes, ('a', 'b'), axis_types=(AUTO, AUTO), devices=devices
  )

  def place(name, leaf):
    if not isinstance(leaf, jax.Array):
      return leaf
    spec = specs.get(name.rpartition('/')[2], P())
    return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

  return trees.map_names(place, tree)


@pytest.fixture(scope='module')
def tree():
  return make_tree()


@pytest.fixture(scope='module')
def folders(tree, tmp_path_factory):
  made = {}
  for name in MESHES:
    made[name] = tmp_path_factory.mktemp('keyframes') / name
    keyframes.write(shard(tree, name), chunk_bytes=CHUNK_BYTES)(made[name])
  return made


def with_elements(tree):
  return {n: a for n, a in trees.flatten_names(tree).items() if a.size}


def regions(shape):
  """Yields the whole, a corner, and slices that cross chunks."""
  yield tuple((0, n) for n in shape)
  yield tuple((0, min(1, n)) for n in shape)
  yield tuple((n // 3, n - n // 4) for n in shape)
  yield tuple((max(0, n - 1), n) for n in shape)


@pytest.mark.parametrize('mesh', MESHES)
def test_orbax_alone_reads_the_tree_back(tree, folders, mesh):
  with ocp.StandardCheckpointer() as reader:
    like = jax.tree.map(
      lambda a: np.empty(a.shape, a.dtype), keyframes.read(folders[mesh])
    )
    found = trees.flatten_names(reader.restore(folders[mesh], like))
  wanted = with_elements(tree)
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    assert found[name].dtype == array.dtype and bits(found[name]) == bits(array)


@pytest.mark.parametrize('mesh', MESHES)
def test_regions_are_read_from_the_files(tree, folders, mesh):
  files = orbax_files.open_folder(folders[mesh])
  for name, array in trees.flatten_names(tree).items():
    array = np.asarray(array)
    for index in regions(array.shape):
      found = files.read(name, array.dtype, array.shape, index)
      want = array[tuple(slice(*ends) for ends in index)]
      assert (found.shape, found.dtype) == (want.shape, want.dtype)
      assert bits(found) == bits(np.ascontiguousarray(want)), (name, index)


def test_tensorstore_reads_the_same(tree, folders):
  folder = folders['eight']
  for name, array in with_elements(tree).items():
    place = folder / orbax_files.folder_of(name)
    store = {'driver': 'file', 'path': f'{place}/'}
    opened = tensorstore.open({'driver': 'zarr', 'kvstore': store}).result()
    assert bits(opened.read().result()) == bits(array)


def test_sharded_arrays_lie_in_files_of_shards(folders):
  """A shard of [24, 64] on (2, 4) is [12, 16] of bf16, 384 bytes: one file."""
  sides = json.loads((folders['eight'] / 'params.embed/.zarray').read_text())
  assert sides['chunks'] == [12, 16]
  # Replicas are written once: as many files as there are chunks.
  names = {p.name for p in (folders['eight'] / 'params.embed').iterdir()}
  assert names == {'.zarray'} | {f'{i}.{j}' for i in range(2) for j in range(4)}


@pytest.mark.parametrize('mesh', MESHES)
def test_no_file_holds_more_than_was_said(folders, mesh):
  for path in folders[mesh].glob('*/.zarray'):
    fields = json.loads(path.read_text())
    itemsize = np.dtype(fields['dtype']).itemsize
    assert math.prod(fields['chunks']) * itemsize <= CHUNK_BYTES


def test_a_region_needs_the_files_that_intersect_it(tree, folders):
  folder, fetched = folders['eight'], []
  paths = [str(p.relative_to(folder)) for p in folder.rglob('*')]

  def fetch(path):
    fetched.append(path)
    return (folder / path).read_bytes()

  files = orbax_files.Files(paths, fetch)
  array = tree['params']['embed']
  index = ((2, 14), (20, 31))  # Rows of both halves, columns of one quarter.
  want = ['params.embed/.zarray', 'params.embed/0.1', 'params.embed/1.1']
  arguments = ('params/embed', array.dtype, array.shape, index)
  assert files.needed(*arguments) == want
  assert bits(files.read(*arguments)) == bits(array[2:14, 20:31])
  assert sorted(fetched) == sorted(want)
  # What was fetched is kept.
  files.read(*arguments)
  assert len(fetched) == 3


def test_a_small_cache_costs_fetches_and_nothing_else(tree, folders):
  folder, count = folders['eight'], 0
  paths = [str(p.relative_to(folder)) for p in folder.rglob('*')]

  def fetch(path):
    nonlocal count
    count += 1
    return (folder / path).read_bytes()

  files = orbax_files.Files(paths, fetch, cache_bytes=1)
  array = tree['params']['embed']
  whole = tuple((0, n) for n in array.shape)
  for _ in range(2):
    found = files.read('params/embed', array.dtype, array.shape, whole)
    assert bits(found) == bits(array)
  assert count == 1 + 2 * 8


def damaged(folder, path, data):
  """Returns the files of a folder with one replaced, None for a missing one."""
  paths = [p.relative_to(folder).as_posix() for p in folder.rglob('*')]
  if data is None:
    paths.remove(path)
  return orbax_files.Files(
    paths, lambda p: data if p == path else (folder / p).read_bytes()
  )


def metadata(folder, **changes):
  fields = json.loads((folder / 'params.embed/.zarray').read_text())
  return json.dumps(fields | changes).encode()


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(shape=[24, 65]), r'shape is \[24, 65\].*\[24, 64\]'),
    (dict(dtype='<f4'), "dtype is '<f4'.*bfloat16"),
    (dict(chunks=[12, 0]), 'chunks .* between 1'),
    (dict(chunks=[12, 2**40]), 'chunks .* between 1'),
    (dict(chunks=[12]), 'chunks .* between 1'),
    (dict(chunks=[12, True]), 'chunks .* between 1'),
    (dict(chunks='x' * 2), 'chunks .* between 1'),
    (dict(chunks=None), 'chunks .* between 1'),
    (dict(order='F'), "order is 'F'"),
    (dict(filters=[{'id': 'x'}]), 'filters'),
    (dict(compressor={'id': 'blosc'}), "compressor 'blosc' is neither"),
    (dict(compressor=[]), 'compressor .* is neither'),
    (dict(zarr_format=3), 'zarr_format is 3'),
    (dict(chunks=[6, 16]), r'params.embed/0.0 holds 193 or more bytes'),
    (dict(chunks=[24, 16]), r'params.embed/0.0 holds 384 bytes; .* has 768'),
    (dict(compressor=None), r'params.embed/0.0 holds \d+'),
  ],
)
def test_metadata_that_does_not_fit_is_refused(folders, changes, message):
  folder = folders['eight']
  files = damaged(folder, 'params.embed/.zarray', metadata(folder, **changes))
  with pytest.raises(ValueError, match=message):
    files.read('params/embed', ml_dtypes.bfloat16, (24, 64), ((0, 24), (0, 64)))


def frame(data, **options):
  return zstandard.ZstdCompressor(**options).compress(data)


@pytest.mark.parametrize(
  'path, data, message',
  [
    ('params.embed/.zarray', None, 'lacks params.embed/.zarray'),
    ('params.embed/1.2', None, 'lacks params.embed/1.2'),
    ('params.embed/.zarray', b'[' * 10_000, 'is not JSON'),
    ('params.embed/.zarray', b' ' * 2**17, 'metadata has at most'),
    ('params.embed/.zarray', b'[]', 'not a JSON object'),
    ('params.embed/1.2', b'', 'holds 0 bytes'),
    ('params.embed/1.2', b'not zstd', 'not a zstd frame'),
    ('params.embed/1.2', frame(bytes(383)), 'holds 383 bytes'),
    ('params.embed/1.2', frame(bytes(2**26)), 'holds 385 or more bytes'),
    (
      'params.embed/1.2',
      frame(bytes(2**26), write_content_size=False),
      'holds 385 or more bytes',
    ),
    ('params.embed/1.2', frame(bytes(384)) * 2, 'holds 385 or more bytes'),
  ],
)
def test_files_that_do_not_fit_are_refused(folders, path, data, message):
  files = damaged(folders['eight'], path, data)
  with pytest.raises(ValueError, match=message):
    files.read('params/embed', ml_dtypes.bfloat16, (24, 64), ((0, 24), (0, 64)))


def test_any_byte_of_a_file_may_be_wrong(tree, folders):
  """Either a region, which the manifest's hashes judge, or a ValueError."""
  folder, random = folders['eight'], np.random.default_rng(1)
  whole, refused = ((0, 24), (0, 64)), 0
  for name in ('.zarray', '0.0'):
    path = f'params.embed/{name}'
    data = (folder / path).read_bytes()
    for at in range(len(data)):
      changed = bytearray(data)
      changed[at] ^= 1 << random.integers(8)
      files = damaged(folder, path, bytes(changed))
      try:
        found = files.read('params/embed', ml_dtypes.bfloat16, (24, 64), whole)
        assert found.shape == (24, 64)
      except ValueError:
        refused += 1
      files = damaged(folder, path, data[:at])
      with pytest.raises(ValueError):
        files.read('params/embed', ml_dtypes.bfloat16, (24, 64), whole)
  assert refused > 100


def test_a_flipped_bit_passes_orbax(tree, folders, tmp_path):
  """Why the hashes are ours: orbax restores other values and says nothing."""
  folder = tmp_path / 'flipped'
  keyframes.write({'x': tree['params']['embed']})(folder)
  data = bytearray((folder / 'x' / '0.0').read_bytes())
  wrong = 0
  for at in range(len(data) // 2, len(data) // 2 + 8):
    data[at] ^= 1
    (folder / 'x' / '0.0').write_bytes(data)
    try:
      found = keyframes.read(folder)['x']
      wrong += bits(found) != bits(tree['params']['embed'])
    except ValueError:
      pass  # The entropy coder noticed.
    data[at] ^= 1
  assert wrong > 0


def test_what_was_written_is_compared(tree, folders, tmp_path):
  arrays = {n: np.asarray(a) for n, a in trees.flatten_names(tree).items()}
  held = weights_held.from_arrays(arrays)
  keyframes.verify(folders['eight'], held)
  arrays['params/norm'] = np.nextafter(arrays['params/norm'], np.float16(9))
  with pytest.raises(ValueError, match=r'eight: params/norm \(box 0\) is not'):
    keyframes.verify(folders['eight'], weights_held.from_arrays(arrays))


def test_a_sharded_target_gives_its_sharding(tree, folders):
  like = {'params': {'embed': shard(tree, 'turned')['params']['embed']}}
  folder = folders['eight']
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    found = reader.restore(
      folder,
      args=ocp.args.PyTreeRestore(
        like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
      ),
    )['params']['embed']
  assert found.sharding == like['params']['embed'].sharding
  assert bits(found) == bits(tree['params']['embed'])


def test_a_file_that_was_decoded_twice_is_counted_once(folders):
  folder = folders['eight']
  region = ('params/embed', ml_dtypes.bfloat16, (24, 64), ((0, 1), (0, 1)))
  others = [region]

  def fetch(path):
    # As another thread that came when the lock of this one was gone.
    if path.endswith('0.0') and others:
      files._busy.clear()
      files.read(*others.pop())
    return (folder / path).read_bytes()

  paths = [p.relative_to(folder).as_posix() for p in folder.rglob('*')]
  files = orbax_files.Files(paths, fetch)
  files.read(*region)
  held = sum(chunk.nbytes for chunk in files._chunks.values())
  assert files._held_bytes == held > 0


def test_errors_name_the_cure(tmp_path):
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'file').touch()
  with pytest.raises(ValueError, match='full is not empty'):
    keyframes.write({'x': np.ones(3)})(tmp_path / 'full')
  for tree in (
    {'a': {'b': np.ones(1)}, 'a.b': np.ones(1)},
    {'a': np.ones(1), 'a/b': np.ones(1)},
    {'a/b': np.ones(1), 'a': np.ones(1)},
  ):
    with pytest.raises(ValueError, match="rename one, or .*'packed'"):
      keyframes.write(tree)
  files = orbax_files.Files([], io.BytesIO)
  with pytest.raises(ValueError, match=r'x: \(\(0, 4\),\) is no region'):
    files.read('x', np.float32, (3,), ((0, 4),))


def test_orbax_warns_of_nothing(tmp_path, caplog):
  keyframes.write({'x': np.ones(3)})(tmp_path / 'made')
  assert caplog.records == []
