"""However weights are cut into blocks, the same boxes are encoded."""

import math

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from composer_jax.delta import chunking, rebuild
from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity
from composer_jax.delta.format import identity as grids
from composer_jax.delta.store import objects as stores
from tests.delta import identities
from tests.delta import publish_test as t


@pytest.fixture
def small_chunks(monkeypatch):
  """Small arrays have many boxes, and ragged ones."""

  def of(shape):
    return grids.Grid(shape, tuple(max(1, min(n, 4)) for n in shape))

  monkeypatch.setattr(grids, 'of', of)


def cut(array, borders):
  """Blocks of an array between the borders of each axis."""
  spans = [
    list(zip([0, *b], [*b, n], strict=True))
    for b, n in zip(borders, array.shape, strict=True)
  ]
  for place in np.ndindex(*map(len, spans)):
    index = tuple(spans[axis][i] for axis, i in enumerate(place))
    values = array[tuple(slice(*ends) for ends in index)]
    yield 'w', str(array.dtype), array.shape, index, values


@st.composite
def cases(draw):
  shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
  size = math.prod(shape)
  dtype = draw(st.sampled_from([np.uint8, np.float32, ml_dtypes.bfloat16]))
  array = np.arange(size, dtype=np.uint8).reshape(shape).astype(dtype)
  if draw(st.booleans()):
    array = np.array(array, order='F')
  borders = [
    sorted(draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=3)))
    if n > 1 else []
    for n in shape
  ]  # fmt: skip
  return array, borders, draw(st.randoms())


@pytest.mark.usefixtures('small_chunks')
@hypothesis.settings(
  max_examples=150,
  deadline=None,
  database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(cases())
def test_every_partition_gives_every_box_once(case):
  array, borders, random = case
  grid = grids.of(array.shape)
  blocks = list(cut(array, borders))
  random.shuffle(blocks)
  cutter = chunking.Cutter()
  found = {}
  for block in blocks:
    for (name, number), values in cutter.add(block):
      assert name == 'w' and number not in found
      found[number] = chunking._flat(values).tobytes()
  assert not cutter.waiting
  wanted = {
    number: array[tuple(slice(*ends) for ends in grid.chunk(number))].tobytes()
    for number in range(grid.num_chunks)
  }
  assert found == wanted
  # Bytes of the boxes that some block holds in part, each once.
  in_part = {
    number
    for _, _, _, index, values in blocks
    for number in (grid.intersecting(index) if values.size else ())
    if any(
      a > c or b < d
      for (a, b), (c, d) in zip(index, grid.chunk(number), strict=True)
    )
  }
  assert cutter.cut_bytes == sum(len(wanted[number]) for number in in_part)
  # One block less is a hole of its size, one more an overlap.
  last = random.choice(blocks)
  if last[4].size:
    cutter = chunking.Cutter()
    for block in blocks:
      if block is not last or len(blocks) == 1:
        list(cutter.add(block))
    if len(blocks) > 1:
      with pytest.raises(ValueError, match='w: .* elements are in chunks'):
        chunking.identify(block for block in blocks if block is not last)
      list(cutter.add(last))
    assert not cutter.waiting
    with pytest.raises(ValueError, match='w: the block at .* overlaps'):
      list(cutter.add(last))


def test_whole_boxes_are_views_and_flat_ones_are_not_copied():
  array = np.arange(24, dtype=np.float32).reshape(4, 6)
  (((_, number), values),) = chunking.Cutter().add(
    ('w', 'float32', (4, 6), ((0, 4), (0, 6)), array)
  )
  assert number == 0 and np.shares_memory(values, array)
  assert np.shares_memory(chunking._flat(values), array)
  turned = chunking._flat(array.T)
  assert turned.tolist() == array.T.reshape(-1).tolist()


def test_blocks_that_disagree_are_named():
  array = np.zeros((2, 3), np.float32)
  cutter = chunking.Cutter()
  list(cutter.add(('w', 'float32', (4, 3), ((0, 2), (0, 3)), array)))
  for block, message in (
    (('w', 'float32', (5, 3), ((2, 4), (0, 3)), array), r'w: .*\(5, 3\) after'),
    (('w', 'float32', (4, 3), ((2, 4), (0, 3)), array[:1]), 'not of the size'),
    (('w', 'float32', (4, 3), ((3, 5), (0, 3)), array), 'leaves the array'),
    (('w', 'float32', (4, 3), ((2, 4),), array), 'leaves the array'),
    (
      ('v', 'int32', (2, 3), ((0, 2), (0, 3)), array),
      'v: dtype .*block of dtype',
    ),
  ):
    with pytest.raises(ValueError, match=message):
      list(cutter.add(block))


@pytest.mark.usefixtures('small_chunks')
def test_manifests_do_not_depend_on_how_weights_are_cut(tmp_path):
  rng = np.random.default_rng(0)
  array = rng.normal(size=(13, 10)).astype(np.float32)
  names = set()
  for place, borders in enumerate(([[], []], [[4, 8], [4]], [[1, 6], [5]])):
    store = stores.Store(tmp_path / str(place))
    publisher = t.open_publisher(store)
    for v in range(3):
      info = publisher.publish(cut(array + v, borders), v)
    assert info.cut_bytes == (array.nbytes if place == 2 else 0) or place == 2
    found = rebuild.read_manifest(store, t.pointer(store).head)
    assert len(found.tensors[0].chunks) == 12
    assert info.target_id == identities.target_id({'w': array + 2})
    t.assert_same_bits(t.served(store), {'w': array + 2})
    names.add(t.pointer(store).head.manifest)
  assert len(names) == 1


def test_what_does_not_decode_is_not_published(tmp_path, monkeypatch):
  """A broken codec, or broken memory, is found before anyone sees it."""
  store = stores.Store(tmp_path)
  publisher = t.open_publisher(store)
  publisher.publish(t.blocks(t.weights(0)), 0)
  before = store.read_pointer('run')
  encode = coding.encode

  def wrong(values, base, **options):
    bits = identity.flat_bits(values).copy()
    bits[-1] ^= 1
    return encode(bits.view(values.dtype), base, **options)

  monkeypatch.setattr(coding, 'encode', wrong)
  with pytest.raises(
    ValueError, match='bias .chunk 0.: codec . does not decode'
  ):
    publisher.publish(t.blocks(t.weights(1)), 1)
  monkeypatch.undo()
  assert store.read_pointer('run') == before
  assert publisher.publish(t.blocks(t.weights(1)), 1).kind == 'delta'


def test_blocks_may_lie_anywhere_in_memory(tmp_path):
  store = stores.Store(tmp_path)
  publisher = t.open_publisher(store)
  for v in range(2):
    raw = bytes(np.arange(4 * 300 + 1).astype(np.uint8) + np.uint8(v))
    odd = np.frombuffer(raw, np.float32, 300, 1)
    strided = np.stack([odd, odd]).T
    arrays = {'odd': odd, 'strided': strided}
    publisher.publish(t.blocks(arrays), v)
    t.assert_same_bits(t.served(store), arrays)
