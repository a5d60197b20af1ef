"""Laws of an episode: exact tokens, aligned records, limits, verdicts."""

import dataclasses

import numpy as np
import pytest

from composer_jax.agent import episode, rewards
from composer_jax.core import records
from composer_jax.sandbox import base
from composer_jax.sandbox import open as open_lib
from composer_jax.tasks import contained
from composer_jax.tasks.list_functions import environment, family, runners
from composer_jax.text import tokenizer as tokenizer_lib

OPTIONS = episode.EpisodeOptions(
  max_tokens=2000, max_turns=9, max_call_tokens=200
)
PRICES = dataclasses.replace(rewards.UNPRICED, invalid_penalty=0.25)
TASK = family.generate(3, 'unseen_all')
EDIT = f'edit {TASK.path} {TASK.function}\n{TASK.reference}'
HONEST = [f'read {TASK.path}', EDIT, 'test', 'finish']


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train([*TASK.files.values(), *HONEST * 4], 290)


class TapePolicy:
  """Samples given calls, with routes, log-probabilities and versions.

  The route of a token is its id and its position, its log-probability minus
  its position, and the version grows by one with every sampled token.
  """

  def __init__(self, tokenizer, calls):
    self.tokenizer = tokenizer
    self.calls = [
      c if isinstance(c, np.ndarray) else tokenizer.encode(c) for c in calls
    ]
    self.requests = []
    self.closed = []
    self.seen = np.zeros(0, np.int32)
    self.version = 0

  def complete(self, request):
    self.requests.append(request)
    call = np.append(self.calls.pop(0), self.tokenizer.END).astype(np.int32)
    sampled = call[: request.max_new_tokens]
    start = max(len(self.seen) - 1, 0)
    self.seen = np.concatenate([self.seen, request.context_T, sampled])
    consumed = np.arange(start, len(self.seen) - 1)
    positions = np.arange(len(self.seen) - len(sampled), len(self.seen))
    versions = self.version + np.arange(1, len(sampled) + 1)
    self.version = int(versions[-1])
    routes = np.stack([self.seen[consumed], consumed], -1)[:, None]
    return records.Completion(
      session=request.session,
      tokens_T=sampled,
      logprobs_T=-positions.astype(np.float32),
      policy_version_T=versions.astype(np.int32),
      consumed_expert_ids_TMA=routes.astype(np.uint16),
      stopped=bool(sampled[-1] == self.tokenizer.END),
    )

  def close(self, session):
    self.closed.append(session)


def _run(
  tokenizer,
  calls,
  runner=None,
  reward=PRICES,
  kind=environment.FunctionEnvironment,
  **changes,
):
  policy = TapePolicy(tokenizer, calls)
  rollout = episode.run(
    kind(TASK, runner or runners.TrustedRunner()),
    policy,
    tokenizer,
    dataclasses.replace(OPTIONS, **changes),
    group=5,
    member=2,
    seed=7,
    reward=reward,
  )
  return policy, rollout


def test_an_honest_episode_passes(tokenizer):
  policy, rollout = _run(tokenizer, HONEST)
  assert rollout.verdict.passed
  assert rollout.reward == 1.0
  assert rollout.tools == ('read', 'edit', 'test', 'finish')
  assert (rollout.num_turns, rollout.num_invalid) == (4, 0)
  assert (rollout.task_id, rollout.group, rollout.member) == (
    TASK.task_id,
    5,
    2,
  )
  assert policy.closed == [policy.requests[0].session]
  assert {r.seed for r in policy.requests} == {(7, 5, 2)}
  turns = episode.turns(rollout, tokenizer)
  assert [t['role'] for t in turns] == ['user'] + ['call', 'tool'] * 3 + [
    'call'
  ]
  assert [t['text'] for t in turns if t['role'] == 'call'] == HONEST
  assert turns[-2]['text'] == '2 passed'


def test_every_array_is_about_its_own_token(tokenizer):
  policy, rollout = _run(tokenizer, ['bogus', *HONEST])
  (trajectory,) = rollout.trajectories
  length = len(trajectory)
  np.testing.assert_array_equal(trajectory.tokens_T, policy.seen)
  # The policy gives each token a route that names it.
  expected = np.stack([policy.seen, np.arange(length)], -1)[:, None]
  expected[-1] = records.NO_ROUTE
  np.testing.assert_array_equal(trajectory.expert_ids_TMA, expected)
  sampled = trajectory.loss_mask_T
  np.testing.assert_array_equal(
    trajectory.logprobs_T, np.where(sampled, -np.arange(length), 0)
  )
  # The n-th sampled token has version n; context has that of the next one.
  later = np.cumsum(sampled[::-1])[::-1]
  np.testing.assert_array_equal(
    trajectory.policy_version_T, sampled.sum() - later + 1
  )
  assert trajectory.temperature == OPTIONS.temperature


def test_sampled_tokens_are_kept_although_encoding_gives_others(tokenizer):
  # Single bytes spell the text in other tokens than the merges would give.
  spelled = np.concatenate([tokenizer.encode(c) for c in HONEST[0]])
  assert len(spelled) > len(tokenizer.encode(HONEST[0]))
  _, rollout = _run(tokenizer, [spelled, *HONEST[1:]])
  (trajectory,) = rollout.trajectories
  written = trajectory.tokens_T[trajectory.loss_mask_T]
  np.testing.assert_array_equal(written[: len(spelled)], spelled)
  assert rollout.verdict.passed


def test_invalid_calls_cost_and_are_counted(tokenizer):
  _, rollout = _run(tokenizer, ['bogus', *HONEST[:2], 'read', 'finish'])
  assert rollout.num_invalid == 2
  assert rollout.tools == ('', 'read', 'edit', '', 'finish')
  assert rollout.verdict.passed
  assert rollout.reward == 1.0 - 2 * 0.25


def test_tokens_that_are_no_text_make_an_invalid_call(tokenizer):
  for bad in (tokenizer.TOOL, tokenizer.PAD, tokenizer.vocab_size):
    call = np.append(tokenizer.encode('finish'), bad).astype(np.int32)
    _, rollout = _run(tokenizer, [call, 'finish'])
    assert rollout.tools == ('', 'finish')
    texts = [t['text'] for t in episode.turns(rollout, tokenizer)]
    assert texts[1:3] == [f'finish<{bad}>', 'error: not a call']


def test_a_call_cut_off_is_invalid_and_closed_by_the_harness(tokenizer):
  policy, rollout = _run(tokenizer, ['read ' * 20, *HONEST], max_call_tokens=64)
  assert rollout.tools == ('', 'read', 'edit', 'test', 'finish')
  assert policy.requests[1].context_T[0] == tokenizer.END
  (trajectory,) = rollout.trajectories
  ends = trajectory.tokens_T == tokenizer.END
  roles = np.isin(
    trajectory.tokens_T, [tokenizer.USER, tokenizer.CALL, tokenizer.TOOL]
  )
  assert ends.sum() == roles.sum()


def test_an_episode_without_finish_fails_however_right(tokenizer):
  _, rollout = _run(tokenizer, HONEST[:3] + ['list'], max_turns=4)
  assert rollout.verdict.status == records.UNFINISHED
  assert rollout.reward == 0.0
  assert rollout.verdict.num_passed == rollout.verdict.num_tests


def test_the_window_never_exceeds_max_tokens(tokenizer):
  _, whole = _run(tokenizer, HONEST)
  # In a window that is just large enough, answers may announce the last call.
  length = len(whole.trajectories[0])
  longest = length + 3 * len(tokenizer.encode(episode.LAST_CALL))
  passed = []
  for max_tokens in range(length - 40, longest + 1):
    _, rollout = _run(tokenizer, HONEST, max_tokens=max_tokens)
    (trajectory,) = rollout.trajectories
    assert len(trajectory) <= max_tokens
    assert trajectory.loss_mask_T[-1]
    passed.append(rollout.verdict.passed)
    assert passed[-1] or rollout.verdict.status == records.UNFINISHED
  assert passed == sorted(passed)
  assert not any(passed[:40]) and passed[-1]
  with pytest.raises(ValueError, match=r'max_tokens \(5\) must exceed that'):
    _run(tokenizer, HONEST, max_tokens=5)


def _answers(rollout, tokenizer):
  turns = episode.turns(rollout, tokenizer)
  return [t['text'] for t in turns if t['role'] == 'tool']


def test_the_answer_before_the_last_call_says_so(tokenizer):
  calls = ['list', *HONEST[:2], 'test']
  for max_turns in range(2, 5):
    _, rollout = _run(tokenizer, calls, max_turns=max_turns)
    told = [a.endswith(episode.LAST_CALL) for a in _answers(rollout, tokenizer)]
    assert told == [False] * (max_turns - 2) + [True]
  _, rollout = _run(tokenizer, ['list', 'finish'], max_turns=3)
  assert not _answers(rollout, tokenizer)[0].endswith(episode.LAST_CALL)


@pytest.mark.parametrize('call', [60, 200])
def test_a_policy_is_told_when_its_window_may_hold_one_more_call_only(
  tokenizer, call
):
  _, whole = _run(tokenizer, ['list'] * 6 + ['finish'])
  (trajectory,) = whole.trajectories
  starts = np.flatnonzero(trajectory.tokens_T == tokenizer.TOOL)
  length = starts[1] - starts[0]
  num_told = 0
  for max_tokens in range(starts[2] + 40, starts[4] + 300, 5):
    _, rollout = _run(
      tokenizer,
      ['list'] * 6 + ['finish'],
      max_tokens=int(max_tokens),
      max_call_tokens=call,
    )
    # Up to the first that says so, answers are as long as without a limit.
    told = [a.endswith(episode.LAST_CALL) for a in _answers(rollout, tokenizer)]
    answer = len(tokenizer.encode(_answers(whole, tokenizer)[0])) + 2
    ends = [starts[0] + i * length + answer for i in range(len(told))]
    # 1.5 calls, but at most a quarter of the window.
    least = min(1.5 * call, max_tokens // 4)
    short = [max_tokens - end < least for end in ends]
    first = short.index(True) if any(short) else len(short)
    assert told[: first + 1] == short[: first + 1]
    num_told += any(told)
  assert num_told > 10


def _contained(task, runner):
  return contained.ContainedEnvironment(
    task.task_id, lambda: environment.FunctionEnvironment(task, runner)
  )


def test_a_broken_sandbox_is_not_the_policys_failure(tokenizer):
  class Broken:
    level = 'unshare'
    calls = 0

    def call(self, files, module, function, arguments):
      del files, module, function, arguments
      self.calls += 1
      return base.Result(
        level='unshare', status='infrastructure', error='no zygote'
      )

  for calls, num_turns in ((HONEST, 3), ([EDIT, 'finish'], 2)):
    runner = Broken()
    policy, rollout = _run(tokenizer, calls, runner, kind=_contained)
    assert rollout.verdict.status == records.INFRASTRUCTURE
    assert not rollout.verdict.passed
    assert rollout.num_turns == num_turns
    assert runner.calls == 1
    assert policy.closed


def test_a_policy_that_loses_routes_is_refused(tokenizer):
  class Lossy(TapePolicy):
    def complete(self, request):
      completion = super().complete(request)
      routes = completion.consumed_expert_ids_TMA[1:]
      return dataclasses.replace(completion, consumed_expert_ids_TMA=routes)

  policy = Lossy(tokenizer, ['finish'])
  with pytest.raises(ValueError, match='all but the last are required'):
    episode.run(
      environment.FunctionEnvironment(TASK, runners.TrustedRunner()),
      policy,
      tokenizer,
      OPTIONS,
      group=0,
      member=0,
      seed=0,
    )
  assert policy.closed


def test_the_real_sandbox_gives_the_trusted_runners_verdict(tokenizer):
  limits = base.Limits(
    wall_s=5.0,
    cpu_s=5.0,
    memory_bytes=1 << 29,
    processes=8,
    file_bytes=1 << 20,
    output_bytes=1 << 16,
  )
  wrong = f'edit {TASK.path} {TASK.function}\nreturn None'
  sandbox = open_lib.open_sandbox('auto', limits, allow_unsafe=True)
  try:
    for calls in (HONEST, [wrong, 'test', 'finish']):
      _, real = _run(tokenizer, calls, sandbox)
      _, trusted = _run(tokenizer, calls)
      assert real.verdict.sandbox_level == sandbox.level
      assert real.verdict == dataclasses.replace(
        trusted.verdict, sandbox_level=sandbox.level
      )
      np.testing.assert_array_equal(
        real.trajectories[0].tokens_T, trusted.trajectories[0].tokens_T
      )
      assert real.sandbox_seconds > 0
  finally:
    sandbox.close()


def test_effort_lowers_the_reward_by_its_penalty(tokenizer):
  _, free = _run(tokenizer, HONEST)
  prices = dataclasses.replace(
    rewards.UNPRICED,
    version=3,
    effort_coefficient=0.3,
    effort_scale=40.0,
    effort_turn_tokens=7.0,
  )
  _, paid = _run(tokenizer, HONEST, reward=prices)
  sampled = int(free.trajectories[0].loss_mask_T.sum())
  price = prices.effort_penalty(sampled, free.num_turns)
  assert 0.1 < price < 1
  assert free.reward - paid.reward == pytest.approx(price)
  assert (free.reward_version, paid.reward_version) == (0, 3)
  assert paid.reward_terms == {'success': 1.0, 'effort': -price}


@pytest.mark.parametrize(
  'field, value, message',
  [
    ('max_turns', 0, 'max_turns must be .* at least 1; got 0'),
    ('max_tokens', 0, 'max_tokens must be .* at least 1'),
  ],
)
def test_options_that_make_no_sense_are_refused(field, value, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(OPTIONS, **{field: value})
