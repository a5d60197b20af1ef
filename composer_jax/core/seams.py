"""What the spine asks of the systems around it, as few protocols.

The spine imports no system. `composer_jax.wiring` makes the objects that a
config names and hands them to a run as one `Systems`. The protocol of an
environment, and of the family that its tasks are of, is in
`agent.environment`.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from composer_jax.core import records, turns


class RunResult(Protocol):
  """What one call of a `Runner` gave; see `sandbox.base.Result`."""

  @property
  def level(self) -> str: ...
  @property
  def status(self) -> str: ...
  @property
  def value(self) -> Any: ...
  @property
  def error(self) -> str: ...
  @property
  def wall_s(self) -> float: ...


class Runner(Protocol):
  """Calls `module.function(*args)` for each args: a sandbox, or less.

  Law: an answer depends on files and arguments alone, and nothing that is
  called reaches what the caller holds.

  Attributes:
    level: how the code is kept apart from this machine.
  """

  level: str

  def call(
    self,
    files: dict[str, str],
    module: str,
    function: str,
    arguments: list[list],
  ) -> RunResult: ...


class CodeCorpus(Protocol):
  """The text of continued pretraining, without what the tasks hold out."""

  @property
  def fim_rate(self) -> float:
    """Share of documents rearranged for fill-in-the-middle."""

  def train_tokenizer(self, extra_texts: list[str]) -> Any:
    """Learns a tokenizer from the corpus and from texts of the protocol."""

  def documents(self, tokenizer: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Token ids of the documents for training, and of those held out."""


class StartingPoint(Protocol):
  """A model that a run goes on from: weights, tokenizer, its chat template."""

  def check(self) -> None:
    """Raises a ValueError where the run's model is another one."""

  def claim(self) -> dict[str, Any]:
    """What a workdir is bound to, of content that the config only names."""

  def take(self, workdir: pathlib.Path) -> None:
    """Keeps in a workdir what is needed beside the weights, or refuses it."""

  def tokenizer(self, workdir: pathlib.Path) -> Any: ...

  def conversations(self, workdir: pathlib.Path) -> list[tuple[Any, Any]]:
    """(tokens, loss mask) of the user's own conversations."""

  def variables(self, like: Any) -> Any:
    """Float32 masters, placed as the tree of shapes and shardings says."""


class Curriculum(Protocol):
  """Draws the task of each group from what earlier groups showed.

  Law: the tasks of a step are a function of the seed and of the outcomes of all
  steps that were trained before any of its groups could be started.
  """

  def task_of(self, group: int) -> str: ...

  def record(self, step: int, groups: list[records.Group]) -> None: ...

  def measure(self, step: int) -> dict[str, Any]: ...

  def truncate(self, step: int) -> None:
    """Forgets what steps from `step` on showed: they are trained again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReceivedPolicy:
  """A version of the policy as a rollout process received it.

  Attributes:
    version: optimizer steps behind these weights.
    target_id: Merkle root that the receiver computed of the weights it has.
    variables: the decoder's, on the device.
    received: what it took: the way it came, bytes and seconds.
  """

  version: int
  target_id: str
  variables: Any
  received: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedPolicy:
  """A `ReceivedPolicy` that lies where an engine serves it, and nowhere else.

  Attributes:
    weights: the engine's own form of them, for `Engine.switch`.
  """

  version: int
  target_id: str
  weights: Any
  received: dict[str, Any]


class WeightPublisher(Protocol):
  """The trainer's side of the way of the weights.

  Laws: each version is published once and in order; groups that other weights
  sampled than were published under their versions are refused; only the next
  `publish` waits for the store.
  """

  def publish(self, state: Any, version: int) -> None:
    """Begins to publish the policy of a state, which may be donated then."""

  def check(self) -> None:
    """Writes down what was published by now; raises what went wrong."""

  def wait(self) -> None:
    """Returns once all is published and written down; raises as `check`."""

  def check_identities(self, groups: list[records.Group]) -> None:
    """Raises a ValueError for groups that other weights sampled."""

  def collect_garbage(self, keep: int, say: Callable[[str], None]) -> None:
    """Frees what no receiver of the newest `keep` versions needs."""

  def close(self) -> None: ...


class WeightReceiver(Protocol):
  """The rollouts' side: verified policies, newest first.

  Law: what is served is exactly what was published under its version.
  """

  def first(self, within_s: float) -> ReceivedPolicy:
    """Waits for a policy; a ValueError says why none came in time."""

  def follow(self, engine: Any) -> None:
    """Begins to place newer policies for an engine."""

  def look(self) -> None:
    """Takes what is published now, where no thread does that."""

  def take(self) -> PlacedPolicy | None:
    """Returns a newer policy once it is placed; waits for nothing."""

  def drop(self, weights_before: Any) -> None:
    """Frees what is served no more."""

  def served(
    self, policy: ReceivedPolicy | PlacedPolicy, swap_s: float | None
  ) -> None:
    """Writes down that a policy is served, and the seconds of the swap."""

  def close(self) -> None: ...


class WeightTransport(Protocol):
  """How policies get from the trainer to whoever samples, by one store."""

  def publisher(self, writer: Any, first: int) -> WeightPublisher:
    """Opens the trainer's side at version `first`; later ones are void."""

  def receiver(self, *, in_background: bool) -> WeightReceiver:
    """Opens the rollouts' side.

    In the background a thread beside the engine's steps fetches and places
    newer policies; otherwise `look` does.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Systems:
  """What a run has of the systems; `wiring.systems_of` makes it.

  Attributes:
    family: tasks of the run, an `agent.environment.TaskFamily`.
    corpus: workdir -> text of pretraining.
    initial: what the run starts from; None for random weights.
    load_tokenizer: file -> tokenizer of either kind.
    settle_judge: (workdir) -> level of isolation that judges code here, decided
      once in a workdir.
    open_runner: level -> a context manager of the runner that judges code.
    curriculum: (tasks, workdir, seed) -> who draws tasks; None has them drawn
      in order.
    hints: writes those on mistakes, an `agent.environment.HintWriter`; None for
      no hints.
    transport: workdir -> the way of the weights.
    write_report: workdir -> path of the page that shows the run.
  """

  family: Any
  corpus: Callable[[pathlib.Path], CodeCorpus]
  initial: StartingPoint | None
  load_tokenizer: Callable[[pathlib.Path], Any]
  settle_judge: Callable[[pathlib.Path], str]
  open_runner: Callable[[str], contextlib.AbstractContextManager[Runner]]
  curriculum: Callable[[Any, pathlib.Path, int], Curriculum] | None
  hints: Callable[..., tuple[turns.Hint, ...]] | None
  transport: Callable[[pathlib.Path], WeightTransport]
  write_report: Callable[[pathlib.Path], pathlib.Path]
