"""The engine's answers depend on the session and the weights alone."""

import dataclasses

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from composer_jax.rollout import sampling
from tests.rollout import serving

OPTIONS = engines.EngineOptions(
  num_slots=4,
  max_len=serving.LENGTH,
  prefill_chunk=5,
  prefill_rows=2,
  decode_steps=3,
  page_size=4,
  num_pages=64,
  num_top=2,
)


@pytest.fixture(scope='module')
def config(make_config):
  return make_config()


@pytest.fixture(scope='module')
def policy(config, make_variables):
  return decoder.policy(make_variables(config, 0))


@pytest.fixture
def engine(config, policy):
  return engines.Engine(config, policy, 0, OPTIONS)


@pytest.fixture
def make_engine(config, policy):
  return lambda **changes: engines.Engine(
    config, policy, 0, dataclasses.replace(OPTIONS, **changes)
  )


def test_room_is_counted_by_the_pages_of_open_sessions(make_engine):
  """A session of 40 tokens takes 10 pages of 4."""
  assert make_engine(num_pages=40).room(3) is None
  engine = make_engine(num_pages=35)
  assert [engine.room(n) for n in range(5)] == [3, 2, 1, 0, 0]
  engine.submit(serving.request(0, serving.tokens(0, 6), new=2))
  engine.step()
  # While it runs it has the 2 pages that it can fill; then what it filled.
  held = {len(s.pages) for s in engine._slots.sessions.values()}
  assert held == {2} and engine.room(1) == 3 and engine.room(2) == 2
  serving.finish(engine)
  assert engine.room(1) == 3
  engine.close('session 0')
  assert engine.room(0) == 3


def _turns(index):
  """Returns contexts of two turns, longer and shorter than a chunk.

  Sessions 4 and 5 share more tokens with each other than with session 3.
  """
  first_T = serving.tokens(index, 3 + 2 * index)
  if index > 3:
    shared_T = serving.tokens(3, 9)
    first_T = np.concatenate([shared_T, serving.tokens(4, 2), first_T[:index]])
  return [first_T, serving.tokens(10 + index, 1 + index)]


def _play(engine, order, after_step=lambda: None):
  """Plays two turns of each session; returns completions by index."""
  completions = {i: [] for i in order}
  for index in order:
    engine.submit(serving.request(index, _turns(index)[0]))
  for _ in range(300):
    for completion in engine.step():
      index = int(completion.session.split()[1])
      completions[index].append(completion)
      if len(completions[index]) == 1:
        engine.submit(serving.request(index, _turns(index)[1], new=5))
      else:
        engine.close(completion.session)
    after_step()
    if not engine.num_unfinished:
      return completions
  raise AssertionError('the engine did not finish')


def _assert_same(actual, expected):
  for index in actual:
    for a, b in zip(actual[index], expected[index], strict=True):
      serving.assert_same_bits(a, b)


def _whole(index, completions):
  """Returns the session's tokens and where they were sampled."""
  tokens, sampled = [], []
  for context_T, completion in zip(_turns(index), completions, strict=True):
    tokens += [context_T, completion.tokens_T]
    sampled += [
      np.zeros(len(context_T), bool),
      np.ones(len(completion.tokens_T), bool),
    ]
  return np.concatenate(tokens), np.concatenate(sampled)


def test_bits_depend_on_the_session_alone(engine, make_engine):
  """Neighbours, slots, order, cached prefixes and pipelining change no bit."""
  indices = range(6)  # Two more sessions than slots, so two wait.
  together = _play(engine, indices)
  assert engine.stats().prefix_hit_tokens
  # By now the prefix store holds every prompt.
  again = _play(engine, [4, 2, 5, 0, 3, 1])
  cached = [again[i][0].num_cached for i in indices]
  assert cached == [len(_turns(i)[0]) - 1 for i in indices]
  _assert_same(again, together)
  for index in (2, 5):
    alone = make_engine(share_prefixes=False)
    _assert_same(_play(alone, [index]), {index: together[index]})
    assert alone.stats().prefix_hit_tokens == 0


def test_reading_late_changes_nothing(engine, make_engine, policy):
  # A swap reads all reports that are still unread.
  late = make_engine(share_prefixes=False)
  at_once = make_engine(share_prefixes=False)
  _assert_same(
    _play(late, [1, 2]),
    _play(at_once, [1, 2], lambda: at_once.swap(policy, 0)),
  )


def test_records_equal_the_decoder_on_the_finished_sequence(
  engine, config, policy
):
  for index, completions in _play(engine, [1, 3]).items():
    tokens_T, sampled_T = _whole(index, completions)
    logits_TV, routes_TMA = serving.recompute(
      config, [(policy, len(tokens_T))], tokens_T
    )

    def joined(name, completions=completions):
      return np.concatenate([getattr(c, name) for c in completions])

    raw_TV = serving.log_softmax(logits_TV)
    for name, logprobs_TV in (
      ('logprobs_T', serving.log_softmax(logits_TV / 1.3)),
      ('raw_logprobs_T', raw_TV),
    ):
      rows_T = np.arange(len(tokens_T))
      # float32 sums run in another order.
      np.testing.assert_allclose(
        joined(name),
        logprobs_TV[rows_T, tokens_T][sampled_T],
        atol=1e-4,
      )
    order_TV = np.argsort(-raw_TV[sampled_T], axis=-1)[:, :2]
    np.testing.assert_array_equal(joined('top_ids_TX'), order_TV)
    np.testing.assert_allclose(
      joined('top_logprobs_TX'),
      np.take_along_axis(raw_TV[sampled_T], order_TV, -1),
      atol=1e-4,
    )
    np.testing.assert_array_equal(
      joined('consumed_expert_ids_TMA'), routes_TMA[:-1]
    )
    starts = [c.routes_start for c in completions]
    first, second = completions
    assert starts == [0, len(first.consumed_expert_ids_TMA)]


@pytest.mark.parametrize(
  'how',
  [
    {'top_k': 3},
    {'top_p': 0.5},
    {'min_p': 0.3, 'top_k': 9, 'temperature': 0.8},
    {'temperature': 0.0},
  ],
)
def test_truncated_logprobs_are_of_what_is_left(engine, config, policy, how):
  context_T = serving.tokens(0, 7)
  # A neighbour in the same batch does not truncate.
  request = serving.request(0, context_T, new=9, **how)
  plain = serving.request(1, context_T, new=9)
  truncated, beside = serving.complete(engine, request, plain)
  (alone,) = serving.complete(
    engine, dataclasses.replace(plain, session='alone')
  )
  serving.assert_same_bits(alone, beside)
  tokens_T = np.concatenate([context_T, truncated.tokens_T])
  logits_TV, _ = serving.recompute(config, [(policy, 16)], tokens_T)
  raw_T = serving.logprobs_of(logits_TV, truncated, 7)
  np.testing.assert_allclose(truncated.raw_logprobs_T, raw_T, atol=1e-4)
  scaled_TV = logits_TV[7:] / (request.temperature or 1e-9)
  order_TV = np.argsort(-scaled_TV, axis=-1)
  p_TV = np.exp(serving.log_softmax(np.take_along_axis(scaled_TV, order_TV, 1)))
  kept_TV = np.tile(np.arange(40) < (request.top_k or 40), (9, 1))
  p_TV = p_TV * kept_TV / (p_TV * kept_TV).sum(-1, keepdims=True)
  kept_TV &= (np.cumsum(p_TV, -1) - p_TV < request.top_p) | (request.top_p == 1)
  kept_TV &= p_TV >= request.min_p * p_TV[:, :1]
  p_TV = p_TV * kept_TV / (p_TV * kept_TV).sum(-1, keepdims=True)
  rank_T = np.argmax(order_TV == truncated.tokens_T[:, None], axis=-1)
  assert (rank_T < kept_TV.sum(-1)).all()
  np.testing.assert_allclose(
    truncated.logprobs_T, np.log(p_TV[np.arange(9), rank_T]), atol=1e-4
  )


def test_a_group_consumes_its_prompt_once(engine, make_engine):
  context_T = serving.tokens(0, 15)
  requests = [serving.request(i, context_T, new=4) for i in range(4)]
  shared = serving.complete(engine, *requests)
  stats = engine.stats()
  assert stats.context_tokens == 14 and stats.prefix_hit_tokens == 3 * 14
  assert [c.num_cached for c in shared] == [0, 14, 14, 14]
  # Three full pages are shared; each of four sessions has two pages of its own.
  assert stats.pages - stats.pages_free == 3 + 4 * 2
  apart = make_engine(share_prefixes=False)
  for ours, separate in zip(
    shared, serving.complete(apart, *requests), strict=True
  ):
    serving.assert_same_bits(ours, separate)
  assert apart.stats().context_tokens == 4 * 14
  # The next turn continues from the pages that each session holds.
  more = [serving.request(i, [1, 2], new=3) for i in range(4)]
  for ours, separate in zip(
    serving.complete(engine, *more), serving.complete(apart, *more), strict=True
  ):
    serving.assert_same_bits(ours, separate)


def test_streamed_tokens_are_those_of_the_completion(engine):
  streamed = []
  engine.submit(
    serving.request(0, serving.tokens(0, 8), new=8), streamed.append
  )
  engine.submit(serving.request(1, [3]))
  completion = serving.finish(engine)['session 0']
  assert [t.position for t in streamed] == [8, 11, 14]
  assert {t.session for t in streamed} == {'session 0'}
  for name in ('tokens_T', 'logprobs_T', 'raw_logprobs_T', 'policy_version_T'):
    joined_T = np.concatenate([getattr(t, name) for t in streamed])
    np.testing.assert_array_equal(joined_T, getattr(completion, name))
  np.testing.assert_array_equal(
    np.concatenate([t.top_ids_TX for t in streamed]), completion.top_ids_TX
  )


def test_context_is_put_off_for_two_dispatches_at_most(engine):
  """Holds whether other contexts or decode steps are dispatched before it."""
  for index in range(3):
    engine.submit(serving.request(index, serving.tokens(index, 4), new=30))
  # Two rows: the third session waits for an extend, then for one decode.
  context_tokens = []
  for _ in range(3):
    engine.step()
    context_tokens.append(engine.stats().context_tokens)
  assert context_tokens == [6, 6, 9]


def test_sampling_stops_at_stop_tokens_and_at_max_len(engine):
  context_T = serving.tokens(2, 7)
  (free,) = serving.complete(engine, serving.request(2, context_T))
  engine.close('session 2')
  stop = int(free.tokens_T[3])
  stop_index = free.tokens_T.tolist().index(stop)
  (stopped,) = serving.complete(
    engine, serving.request(2, context_T, stop_tokens=(39, stop))
  )
  assert stopped.stopped and not free.stopped
  np.testing.assert_array_equal(
    stopped.tokens_T, free.tokens_T[: stop_index + 1]
  )
  engine.close('session 2')
  (longest,) = serving.complete(engine, serving.request(2, context_T, new=1000))
  assert not longest.stopped
  assert len(context_T) + len(longest.tokens_T) == OPTIONS.max_len
  np.testing.assert_array_equal(longest.tokens_T[:6], free.tokens_T)


def test_a_token_is_drawn_by_its_seed_and_its_position_in_the_session(engine):
  """Over two requests, at a temperature that makes all tokens as likely."""
  first, second = (
    serving.request(0, serving.tokens(seed, 5), new=4, temperature=1e6)
    for seed in (1, 2)
  )
  drawn = []
  for request in (first, second):
    (completion,) = serving.complete(engine, request)
    drawn += completion.tokens_T.tolist()
  settings = sampling.Settings(
    keys_B2=np.tile(sampling.key_of(first.seed), (8, 1)),
    temperatures_B=np.ones(8, np.float32),
    top_ps_B=np.ones(8, np.float32),
    top_ks_B=np.zeros(8, np.int32),
    min_ps_B=np.zeros(8, np.float32),
  )
  want = sampling.draw(
    settings,
    np.array([*range(5, 9), *range(14, 18)], np.int32),
    np.zeros((8, 40), np.float32),
    truncate=False,
    numerics='fast',
  )
  assert drawn == want.tokens_B.tolist()


def test_without_routes_the_tokens_are_the_same(engine, make_engine):
  request = serving.request(0, serving.tokens(0, 8))
  (with_routes,) = serving.complete(engine, request)
  (without,) = serving.complete(make_engine(record_routes=False), request)
  np.testing.assert_array_equal(without.tokens_T, with_routes.tokens_T)
  np.testing.assert_array_equal(without.logprobs_T, with_routes.logprobs_T)
  routes_TMA = without.consumed_expert_ids_TMA
  assert routes_TMA.shape == with_routes.consumed_expert_ids_TMA.shape
  assert (routes_TMA == records.NO_ROUTE).all()


@pytest.mark.slow
def test_an_engine_in_bfloat16_is_that_of_a_model_in_bfloat16(
  engine, make_engine, make_config, policy
):
  request = serving.request(0, serving.tokens(0, 8))
  narrow = engines.Engine(
    make_config(compute_dtype='bfloat16'), policy, 0, OPTIONS
  )
  (expected,) = serving.complete(narrow, request)
  (actual,) = serving.complete(make_engine(compute_dtype='bfloat16'), request)
  serving.assert_same_bits(actual, expected)
  (wide,) = serving.complete(engine, request)
  assert (wide.logprobs_T[0] != actual.logprobs_T[0]).any()


def test_what_cannot_be_served_is_refused(engine):
  refused = [
    (serving.request(0, [3, 40]), r'tokens from 3 to 40.*0\.\.39'),
    (serving.request(0, [3, -1]), r'tokens from -1 to 3.*0\.\.39'),
    (serving.request(0, [3] * 41), r'hold 41 tokens.*max_len \(40\)'),
    (serving.request(0, []), r"session 'session 0' has an empty context"),
    (
      serving.request(0, [3], stop_tokens=(1, 2**70)),
      r'stop_tokens holds tokens from 1 to 1180591620717411303424; .*0\.\.39',
    ),
    (serving.request(0, [3], stop_tokens=(1,) * 5), r'5 stop tokens.*\(4\)'),
  ]
  for request, message in refused:
    with pytest.raises(ValueError, match=message):
      engine.submit(request)
  assert engine.num_unfinished == 0 and engine.stats().sessions == 0
  for changes, message in (
    ({'prefill_chunk': 0}, 'prefill_chunk must be an integer of at least 1'),
    (
      {'page_size': True},
      'page_size must be an integer of at least 1; got True',
    ),
    ({'num_pages': 9}, r'num_pages \(9\) of 4 tokens.*at least 10'),
    ({'prefill_rows': ()}, 'prefill_rows must name'),
    ({'on_swap': 'drop'}, r"'keep', 'refresh'.*got 'drop'"),
  ):
    with pytest.raises(ValueError, match=message):
      dataclasses.replace(OPTIONS, **changes)
