"""A fault of one environment is counted, and ends no run or evaluation."""

import types

import pytest

from composer_jax import wiring
from composer_jax.agent import environment, episode
from composer_jax.core import records
from composer_jax.tasks import contained
from composer_jax.tasks.practice import conversation, evaluation
from composer_jax.tasks.repository import scripts
from composer_jax.text import tokenizer as tokenizers
from experiments.examples import own_family
from tests.tasks.practice import own_family_test

TASK = own_family.Word(task_id='words/train/3')
CALLS = [f'say {TASK.text[::-1]}', 'finish']


class Unprintable(Exception):
  def __str__(self):
    raise KeyError('no text')


class _Raises:
  """An attribute or method that fails, read or called from the n-th time on."""

  def __init__(self, error, times=0):
    self._error, self._left = error, times

  def __get__(self, owner, kind=None):
    self._left -= 1
    if self._left < 0:
      raise self._error
    return 0


def _faulty(**fields):
  return type('Faulty', (own_family.Backwards,), fields)


def _gives(value):
  return lambda self, *_: value


def _restarts_and_fails(self, chain, limits):
  chain.sample(_PROMPT_T, 5)
  chain.restart()
  raise KeyError('a bug')


FAULTS = {
  'init': dict(__init__=_Raises(KeyError('a bug'))),
  'prompt': dict(prompt=_Raises(KeyError('a bug')), __init__=_gives(None)),
  'tools': dict(tools=None),
  'history': dict(history=[('only one',)]),
  'call': dict(call=_Raises(RecursionError('deep'))),
  'exit': dict(call=_Raises(SystemExit(1))),
  'unprintable': dict(call=_Raises(Unprintable())),
  'no answer': dict(call=_gives(None)),
  'answer of bytes': dict(
    call=_gives(types.SimpleNamespace(text=b'x', tool='say'))
  ),
  'verdict': dict(verdict=_Raises(OSError('full'))),
  'no verdict': dict(verdict=_gives(None)),
  'flags': dict(flags=_Raises(KeyError('a bug'))),
  'no flags': dict(flags=None),
  'to-dos': dict(open_todos=_Raises(KeyError('late'), times=2)),
  'seconds': dict(sandbox_seconds='long'),
  'drive': dict(drive=_Raises(KeyError('a bug'))),
}
_TOKENIZER = tokenizers.Tokenizer.train(CALLS * 4, 270)
_PROMPT_T = _TOKENIZER.encode('Backwards')
_OPTIONS = episode.EpisodeOptions(max_tokens=300, max_call_tokens=50)


def _run(kind, policy=None):
  env = contained.ContainedEnvironment(TASK.task_id, lambda: kind(TASK))
  policy = policy or scripts.ScriptedCalls(_TOKENIZER, CALLS)
  return episode.run(
    env, policy, _TOKENIZER, _OPTIONS, group=0, member=0, seed=0
  )


def _talk(kind):
  env = contained.ContainedEnvironment(TASK.task_id, lambda: kind(TASK))
  said = iter(CALLS)

  def ask(messages, functions, **sampling):
    message = {'content': f'```\n{next(said)}\n```'}
    return conversation.ModelMessage(
      message=message, finish='stop', usage={}, seconds=0.0
    )

  talk = conversation.Conversation(env, conversation.ChatOptions(), 0)
  talk.play(ask, (), episode.rewards.UNPRICED, seed=0)
  return talk


def test_a_sound_environment_is_as_without():
  sound = episode.run(
    own_family.Backwards(TASK),
    scripts.ScriptedCalls(_TOKENIZER, CALLS),
    _TOKENIZER,
    _OPTIONS,
    group=0,
    member=0,
    seed=0,
  )
  again = _run(own_family.Backwards)
  assert sound.verdict == again.verdict and again.verdict.passed
  assert sound.tools == again.tools and sound.turns == again.turns
  assert _talk(own_family.Backwards).verdict.passed


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_is_one_of_the_infrastructure(fault):
  plays = [_run] if fault == 'drive' else [_run, _talk]
  for play in plays:
    rollout = play(_faulty(**FAULTS[fault]))
    assert rollout.verdict.status == records.INFRASTRUCTURE
    assert rollout.reward == 0.0 and rollout.task_id == TASK.task_id
    assert 'Error' in rollout.verdict.detail or fault in ('exit', 'unprintable')


def test_odd_texts_are_no_fault():
  odd = environment.ToolResult(text='\ud800', tool='say', is_final=True)
  rollout = _run(_faulty(call=_gives(odd), state=_Raises(KeyError('unused'))))
  assert rollout.verdict.status == records.GRADED


def test_a_harness_that_fails_keeps_what_was_sampled():
  rollout = _run(_faulty(drive=_restarts_and_fails))
  assert rollout.verdict.status == records.INFRASTRUCTURE
  assert len(rollout.trajectories) == 1


def test_errors_of_the_policy_and_of_the_config_pass():
  class Lost(scripts.ScriptedCalls):
    def complete(self, request):
      raise ConnectionError('the engine is gone')

  with pytest.raises(ConnectionError, match='engine'):
    _run(own_family.Backwards, Lost(_TOKENIZER, CALLS))
  with pytest.raises(ConnectionError, match='engine'):
    _run(_faulty(drive=_restarts_and_fails), Lost(_TOKENIZER, CALLS))
  with pytest.raises(ValueError, match='cannot be played'):
    _run(_faulty(drive=_Raises(ValueError('cannot be played'))))


class OneFaulty(own_family.Words):
  """Of its tasks the second has an environment that fails."""

  def environment(self, task, runner):
    if task.task_id == self.listed('vowels', 3)[1].task_id:
      raise KeyError('a bug of the family')
    return super().environment(task, runner)


def test_an_evaluation_goes_on(tmp_path):
  name = f'{__name__}:OneFaulty'
  spec = wiring.spec_of(own_family_test.config_of(name).to_dict())
  options = evaluation.EvaluationOptions(
    policy='gold', split='', tasks=3, samples=1, threads=1
  )
  summary = evaluation.evaluate(
    spec, wiring.systems_of(spec), options, tmp_path
  )
  assert summary['overall']['passed'] == 2
  assert summary['overall']['infrastructure'] == 1
