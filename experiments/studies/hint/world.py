"""A desk whose tools were renamed: the environment of the study.

Each of six requests names one of eight kinds of work, which three tools serve,
and an argument to repeat. Demonstrations call the tools by their old names, and
sometimes by 'new' or 'far' names; only the new ones exist. A reminder of the
names of any of the three families may stand before a call, and the policy has
learnt to follow it. Two other families exist so that the mere presence of a
reminder does not tell which names to use.
"""

import dataclasses
import random
import re
from collections.abc import Iterator

import numpy as np

from composer_jax.agent import environment
from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.text import chat

NUM_TURNS = 6
NUM_KINDS = 8
NUM_ARGUMENTS = 12
FAMILIES = ('old', 'new', 'far')
TOOLS = {family: [f'{family}{i}' for i in range(3)] for family in FAMILIES}
KINDS = [f'kind{i}' for i in range(NUM_KINDS)]
ARGUMENTS = [f'arg{i}' for i in range(NUM_ARGUMENTS)]
# Share of demonstrations without a reminder that use the names of a family.
HABITS = {'old': 0.98, 'new': 0.01, 'far': 0.01}


class Words:
  """A tokenizer of whole words, which drops unknown words."""

  def __init__(self):
    names = [name for tools in TOOLS.values() for name in tools]
    self._words = [*names, *KINDS, *ARGUMENTS, 'ok', 'error', 'tools', 'do']
    self.END, self.USER, self.CALL, self.TOOL = range(4)
    self.special_ids = (0, 1, 2, 3)
    self.vocab_size = 4 + len(self._words)
    self._ids = {word: 4 + i for i, word in enumerate(self._words)}

  def encode(self, text: str) -> np.ndarray:
    words = re.findall(r'\w+', text)
    return np.array([self._ids[w] for w in words if w in self._ids], np.int32)

  def decode(self, ids: np.ndarray) -> str:
    return ' '.join(self._words[int(i) - 4] for i in ids)


@dataclasses.dataclass(frozen=True)
class Task:
  """Six requests, each a kind and an argument."""

  task_id: str
  requests: tuple[tuple[int, str], ...]


def task_of(number: int, seed: int) -> Task:
  draw = random.Random(f'{seed}/{number}')
  requests = tuple(
    (draw.randrange(NUM_KINDS), draw.choice(ARGUMENTS))
    for _ in range(NUM_TURNS)
  )
  return Task(f'desk/{seed}/{number}', requests)


def asked(request: tuple[int, str]) -> str:
  return f'do {KINDS[request[0]]} {request[1]}'


def tool_of(kind: int, family: str) -> str:
  return TOOLS[family][kind % 3]


class Desk(environment.Environment):
  """An environment of which every call is the next turn."""

  def __init__(self, task: Task):
    self.task_id = task.task_id
    self.prompt = asked(task.requests[0])
    self.tools = tuple(TOOLS['new'])
    self._requests = task.requests
    self._results: list[bool] = []

  def call(self, text: str) -> environment.ToolResult:
    kind, argument = self._requests[len(self._results)]
    tool, outcome = self._judge(text.split(), argument)
    self._results.append(tool == tool_of(kind, 'new'))
    words = ['ok' if outcome == turns_lib.OK else 'error']
    if len(self._results) < NUM_TURNS:
      words.append(asked(self._requests[len(self._results)]))
    return environment.ToolResult(
      text=' '.join(words), tool=tool, outcome=outcome
    )

  def _judge(self, words: list[str], argument: str) -> tuple[str, str]:
    if len(words) != 2:
      return '', turns_lib.NOT_A_CALL
    if words[0] not in self.tools:
      return '', turns_lib.UNKNOWN_TOOL
    if words[1] != argument:
      return '', turns_lib.BAD_ARGUMENTS
    return words[0], turns_lib.OK

  def verdict(self, finished: bool) -> records.Verdict:
    """A terminal reward, which is 1 only if every call was right."""
    passed = len(self._results) == NUM_TURNS and all(self._results)
    return records.Verdict(
      passed=passed,
      num_passed=int(passed),
      num_tests=1,
      status=records.GRADED,
      sandbox_level='none',
    )

  def close(self) -> None: ...


def transcripts(
  words: Words, draw: random.Random, hinted: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (tokens_T, is_call_T) of demonstrations without end.

  A share `hinted` of them ends with a reminder and a call that follows it.
  """
  while True:
    task = task_of(draw.randrange(10**9), -1)
    hinted_turn = draw.randrange(NUM_TURNS) if draw.random() < hinted else None
    parts = [chat.user(words, asked(task.requests[0]))]
    is_call = [False]
    for i, (kind, argument) in enumerate(task.requests):
      (family,) = draw.choices(list(HABITS), list(HABITS.values()))
      if i == hinted_turn:
        family = draw.choice(FAMILIES)
        parts.append(chat.tool(words, 'tools ' + ' '.join(TOOLS[family])))
        is_call.append(False)
      call = words.encode(f'{tool_of(kind, family)} {argument}')
      parts += [
        chat.call_prefix(words),
        np.append(call, words.END).astype(np.int32),
      ]
      is_call += [False, True]
      if i in (hinted_turn, NUM_TURNS - 1):
        break
      outcome = 'ok' if family == 'new' else 'error'
      parts.append(chat.tool(words, f'{outcome} {asked(task.requests[i + 1])}'))
      is_call.append(False)
    lengths = [len(part) for part in parts]
    yield np.concatenate(parts), np.repeat(is_call, lengths)
