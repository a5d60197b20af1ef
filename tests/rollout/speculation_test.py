"""Speculation changes how fast tokens come, and nothing else.

Drafts are scripted from what plain decoding sampled: some come true, others
are a token whose values are not finite, and some are missing.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models import decoder
from composer_jax.rollout import controller as controllers
from composer_jax.rollout import engine as engines
from composer_jax.rollout import options as options_lib
from composer_jax.rollout import sessions
from tests.rollout import faults_test, serving

# `faults_test` compiles the same plain programs.
OPTIONS = dataclasses.replace(faults_test.OPTIONS, num_pages=64)
SPECULATION = options_lib.Speculation(drafter='ngrams', depth=4)


@pytest.fixture(scope='module')
def config(make_config):
  return make_config(tie_embeddings=False)


@pytest.fixture(scope='module')
def policies(config, make_variables):
  return [decoder.policy(make_variables(config, i)) for i in range(2)]


def _scripted(whole, bad):
  """Returns a function that drafts by sessions' tokens, by first token.

  One draft of six is `bad`; for one position of eleven there is none.
  """
  known_VS = np.zeros((40, serving.LENGTH + 4), np.int32)
  for tokens_T in whole:
    known_VS[tokens_T[0], : len(tokens_T)] = tokens_T

  def draft(table, history_BS, positions_B, depth):
    del table
    first_B1 = history_BS[:, :1]
    at_BK = positions_B[:, None] + 1 + jnp.arange(depth)
    drafts_BK = jnp.asarray(known_VS)[first_B1, at_BK]
    drafts_BK = jnp.where((at_BK + first_B1) % 6 == 5, bad, drafts_BK)
    return jnp.where(at_BK % 11 == 9, sessions.NOT_SAMPLED, drafts_BK)

  return draft


def _drafting(config, policy, whole, bad, depth=4, **changes):
  options = dataclasses.replace(OPTIONS, speculation=SPECULATION, **changes)
  draft = _scripted(whole, bad)
  engine = engines.Engine(config, policy, 0, options, draft=draft)
  engine.controller = controllers.Controller((depth,))
  return engine


def _turns(**fields):
  """Returns two requests of each of five sessions, for four slots."""
  first = [
    # Of a single token, so that a pass has only the token it was given.
    serving.request(0, [0, *serving.tokens(0, 8)], new=1, **fields),
    serving.request(1, [1, *serving.tokens(1, 3)], new=14, **fields),
    serving.request(
      2, [2, *serving.tokens(2, 5)], new=13, **fields | {'temperature': 0.0}
    ),
    serving.request(3, [3], new=18, stop_tokens=(7, 11), **fields),
    serving.request(4, [4, *serving.tokens(4, 6)], new=60, **fields),
  ]
  # The fifth has as many tokens as there may be.
  second = [serving.request(i, [5, 6], new=9, **fields) for i in range(4)]
  return first, second


def _play(engine, **fields):
  first, second = _turns(**fields)
  turns = list(zip(first, serving.complete(engine, *first), strict=True))
  return turns + list(
    zip(second, serving.complete(engine, *second), strict=True)
  )


def _whole(turns):
  whole = {}
  for request, completion in turns:
    parts = whole.setdefault(request.session, [])
    parts += [request.context_T, completion.tokens_T]
  return [np.concatenate(parts) for parts in whole.values()]


def _assert_same(have, want):
  """Compares records; sums of log-probabilities run in another order."""
  for (_, actual), (_, expected) in zip(have, want, strict=True):
    for name in (
      'tokens_T',
      'policy_version_T',
      'context_version_T',
      'consumed_expert_ids_TMA',
      'consumed_version_T',
    ):
      np.testing.assert_array_equal(
        getattr(actual, name), getattr(expected, name), name
      )
    for name in ('logprobs_T', 'raw_logprobs_T'):
      np.testing.assert_allclose(
        getattr(actual, name), getattr(expected, name), atol=1e-5
      )
    assert actual.stopped == expected.stopped
    assert actual.num_cached == expected.num_cached


@pytest.fixture(scope='module')
def plain(config, policies):
  """What plain decoding gives, and the policy with a token of NaN."""
  turns = _play(engines.Engine(config, policies[0], 0, OPTIONS))
  requests, completions = zip(*turns, strict=True)
  return turns, *faults_test._poisoned(policies[0], requests, completions)


def test_what_is_drafted_changes_no_token_and_no_record(config, plain):
  """At borders of pages, stop tokens and budgets, too; NaN is taken back."""
  want, policy, bad = plain
  engine = _drafting(config, policy, _whole(want), bad)
  _assert_same(_play(engine), want)
  kept_X = engine.controller.kept_X
  # Passes keep from a single token to all of one pass.
  assert kept_X[0] and kept_X[4] and kept_X[1:4].sum()
  # Some positions have no draft, and the last of a budget needs none.
  num_tokens = (np.arange(1, 6) * kept_X).sum()
  assert num_tokens < engine.stats().sampled_tokens


def _take(chosen, depth, num_rows, rate):
  counts_X = np.zeros(depth + 1, int) if depth else None
  chosen.take(counts_X, num_rows, 10, 10 / rate)


def _run(rates, dispatches, slow=range(0)):
  """Returns the rate of all dispatches, and the last one's depth.

  Dispatches in `slow` are measured as 1,000 times as long as they are.
  """
  chosen = controllers.Controller((0, 2, 4))
  seconds = 0.0
  for i in range(dispatches):
    depth = chosen.choose(8)
    seconds += 10 / rates[depth]
    _take(chosen, depth, 8, rates[depth] / (1000 if i in slow else 1))
  return 10 * dispatches / seconds, depth


def test_a_depth_runs_where_it_is_faster_and_costs_little_where_it_is_not():
  rate, depth = _run({0: 1.0, 2: 0.4, 4: 0.2}, 3000)
  assert depth == 0 and rate > 0.985
  rate, depth = _run({0: 1.0, 2: 1.2, 4: 1.7}, 5000)
  assert depth == 4 and rate > 0.98 * 1.7
  # Not for less than measurements vary by.
  assert _run({0: 1.0, 2: 1.01, 4: 0.9}, 300)[1] == 0


def test_first_trials_are_short_and_the_dearest_wait():
  costly = {0: 1.0, 2: 0.5, 4: 1 / 3}
  assert _run(costly, 32)[0] == 1.0
  for dispatches, least in ((35, 0.92), (100, 0.97), (300, 0.985)):
    assert _run(costly, dispatches)[0] > least


@pytest.mark.parametrize('first', [0, 2, 33, 34, 40, 69, 104])
def test_a_slow_dispatch_holds_no_depth_back(first):
  """In a trial or beside one; and a whole trial of them not for long."""
  for rates in ({0: 1.0, 2: 0.8, 4: 0.6}, {0: 1.0, 2: 1.2, 4: 1.7}):
    slow = range(first, first + 1)
    assert _run(rates, 5000, slow)[0] > 0.97 * max(rates.values())
    slow = range(first, first + 20)
    assert _run(rates, 8000, slow)[0] > 0.94 * max(rates.values())


def test_dispatches_that_truncate_are_measured_apart():
  chosen = controllers.Controller((0, 4))
  for _ in range(200):
    for truncates in (False, True):
      depth = chosen.choose(8, truncates)
      rate = (2.0 if truncates else 0.5) if depth else 1.0
      counts_X = np.zeros(depth + 1, int) if depth else None
      chosen.take(counts_X, 8, 10, 10 / rate, truncates)
  assert (chosen.choose(8, False), chosen.choose(8, True)) == (0, 4)


def test_a_controller_notices_that_drafts_come_true_no_more():
  chosen = controllers.Controller((0, 4))
  depths = []
  for i in range(400):
    depths.append(chosen.choose(3))
    rate = (0.5 if i >= 200 else 2.0) if depths[-1] else 1.0
    _take(chosen, depths[-1], 3, rate)
  assert depths[199] == 4
  assert np.mean(depths[-100:]) < 1


def test_what_cannot_be_drafted_is_refused(config):
  with pytest.raises(ValueError, match='depth must be 2 or 4; got 3'):
    options_lib.Speculation(drafter='ngrams', depth=3)
  with pytest.raises(ValueError, match="'none', 'ngrams', 'heads'.*'eagle'"):
    options_lib.Speculation(drafter='eagle')
  options = options_lib.ServingOptions(
    speculation=options_lib.Speculation(drafter='heads')
  )
  for value in (None, 'ngrams', {'drafter': 'ngrams'}):
    with pytest.raises(ValueError, match=r'speculation must be a Speculation'):
      dataclasses.replace(OPTIONS, speculation=value)
  with pytest.raises(ValueError, match="'heads', and the model has none"):
    options_lib.served(config, options)


@pytest.mark.slow
@pytest.mark.parametrize('depth', [2, 4])
@pytest.mark.parametrize(
  'how',
  [{'top_k': 3}, {'top_p': 0.6, 'temperature': 0.8}, {'min_p': 0.2}],
)
def test_truncated_sampling_stays_the_same(config, policies, how, depth):
  options = dataclasses.replace(OPTIONS, num_top=2)
  want = _play(engines.Engine(config, policies[0], 0, options), **how)
  requests, completions = zip(*want, strict=True)
  policy, bad = faults_test._poisoned(policies[0], requests, completions)
  engine = _drafting(config, policy, _whole(want), bad, depth, num_top=2)
  have = _play(engine, **how)
  _assert_same(have, want)
  for (_, actual), (_, expected) in zip(have, want, strict=True):
    np.testing.assert_array_equal(actual.top_ids_TX, expected.top_ids_TX)
  assert engine.controller.kept_X[1:].sum()


@pytest.mark.slow
@pytest.mark.parametrize('on_swap', ['keep', 'refresh'])
def test_a_draft_is_verified_by_the_weights_of_the_swap(
  config, policies, on_swap
):
  """Plain decoding that swaps behind the same token samples the same."""
  request = serving.request(0, [1, *serving.tokens(0, 7)], new=24)

  def swapped(engine, is_due):
    engine.submit(request)
    while not is_due():
      engine.step()
    engine.swap(policies[1], 5)
    return [(request, serving.finish(engine)[request.session])]

  options = dataclasses.replace(OPTIONS, on_swap=on_swap)
  first = engines.Engine(config, policies[0], 0, options)
  (whole,) = serving.complete(first, request)
  engine = _drafting(
    config,
    policies[0],
    [np.concatenate([request.context_T, whole.tokens_T])],
    bad=9,
    on_swap=on_swap,
  )
  have = swapped(engine, lambda: engine.stats().sampled_tokens > 3)
  count = int((have[0][1].policy_version_T == 0).sum())
  assert 5 < count < 24
  stepwise = dataclasses.replace(options, decode_steps=1)
  plain = engines.Engine(config, policies[0], 0, stepwise)
  # A dispatch of one token may be under way, which the swap reads.
  want = swapped(
    plain, lambda: plain.stats().sampled_tokens == count - 1 and plain._unread
  )
  assert int((want[0][1].policy_version_T == 0).sum()) == count
  _assert_same(have, want)
