"""Full caches, bad values and closed sessions affect no other session."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from tests.rollout import serving

OPTIONS = engines.EngineOptions(
  num_slots=4,
  max_len=serving.LENGTH,
  prefill_chunk=5,
  prefill_rows=2,
  decode_steps=3,
  page_size=4,
  num_pages=12,
)


@pytest.fixture(scope='module')
def config(make_config):
  # With tied embeddings a bad row would be a bad logit of every session.
  return make_config(tie_embeddings=False)


@pytest.fixture(scope='module')
def policy(config, make_variables):
  return decoder.policy(make_variables(config, 0))


@pytest.fixture
def make_engine(config, policy):
  def make(variables=policy, **changes):
    options = dataclasses.replace(OPTIONS, **changes)
    return engines.Engine(config, variables, 0, options)

  return make


def _poisoned(policy, requests, completions):
  """Makes the embedding of an unused token NaN; returns weights and token."""
  parts = [a.context_T for a in requests] + [c.tokens_T for c in completions]
  bad = max(set(range(40)) - set(np.concatenate(parts).tolist()))
  policy = jax.tree.map(np.array, policy)
  policy['params']['embedding'][bad] = np.nan
  return policy, bad


def _assert_nothing_held(engine):
  stats = engine.stats()
  assert (stats.sessions, stats.running, stats.waiting) == (0, 0, 0)
  assert stats.pages_free + stats.pages_cached == stats.pages


@pytest.mark.slow
def test_a_full_cache_makes_requests_wait_and_corrupts_nothing(
  config, policy, make_engine
):
  engine = make_engine()
  # Each session takes 36 tokens, nine of twelve pages, and then a second turn.
  requests = [
    serving.request(i, serving.tokens(i, 12), new=24) for i in range(6)
  ]
  first_turns = serving.complete(engine, *requests)
  assert engine.stats().sessions == 6
  more = [serving.request(i, [1], new=3) for i in range(6)]
  second_turns = serving.complete(engine, *more)
  for turn, next_turn, request in zip(
    first_turns, second_turns, requests, strict=True
  ):
    tokens_T = np.concatenate(
      [request.context_T, turn.tokens_T, [1], next_turn.tokens_T]
    )
    assert len(tokens_T) == serving.LENGTH
    logits_TV, routes_TMA = serving.recompute(
      config, [(policy, serving.LENGTH)], tokens_T
    )
    for start, completion in ((12, turn), (37, next_turn)):
      np.testing.assert_allclose(
        completion.logprobs_T,
        serving.logprobs_of(logits_TV / 1.3, completion, start),
        atol=1e-4,
      )
      np.testing.assert_array_equal(
        completion.consumed_expert_ids_TMA,
        routes_TMA[completion.routes_start :][
          : len(completion.consumed_expert_ids_TMA)
        ],
      )
  # Most sessions had lost their pages before the second turn.
  starts = [next_turn.routes_start for next_turn in second_turns]
  assert starts.count(0) >= 5
  for request in requests:
    engine.close(request.session)
  _assert_nothing_held(engine)


@pytest.mark.slow
def test_batch_invariant_bits_outlast_the_loss_of_pages(
  make_config, make_variables
):
  """Also across a swap with refresh to the same weights."""
  config = make_config(
    num_layers=2, tie_embeddings=False, numerics='batch_invariant'
  )
  policy = decoder.policy(make_variables(config, 0))
  options = dataclasses.replace(
    OPTIONS, page_size=32, num_pages=4, num_slots=2, prefill_chunk=16
  )

  def play(order, how):
    how_options = dataclasses.replace(options, on_swap=how)
    engine = engines.Engine(config, policy, 0, how_options)
    turns = [[serving.request(i, serving.tokens(i, 9)) for i in order]]
    turns.append([serving.request(i, [1, 2]) for i in order])
    first_turns = serving.complete(engine, *turns[0])
    for request in turns[1]:
      engine.submit(request)
    for _ in range(3):
      engine.step()
    engine.swap(policy, 0)
    outcomes = serving.finish(engine)
    second_turns = [outcomes[request.session] for request in turns[1]]
    return {
      i: (a, b)
      for i, a, b in zip(order, first_turns, second_turns, strict=True)
    }

  alone = {i: play([i], 'keep')[i] for i in (0, 3)}
  together = play([3, 1, 2, 0, 4], 'refresh')
  lost = 0
  for index, pair in alone.items():
    for ours, expected in zip(together[index], pair, strict=True):
      for name in ('tokens_T', 'logprobs_T', 'raw_logprobs_T'):
        np.testing.assert_array_equal(
          getattr(ours, name), getattr(expected, name)
        )
      routes_TMA = ours.consumed_expert_ids_TMA
      want_TMA = expected.consumed_expert_ids_TMA
      lost += len(routes_TMA) > len(want_TMA)
      np.testing.assert_array_equal(routes_TMA[-len(want_TMA) :], want_TMA)
  assert lost == 2


def test_values_that_are_not_finite_fail_their_own_request_alone(
  policy, make_engine
):
  requests = [serving.request(i, serving.tokens(i, 9)) for i in range(3)]
  want = serving.complete(make_engine(num_pages=64), *requests)
  poisoned, bad = _poisoned(policy, requests, want)
  engine = make_engine(num_pages=64)
  engine.swap(poisoned, 6)
  # Shares the pages of the first session's beginning.
  bad_T = np.concatenate([requests[0].context_T[:6], [bad], [1, 2, 3]])
  outcomes = serving.complete(engine, *requests, serving.request(66, bad_T))
  for actual, expected in zip(outcomes[:3], want, strict=True):
    for name in ('tokens_T', 'logprobs_T', 'consumed_expert_ids_TMA'):
      np.testing.assert_array_equal(
        getattr(actual, name), getattr(expected, name)
      )
  failure = outcomes[3]
  assert isinstance(failure, records.Failure)
  # The bad token's chunk begins at 5, or where the copied page ended.
  assert (failure.session, failure.version) == ('session 66', 6)
  assert failure.position in (4, 5)
  message = f'tokens from {failure.position} on of session .* version 6'
  assert re.search(message, failure.reason)
  assert not engine.is_open('session 66')
  assert engine.stats().failures == 1
  # The last token of a context is consumed by decode.
  (late,) = serving.complete(engine, serving.request(67, [1, 2, 3, bad]))
  assert (late.position, late.version) == (3, 6)


def test_bad_pages_do_not_harm_their_next_owner(policy, make_engine):
  # One session takes all pages, so the next session gets the bad ones.
  request = serving.request(0, serving.tokens(3, 20), new=20)
  (want,) = serving.complete(make_engine(num_pages=10), request)
  poisoned, bad = _poisoned(policy, [request], [want])
  engine = make_engine(poisoned, num_pages=10)
  for context_T in ([5] * 30 + [bad] + [5] * 6, [bad]):
    (failure,) = serving.complete(engine, serving.request(66, context_T, new=2))
    assert isinstance(failure, records.Failure)
    (got,) = serving.complete(engine, request)
    np.testing.assert_array_equal(got.logprobs_T, want.logprobs_T)
    engine.close('session 0')
  # The bad prompt is consumed anew and fails again.
  for _ in range(2):
    (failure,) = serving.complete(
      engine, serving.request(66, [1, 2, 3, bad, 4, 5], new=2)
    )
    assert (failure.session, failure.position) == ('session 66', 0)
  _assert_nothing_held(engine)


def test_bad_values_reach_no_session_through_pages_it_does_not_own(
  policy, make_engine
):
  """A short row's page table points at pages that it does not own."""
  short = serving.request(1, [7], new=3)
  (want,) = serving.complete(make_engine(), short)
  long = serving.request(2, serving.tokens(2, 9), new=24)
  poisoned, bad = _poisoned(policy, [short], [want])
  engine = make_engine(poisoned)
  # This session takes page 0 and keeps it.
  serving.complete(engine, serving.request(0, [5], new=1))
  engine.submit(long)
  for _ in range(3):
    engine.step()
  # A dispatch writes bad values; another one reads before they are reported.
  engine.submit(serving.request(0, [bad, 5], new=1))
  consumed = engine.stats().context_tokens
  while engine.stats().context_tokens == consumed:
    assert not engine.step()
  engine.submit(short)
  outcomes = serving.finish(engine)
  assert isinstance(outcomes['session 0'], records.Failure)
  np.testing.assert_array_equal(
    outcomes['session 1'].logprobs_T, want.logprobs_T
  )


def test_bad_values_are_not_copied_with_a_page(policy, make_engine):
  """Copying a shared page takes only the tokens that both sessions have."""
  context_T = serving.tokens(0, 6)
  requests = [serving.request(i, context_T, new=3) for i in range(4)]
  clean = serving.complete(make_engine(), *requests)
  # First token sampled by one session that the session behind it does not have.
  first, bad, second = next(
    (i, completion.tokens_T[0], j)
    for i, completion in enumerate(clean)
    for j, other_completion in enumerate(clean)
    if completion.tokens_T[0] not in [*context_T, *other_completion.tokens_T]
  )
  poisoned = jax.tree.map(np.array, policy)
  poisoned['params']['embedding'][bad] = np.nan
  engine = make_engine(poisoned)
  engine.submit(requests[first])
  engine.step()
  engine.step()
  # The bad token follows the prompt in its last page and is not yet reported.
  engine.submit(requests[second])
  outcomes = serving.finish(engine)
  failure, copied = (outcomes[requests[i].session] for i in (first, second))
  assert (failure.position, copied.num_cached) == (6, 5)
  np.testing.assert_array_equal(copied.logprobs_T, clean[second].logprobs_T)


def test_a_session_closed_at_any_moment_leaves_nothing(make_engine):
  want = serving.complete(
    make_engine(), serving.request(9, serving.tokens(9, 6), new=12)
  )
  engine = make_engine()
  for moment in range(9):
    for index in range(3):
      context_T = serving.tokens(index // 2, 11)
      engine.submit(serving.request(index, context_T, new=6))
    engine.submit(serving.request(9, serving.tokens(9, 6), new=12))
    outcomes = []
    for _ in range(moment):
      outcomes += engine.step()
    for index in range(3):
      engine.close(f'session {index}')
    engine.close('session 1')
    (completion,) = [
      outcome
      for outcome in [*outcomes, *serving.finish(engine).values()]
      if outcome.session == 'session 9'
    ]
    np.testing.assert_array_equal(completion.tokens_T, want[0].tokens_T)
    engine.close('session 9')
    _assert_nothing_held(engine)
  engine.close('session 9')  # Closing twice is allowed.
