"""Laws of fill-in-the-middle: a permutation plus marks, which can be undone."""

import numpy as np
import pytest

from composer_jax.text import fim
from composer_jax.text import tokenizer as tokenizer_lib
from tests.text import infilled

T = tokenizer_lib.Tokenizer
MARKS = [T.FIM_PREFIX, T.FIM_MIDDLE, T.FIM_SUFFIX]


class Scripted:
  """A generator whose draws are known."""

  def __init__(self, cuts, spm):
    self._cuts = cuts
    self._uniforms = iter([0.0, 0.0 if spm else 0.9])

  def random(self):
    return next(self._uniforms)

  def integers(self, low, high, size):
    del low, high, size
    return np.array(self._cuts)


def test_psm_and_spm_by_hand():
  ids = np.array([T.BOS, 20, 21, 22, 23, T.EOD], np.int32)
  pre, mid, suf = MARKS
  psm = [T.BOS, pre, 20, suf, 23, mid, 21, 22, T.EOD]
  spm = [T.BOS, pre, suf, 23, mid, 20, 21, 22, T.EOD]
  for is_spm, expected in ((False, psm), (True, spm)):
    got = fim.transform(ids, Scripted([3, 1], is_spm), rate=0.5)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(infilled.restore(got), ids)


@pytest.mark.parametrize('framed', [False, True])
def test_restore_undoes_transform(framed):
  body = np.arange(30, 70, dtype=np.int32)
  ids = np.concatenate([[T.BOS], body, [T.EOD]]) if framed else body
  ids = ids.astype(np.int32)
  for seed in range(50):
    out = fim.transform(ids, np.random.default_rng(seed))
    assert out.dtype == np.int32
    assert len(ids) + 3 <= len(out) <= len(ids) + fim.OVERHEAD
    ended = ids if framed else np.append(ids, T.EOD)
    np.testing.assert_array_equal(infilled.restore(out), ended)


def test_rate_is_the_share_and_zero_changes_nothing():
  ids = np.arange(30, 70, dtype=np.int32)
  rng = np.random.default_rng(0)
  changed = sum(len(fim.transform(ids, rng, 0.3)) > 40 for _ in range(2000))
  # Five standard deviations of a binomial: 5 * sqrt(2000 * 0.21) = 102.
  assert abs(changed - 600) < 102
  assert fim.transform(ids, rng, 0.0) is ids


def test_the_shortest_documents_survive():
  for ids in ([], [T.BOS], [T.EOD], [T.BOS, T.EOD], [40]):
    out = fim.transform(np.array(ids, np.int32), np.random.default_rng(1))
    assert sorted(set(out) & set(MARKS)) == sorted(MARKS)
    assert out[-1] == T.EOD


def test_errors():
  ids = np.array([T.FIM_MIDDLE, 30], np.int32)
  with pytest.raises(ValueError, match='already holds'):
    fim.transform(ids, np.random.default_rng(0))
  with pytest.raises(ValueError, match='each fill-in-the-middle mark once'):
    infilled.restore(ids)
