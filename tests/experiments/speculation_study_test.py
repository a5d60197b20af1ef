"""Passes are counted from drafts at every place as an engine takes them."""

import numpy as np

from composer_jax.rollout import drafts
from experiments.studies.speculation import analyze, replayed

# Two turns, of 6 and of 2 sampled tokens.
EPISODE = replayed.Episode(
  tokens_T=np.arange(12, dtype=np.int32),
  sampled_T=np.isin(np.arange(12), [2, 3, 4, 5, 6, 7, 10, 11]),
  seed=(1, 2, 3),
  version=0,
  group=2,
  temperature=1.0,
)


def test_a_pass_keeps_right_drafts_and_a_token_behind_them():
  right_TK = np.arange(12)[:, None] + 1 + np.arange(4)
  wrong_TK = right_TK.copy()
  wrong_TK[1, 1] = wrong_TK[5, 0] = 99
  found = list(replayed.passes(EPISODE, wrong_TK, 4))
  # Tokens 2 and 3, then 4 to 7, of which the last pass drafts no more.
  assert found == [(2, 6, [1, 4]), (10, 2, [2])]
  assert list(replayed.passes(EPISODE, right_TK, 1)) == [
    (2, 6, [1, 1, 1]),
    (10, 2, [1]),
  ]
  assert list(replayed.passes(EPISODE, 0 * right_TK, 3)) == [
    (2, 6, [0] * 6),
    (10, 2, [0, 0]),
  ]


def test_a_model_and_its_heads_draft_for_the_tokens_that_they_predict():
  # The model is right everywhere, the head where the token is even.
  places_T = np.arange(12)
  second_T = np.where(places_T % 2, -5, places_T + 2)
  drawn_KT = np.stack([places_T + 1, second_T])
  model_TK = replayed.by_model(drawn_KT)
  np.testing.assert_array_equal(model_TK[4], [5, 6, 7, 8])
  heads_TK = replayed.by_heads(drawn_KT)
  np.testing.assert_array_equal(heads_TK[5], [6, -1, -1, -1])
  assert heads_TK[4, 0] == -5


def test_what_an_episode_repeats_is_drafted_from_its_own_tokens():
  tokens_T = np.array([5, 1, 2, 3, 4, 9, 1, 2, 3, 4], np.int32)
  sampled_T = np.arange(10) >= 7
  episode = replayed.Episode(tokens_T, sampled_T, (0,), 0, 0, 1.0)
  (made_TK,) = replayed.by_ngrams([episode], drafts.NGrams(64), 16)
  np.testing.assert_array_equal(made_TK[6], [2, 3, 4, 9])
  assert (made_TK[9] == -1).all()  # No pass begins behind the last token.


def test_a_line_of_the_table_has_tokens_a_pass_by_depth():
  row = dict(
    run=1, stage='rl', drafter='heads', kind='all', age=0, episodes=1, earlier=0
  )
  rows = [
    row | dict(depth=1, tokens=30, passes=20, right=[10]),
    row | dict(depth=2, tokens=30, passes=15, right=[10, 5]),
  ]
  last = analyze.table(rows).splitlines()[-1]
  assert last == '| 1 | rl | heads | all | 1.50 | 2.00 |  |  | 0.67 0.33 |'
