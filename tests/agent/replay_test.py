"""An episode is a function of its record and of its environment."""

import dataclasses

import numpy as np
import pytest

from composer_jax.agent import episode, rewards
from composer_jax.core import records
from composer_jax.tasks import mistakes
from composer_jax.tasks.list_functions import environment, family, runners
from composer_jax.text import tokenizer as tokenizer_lib
from tests.agent import episode_test, summarize_test
from tests.agent import replaying as replay


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train(['a sum up of work to go on'], 270)


def assert_same(again, rollout):
  assert len(again.trajectories) == len(rollout.trajectories)
  for replayed, recorded in zip(
    again.trajectories, rollout.trajectories, strict=True
  ):
    for field in dataclasses.fields(records.Trajectory):
      np.testing.assert_array_equal(
        getattr(replayed, field.name), getattr(recorded, field.name), field.name
      )
  for replayed, recorded in zip(again.hints, rollout.hints, strict=True):
    assert repr(replayed) == repr(recorded)
  others = [
    dataclasses.replace(
      r, trajectories=rollout.trajectories, hints=(), sandbox_seconds=0.0
    )
    for r in (again, rollout)
  ]
  assert others[0] == others[1]


@pytest.fixture(scope='module')
def chain(tokenizer):
  """Returns a rollout of many windows."""
  talker = summarize_test.Talker(sizes=(1, 4, 7))
  calls = summarize_test.long_talk(30)
  _, rollout = summarize_test.play(tokenizer, talker, calls)
  assert len(rollout.trajectories) > 4
  return rollout


def again(rollout, tokenizer, talker, summary=summarize_test.SUMMARY, **budget):
  options = dataclasses.replace(summarize_test.OPTIONS, **budget)
  return replay.replay(rollout, talker, tokenizer, options, summary=summary)


def test_calls_cut_off_edits_and_tests_come_out_again(tokenizer):
  task = family.generate(3, 'train')
  edit = f'edit {task.path} {task.function}\n'
  calls = [
    f'read {task.path}',
    'no such tool',
    'read ' * 40,
    edit + 'return 7',
    'test',
    edit + task.reference,
    'test',
    'finish',
  ]
  runner = runners.TrustedRunner()
  options = dataclasses.replace(episode_test.OPTIONS, max_call_tokens=80)
  rollout = episode.run(
    environment.FunctionEnvironment(task, runner),
    episode_test.TapePolicy(tokenizer, calls),
    tokenizer,
    options,
    group=0,
    member=0,
    seed=0,
    reward=episode_test.PRICES,
    hints=mistakes.HintOptions().write,
  )
  assert rollout.verdict.passed and rollout.num_invalid == 2
  assert len(rollout.hints) == 2

  def play_again(reward):
    return replay.replay(
      rollout,
      environment.FunctionEnvironment(task, runner),
      tokenizer,
      options,
      reward=reward,
      hints=mistakes.HintOptions().write,
    )

  assert_same(play_again(episode_test.PRICES), rollout)
  # Under other prices the same episode earns something else.
  dear = dataclasses.replace(rewards.UNPRICED, version=4, invalid_penalty=1.0)
  repriced = play_again(dear)
  assert (repriced.reward, repriced.reward_version) == (-1.0, 4)


def test_a_chain_of_windows_comes_out_again(tokenizer, chain):
  talker = summarize_test.Talker(sizes=(1, 4, 7))
  assert_same(again(chain, tokenizer, talker), chain)
  assert talker.calls == summarize_test.long_talk(30)


@pytest.mark.parametrize(
  'budget', [{'max_turns': 9}, {'max_sampled_tokens': 60}]
)
def test_what_a_budget_ended_ends_there_again(tokenizer, budget):
  talker = summarize_test.Talker()
  calls = summarize_test.long_talk(30)
  _, cut = summarize_test.play(tokenizer, talker, calls, **budget)
  assert cut.verdict.status == records.UNFINISHED
  talker = summarize_test.Talker()
  assert_same(again(cut, tokenizer, talker, **budget), cut)
  with pytest.raises(replay.Differs, match='ends after|differs from'):
    again(cut, tokenizer, summarize_test.Talker())


def test_another_answer_is_named_with_its_turn(tokenizer, chain):
  class Forgetful(summarize_test.Talker):
    def call(self, text):
      result = super().call(text)
      if len(self.calls) == 9:
        return dataclasses.replace(result, text='nothing')
      return result

  with pytest.raises(replay.Differs, match=r'before turn \d+ of task .talk'):
    again(chain, tokenizer, Forgetful(sizes=(1, 4, 7)))


def test_another_verdict_trigger_or_end_is_named(tokenizer, chain):
  class Harsh(summarize_test.Talker):
    def verdict(self, finished):
      del finished
      return super().verdict(False)

  with pytest.raises(replay.Differs, match="status is 'unfinished'"):
    again(chain, tokenizer, Harsh(sizes=(1, 4, 7)))

  class Endless(summarize_test.Talker):
    def call(self, text):
      return dataclasses.replace(super().call(text), is_final=False)

  with pytest.raises(replay.Differs, match='ends after'):
    again(chain, tokenizer, Endless(sizes=(1, 4, 7)))
  other = dataclasses.replace(summarize_test.SUMMARY, trigger=150)
  with pytest.raises(replay.Differs, match='The context before turn'):
    again(chain, tokenizer, summarize_test.Talker((1, 4, 7)), other)
