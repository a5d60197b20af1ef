"""The protocols of an episode: environments, policies and task families.

An environment belongs to one episode. It answers any text as a tool call,
malformed text included; only failures of the host raise. A policy may be
shared: it continues the sessions of many episodes at once.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from composer_jax.core import checks, records, seams
from composer_jax.core import turns as turns_lib


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
  """The answer to one tool call.

  Attributes:
    text: the answer as the policy reads it.
    tool: the tool's name, '' for an invalid call.
    outcome: one of `core.turns.OUTCOMES`; FAILED is a call that was carried
      out and reports a failure, such as tests that fail.
    is_final: true if the call ends the episode.
  """

  text: str
  tool: str
  outcome: str = turns_lib.OK
  is_final: bool = False

  def __post_init__(self):
    checks.one_of(self, 'outcome', turns_lib.OUTCOMES)
    rule = f'be empty for an invalid call and no other ({self.outcome!r})'
    checks.require(self, 'tool', bool(self.tool) == self.is_valid, rule)

  @property
  def is_valid(self) -> bool:
    return self.outcome not in turns_lib.INVALID_OUTCOMES


class Environment(Protocol):
  """Tools and the workspace that they act on, for one episode.

  A class that inherits it gets the defaults, and defines everything else.

  Attributes:
    task_id: name of the task.
    prompt: first message of the user.
    protocol: end of the prompt on how to write a call as text.
    tools: names of the tools that exist here.
    is_broken: true once the sandbox failed, which ends the episode.
    flags: alarms of monitors so far, sorted.
    sandbox_seconds: wall time inside the sandbox so far.
    open_todos: number of to-dos in the policy's plan that are not done.
    history: calls and answers, as text, that stand before the first turn.
    single_turn: true if the episode ends with its first turn.
  """

  task_id: str
  prompt: str
  protocol: str = ''
  tools: tuple[str, ...]
  is_broken: bool = False
  flags: tuple[str, ...] = ()
  sandbox_seconds: float = 0.0
  open_todos: int = 0
  history: Sequence[tuple[str, str]] = ()
  single_turn: bool = False

  @abc.abstractmethod
  def call(self, text: str) -> ToolResult:
    """Carries out one tool call; never raises for a policy's text."""

  @abc.abstractmethod
  def verdict(self, finished: bool) -> records.Verdict:
    """Grades the workspace as it is; status INFRASTRUCTURE if broken."""

  def drive(self, chain: Any, limits: Any) -> bool:
    """Plays the whole episode by a harness of its own; false if it has none.

    Args:
      chain: `agent.window.Chain` by which the policy is asked.
      limits: `agent.episode.EpisodeOptions` of the run.
    """
    return False

  def usage(self, tool: str) -> str:
    """Returns one line on how to call one of `tools`."""
    return tool

  def state(self) -> str:
    """Returns the to-do list, for a new window; '' if there is none."""
    return ''

  def close(self) -> None:
    """Frees the workspace; may be called twice."""
    return


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
  """A turn with its texts, the input of a hint writer.

  Attributes:
    turn: position of the turn's tokens, and its outcome.
    call: text of the tool call; '' where the sampled tokens are no text.
    answer: answer of the environment; '' for a summary.
    is_final: true if the episode ended with this call.
    open_todos: number of open to-dos after the call.
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
  """Samples tokens; many episodes, each in a thread, may share one policy."""

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Continues `request.session`; blocks until sampling has ended."""

  def close(self, session: str) -> None:
    """Forgets a session; an unknown one is ignored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSource:
  """The tasks of a split, in the order of a seed.

  Attributes:
    of_group: group id -> task, used where no curriculum decides.
    of_id: task id -> task.
    pool: step -> candidates from which a curriculum draws that step's tasks.
  """

  of_group: Callable[[int], Any]
  of_id: Callable[[str], Any]
  pool: Callable[[int], Sequence[Any]]


class TaskFamily(Protocol):
  """Tasks of one kind, and what a run needs of them; with defaults to inherit.

  Laws: a task is a function of its id alone; the tasks that a run draws are a
  function of its config and seed; 'train' and the axes share no task; RL does
  not train on a task whose solution SFT has shown.

  Attributes:
    axes: names of the held-out splits; the first gives a run's main figure.
    needs_execution: true if these tasks can only be judged by running code.
    finish_call: text of the tool call that ends an episode.
    max_windows: most windows of an episode, where a harness of its own plays.
  """

  max_windows: int = 1
  axes: tuple[str, ...]
  needs_execution: bool
  finish_call: str

  def requirements(self) -> list[str]:
    """Returns the packages that the sandbox needs, as pip names them."""
    return []

  def images(self) -> str:
    """Returns the folder of the images that boxes begin as; '' for none."""
    return ''

  def root_folders(self) -> tuple[str, ...]:
    """Returns folders of the workspace that programs look for at the root."""
    return ()

  def held_out_packages(self) -> tuple[str, ...]:
    """Returns the packages that no corpus may contain."""
    return ()

  def listed(self, split: str, count: int) -> list[Any]:
    """Returns the first `count` tasks of a split for evaluation; 0 for all."""

  def gold(self, task: Any, tokenizer: Any) -> Policy:
    """Returns a policy that solves the task; a ValueError if none is known."""

  def functions(self) -> list[Any]:
    """Returns the schemas of the tools, for models that call functions."""
    return []

  def check(self) -> None:
    """Raises a ValueError for an impossible config; reads no file."""

  def check_files(self) -> None:
    """Raises a ValueError if the tasks on disk are too few for the run."""

  def identity(self) -> str:
    """Hashes tasks that are read from disk; '' where they are generated."""
    return ''

  def texts(self) -> list[str]:
    """Returns sample tasks and calls, to train the tokenizer on."""

  def tasks(self, tokenizer: Any, *, split: str, seed: int) -> TaskSource:
    """Returns the tasks of a split; a ValueError if the run needs more."""

  def is_right_edit(self, task_id: str, call: str) -> bool | None:
    """True if a call's edit solves the task; None where only tests can say."""

  def environment(self, task: Any, runner: seams.Runner) -> Environment:
    """Returns a new environment for one episode of a task."""

  def demonstrations(
    self, job: Any
  ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """Returns (tokens_T, loss_mask_T) pairs for SFT, and held-out pairs."""
