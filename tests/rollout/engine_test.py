"""Engine: what a session gets depends on the session and the weights alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.models import decoder, head
from composer_jax.rollout import engine as engines

OPTIONS = engines.EngineOptions(
  num_slots=4,
  max_len=40,
  prefill_chunk=5,
  prefill_rows=2,
  decode_steps=3,
)


@pytest.fixture(scope='module')
def config(make_config):
  return make_config()


@pytest.fixture(scope='module')
def policies(config, make_variables):
  return [decoder.policy(make_variables(config, i)) for i in range(2)]


@pytest.fixture
def engine(config, policies):
  return engines.Engine(config, policies[0], 0, OPTIONS)


def _request(index, context, new=6, stop_tokens=(), temperature=1.3):
  return records.SampleRequest(
    session=f'session {index}',
    context_T=np.asarray(context, np.int32),
    max_new_tokens=new,
    stop_tokens=stop_tokens,
    seed=(3, index),
    temperature=temperature,
  )


def _turns(index):
  """Contexts of a session's two turns, longer and shorter than a chunk."""
  rng = np.random.default_rng(index)
  lengths = 3 + 2 * index, 1 + index
  return [rng.integers(0, 40, n).astype(np.int32) for n in lengths]


def _play(engine, indices, order=None):
  """Plays two turns of each session; returns completions by index."""
  found = {i: [] for i in indices}
  for index in order or indices:
    engine.submit(_request(index, _turns(index)[0]))
  for _ in range(200):
    for completion in engine.step():
      index = int(completion.session.split()[1])
      found[index].append(completion)
      if len(found[index]) == 1:
        engine.submit(_request(index, _turns(index)[1], new=5))
      else:
        engine.close(completion.session)
    if not engine.num_unfinished:
      return found
  raise AssertionError('the engine did not finish')


def _assert_equal(some, others):
  for a, b in zip(some, others, strict=True):
    for name in ('tokens_T', 'logprobs_T', 'consumed_expert_ids_TMA'):
      np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def _whole(completions, index):
  """Returns the session's tokens and where they were sampled."""
  tokens, sampled = [], []
  for context_T, completion in zip(_turns(index), completions, strict=True):
    tokens += [context_T, completion.tokens_T]
    sampled += [
      np.zeros(len(context_T), bool),
      np.ones(len(completion.tokens_T), bool),
    ]
  return np.concatenate(tokens), np.concatenate(sampled)


def test_bits_do_not_depend_on_neighbours_slots_or_schedule(
  engine, config, policies
):
  indices = range(6)  # More than slots: two wait.
  together = _play(engine, indices)
  shuffled = _play(engine, indices, order=[4, 2, 5, 0, 3, 1])
  for index in indices:
    _assert_equal(together[index], shuffled[index])
    alone = engines.Engine(config, policies[0], 0, OPTIONS)
    _assert_equal(together[index], _play(alone, [index])[index])


def test_records_equal_a_full_forward_of_the_same_weights(
  engine, config, policies
):
  forward = jax.jit(decoder.Decoder(config).apply)
  widened = jax.tree.map(lambda x: x.astype(jnp.float32), policies[0])
  for index, completions in _play(engine, [1, 3]).items():
    tokens_T, sampled_T = _whole(completions, index)
    tokens_BT = np.zeros((1, OPTIONS.max_len), np.int32)
    tokens_BT[0, : len(tokens_T)] = tokens_T
    positions_BT = np.arange(OPTIONS.max_len, dtype=np.int32)[None]
    segments_BT = (positions_BT < len(tokens_T)).astype(np.int32)
    output = forward(widened, tokens_BT, segments_BT, positions_BT)
    logprobs_BT, _ = head.target_logprobs(
      widened,
      output.hidden_BTD,
      tokens_BT,
      segments_BT,
      jnp.full(tokens_BT.shape, 1.3),
      config,
    )
    recorded_T = np.concatenate([c.logprobs_T for c in completions])
    # The same float32 sums in another order.
    np.testing.assert_allclose(
      np.asarray(logprobs_BT)[0, : len(tokens_T)][sampled_T],
      recorded_T,
      atol=1e-4,
    )
    routes_TMA = np.concatenate(
      [c.consumed_expert_ids_TMA for c in completions]
    )
    np.testing.assert_array_equal(
      routes_TMA,
      np.moveaxis(output.expert_ids_MBTA, 0, 2)[0, : len(tokens_T) - 1],
    )


def test_a_swap_keeps_the_prefix_and_marks_what_follows(
  engine, config, policies
):
  request = _request(0, _turns(0)[0], new=20)
  engine.submit(request)
  engine.step()  # Prefill, which samples the first token.
  engine.step()
  before = 1 + OPTIONS.decode_steps
  engine.swap(policies[1], 5)
  (swapped,) = _finish(engine)
  assert swapped.policy_version_T.tolist() == [0] * before + [5] * (20 - before)

  kept = engines.Engine(config, policies[0], 0, OPTIONS)
  kept.submit(request)
  (unswapped,) = _finish(kept)
  np.testing.assert_array_equal(
    swapped.tokens_T[:before], unswapped.tokens_T[:before]
  )
  np.testing.assert_array_equal(
    swapped.logprobs_T[:before], unswapped.logprobs_T[:before]
  )
  assert swapped.logprobs_T[before] != unswapped.logprobs_T[before]

  # The first token after the swap: old keys and values, new weights.
  mixed = engines.Engine(config, policies[0], 0, OPTIONS)
  prefix_T = np.concatenate([request.context_T, swapped.tokens_T[: before - 1]])
  mixed.submit(_request(0, prefix_T, new=1))
  _finish(mixed)
  mixed.swap(policies[1], 5)
  (recomputed,) = _logprob_of(mixed, 0, swapped.tokens_T, before)
  np.testing.assert_allclose(recomputed, swapped.logprobs_T[before], atol=1e-4)


def _finish(engine):
  found = []
  while engine.num_unfinished:
    found += engine.step()
  return found


def _logprob_of(engine, index, tokens_T, place):
  """Samples the token at `place`, whose random numbers are the session's."""
  engine.submit(_request(index, [], new=1))
  (completion,) = _finish(engine)
  assert completion.tokens_T[0] == tokens_T[place]
  return completion.logprobs_T


def test_context_is_put_off_for_two_dispatches_at_most(engine):
  """Whether other context or decodes go before it."""
  for index, new in enumerate((30, 30, 1)):
    engine.submit(_request(index, [7], new=new))
  # Two rows: the third session waits for an extend, then for one decode.
  finished = [[c.session for c in engine.step()] for _ in range(3)]
  assert finished == [[], [], ['session 2']]


def test_sampling_stops_at_stop_tokens_and_at_max_len(engine):
  free = _play(engine, [2])[2][0]
  stop = int(free.tokens_T[3])
  first = free.tokens_T.tolist().index(stop)
  engine.submit(_request(2, _turns(2)[0], stop_tokens=(39, stop)))
  (stopped,) = _finish(engine)
  assert stopped.stopped and not free.stopped
  np.testing.assert_array_equal(stopped.tokens_T, free.tokens_T[: first + 1])
  engine.close('session 2')
  engine.submit(_request(2, _turns(2)[0], new=1000))
  (longest,) = _finish(engine)
  assert not longest.stopped
  assert len(_turns(2)[0]) + len(longest.tokens_T) == OPTIONS.max_len
  np.testing.assert_array_equal(longest.tokens_T[:6], free.tokens_T)


def test_two_programs_are_compiled_and_no_more(make_config, make_variables):
  config = make_config(num_layers=2)
  options = engines.EngineOptions(
    num_slots=3, max_len=40, prefill_chunk=4, prefill_rows=8, decode_steps=2
  )
  engine = engines.Engine(config, make_variables(config, 0), 0, options)
  _play(engine, range(4))
  engine.swap(make_variables(config, 1), 1)
  _play(engine, [3, 0])
  other = engines.Engine(config, make_variables(config, 2), 0, options)
  _play(other, [1])
  assert other.traces == {'extend': 1, 'decode': 1}


def test_what_cannot_be_served_is_refused(
  engine, make_config, make_variables, policies
):
  with pytest.raises(ValueError, match=r'tokens from 3 to 40.*0\.\.39'):
    engine.submit(_request(0, [3, 40]))
  with pytest.raises(ValueError, match=r'hold 41 tokens.*max_len \(40\)'):
    engine.submit(_request(0, [3] * 41))
  with pytest.raises(ValueError, match=r'5 stop tokens exceed.*\(4\)'):
    engine.submit(_request(0, [3], stop_tokens=(1, 2, 3, 4, 5)))
  assert engine.num_unfinished == 0
  engine.swap(policies[1], 4)
  with pytest.raises(ValueError, match='version 4 for the older 3'):
    engine.swap(policies[0], 3)
  other = make_variables(make_config(dense_ffw_dim=8), 0)
  with pytest.raises(ValueError, match=r'ffw/down of version 5 .*\(8, 16\)'):
    engine.swap(other, 5)
  with pytest.raises(ValueError, match='prefill_chunk must be a positive'):
    engines.EngineOptions(num_slots=1, max_len=4, prefill_chunk=0)
