"""A task family of your own, for the whole job and for evaluations.

  ./run.sh --config=configs/composer/tiny.py:smoke --workdir=runs/words \\
      --config.tasks.family=experiments.examples.own_family:Words
  ./run.sh evaluate --policy=gold --tasks=20 --out=runs/eval_words \\
      --config=configs/composer/tiny.py \\
      --config.tasks.family=experiments.examples.own_family:Words

The task is to say a word backwards. A config names the class by its module,
which every process of a run imports; the library need not be changed.
"""

import dataclasses
import random
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.agent import episode
from composer_jax.core import records, turns
from composer_jax.tasks import curriculum
from composer_jax.tasks.practice import transcripts
from composer_jax.tasks.repository import scripts

LETTERS = 'abcdefgh'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Word:
  """A task, which is a function of its id alone."""

  task_id: str

  @property
  def text(self) -> str:
    # Words that begin with a vowel are held out.
    split = self.task_id.split('/')[1]
    first = 'bcdfgh' if split == 'train' else 'ae'
    draw = random.Random(self.task_id)
    return draw.choice(first) + ''.join(draw.choices(LETTERS, k=3))


class Backwards(environments.Environment):
  """One episode: `say WORD`, as often as the policy likes, then `finish`."""

  tools = ('say', 'finish')

  def __init__(self, task: Word):
    self.task_id, self.prompt = task.task_id, f'Backwards: {task.text}'
    self._wanted, self._said = task.text[::-1], ''

  def call(self, text: str) -> environments.ToolResult:
    name, _, word = text.partition(' ')
    if name not in self.tools:
      return environments.ToolResult(
        text='error: say or finish', tool='', outcome=turns.UNKNOWN_TOOL
      )
    self._said = word if name == 'say' else self._said
    return environments.ToolResult(
      text='noted', tool=name, is_final=name == 'finish'
    )

  def verdict(self, finished: bool) -> records.Verdict:
    is_right = self._said == self._wanted
    return records.Verdict(
      passed=finished and is_right,
      num_passed=int(is_right),
      num_tests=1,
      status=records.GRADED if finished else records.UNFINISHED,
      sandbox_level='none',
    )


class Words(environments.TaskFamily):
  """Tasks without end, drawn by their ids."""

  axes = ('vowels',)
  needs_execution = False
  finish_call = 'finish'

  def __init__(self, spec: Any):
    self._spec = spec

  def environment(self, task: Word, runner: Any) -> Backwards:
    return Backwards(task)

  def gold(self, task: Word, tokenizer: Any) -> environments.Policy:
    calls = [f'say {task.text[::-1]}', 'finish']
    return scripts.ScriptedCalls(tokenizer, calls)

  def listed(self, split: str, count: int) -> list[Word]:
    source = self.tasks(None, split=split, seed=self._spec.seed)
    return [source.of_group(i) for i in range(count)]

  def texts(self) -> list[str]:
    words = [w.text for w in self.listed('train', 500)]
    return [f'Backwards: {w}\nsay {w[::-1]}\nnoted\nfinish' for w in words]

  def tasks(
    self, tokenizer: Any, *, split: str, seed: int
  ) -> environments.TaskSource:
    name = lambda index: f'words/{split}/{seed}/{index}'
    size = self._spec.rl.prompts * self._spec.systems['curriculum'].candidates
    return environments.TaskSource(
      of_group=lambda group: Word(task_id=name(group)),
      of_id=lambda task_id: Word(task_id=task_id),
      pool=lambda step: [
        curriculum.Candidate(task_id=name(i), labels=())
        for i in range(step * size, (step + 1) * size)
      ],
    )

  def demonstrations(self, job: Any) -> tuple[list, list]:
    """Plays the solutions of tasks that RL does not draw."""
    spec, seed = self._spec, self._spec.seed + transcripts.SEED
    source = self.tasks(job.tokenizer, split='train', seed=seed)
    count = spec.systems['demonstrations'].count
    rollouts = [
      episode.run(
        self.environment(source.of_group(i), None),
        self.gold(source.of_group(i), job.tokenizer),
        job.tokenizer,
        spec.episode,
        group=i,
        member=0,
        seed=seed,
      )
      for i in range(count + 32)
    ]
    passed = sum(r.verdict.passed for r in rollouts) / len(rollouts)
    windows = transcripts.shown(job, rollouts, {'passed': passed})
    return windows[:count], windows[count:]
