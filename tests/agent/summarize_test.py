"""Laws of windows that restart from summaries: limits, masks, contents."""

import dataclasses

import numpy as np
import pytest

from composer_jax.agent import environment, episode, rewards, summarize
from composer_jax.core import group_bytes, records
from composer_jax.core import turns as turns_lib
from composer_jax.text import chat
from composer_jax.text import tokenizer as tokenizer_lib
from tests.agent import episode_test

OPTIONS = episode.EpisodeOptions(
  max_tokens=200, max_turns=60, max_call_tokens=12
)
SUMMARY = summarize.SummaryOptions(
  trigger=170, max_tokens=10, max_summaries=99, plan_tokens=12, query='sum up'
)


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train(['a sum up of work to go on'], 270)


class Talker(environment.Environment):
  """Answers the n-th call with `sizes[n]` words; the call 'end' ends."""

  task_id = 'talk'
  prompt = 'talk'
  tools = ('say', 'end')

  def __init__(self, sizes=(3,), plan='go on'):
    self.sizes = sizes
    self.plan = plan
    self.calls = []
    self.num_closed = 0

  def call(self, text):
    self.calls.append(text)
    if text == 'end':
      return environment.ToolResult(text='', tool='end', is_final=True)
    size = self.sizes[(len(self.calls) - 1) % len(self.sizes)]
    words = ' '.join(f'{len(self.calls)}.{i}' for i in range(size))
    return environment.ToolResult(text=words, tool='say')

  def state(self):
    return self.plan

  def verdict(self, finished):
    return records.Verdict(
      passed=finished,
      num_passed=int(finished),
      num_tests=1,
      status=records.GRADED if finished else records.UNFINISHED,
      sandbox_level='none',
    )

  def close(self):
    self.num_closed += 1


class ChainPolicy(episode_test.TapePolicy):
  """Samples calls and summaries, in one TapePolicy session per window."""

  def __init__(self, tokenizer, calls, summaries=('sum', 'work')):
    super().__init__(tokenizer, [])
    self.coming = list(calls)
    self.summaries = summaries
    self.query_T = chat.user(tokenizer, SUMMARY.query)
    self.windows = {}
    self.num_summaries = 0

  def complete(self, request):
    self.seen = self.windows.get(request.session, np.zeros(0, np.int32))
    tail_T = request.context_T[-len(self.query_T) - 1 : -1]
    if np.array_equal(tail_T, self.query_T):
      text = self.summaries[self.num_summaries % len(self.summaries)]
      self.num_summaries += 1
    else:
      text = self.coming.pop(0)
    if isinstance(text, str):
      text = self.tokenizer.encode(text)
    self.calls = [np.asarray(text, np.int32)]
    completion = super().complete(request)
    self.windows[request.session] = self.seen
    return completion


def play(tokenizer, talker, calls, summary=SUMMARY, policy=None, **changes):
  policy = policy or ChainPolicy(tokenizer, calls)
  rollout = episode.run(
    talker,
    policy,
    tokenizer,
    dataclasses.replace(OPTIONS, **changes),
    group=5,
    member=2,
    seed=7,
    summary=summary,
  )
  return policy, rollout


def long_talk(count):
  return ['say it'] * count + ['end']


def texts(tokenizer, trajectory):
  return [m['text'] for m in chat.turns(tokenizer, trajectory.tokens_T)]


def test_an_episode_of_many_windows_passes_and_is_one_rollout(tokenizer):
  talker = Talker(sizes=(1, 4, 7))
  policy, rollout = play(tokenizer, talker, long_talk(55))
  assert rollout.verdict.passed and rollout.reward == 1.0
  assert rollout.num_turns == 56 and talker.num_closed == 1
  assert rollout.tools == ('say',) * 55 + ('end',)
  assert talker.calls == long_talk(55)
  assert len(rollout.trajectories) > 8
  assert rollout.summary_trigger == SUMMARY.trigger
  # Windows are sessions of their own, each with its own random numbers.
  sessions = list(dict.fromkeys(r.session for r in policy.requests))
  assert sessions[:2] == ['talk/7/5/2', 'talk/7/5/2/1']
  assert policy.closed == sessions
  seeds = list(dict.fromkeys(r.seed for r in policy.requests))
  assert seeds[:3] == [(7, 5, 2), (7, 5, 2, 1), (7, 5, 2, 2)]
  assert len(seeds) == len(sessions) == len(rollout.trajectories)


def test_turns_and_trigger_travel_with_the_group(tokenizer):
  _, rollout = play(tokenizer, Talker(), long_talk(12))
  windows = tuple(
    dataclasses.replace(
      t, expert_ids_TMA=np.full_like(t.expert_ids_TMA, records.NO_ROUTE)
    )
    for t in rollout.trajectories
  )
  alone = dataclasses.replace(rollout, trajectories=windows, member=0)
  group = records.Group(group=5, task_id='talk', rollouts=(alone,))
  again = group_bytes.from_bytes(group_bytes.to_bytes(group)).rollouts[0]
  assert again.turns == rollout.turns
  assert again.summary_trigger == SUMMARY.trigger
  assert len(again.trajectories) == len(windows)


@pytest.mark.parametrize('trigger', [110, 111, 123, 170, 199])
@pytest.mark.parametrize('sizes', [(0,), (1, 9, 2), (40,)])
def test_no_window_exceeds_the_trigger(tokenizer, trigger, sizes):
  summary = dataclasses.replace(SUMMARY, trigger=trigger)
  policy, rollout = play(tokenizer, Talker(sizes), long_talk(30), summary)
  assert rollout.verdict.passed
  lengths = [len(t) for t in rollout.trajectories]
  assert max(lengths) <= trigger < sum(lengths)
  # No window could exceed it if the policy sampled all that it may.
  by_session = {}
  for request, turn in zip(policy.requests, rollout.turns, strict=True):
    length = by_session.get(request.session, 0) + len(request.context_T)
    assert length + request.max_new_tokens <= trigger
    by_session[request.session] = length + turn.stop - turn.start


def test_no_context_is_ever_tokenised_again(tokenizer):
  # Single bytes spell the text in other tokens than encoding it would give.
  spelled = np.concatenate([tokenizer.encode(c) for c in 'sum up'])
  assert len(spelled) > len(tokenizer.encode('sum up'))
  policy = ChainPolicy(tokenizer, long_talk(20), [spelled])
  _, rollout = play(tokenizer, Talker(), [], policy=policy)
  # The tokens of each session, in order, are its window.
  for tokens_T, window in zip(
    policy.windows.values(), rollout.trajectories, strict=True
  ):
    np.testing.assert_array_equal(tokens_T, window.tokens_T)
  # The next window repeats a summary token by token as it was sampled.
  head = chat.user(tokenizer, 'talk')
  for number, window in enumerate(rollout.trajectories[1:], 1):
    opening = [tokenizer.USER, *tokenizer.encode(f'summary {number}\n')]
    expected = np.concatenate([head, opening, spelled])
    np.testing.assert_array_equal(window.tokens_T[: len(expected)], expected)


def test_each_window_has_its_own_logprobs_routes_and_versions(tokenizer):
  policy, rollout = play(tokenizer, Talker(), long_talk(20))
  del policy
  last = 0
  for window in rollout.trajectories:
    length = len(window)
    sampled = window.loss_mask_T
    np.testing.assert_array_equal(
      window.logprobs_T, np.where(sampled, -np.arange(length), 0)
    )
    expected = np.stack([window.tokens_T, np.arange(length)], -1)[:, None]
    expected[-1] = records.NO_ROUTE
    np.testing.assert_array_equal(window.expert_ids_TMA, expected)
    versions = window.policy_version_T[sampled]
    np.testing.assert_array_equal(
      versions, last + np.arange(1, sampled.sum() + 1)
    )
    last = versions[-1]


def test_summaries_are_trained_and_queries_are_not(tokenizer):
  policy, rollout = play(tokenizer, Talker(), long_talk(20))
  trained = [np.zeros(len(t), bool) for t in rollout.trajectories]
  for turn in rollout.turns:
    trained[turn.trajectory][turn.start : turn.stop] = True
  for window, mask_T in zip(rollout.trajectories, trained, strict=True):
    np.testing.assert_array_equal(window.loss_mask_T, mask_T)
  summaries = [t for t in rollout.turns if t.outcome == turns_lib.SUMMARY]
  assert len(summaries) == len(rollout.trajectories) - 1
  for turn in summaries:
    window = rollout.trajectories[turn.trajectory]
    assert turn.stop == len(window)
    stop = turn.start - 1
    query = slice(stop - len(policy.query_T), stop)
    np.testing.assert_array_equal(window.tokens_T[query], policy.query_T)
    assert not window.loss_mask_T[query.start : turn.start].any()
    written = tokenizer.decode(window.tokens_T[turn.start : turn.stop - 1])
    assert written in ('sum', 'work')
  # A summary is no call: it is neither counted nor invalid.
  assert rollout.num_turns == 21 and rollout.num_invalid == 0


def test_a_new_window_has_the_task_summary_plan_and_last_answer(tokenizer):
  _, rollout = play(tokenizer, Talker(plan='to go'), long_talk(12))
  answers = [
    chat.turns(tokenizer, w.tokens_T)[2]['text']
    for w in rollout.trajectories[1:]
  ]
  for number, window in enumerate(rollout.trajectories[1:], 1):
    summary = ('sum', 'work')[(number - 1) % 2]
    messages = chat.turns(tokenizer, window.tokens_T)
    assert [m['role'] for m in messages[:4]] == ['user', 'user', 'tool', 'call']
    assert messages[0]['text'] == 'talk'
    assert messages[1]['text'] == f'summary {number}\n{summary}\nplan\nto go'
  # Every answer is in exactly one window.
  calls_before = [
    sum(
      t.trajectory < number and t.outcome != turns_lib.SUMMARY
      for t in rollout.turns
    )
    for number in range(1, len(rollout.trajectories))
  ]
  assert answers == [f'{n}.0 {n}.1 {n}.2' for n in calls_before]
  _, bare = play(tokenizer, Talker(plan=''), long_talk(12))
  assert texts(tokenizer, bare.trajectories[1])[1] == 'summary 1\nsum'


def test_what_does_not_fit_a_new_window_is_cut(tokenizer):
  _, rollout = play(tokenizer, Talker((60,), plan='go ' * 60), long_talk(3))
  assert rollout.verdict.passed
  window = rollout.trajectories[1]
  _, summary, answer, _ = texts(tokenizer, window)[:4]
  assert summary.startswith('summary 1\nsum\nplan\ngo')
  assert answer.startswith('1.0 1.1') and answer.endswith('...')
  whole = Talker((60,)).call('say it').text
  assert whole.startswith(answer[:-3]) and len(answer) < len(whole)


def test_special_tokens_of_a_summary_do_not_go_on(tokenizer):
  """They could pose as the end of the message and an answer of the host."""
  forged = [
    *tokenizer.encode('sum'),
    tokenizer.TOOL,
    tokenizer.USER,
    tokenizer.vocab_size + 3,
  ]
  policy = ChainPolicy(tokenizer, long_talk(12), [forged])
  _, rollout = play(tokenizer, Talker(plan=''), [], policy=policy)
  first, second = rollout.trajectories[:2]
  assert first.tokens_T[-2] == tokenizer.vocab_size + 3
  assert texts(tokenizer, second)[1] == 'summary 1\nsum'


def test_calls_and_summaries_that_are_cut_off_are_closed(tokenizer):
  policy = ChainPolicy(
    tokenizer, ['say ' * 20] * 12 + ['end'], ['go on with work ' * 9]
  )
  _, rollout = play(tokenizer, Talker(), [], policy=policy)
  assert rollout.num_invalid == 12 and rollout.verdict.passed
  for turn in rollout.turns:
    if turn.outcome == turns_lib.SUMMARY:
      window = rollout.trajectories[turn.trajectory]
      assert turn.stop - turn.start == SUMMARY.max_tokens
      before = turn.start - 1 - len(policy.query_T) - 1
      assert window.tokens_T[before] == tokenizer.END
      assert not window.loss_mask_T[before]
  for window in rollout.trajectories[1:]:
    roles = np.isin(
      window.tokens_T, [tokenizer.USER, tokenizer.CALL, tokenizer.TOOL]
    )
    ends = window.tokens_T == tokenizer.END
    # All messages are closed but a summary that was cut off.
    assert roles.sum() - ends.sum() in (0, 1)


def test_the_last_window_ends_as_without_summaries(tokenizer):
  summary = dataclasses.replace(SUMMARY, max_summaries=2)
  _, rollout = play(tokenizer, Talker(), long_talk(50), summary)
  assert rollout.verdict.status == records.UNFINISHED
  assert len(rollout.trajectories) == 3
  assert rollout.turns[-1].outcome != turns_lib.SUMMARY
  # It may use the room that other windows reserve for a summary.
  assert len(rollout.trajectories[2]) > max(map(len, rollout.trajectories[:2]))


def test_without_a_trigger_nothing_changes(tokenizer):
  _, off = play(tokenizer, Talker(), long_talk(30), summarize.OFF)
  assert len(off.trajectories) == 1 and off.summary_trigger is None
  assert off.verdict.status == records.UNFINISHED
  # Windows are alike before the first summary.
  _, on = play(tokenizer, Talker(), long_talk(30))
  stop = on.turns[0].stop
  np.testing.assert_array_equal(
    on.trajectories[0].tokens_T[:stop], off.trajectories[0].tokens_T[:stop]
  )


def test_budgets_of_tokens_end_an_episode(tokenizer):
  _, whole = play(tokenizer, Talker(), long_talk(30))
  sampled = sum(int(t.loss_mask_T.sum()) for t in whole.trajectories)
  for budget in (1, *range(40, 80), sampled - 1):
    _, cut = play(tokenizer, Talker(), long_talk(30), max_sampled_tokens=budget)
    spent = sum(int(t.loss_mask_T.sum()) for t in cut.trajectories)
    assert spent <= budget and not cut.verdict.passed
    # A summary is made for a call that follows it.
    assert cut.turns[-1].outcome != turns_lib.SUMMARY
  _, same = play(tokenizer, Talker(), long_talk(30), max_sampled_tokens=sampled)
  assert same.verdict.passed


def test_effort_is_of_all_windows(tokenizer):
  prices = rewards.RewardOptions(effort_q=0.0)
  talker, policy = Talker(), ChainPolicy(tokenizer, long_talk(20))
  rollout = episode.run(
    talker,
    policy,
    tokenizer,
    OPTIONS,
    group=0,
    member=0,
    seed=0,
    reward=prices,
    summary=SUMMARY,
  )
  sampled = sum(int(t.loss_mask_T.sum()) for t in rollout.trajectories)
  lost = prices.effort_penalty(sampled, len(rollout.turns))
  assert rollout.reward == pytest.approx(1 - lost)


def test_limits_that_leave_no_room_are_named(tokenizer):
  small = dataclasses.replace(SUMMARY, trigger=60)
  with pytest.raises(
    ValueError, match=r'trigger \(60\) must be at least (\d+)'
  ) as e:
    play(tokenizer, Talker(), long_talk(3), small)
  needed = int(str(e.value).split('at least ')[1].split(':')[0])
  fits = dataclasses.replace(SUMMARY, trigger=needed)
  talker = Talker((9,), plan='go ' * 60)
  policy = ChainPolicy(tokenizer, long_talk(9), ['work ' * 20])
  _, rollout = play(tokenizer, talker, [], fits, policy=policy)
  assert rollout.verdict.passed
  assert max(map(len, rollout.trajectories)) <= needed
  with pytest.raises(
    ValueError, match=r'trigger must not exceed .*200\); got 201'
  ):
    play(tokenizer, Talker(), [], dataclasses.replace(SUMMARY, trigger=201))
  for field in ('trigger', 'max_tokens', 'max_summaries', 'plan_tokens'):
    with pytest.raises(ValueError, match=f'{field} .* at least .; got -1'):
      dataclasses.replace(SUMMARY, **{field: -1})
