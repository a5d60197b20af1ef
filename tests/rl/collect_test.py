"""Groups leave the stream whole, and every error reaches its reader."""

import contextlib
import dataclasses
import threading
import time
import types

import numpy as np
import pytest

from composer_jax.agent import rewards
from composer_jax.core import records
from composer_jax.rl import advantage, batching, collect, update
from composer_jax.tasks import mistakes
from composer_jax.text import tokenizer as tokenizer_lib
from tests.agent import summarize_test
from tests.rl import advantage_test


def finish(stream, within_s=20):
  """Waits until no episode is open, as the rollout worker does."""
  deadline = time.monotonic() + within_s
  while stream.open_episodes:
    assert time.monotonic() < deadline, 'episodes never end'
    time.sleep(0.002)


@pytest.fixture
def make_stream():
  streams = []
  source = advantage_test.make_group([1.0, 0.0])

  def make(on_group, play=lambda member: None):
    def rollout(task, policy, *, group, member, seed):
      play(member)
      return source.rollouts[member]

    collector = collect.Collector(
      task_of_group=lambda group: None,
      play=rollout,
      rollouts_per_group=2,
      seed=0,
    )
    streams.append(collect.GroupStream(collector, None, 2))
    return streams[-1], on_group

  yield make
  for stream in streams:
    stream.close()


def test_a_group_is_handed_over_once_and_in_order(make_stream):
  groups = []
  # The second member ends first.
  stream, done = make_stream(
    groups.append, lambda member: time.sleep(0.05 * (1 - member))
  )
  stream.admit(0, done)
  finish(stream)
  assert [[r.member for r in g.rollouts] for g in groups] == [[0, 1]]


@pytest.mark.parametrize('error', [OSError, ValueError, KeyError, SystemExit])
def test_an_error_of_whoever_takes_the_group_ends_the_wait(make_stream, error):
  def on_group(group):
    raise error('no room')

  stream, done = make_stream(on_group)
  stream.admit(0, done)
  with pytest.raises(error, match='no room'):
    finish(stream)


def test_an_error_of_an_episode_ends_the_wait(make_stream):
  def play(member):
    if member:
      raise KeyError('tool')

  stream, done = make_stream(lambda group: None, play)
  stream.admit(0, done)
  with pytest.raises(KeyError, match='tool'):
    finish(stream)


def test_members_that_are_revoked_end_at_their_next_turn_and_are_no_error(
  make_stream,
):
  groups, asked = [], []
  begun, revoked = threading.Event(), threading.Event()
  zeros = np.zeros(1, np.int32)
  answer = records.Completion(
    session='',
    tokens_T=zeros,
    logprobs_T=zeros.astype(np.float32),
    policy_version_T=zeros,
    consumed_expert_ids_TMA=np.zeros((1, 1, 1), np.uint16),
    stopped=True,
  )

  class Policy:
    def complete(self, request):
      asked.append(request.session)
      return answer

    def close(self, session):
      asked.append(f'close {session}')

  def play(task, policy, *, group, member, seed):
    request = records.SampleRequest(
      session=f'{member}',
      context_T=np.zeros(1, np.int32),
      max_new_tokens=1,
      stop_tokens=(),
      seed=(0,),
    )
    with contextlib.closing(types.SimpleNamespace(close=lambda: None)):
      policy.complete(request)
      begun.set()
      assert revoked.wait(20)
      policy.complete(request)
    return advantage_test.make_group([1.0, 0.0, 1.0]).rollouts[member]

  collector = collect.Collector(
    task_of_group=lambda group: None, play=play, rollouts_per_group=3, seed=0
  )
  stream = collect.GroupStream(collector, Policy(), 1)
  # Only the first begins; the others never do.
  share = stream.admit(0, groups.append)
  assert begun.wait(20)
  share.is_revoked = True
  stream.admit(0, groups.append, range(1, 3))
  revoked.set()
  finish(stream)
  stream.close()
  assert [[r.member for r in g.rollouts] for g in groups] == [[1, 2]]
  # What is left of the first time shares no session with the second.
  assert asked == ['0/0', '1/1', '1/1', '1/2', '1/2']


def test_as_many_episodes_begin_as_there_is_room_and_one_in_any_case():
  begun, may_end = [], threading.Semaphore(0)

  def play(task, policy, *, group, member, seed):
    begun.append(member)
    assert may_end.acquire(timeout=20)
    return advantage_test.make_group([1.0, 0.0] * 3).rollouts[member]

  collector = collect.Collector(
    task_of_group=lambda group: None, play=play, rollouts_per_group=6, seed=0
  )
  groups = []
  stream = collect.GroupStream(collector, None, 6)

  def wait_for(count):
    deadline = time.monotonic() + 20
    while len(begun) < count or stream.num_playing > count:
      assert time.monotonic() < deadline
      time.sleep(0.002)
    time.sleep(0.05)
    assert len(begun) == count

  stream.make_room(lambda _: 0)
  stream.admit(0, groups.append)
  wait_for(1)
  stream.make_room(lambda _: 2)
  wait_for(3)
  may_end.release()  # One ends; two play, so that nobody takes its place.
  wait_for(3)
  assert stream.num_playing == 2
  may_end.release(2)  # None plays: one begins.
  wait_for(4)
  stream.make_room(lambda _: None)
  wait_for(6)
  may_end.release(3)
  finish(stream)
  assert [len(g.rollouts) for g in groups] == [6]
  # Who waits when it ends does not play.
  stream.make_room(lambda _: 0)
  begun.clear()
  stream.admit(1, groups.append)
  wait_for(1)
  stream.close()
  may_end.release()
  while stream.num_playing:
    time.sleep(0.002)
  assert len(begun) == 1 and len(groups) == 1


def test_no_more_play_than_have_room_from_the_first_step_on():
  lock, playing, most = threading.Lock(), [0], [0]

  def play(task, policy, *, group, member, seed):
    with lock:
      playing[0] += 1
      most[0] = max(most[0], playing[0])
    time.sleep(0.01)
    with lock:
      playing[0] -= 1
    return advantage_test.make_group([1.0, 0.0]).rollouts[member]

  class Engine:
    options = types.SimpleNamespace(num_slots=16)
    num_unfinished = 0

    def room(self, expected):
      count = max(0, 3 - expected)
      time.sleep(0.002)  # Others would begin meanwhile.
      return count

    def step(self):
      return []

  collector = collect.Collector(
    task_of_group=lambda group: None, play=play, rollouts_per_group=2, seed=0
  )
  assert len(collect.groups(collector, Engine(), range(12))) == 12
  assert most == [3]


def test_the_player_prices_hints_and_summarises_every_episode():
  tokenizer = tokenizer_lib.Tokenizer.train(['a sum up of work'], 270)
  environments = []

  def make_environment(task):
    environments.append(summarize_test.Talker())
    environments[-1].task_id = task
    return environments[-1]

  requests = []

  def reward_of_group(group):
    requests.append(group)
    return dataclasses.replace(
      rewards.UNPRICED, version=group, invalid_penalty=0.5
    )

  collector = collect.Collector(
    task_of_group=lambda group: f'task {group}',
    play=collect.episode_player(
      tokenizer,
      make_environment,
      summarize_test.OPTIONS,
      reward_of_group=reward_of_group,
      hints=mistakes.HintOptions().write,
      summary=summarize_test.SUMMARY,
    ),
    rollouts_per_group=2,
    seed=7,
  )
  calls = ['say ' * 20, *summarize_test.long_talk(12)]
  for member in range(2):
    policy = summarize_test.ChainPolicy(tokenizer, calls)
    task = collector.task_of_group(4)
    rollout = collector.play(task, policy, group=4, member=member, seed=7)
    assert (rollout.task_id, rollout.group, rollout.member) == (
      'task 4',
      4,
      member,
    )
    assert policy.requests[0].seed == (7, 4, member)
    assert (rollout.reward, rollout.reward_version) == (0.5, 4)
    assert [h.kind for h in rollout.hints] == ['not_a_call']
    assert len(rollout.trajectories) > 2
  assert requests == [4, 4]
  assert [talker.num_closed for talker in environments] == [1, 1]


SHAPE = batching.BatchShape(
  rows=2, seq_len=24, num_moe_layers=1, num_active=1, num_experts=2
)


def windows_of(rollout, parts):
  """Returns the rollout with its trajectory cut into so many windows."""
  (trajectory,) = rollout.trajectories
  cuts = [len(trajectory) * i // parts for i in range(parts + 1)]
  names = [f.name for f in dataclasses.fields(records.Trajectory)]
  windows = [
    records.Trajectory(
      **{
        name: getattr(trajectory, name)[start:stop]
        for name in names
        if name != 'temperature'
      },
      temperature=trajectory.temperature,
    )
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
  ]
  return dataclasses.replace(rollout, trajectories=tuple(windows))


def test_a_chain_counts_once_whatever_its_windows():
  """Its reward counts once in the group, and all its tokens have its advantage.

  Counting it once a window would pull the baseline to the rewards of long
  chains; normalising by windows would give their tokens more weight.
  """
  rewards_R = [1.0, 0.0, 0.0, 0.25]
  group = advantage_test.make_group(rewards_R, length=12)
  chained = dataclasses.replace(
    group,
    rollouts=tuple(
      windows_of(rollout, parts)
      for rollout, parts in zip(group.rollouts, (3, 1, 4, 2), strict=True)
    ),
  )
  weights = []
  for form in (group, chained):
    advantages_R = advantage.group_advantages(form, np.array(rewards_R))
    np.testing.assert_allclose(advantages_R, np.array(rewards_R) - 0.3125)
    packed, kept = update._trained([form], [advantages_R], SHAPE)
    assert len(kept) == sum(len(r.trajectories) for r in form.rollouts)
    # Weight of each token in the loss, in order of the rollouts.
    places = iter(packed.places)
    weights.append(
      [
        np.concatenate(
          [
            (b.advantages_BT * b.loss_weights_BT)[place.row, place.span]
            for place in (next(places) for _ in r.trajectories)
            for b in [packed.microbatches[place.batch]]
          ]
        )
        for r in form.rollouts
      ]
    )
  for alone_T, chain_T, advantage_ in zip(*weights, advantages_R, strict=True):
    np.testing.assert_array_equal(chain_T, alone_T)
    sampled_T = chain_T[chain_T != 0]
    np.testing.assert_array_equal(
      sampled_T, np.full_like(sampled_T, advantage_)
    )
    assert len(sampled_T)
