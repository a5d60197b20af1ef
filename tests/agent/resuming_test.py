"""An episode that goes on elsewhere is the undisturbed one, to the bit."""

import dataclasses

import numpy as np
import pytest

from composer_jax.agent import episode, resuming
from composer_jax.core import played, records
from composer_jax.fleet.leases import turn_bytes
from composer_jax.text import tokenizer as tokenizer_lib
from tests.agent import replay_test, summarize_test


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train(['a sum up of work to go on'], 270)


class Engine:
  """Answers by the tokens of the window alone, wherever they came from."""

  def __init__(self, tokenizer, version=0):
    self.tokenizer, self.version = tokenizer, version
    self.windows, self.consumed, self.asked = {}, {}, []

  def complete(self, request):
    name = request.session
    self.asked.append(name)
    known_T = self.windows.get(name, np.zeros(0, np.int32))
    known_T = np.concatenate([known_T, request.context_T])
    index = int(name.split('/')[4]) if name.count('/') > 3 else 0
    is_end = index == 2 and (known_T == self.tokenizer.END).sum() > 6
    call = self.tokenizer.encode('end' if is_end else 'say it')
    call = np.append(call, self.tokenizer.END).astype(np.int32)
    start, stop = len(known_T), len(known_T) + len(call)
    self.windows[name] = all_T = np.concatenate([known_T, call])
    first, self.consumed[name] = self.consumed.get(name, 0), stop - 1
    consumed = np.arange(first, stop - 1)
    draws = np.random.default_rng((start, int(known_T.sum()))).random(len(call))
    routes_TMA = np.stack([all_T[consumed], 1000 + consumed], -1)[:, None]
    return records.Completion(
      session=name,
      tokens_T=call,
      logprobs_T=-draws.astype(np.float32),
      policy_version_T=np.full(len(call), self.version, np.int32),
      consumed_expert_ids_TMA=routes_TMA.astype(np.uint16),
      stopped=True,
      routes_start=first,
      context_version_T=np.full(len(call), self.version, np.int32),
      consumed_version_T=np.full(len(consumed), self.version, np.int32),
    )

  def close(self, session):
    self.windows.pop(session, None)


def play(tokenizer, policy, talker=None):
  return episode.run(
    talker or summarize_test.Talker(sizes=(1, 4, 7)),
    policy,
    tokenizer,
    summarize_test.OPTIONS,
    group=5,
    member=2,
    seed=7,
    summary=summarize_test.SUMMARY,
  )


@pytest.fixture(scope='module')
def undisturbed(tokenizer):
  policy = resuming.ResumedPolicy(Engine(tokenizer))
  rollout = play(tokenizer, policy)
  assert rollout.verdict.passed and len(rollout.trajectories) == 3
  return rollout, policy.record()


def through_bytes(turns):
  saved = played.SavedTurns(
    group=5, task_id='talk', turns={2: turns}, policies={0: 'a' * 64}
  )
  data = turn_bytes.to_bytes(saved)
  again = turn_bytes.from_bytes(data, 1 << 20)
  assert turn_bytes.to_bytes(again) == data
  return again.turns[2]


def test_it_goes_on_from_every_turn(tokenizer, undisturbed):
  rollout, turns = undisturbed
  assert len(turns) == len(rollout.turns) == 15
  for count in range(1, len(turns) + 1):
    engine = Engine(tokenizer)
    policy = resuming.ResumedPolicy(engine, through_bytes(turns[:count]))
    replay_test.assert_same(play(tokenizer, policy), rollout)
    assert not policy.is_replaying
    # Nothing that was sampled is sampled again.
    assert len(engine.asked) == len(turns) - count
    assert len(policy.record()) == len(turns)


def test_it_goes_on_from_worker_to_worker(tokenizer, undisturbed):
  rollout, turns = undisturbed
  record = turns[:3]

  class Left(Exception):
    pass

  class Leaving(Engine):
    def complete(self, request):
      if len(self.asked) == 4:
        raise Left
      return super().complete(request)

  while len(record) + 4 < len(turns):
    policy = resuming.ResumedPolicy(Leaving(tokenizer), through_bytes(record))
    with pytest.raises(Left):
      play(tokenizer, policy)
    assert len(policy.record()) == len(record) + 4
    record = policy.record()
  policy = resuming.ResumedPolicy(Engine(tokenizer), through_bytes(record))
  replay_test.assert_same(play(tokenizer, policy), rollout)


def test_newer_weights_go_on_with_what_older_ones_wrote(tokenizer, undisturbed):
  rollout, turns = undisturbed
  policy = resuming.ResumedPolicy(Engine(tokenizer, version=3), turns[:5])
  first = play(tokenizer, policy).trajectories[0]
  stop = rollout.turns[4].stop
  sampled_T = first.loss_mask_T
  assert set(first.policy_version_T[:stop][sampled_T[:stop]]) == {0}
  assert set(first.policy_version_T[stop:]) == {3}
  # Its whole cache is of the newer ones.
  assert set(first.consumed_version_T) == {3}
  assert set(first.context_version_T[stop:]) == {3}


def test_a_tool_that_answers_otherwise_is_seen_at_once(tokenizer, undisturbed):
  turns = undisturbed[1]

  class Forgetful(summarize_test.Talker):
    def call(self, text):
      result = super().call(text)
      if len(self.calls) == 6:
        return dataclasses.replace(result, text='nothing')
      return result

  engine = Engine(tokenizer)
  policy = resuming.ResumedPolicy(engine, turns[:9])
  talker = Forgetful(sizes=(1, 4, 7))
  with pytest.raises(resuming.Diverged):
    play(tokenizer, policy, talker)
  assert not engine.asked and talker.num_closed == 1


def test_an_episode_that_ends_within_its_record_is_seen(tokenizer, undisturbed):
  class Hasty(summarize_test.Talker):
    def call(self, text):
      return dataclasses.replace(
        super().call(text), is_final=len(self.calls) == 6
      )

  policy = resuming.ResumedPolicy(Engine(tokenizer), undisturbed[1][:9])
  play(tokenizer, policy, Hasty(sizes=(1, 4, 7)))
  assert policy.is_replaying


def request_of(turn, max_new_tokens=99):
  return records.SampleRequest(
    session='talk',
    context_T=turn.context_T,
    max_new_tokens=max_new_tokens,
    stop_tokens=(),
    seed=(),
  )


def test_an_answer_longer_than_is_asked_for_is_seen(tokenizer, undisturbed):
  turn = undisturbed[1][0]
  length = len(turn.completion.tokens_T)
  policies = [resuming.ResumedPolicy(None, [turn]) for _ in range(2)]
  policies[0].complete(request_of(turn, length))
  with pytest.raises(resuming.Diverged):
    policies[1].complete(request_of(turn, length - 1))


def test_a_window_that_was_closed_is_brought_to_no_other(
  tokenizer, undisturbed
):
  turn, engine = undisturbed[1][0], Engine(tokenizer)
  policy = resuming.ResumedPolicy(engine, [turn])
  policy.complete(request_of(turn))
  policy.close('talk')
  answer = policy.complete(request_of(turn))
  window_T = [*turn.context_T, *answer.tokens_T]
  np.testing.assert_array_equal(engine.windows['talk'], window_T)


def test_routes_of_a_whole_window_begin_at_its_first_token(
  tokenizer, undisturbed
):
  """Also where an engine does not say so, since it knows no other turns."""

  class Silent(Engine):
    def complete(self, request):
      answer = super().complete(request)
      return dataclasses.replace(answer, routes_start=None)

  rollout, turns = undisturbed
  policy = resuming.ResumedPolicy(Silent(tokenizer), turns[:3])
  replay_test.assert_same(play(tokenizer, policy), rollout)
