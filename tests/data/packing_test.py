"""Laws of packing: nothing lost, nothing doubled, nothing joined."""

import collections

import numpy as np
import pytest

from composer_jax.data import packing

LENGTHS = [5, 0, 40, 1, 17, 3, 64, 2, 9]


def covered(rows):
  """Counts how often each token of each document appears."""
  return collections.Counter(
    (piece.document, t)
    for row in rows
    for piece in row
    for t in range(piece.start, piece.stop)
  )


def every_token_once(rows):
  tokens = {(d, t) for d, n in enumerate(LENGTHS) for t in range(n)}
  return covered(rows) == collections.Counter(tokens)


@pytest.mark.parametrize('seq_len', [2, 7, 16, 64, 500])
@pytest.mark.parametrize('fim_rate', [0.0, 0.5, 1.0])
def test_concatenate_covers_every_token_once(seq_len, fim_rate):
  rows = packing.concatenate(
    LENGTHS,
    seq_len,
    rng=np.random.default_rng(1),
    fim_rate=fim_rate,
    fim_overhead=4,
  )
  assert every_token_once(rows)
  for i, row in enumerate(rows):
    used = sum(p.stop - p.start + 4 * p.is_fim for p in row)
    assert used == seq_len or (i == len(rows) - 1 and used < seq_len)


def test_concatenate_by_hand():
  """One document of 5 tokens in rows of 2."""
  rows = packing.concatenate([5], 2, rng=np.random.default_rng(0))
  cuts = [[(p.start, p.stop) for p in row] for row in rows]
  assert cuts == [[(0, 2)], [(2, 4)], [(4, 5)]]


def test_fim_rate_is_the_share_of_long_pieces():
  lengths = [64] * 2000
  rows = packing.concatenate(
    lengths, 68, rng=np.random.default_rng(0), fim_rate=0.5, fim_overhead=4
  )
  pieces = [p for row in rows for p in row]
  long = [p for p in pieces if p.stop - p.start >= 32]
  share = sum(p.is_fim for p in long) / len(long)
  # Five standard deviations; pieces without room in their row stay plain.
  assert 0.4 < share < 0.56
  assert not any(p.is_fim for p in pieces if p.stop - p.start < 32)


@pytest.mark.parametrize('num_open', [1, 2, 64])
def test_first_fit_keeps_documents_whole(num_open, monkeypatch):
  monkeypatch.setattr(packing, '_NUM_OPEN', num_open)
  rows = packing.first_fit(LENGTHS, 64, rng=np.random.default_rng(0))
  assert every_token_once(rows)
  for row in rows:
    assert sum(p.stop for p in row) <= 64
    assert all(p.start == 0 and p.stop == LENGTHS[p.document] for p in row)


def test_first_fit_fills_rows_completely():
  rows = packing.first_fit([32, 32, 64], 64, rng=np.random.default_rng(0))
  assert len(rows) == 2


def test_first_fit_wastes_less_than_half(monkeypatch):
  """Two rows at most half full would have been one row."""
  monkeypatch.setattr(packing, '_NUM_OPEN', 500)
  lengths = np.random.default_rng(3).integers(1, 65, 500).tolist()
  rows = packing.first_fit(lengths, 64, rng=np.random.default_rng(0))
  assert len(rows) <= 2 * sum(lengths) / 64 + 1


def test_first_fit_refuses_what_does_not_fit():
  with pytest.raises(ValueError, match=r'64 tokens .*seq_len \(63\)'):
    packing.first_fit(LENGTHS, 63, rng=np.random.default_rng(0))


def test_fill_by_hand():
  documents = [np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)]
  masks = [None, np.array([True, True])]
  row = (
    packing.DocumentPart(document=0, start=0, stop=3),
    packing.DocumentPart(document=1, start=0, stop=2),
  )
  filled = packing.fill(
    row, 7, lambda p: (documents[p.document], masks[p.document])
  )
  np.testing.assert_array_equal(filled.tokens_T, [5, 6, 7, 8, 9, 0, 0])
  np.testing.assert_array_equal(filled.segment_ids_T, [1, 1, 1, 2, 2, 0, 0])
  np.testing.assert_array_equal(filled.positions_T, [0, 1, 2, 0, 1, 0, 0])
  np.testing.assert_array_equal(filled.loss_weights_T, [0, 1, 1, 0, 1, 0, 0])


def test_an_empty_row_is_all_padding():
  filled = packing.fill((), 3, lambda p: (np.zeros(0, np.int32), None))
  assert not filled.segment_ids_T.any()
  assert not filled.loss_weights_T.any()
