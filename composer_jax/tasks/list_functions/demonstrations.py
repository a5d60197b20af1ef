"""Transcripts of the tool protocol by a scripted policy that errs on purpose.

The policy knows the task's reference and goes read, edit, test, finish; `Noise`
says how often it does something worse instead. Its transcripts come from the
same `episode.run` as a model's, so nothing in their form tells them apart.
Wrong edits are train compositions: no held-out body is ever written.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from composer_jax.agent import environment as environment_lib
from composer_jax.agent import episode
from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.tasks import source
from composer_jax.tasks.list_functions import (
  compositions,
  environment,
  family,
  runners,
)
from composer_jax.tasks.repository import scripts
from composer_jax.text import chat, tool_calls

_MENDED = (turns_lib.OK, turns_lib.FAILED)
_UNKNOWN_TOOLS = ('open', 'run', 'write', 'show', 'check')
_MISSING_FILES = ('tests.py', 'setup.py', 'util.py')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
  """Probabilities of each imperfection, drawn anew wherever it may occur.

  Attributes:
    wrong_tool: a call is to a tool that does not exist.
    wrong_arguments: a call names a missing file, a missing function or has an
      argument too few.
    detour: a call is valid but of no use (list, or read of `__init__.py`).
    skip_read: edits without having read; the body is then a guess.
    wrong_edit: a body is that of a near composition.
    broken_edit: a body lacks its last bracket or word.
    skip_test: finishes after an edit without a test.
    give_up: finishes after an error or a failed test instead of trying again.
  """

  wrong_tool: float = 0.0
  wrong_arguments: float = 0.0
  detour: float = 0.0
  skip_read: float = 0.0
  wrong_edit: float = 0.0
  broken_edit: float = 0.0
  skip_test: float = 0.0
  give_up: float = 0.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not 0 <= value <= 1:
        raise ValueError(
          f'Noise.{field.name} ({value}) is a probability: it must lie in 0..1.'
        )


FLAWLESS = Noise()


class ScriptedPolicy:
  """Decides by script in one episode; implements `agent.environment.Policy`.

  It reads only the last answer in the context, and the task it was made for.
  Log-probabilities are zero and there are no routes: `NO_ROUTE` throughout.
  """

  def __init__(
    self,
    task: family.FunctionTask,
    tokenizer: Any,
    noise: Noise,
    draw: random.Random,
  ):
    if task.held_out:
      raise ValueError(
        f'Task {task.task_id!r} is held out; demonstrations show train tasks '
        'only.'
      )
    self._task = task
    self._tokenizer = tokenizer
    self._noise = noise
    self._draw = draw
    self._step = self._resume = 'read'
    self._has_read = False
    self._is_first = True

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Writes the next call, cut off where the request says."""
    self._advance(self._last_answer(request.context_T))
    text = tool_calls.render(self._call())
    is_first, self._is_first = self._is_first, False
    return scripts.completion(self._tokenizer, request, text, is_first=is_first)

  def close(self, session: str) -> None:
    del session

  def _happens(self, probability: float) -> bool:
    # No draw for zero, so that knobs do not move each other's chances.
    return probability > 0 and self._draw.random() < probability

  def _last_answer(self, context_T: np.ndarray) -> str:
    # The context ends with the answer and an empty call to be filled in.
    if self._is_first:
      return ''
    return chat.turns(self._tokenizer, context_T)[-2]['text']

  def _advance(self, answer: str) -> None:
    """Chooses the step that follows `answer` to the step before."""
    if self._is_first:
      skip = self._happens(self._noise.skip_read)
      self._step = 'edit' if skip else 'read'
    elif answer.startswith('error:'):
      give_up = self._happens(self._noise.give_up)
      self._step = 'finish' if give_up else self._resume
    elif self._step == 'detour':
      self._step = self._resume
    elif self._step == 'read':
      self._has_read = True
      self._step = 'edit'
    elif self._step == 'edit':
      skip = self._happens(self._noise.skip_test)
      self._step = 'finish' if skip else 'test'
    elif self._step == 'test':
      failed = ' failed' in answer
      again = failed and not self._happens(self._noise.give_up)
      repair = 'edit' if self._has_read else 'read'
      self._step = repair if again else 'finish'
    self._resume = self._step

  def _call(self) -> tool_calls.Call:
    """The call of the current step, or a flawed one in its place."""
    if self._happens(self._noise.detour):
      self._step = 'detour'
      if self._draw.random() < 0.5:
        return tool_calls.Call(name='list')
      return tool_calls.Call(name='read', arguments=('__init__.py',))
    call = self._intended()
    if self._happens(self._noise.wrong_tool):
      name = self._draw.choice(_UNKNOWN_TOOLS)
      return dataclasses.replace(call, name=name)
    if self._happens(self._noise.wrong_arguments):
      return self._misdirected(call)
    return call

  def _intended(self) -> tool_calls.Call:
    task = self._task
    if self._step == 'read':
      return tool_calls.Call(name='read', arguments=(task.path,))
    if self._step == 'edit':
      arguments = (task.path, task.function)
      return tool_calls.Call(
        name='edit', arguments=arguments, payload=self._body()
      )
    return tool_calls.Call(name=self._step)

  def _misdirected(self, call: tool_calls.Call) -> tool_calls.Call:
    if not call.arguments:
      return dataclasses.replace(call, arguments=(self._task.path,))
    flaw = self._draw.randrange(3)
    arguments = list(call.arguments)
    if flaw == 0:
      arguments.pop()
    elif flaw == 1 or len(arguments) == 1:
      arguments[0] = self._draw.choice(_MISSING_FILES)
    else:
      names = set(family.FUNCTIONS) - {self._task.function}
      arguments[1] = self._draw.choice(sorted(names))
    return dataclasses.replace(call, arguments=tuple(arguments))

  def _body(self) -> str:
    body = self._task.reference
    if not self._has_read:
      guess = family.draw_composition('train', self._draw)
      body = self._renamed(guess)
    elif self._happens(self._noise.wrong_edit):
      right = family.composition_of(self._task)
      near = family.draw_composition('train', self._draw, like=right)
      body = self._renamed(near)
    if self._happens(self._noise.broken_edit):
      broken = body.rstrip(')]')
      body = broken if broken != body else body.rsplit(' ', 1)[0] + ' ('
    return body

  def _renamed(self, composition: compositions.Composition) -> str:
    return composition.body(*family.names_of(self._task))


def transcripts(
  tokenizer: Any,
  *,
  seed: int,
  count: int,
  noise: Noise,
  options: episode.EpisodeOptions,
  hints: environment_lib.HintWriter | None = None,
) -> Iterator[records.Rollout]:
  """Rollouts of scripted policies on train tasks 0, 1, ...

  Args:
    seed: of the tasks and of the noise; equal arguments give equal tokens.
    options: limits, as in RL.
    hints: on the mistakes, for `hindsight`; None for no hints.

  Yields:
    Rollouts; `trajectories[0]` is what SFT trains on.
  """
  runner = runners.TrustedRunner()
  for index in range(count):
    task = family.generate(index, 'train', seed)
    draw = random.Random(f'demonstration/{seed}/{index}')
    policy = ScriptedPolicy(task, tokenizer, noise, draw)
    yield episode.run(
        environment.FunctionEnvironment(task, runner), policy, tokenizer,
        options, group=index, member=0, seed=seed, hints=hints,
    )  # fmt: skip


def hindsight(
  rollout: records.Rollout, tokenizer: Any
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (tokens_T, loss mask) for each hint whose mistake was mended.

  A policy that has hardly seen a hint is a poor teacher, however it is held
  still (`experiments/studies/hint`). In a transcript the call after a mistake
  is often the one that was meant: put behind the hint, in the place of the
  mistake, it shows what hints are for. The mistake is not in the example.

  The call right after the mistake is taken, if it was carried out in the same
  window. One that ends the episode mends nothing, unless the mistake was meant
  to.
  """
  turn_after = {
    (before.trajectory, before.start): after
    for before, after in zip(rollout.turns, rollout.turns[1:], strict=False)
    if before.trajectory == after.trajectory and after.outcome in _MENDED
  }
  for hint in rollout.hints:
    after = turn_after.get((hint.trajectory, hint.start))
    if after is None:
      continue
    tokens_T = rollout.trajectories[hint.trajectory].tokens_T
    ids = tokens_T[hint.start : hint.stop - 1]
    mistake = tokenizer.decode(ids) if chat.is_text(tokenizer, ids) else ''
    if after is rollout.turns[-1] and after.tool not in mistake:
      continue
    context_T = np.concatenate(
      [tokens_T[: hint.at], hint.tokens_T, tokens_T[hint.at : hint.start]]
    )
    call_T = tokens_T[after.start : after.stop]
    yield (
      np.concatenate([context_T, call_T]),
      np.arange(len(context_T) + len(call_T)) >= len(context_T),
    )


def _edits(rollout: records.Rollout, tokenizer: Any) -> Iterator[str]:
  """Payloads of the rollout's valid edits."""
  for turn in rollout.turns:
    if turn.tool == 'edit':
      window = rollout.trajectories[turn.trajectory]
      # Without the end token, which a valid call has.
      ids = window.tokens_T[turn.start : turn.stop - 1]
      yield tool_calls.parse(tokenizer.decode(ids)).payload


def describe(
  rollouts: Sequence[records.Rollout], tokenizer: Any
) -> dict[str, float]:
  """Rates of what went well and wrong, of demonstrations or of a policy.

  Returns:
    episodes, tokens (mean), turns (mean);
    invalid_calls: share of all calls;
    any_invalid: share of episodes with at least one;
    wrong_edits: share of valid edits whose body is not the reference up to
      bound names (a right body of another form counts as wrong);
    edited, tested, finished: share of episodes;
    correct: share whose final code passes every hidden test, finished or not;
    passed: share that pass.
  """
  if not rollouts:
    raise ValueError('describe needs at least one rollout.')
  calls = sum(r.num_turns for r in rollouts)
  wrong = edits = 0
  for rollout in rollouts:
    task = family.from_id(rollout.task_id)
    argument = family.names_of(task)[0]
    right = source.normal_body(task.reference, argument)
    for payload in _edits(rollout, tokenizer):
      edits += 1
      wrong += not _has_form(payload, argument, right)
  count = len(rollouts)

  def share(values: Iterator[bool]) -> float:
    return sum(values) / count

  return {
    'episodes': float(count),
    'tokens': sum(len(t) for r in rollouts for t in r.trajectories) / count,
    'turns': calls / count,
    'invalid_calls': sum(r.num_invalid for r in rollouts) / max(calls, 1),
    'any_invalid': share(r.num_invalid > 0 for r in rollouts),
    'wrong_edits': wrong / max(edits, 1),
    'edited': share('edit' in r.tools for r in rollouts),
    'tested': share('test' in r.tools for r in rollouts),
    'finished': share('finish' in r.tools for r in rollouts),
    'correct': share(
      r.verdict.num_passed == r.verdict.num_tests for r in rollouts
    ),
    'passed': share(r.verdict.passed for r in rollouts),
  }


def _has_form(body: str, argument: str, form: str) -> bool:
  try:
    return source.normal_body(body, argument) == form
  except ValueError:
    return False
