"""Transcripts of the tool protocol by a scripted policy that errs on purpose.

The policy knows the task's reference and calls read, edit, test and finish;
`Noise` has the probabilities of worse calls. Transcripts come from the same
`episode.run` as a model's, so that their form does not differ. Wrong edits are
train compositions: no held-out body is ever written.
"""

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from composer_jax.agent import environment as environment_lib
from composer_jax.agent import episode
from composer_jax.core import checks, records
from composer_jax.core import turns as turns_lib
from composer_jax.tasks import source
from composer_jax.tasks.list_functions import (
  environment,
  family,
  runners,
)
from composer_jax.tasks.repository import scripts
from composer_jax.text import chat, tool_calls

_MENDED = (turns_lib.OK, turns_lib.FAILED)
_UNKNOWN_TOOLS = ('open', 'run', 'write', 'show', 'check')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
  """Probabilities of imperfections, drawn anew at each chance.

  Attributes:
    wrong_tool: probability that a call names a tool that does not exist.
    wrong_edit: probability that a body is that of a near composition.
    broken_edit: probability that a body lacks its last bracket or word.
    skip_test: probability of finishing after an edit without a test.
    give_up: probability of finishing after an error or a failed test.
    cut_short: probability that an episode has 2 to 5 calls only; it finishes
      with the last.
  """

  wrong_tool: float = 0.0
  wrong_edit: float = 0.0
  broken_edit: float = 0.0
  skip_test: float = 0.0
  give_up: float = 0.0
  cut_short: float = 0.0

  def __post_init__(self):
    for field in dataclasses.fields(Noise):
      is_probability = 0 <= getattr(self, field.name) <= 1
      checks.require(self, field.name, is_probability, 'lie in [0, 1]')


FLAWLESS = Noise()


class ScriptedPolicy:
  """Follows a script in one episode; implements `agent.environment.Policy`.

  Reads nothing but its task and the last answer in the context.
  Log-probabilities are zero, and every route is `NO_ROUTE`.
  """

  def __init__(
    self,
    task: family.FunctionTask,
    tokenizer: Any,
    noise: Noise,
    draw: random.Random,
  ):
    self._task, self._tokenizer = task, tokenizer
    self._noise, self._draw = noise, draw
    self._step, self._place = 'read', 0

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Writes the next call, cut off at the request's limit."""
    if self._place:
      # The context ends with the answer and the start of a call.
      language = chat.language_of(self._tokenizer)
      self._advance(language.messages(request.context_T)[-2]['text'])
    text, place = tool_calls.render(self._call()), self._place
    self._place += 1
    return scripts.completion(
      self._tokenizer, request, text, is_first=not place, place=place
    )

  def close(self, session: str) -> None:
    del session

  def _happens(self, probability: float) -> bool:
    # Noise that is off draws nothing, so that it shifts no other draw.
    return probability > 0 and self._draw.random() < probability

  def _advance(self, answer: str) -> None:
    """Chooses the next step after the answer to the last one."""
    if answer.endswith(episode.LAST_CALL):
      self._step = 'finish'
    elif answer.startswith('error:'):
      if self._happens(self._noise.give_up):
        self._step = 'finish'
    elif self._step == 'read':
      self._step = 'edit'
    elif self._step == 'edit':
      skip = self._happens(self._noise.skip_test)
      self._step = 'finish' if skip else 'test'
    elif self._step == 'test':
      failed = ' failed' in answer
      again = failed and not self._happens(self._noise.give_up)
      self._step = 'edit' if again else 'finish'

  def _call(self) -> tool_calls.Call:
    """Returns the call of the current step, or a flawed one in its place."""
    arguments: tuple[str, ...] = ()
    payload = ''
    if self._step in ('read', 'edit'):
      arguments = (self._task.path,)
    if self._step == 'edit':
      arguments += (self._task.function,)
      payload = self._body()
    call = tool_calls.Call(
      name=self._step, arguments=arguments, payload=payload
    )
    if self._happens(self._noise.wrong_tool):
      name = self._draw.choice(_UNKNOWN_TOOLS)
      return dataclasses.replace(call, name=name)
    return call

  def _body(self) -> str:
    body = self._task.reference
    if self._happens(self._noise.wrong_edit):
      like = family.composition_of(self._task)
      wrong = family.draw_composition(self._draw, like=like)
      body = wrong.body(*family.names_of(self._task))
    if self._happens(self._noise.broken_edit):
      broken = body.rstrip(')]')
      body = broken if broken != body else body.rsplit(' ', 1)[0] + ' ('
    return body


def transcripts(
  tokenizer: Any,
  *,
  seed: int,
  count: int,
  noise: Noise,
  options: episode.EpisodeOptions,
  hints: environment_lib.HintWriter | None = None,
) -> Iterator[records.Rollout]:
  """Yields rollouts of scripted policies on train tasks 0, 1, ...

  Args:
    seed: seed of tasks and noise; equal arguments give equal tokens.
    options: limits of an episode, as in RL.
    hints: writer of hints on mistakes, for `hindsight`; None for no hints.
  """
  runner = runners.TrustedRunner()
  for index in range(count):
    task = family.generate(index, 'train', seed)
    draw = random.Random(f'demonstration/{seed}/{index}')
    policy = ScriptedPolicy(task, tokenizer, noise, draw)
    limits = options
    if draw.random() < noise.cut_short:
      turns = min(draw.randint(2, 5), options.max_turns)
      limits = dataclasses.replace(options, max_turns=turns)
    yield episode.run(
        environment.FunctionEnvironment(task, runner), policy, tokenizer,
        limits, group=index, member=0, seed=seed, hints=hints,
    )  # fmt: skip


def hindsight(
  rollout: records.Rollout,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (tokens_T, loss_mask_T) for each hint whose mistake was mended.

  A policy that has hardly seen a hint is a poor teacher
  (`experiments/studies/hint`). The call after a mistake is often the one that
  was meant: the example has it after the hint, in place of the mistake.

  Only a call right after the mistake counts, carried out in the same window. A
  call that ends the episode mends nothing.
  """
  turn_after = {
    (before.trajectory, before.start): after
    for before, after in zip(rollout.turns, rollout.turns[1:], strict=False)
    if before.trajectory == after.trajectory and after.outcome in _MENDED
  }
  for hint in rollout.hints:
    after = turn_after.get((hint.trajectory, hint.start))
    if after is None or after is rollout.turns[-1]:
      continue
    tokens_T = rollout.trajectories[hint.trajectory].tokens_T
    context_T = np.concatenate(
      [tokens_T[: hint.at], hint.tokens_T, tokens_T[hint.at : hint.start]]
    )
    call_T = tokens_T[after.start : after.stop]
    yield (
      np.concatenate([context_T, call_T]),
      np.arange(len(context_T) + len(call_T)) >= len(context_T),
    )


def is_right_edit(task: family.FunctionTask, text: str) -> bool:
  """True for an edit of the task's function to its reference.

  Bound names may differ. A right body of another form counts as wrong.
  """
  try:
    call = tool_calls.parse(text)
    argument = family.names_of(task)[0]
    form = source.normal_body(call.payload, argument)
  except ValueError:
    return False
  return (call.name, *call.arguments) == (
    'edit',
    task.path,
    task.function,
  ) and (form == source.normal_body(task.reference, argument))


def _edits(rollout: records.Rollout, tokenizer: Any) -> Iterator[str]:
  """Yields the rollout's valid edits, as calls."""
  language = chat.language_of(tokenizer)
  for turn in rollout.turns:
    if turn.tool == 'edit':
      window = rollout.trajectories[turn.trajectory]
      turn_T = window.tokens_T[turn.start : turn.stop]
      # A valid call ends in an end token.
      yield from language.dialogue('').read(turn_T, True).calls


def describe(
  rollouts: Sequence[records.Rollout], tokenizer: Any
) -> dict[str, float]:
  """Returns statistics of at least one demonstration or rollout of a policy.

  Returns:
    tokens, turns: means per episode; invalid_calls: share of all calls;
    wrong_edits: share of valid edits that are not `is_right_edit`; and shares
    of episodes: tested, finished, passed.
  """
  calls = sum(r.num_turns for r in rollouts)
  wrong_edits = [
    not is_right_edit(family.from_id(r.task_id), edit)
    for r in rollouts
    for edit in _edits(r, tokenizer)
  ]

  def mean(values: Iterable[float]) -> float:
    return sum(values) / len(rollouts)

  return {
    'tokens': mean(len(t) for r in rollouts for t in r.trajectories),
    'turns': mean(r.num_turns for r in rollouts),
    'invalid_calls': sum(r.num_invalid for r in rollouts) / max(calls, 1),
    'wrong_edits': sum(wrong_edits) / max(len(wrong_edits), 1),
    'tested': mean('test' in r.tools for r in rollouts),
    'finished': mean('finish' in r.tools for r in rollouts),
    'passed': mean(r.verdict.passed for r in rollouts),
  }
