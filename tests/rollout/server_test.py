"""Many threads block on one engine, and every one of them is answered."""

import dataclasses
from concurrent import futures

import jax
import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.rollout import engine as engines
from composer_jax.rollout import server

OPTIONS = engines.EngineOptions(
  num_slots=3, max_len=24, prefill_chunk=4, prefill_rows=2, decode_steps=2
)


@pytest.fixture(scope='module')
def policy_arrays(make_config, make_variables):
  config = make_config(num_layers=2, tie_embeddings=False)
  return config, [make_variables(config, i) for i in range(2)]


@pytest.fixture
def engine(policy_arrays):
  config, variables = policy_arrays
  return engines.Engine(config, variables[0], 0, OPTIONS)


def _request(index, length=3):
  return records.SampleRequest(
    session=f'session {index}',
    context_T=np.arange(length, dtype=np.int32) + index,
    max_new_tokens=4,
    stop_tokens=(),
    seed=(index,),
  )


def _episode(index):
  def play(policy):
    completions = [policy.complete(_request(index)) for _ in range(2)]
    policy.close(f'session {index}')
    return index, [c.tokens_T.tolist() for c in completions]

  return play


def play_all(jobs, engine, num_threads=3):
  """Plays jobs in threads against an engine; returns results in order."""
  policy = server.EnginePolicy(engine, timeout_s=60)
  with futures.ThreadPoolExecutor(num_threads) as pool:
    running = [pool.submit(job, policy) for job in jobs]
    policy.serve(lambda: all(job.done() for job in running))
  policy.close()
  return [job.result() for job in running]


def test_completions_do_not_depend_on_threads(engine):
  jobs = [_episode(i) for i in range(7)]
  with_few_threads = play_all(jobs, engine, 1)
  # With more threads than slots the other sessions wait and are served later.
  with_seven_threads = play_all(jobs, engine, 7)
  assert with_seven_threads == with_few_threads
  assert not engine.is_open('session 6')


def test_weights_can_be_swapped_while_episodes_run(engine, policy_arrays):
  policy = server.EnginePolicy(engine, timeout_s=60)

  def before_step():
    if engine.stats().sampled_tokens == 0 and engine.stats().dispatches == 2:
      engine.swap(policy_arrays[1][1], 1)

  with futures.ThreadPoolExecutor() as pool:
    job = pool.submit(policy.complete, _request(0))
    policy.serve(job.done, before_step)
  assert job.result().policy_version_T.tolist() == [0, 0, 1, 1]


def test_a_refusal_reaches_its_caller_alone(engine):
  def bad(policy):
    with pytest.raises(ValueError, match=r'hold 30 tokens.*max_len \(24\)'):
      policy.complete(_request(9, length=30))
    return 'refused'

  results = play_all([_episode(0), bad, _episode(1)], engine)
  assert results[1] == 'refused' and results[2][0] == 1


def test_what_stops_the_loop_reaches_every_waiting_thread(engine):
  policy = server.EnginePolicy(engine, timeout_s=60)
  with futures.ThreadPoolExecutor() as pool:
    # Of five callers two wait for one of three slots.
    jobs = [pool.submit(policy.complete, _request(i)) for i in range(5)]

    def before_step():
      if engine.num_unfinished == 5:
        raise OSError('the store is gone')

    with pytest.raises(OSError, match='store is gone'):
      policy.serve(lambda: False, before_step)
    for job in jobs:
      with pytest.raises(RuntimeError, match='store is gone'):
        job.result(timeout=60)
  with pytest.raises(RuntimeError, match='has stopped serving'):
    policy.complete(_request(7))


def test_waiting_ends_at_the_timeout_and_says_for_what(engine):
  policy = server.EnginePolicy(engine, timeout_s=0.05)
  with pytest.raises(TimeoutError, match="'session 0' got no completion"):
    policy.complete(_request(0))


def test_a_session_closed_while_it_samples_frees_its_slot(engine):
  policy = server.EnginePolicy(engine, timeout_s=60)
  with futures.ThreadPoolExecutor() as pool:
    job = pool.submit(policy.complete, _request(0))

    def before_step():
      if engine.num_unfinished:
        policy.close('session 0')

    policy.serve(job.done, before_step)
    with pytest.raises(RuntimeError, match='closed while it sampled'):
      job.result()
  assert not engine.is_open('session 0')
  policy.close('never opened')
  policy.serve(iter([False, True]).__next__)


def test_ending_a_policy_frees_what_its_episodes_left_open(engine):
  def careless(policy):
    policy.complete(_request(1))

  play_all([careless], engine)
  assert not engine.is_open('session 1')


def test_what_is_closed_last_is_closed_when_serving_ends(engine):
  policy = server.EnginePolicy(engine, timeout_s=60)
  with futures.ThreadPoolExecutor() as pool:
    job = pool.submit(policy.complete, _request(0))

    def done():
      if job.done():
        policy.close('session 0')
      return job.done()

    policy.serve(done)
  assert not engine.is_open('session 0')


@pytest.mark.parametrize(
  'change,message',
  [
    ({'top_p': 0.9}, r"'session 0' has top_p 0\.9, .* needs 1"),
    ({'top_k': 5}, 'top_k 5'),
    ({'min_p': 0.1}, r'min_p 0\.1'),
    ({'temperature': 0.0}, 'temperature 0; .* a positive one'),
  ],
)
def test_what_a_trainer_could_not_recompute_is_refused(engine, change, message):
  policy = server.EnginePolicy(engine, timeout_s=60)
  with pytest.raises(ValueError, match=message):
    policy.complete(dataclasses.replace(_request(0), **change))


def test_values_that_are_not_finite_reach_their_caller_as_an_error(
  policy_arrays,
):
  config, variables = policy_arrays
  jobs = [_episode(0), _episode(1)]
  clean = play_all(jobs, engines.Engine(config, variables[0], 0, OPTIONS))
  drawn = {token for _, turns in clean for turn in turns for token in turn}
  # Beyond the contexts of both, which hold 0 to 3.
  token = min(set(range(6, 30)) - drawn)
  broken = jax.tree.map(np.array, variables[0])
  broken['params']['embedding'][token] = np.nan
  engine = engines.Engine(config, broken, 0, OPTIONS)

  def bad(policy):
    with pytest.raises(FloatingPointError, match='over 1 tokens from 2 on of'):
      policy.complete(_request(token - 2))

  assert play_all([*jobs, bad], engine)[:2] == clean
  assert engine.stats().sessions == 0
