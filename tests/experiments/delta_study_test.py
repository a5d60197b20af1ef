"""Recordings come back as they were; README.md has the table of the results."""

import ml_dtypes
import numpy as np

from benchmarks import (
  delta_bounds,
  delta_peers,
  delta_recordings,
  delta_terabyte,
  delta_world,
)
from experiments.studies import results
from experiments.studies.delta import analyze


def test_recordings_come_back_bit_for_bit(tmp_path):
  kept = {
    'params/a': np.array([1, -0.0, np.nan, np.inf]).astype(ml_dtypes.bfloat16),
    'bias/b': np.array(3.5, np.float32),
  }
  folder = tmp_path / 'case'
  for step in (11, 9, 10):
    delta_recordings.save(
      folder, 'policy', step, kept | {'step': np.float32([step])}
    )
  assert not delta_recordings.names(tmp_path)
  delta_recordings.finish(folder, {'steps': 11})
  assert delta_recordings.names(tmp_path) == [folder]
  assert delta_recordings.about(folder) == {'steps': 11}
  dtypes = {n: str(a.dtype) for n, a in kept.items()} | {'step': 'float32'}
  found = delta_recordings.load(folder, 'policy', dtypes)
  assert [float(f['step'][0]) for f in found] == [9, 10, 11]
  for name, array in kept.items():
    assert found[0][name].dtype == array.dtype
    assert found[0][name].tobytes() == array.tobytes()


def _step():
  rng = np.random.default_rng(0)
  masters = 0.02 * rng.standard_normal((64, 512))
  update = 1e-5 * rng.standard_normal(masters.shape)
  return [m.astype(ml_dtypes.bfloat16) for m in (masters, masters + update)]


def test_peers_are_undone():
  base, array = _step()
  bits = delta_bounds.bits_of(array)
  assert (
    delta_peers.undo_xor(delta_peers.xor(base, array), base) == bits
  ).all()
  count = int((bits != delta_bounds.bits_of(base)).sum())
  blob = delta_peers.gaps(base, array)
  assert (delta_peers.undo_gaps(blob, base, count) == bits).all()


def test_bounds_in_closed_form():
  # Of four weights of one exponent two change, one up and one down: each of
  # the two entropies is a bit, of four masks and of two steps.
  base = np.array([1.0, 1.5, 1.25, 1.75]).astype(ml_dtypes.bfloat16)
  array = base.view(np.uint16) + np.array([0, 1, -1, 0])
  array = array.astype(np.uint16).view(ml_dtypes.bfloat16)
  assert delta_bounds.of_array(base, array) == (6.0, 6.0)
  # A bit of exponent that says all: of the upper binade all go up.
  base = np.array([1.0, 1.0, 2.0, 2.0]).astype(ml_dtypes.bfloat16)
  array = base.view(np.uint16) + np.uint16([0, 0, 1, 1])
  assert delta_bounds.of_array(base, array.view(ml_dtypes.bfloat16)) == (4.0, 0)
  assert delta_bounds.changed({'a': base}, {'a': base}) == (0, 4)


def test_order_of_codes_is_that_of_the_floats():
  codes = np.array([-np.inf, -1.0, -0.0, 0.0, 1e-40, 2.0, np.inf])
  codes = codes.astype(ml_dtypes.bfloat16)
  order = delta_bounds.ordered(delta_bounds.bits_of(codes))
  assert (np.diff(order) > 0).all() and order[3] - order[2] == 1


def test_a_terabyte_in_closed_form():
  # 1000 s of encoding, 100 GB that take 80 s each way, 500 s of applying.
  found = delta_terabyte.seconds(
    ratio=10, encode=0.5, apply=1.0, link=10, cores=2
  )
  assert found['one after another'] == 1000 + 80 + 80 + 500
  assert found['overlapped'] == 1000 + 500


def test_depth_of_the_tree():
  found = [delta_world.depth(n) for n in (1, 2, 5, 6, 21, 22, 85)]
  assert found == [1, 2, 2, 3, 3, 4, 4]


def test_table_and_readme_are_those_of_the_results():
  rows = results.read(analyze.ROOT / 'results')
  assert {r['stage'] for r in rows} == {'setup', 'steps', 'coded'}
  table = (analyze.ROOT / 'table.md').read_text()
  assert table == analyze.table(rows)
  assert table in (analyze.ROOT / 'README.md').read_text()
