"""A small world to learn from live use in: requests, and edits in two styles.

A request names a domain and what a line of code has to compute. The policy
answers with one call: an edit, with or without a comment, a question, or text
that is no call. SFT shows all of them, so that a policy begins without a taste;
pinned suites ask for right code alone, whatever its style.
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

DOMAINS = ('web', 'data')
CODE = {
  'sort': 'sorted(x)',
  'total': 'sum(x)',
  'largest': 'max(x)',
  'smallest': 'min(x)',
  'count': 'len(x)',
  'reverse': 'x[::-1]',
  'first': 'x[0]',
  'last': 'x[-1]',
}
_VERBS = {'train': ('write', 'give me', 'make', 'code'), 'wordings': ('add',)}
# Of demonstrations: shares of wrong code, of comments, of questions and of
# calls that no tool takes.
WRONG, COMMENTED, ASKED, BROKEN = 0.15, 0.5, 0.1, 0.08
TOOLS = ('edit', 'ask')


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveRequest:
  """A task, which is a function of its id alone; `package` is its domain."""

  task_id: str

  @property
  def _draw(self) -> tuple[str, str, str]:
    draw = random.Random(self.task_id)
    split = self.task_id.split('/')[1]
    verb = draw.choice(_VERBS[split])
    return draw.choice(DOMAINS), verb, draw.choice(list(CODE))

  @property
  def package(self) -> str:
    return self._draw[0]

  @property
  def item(self) -> str:
    return self._draw[2]

  @property
  def prompt(self) -> str:
    domain, verb, item = self._draw
    return f'{domain}: {verb} {item}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadCall:
  """What a call of the policy says: its tool, '' for none, and its edit."""

  tool: str
  code: str = ''
  is_commented: bool = False


def read(text: str) -> ReadCall:
  """Reads a call as tools and users see it."""
  name, _, rest = text.partition(' ')
  if name not in TOOLS or not rest:
    return ReadCall(tool='')
  code, mark, _ = rest.partition(' # ')
  return ReadCall(tool=name, code=code, is_commented=bool(mark))


class LiveEdits(environments.Environment):
  """One episode of a suite: one call, which ends it."""

  tools, single_turn = TOOLS, True

  def __init__(self, task: LiveRequest):
    self.task_id, self.prompt = task.task_id, task.prompt
    self._wanted, self._call = CODE[task.item], ReadCall(tool='')

  def call(self, text: str) -> environments.ToolResult:
    self._call = read(text)
    if not self._call.tool:
      return environments.ToolResult(
        text='error: edit or ask', tool='', outcome=turns.UNKNOWN_TOOL
      )
    return environments.ToolResult(
      text='noted', tool=self._call.tool, is_final=True
    )

  def verdict(self, finished: bool) -> records.Verdict:
    is_right = self._call == dataclasses.replace(
      self._call, tool='edit', code=self._wanted
    )
    return records.Verdict(
      passed=finished and is_right,
      num_passed=int(is_right),
      num_tests=1,
      status=records.GRADED if finished else records.UNFINISHED,
      sandbox_level='none',
    )


def shown(task: LiveRequest, draw: random.Random) -> str:
  """Returns the call of a demonstration, which may be any of its kinds."""
  kind = draw.random()
  if kind < ASKED:
    return f'ask which {task.item}?'
  code = CODE[task.item]
  if draw.random() < WRONG:
    code = draw.choice(list(CODE.values()))
  text = f'edit {code}'
  if draw.random() < COMMENTED:
    text = f'{text} # {task.item}'
  return text.replace('edit', 'edti') if kind < ASKED + BROKEN else text


class LiveRequests(environments.TaskFamily):
  """Requests without end, drawn by their ids."""

  axes = ('wordings',)
  needs_execution = False
  finish_call = 'ask done?'

  def __init__(self, spec: Any):
    self._spec = spec

  def environment(self, task: LiveRequest, runner: Any) -> LiveEdits:
    return LiveEdits(task)

  def gold(self, task: LiveRequest, tokenizer: Any) -> environments.Policy:
    return scripts.ScriptedCalls(tokenizer, [f'edit {CODE[task.item]}'])

  def listed(self, split: str, count: int) -> list[LiveRequest]:
    source = self.tasks(None, split=split, seed=self._spec.seed)
    return [source.of_group(i) for i in range(count)]

  def texts(self) -> list[str]:
    draw = random.Random(0)
    return [f'{t.prompt}\n{shown(t, draw)}' for t in self.listed('train', 500)]

  def is_right_edit(self, task_id: str, call: str) -> bool | None:
    return read(call).code == CODE[LiveRequest(task_id=task_id).item]

  def tasks(
    self, tokenizer: Any, *, split: str, seed: int
  ) -> environments.TaskSource:
    name = lambda index: f'live/{split}/{seed}/{index}'
    size = self._spec.rl.prompts * self._spec.systems['curriculum'].candidates
    return environments.TaskSource(
      of_group=lambda group: LiveRequest(task_id=name(group)),
      of_id=lambda task_id: LiveRequest(task_id=task_id),
      pool=lambda step: [
        curriculum.Candidate(task_id=name(i), labels=())
        for i in range(step * size, (step + 1) * size)
      ],
    )

  def demonstrations(self, job: Any) -> tuple[list, list]:
    spec, seed = self._spec, self._spec.seed + transcripts.SEED
    source = self.tasks(job.tokenizer, split='train', seed=seed)
    count, draw = spec.systems['demonstrations'].count, random.Random(seed)

    def played(index: int) -> records.Rollout:
      task = source.of_group(index)
      return episode.run(
        self.environment(task, None),
        scripts.ScriptedCalls(job.tokenizer, [shown(task, draw)]),
        job.tokenizer,
        spec.episode,
        group=index,
        member=0,
        seed=seed,
      )

    rollouts = [played(i) for i in range(count + 32)]
    passed = sum(r.verdict.passed for r in rollouts) / len(rollouts)
    windows = transcripts.shown(job, rollouts, {'passed': passed})
    return windows[:count], windows[count:]
