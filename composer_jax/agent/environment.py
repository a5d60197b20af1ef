"""What an episode needs: a world that answers, and a policy that acts in it.

An environment belongs to one episode. It reads the text of a call, which may
be anything at all, and answers; only the host's own failures raise. A policy
may be shared: it continues the sessions of many episodes at once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from composer_jax.core import records, seams
from composer_jax.core import turns as turns_lib


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
  """What a tool answers.

  Attributes:
    text: the answer as the policy reads it.
    tool: the tool's name, '' for an invalid call.
    outcome: one of `core.turns.OUTCOMES`; FAILED is a call that was carried
      out and reports a failure, such as tests that fail.
    is_final: whether the episode ends.
  """

  text: str
  tool: str
  outcome: str = turns_lib.OK
  is_final: bool = False

  def __post_init__(self):
    if self.outcome not in turns_lib.OUTCOMES:
      raise ValueError(
        f'ToolResult.outcome {self.outcome!r} is not one of '
        f'{turns_lib.OUTCOMES}.'
      )
    if bool(self.tool) != self.is_valid:
      raise ValueError(
        f'ToolResult.tool ({self.tool!r}) must be empty for an invalid call '
        f'and for no other; the outcome is {self.outcome!r}.'
      )

  @property
  def is_valid(self) -> bool:
    return self.outcome not in turns_lib.INVALID_OUTCOMES


class Environment(Protocol):
  """Tools and the workspace that they act on, for one episode.

  Attributes:
    task_id: name of the task.
    prompt: what the user says first.
    tools: names of the tools that exist here.
    is_broken: the sandbox failed, retry included; the episode should end.
    flags: alarms of monitors so far, sorted.
    sandbox_seconds: wall time inside the sandbox so far.
    sandbox_level: isolation of what runs here.
    num_tests: hidden tests that decide.
    open_todos: items of the policy's own list that it has not done.
  """

  @property
  def task_id(self) -> str: ...
  @property
  def prompt(self) -> str: ...
  @property
  def tools(self) -> tuple[str, ...]: ...
  @property
  def is_broken(self) -> bool: ...
  @property
  def flags(self) -> tuple[str, ...]: ...
  @property
  def sandbox_seconds(self) -> float: ...
  @property
  def sandbox_level(self) -> str: ...
  @property
  def num_tests(self) -> int: ...
  @property
  def open_todos(self) -> int: ...

  def call(self, text: str) -> ToolResult:
    """Parses and carries out one call; never raises for a policy's text."""

  def usage(self, tool: str) -> str:
    """One line on how to call one of `tools`."""

  def state(self) -> str:
    """The plan so far (the to-do list), for a new window; '' for none."""

  def verdict(self, finished: bool) -> records.Verdict:
    """The verdict on the workspace as it is; INFRASTRUCTURE if broken."""

  def close(self) -> None:
    """Forgets the workspace; may be called twice."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
  """A turn and what came of it, as those see it who write hints.

  Attributes:
    turn: where its tokens lie, and its outcome.
    call: its text; '' where its tokens are no text.
    answer: what the environment said; '' for a summary.
    is_final: whether the episode ended with this call.
    open_todos: items of the policy's own list not done after it.
  """

  turn: turns_lib.Turn
  call: str
  answer: str
  is_final: bool = False
  open_todos: int = 0


# (environment, tokenizer, moments, tokens_T of each window) -> hints on them.
HintWriter = Callable[
  [Environment, Any, Sequence[Moment], Sequence[np.ndarray]],
  tuple[turns_lib.Hint, ...],
]


class Policy(Protocol):
  """Samples tokens. Many episodes, each in a thread, may share one policy."""

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Goes on with `request.session`; blocks until sampling ended."""

  def close(self, session: str) -> None:
    """Forgets a session; unknown ones are ignored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSource:
  """The tasks of a split, in the order of a seed."""

  # Group id -> task, where no curriculum decides.
  of_group: Callable[[int], Any]
  of_id: Callable[[str], Any]
  # Step -> what a curriculum may draw for it.
  pool: Callable[[int], Sequence[Any]]


class TaskFamily(Protocol):
  """Tasks of one kind and all that a run needs to practise them.

  Laws: a task is a function of its id alone, and which tasks a run draws of the
  config and a seed; 'train' and 'held_out' share no task; what SFT is shown the
  solution of, RL does not train on.

  Attributes:
    needs_execution: true if these tasks can only be judged by running code.
    finish_call: text of the tool call that ends an episode.
  """

  needs_execution: bool
  finish_call: str

  def requirements(self) -> list[str]:
    """Returns the packages that the sandbox needs, as pip names them."""

  def held_out_packages(self) -> tuple[str, ...]:
    """Returns the packages that no corpus may contain."""

  def listed(self, split: str, count: int) -> list[Any]:
    """Returns the first `count` tasks of a split for evaluation; 0 for all."""

  def gold(self, task: Any, tokenizer: Any) -> Policy:
    """Returns a policy that solves the task; a ValueError if none is known."""

  def functions(self) -> list[Any]:
    """Returns the schemas of the tools, for models that call functions."""

  def check(self) -> None:
    """Raises a ValueError for a config that cannot be; reads no file."""

  def identity(self) -> str:
    """Hash of tasks that are read from disk; '' where they are generated."""

  def texts(self) -> list[str]:
    """What tasks and calls look like, for the tokenizer beside the corpus."""

  def tasks(self, tokenizer: Any, *, split: str, seed: int) -> TaskSource:
    """The tasks of a split; a ValueError where a run needs more."""

  def environment(self, task: Any, runner: seams.Runner) -> Environment:
    """A new environment for one episode of a task."""

  def demonstrations(
    self, job: Any
  ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """(tokens, loss mask) of what SFT learns, and of transcripts held out.

    The job is a `pipeline.job.Job`.
    """
