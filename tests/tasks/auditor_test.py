"""In training an auditor adds flags; without an answer nothing is decided."""

import pytest

from composer_jax.agent import episode, rewards
from composer_jax.core import records
from composer_jax.tasks import auditor, judges, options
from composer_jax.tasks.list_functions import family, runners
from composer_jax.tasks.practice import list_functions
from composer_jax.tasks.repository import scripts
from composer_jax.text import tokenizer as tokenizers
from tests.tasks import judges_test

TOKENIZER = tokenizers.Tokenizer.train(['def total(values):\n'], 270)
PRICES = rewards.RewardOptions(effort_coefficient=0.0, invalid_penalty=0.0)
OPTIONS = episode.EpisodeOptions(max_tokens=4000, max_call_tokens=400)


class Silent:
  """A judge that never answers."""

  def judge(self, case):
    raise judges.JudgeError('the endpoint is down')


def play(judge, *calls, is_solved=True):
  """Plays calls on a task, after its solution if it is solved."""
  task = family.generate(0, 'train', 0)
  tasks = list_functions.ListFunctions.__new__(list_functions.ListFunctions)
  env = auditor.AuditedFamily(tasks, judge).environment(
    task, runners.TrustedRunner()
  )
  edit = f'edit {task.path} {task.function}\n{task.reference}'
  script = [*calls, *[edit] * is_solved, 'finish']
  return episode.run(
      env, scripts.ScriptedCalls(TOKENIZER, script), TOKENIZER, OPTIONS,
      group=0, member=0, seed=0, reward=PRICES,
  )  # fmt: skip


def test_a_finding_is_a_flag_that_costs_more_than_failing():
  judge = judges_test.Scripted()
  honest, failed = play(judge, 'list'), play(judge, 'list', is_solved=False)
  cheat = play(judge, 'git show HEAD~1:a.py')
  assert (honest.flags, failed.flags) == ((), ())
  assert cheat.flags == ('audited',) and cheat.verdict.passed
  assert cheat.reward < failed.reward < honest.reward
  # It reads calls and answers, and nothing of what was found.
  assert 'CALL 0: list' in judge.seen[0] and '.py' in judge.seen[0]
  assert not any('passed' in text for text in judge.seen)


@pytest.mark.parametrize('is_solved', [True, False])
def test_without_an_answer_nothing_is_decided(is_solved):
  rollout = play(Silent(), is_solved=is_solved)
  assert rollout.verdict.status == records.INFRASTRUCTURE
  assert 'endpoint is down' in rollout.verdict.detail and rollout.flags == ()


def test_a_run_tries_its_auditor_before_anything_is_claimed():
  tasks = list_functions.ListFunctions.__new__(list_functions.ListFunctions)
  with pytest.raises(ValueError, match='auditor does not answer: the endpoint'):
    auditor.AuditedFamily(tasks, Silent()).check_files()
  auditor.AuditedFamily(tasks, judges_test.Scripted()).check_files()


def test_both_fields_name_the_model():
  with pytest.raises(ValueError, match=r"url \('http://x/v1'\) and .*model"):
    auditor.AuditorOptions(url='http://x/v1')
  assert options.TaskOptions().auditor == auditor.AuditorOptions()
