"""Protocols of the systems that a run uses, such as corpus and transport.

The training packages import no system. `composer_jax.wiring` makes the objects
that a config names and gives them to a run as one `Systems`. Protocols of
environments and task families are in `agent.environment`.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from composer_jax.core import played, records, turns


class RunResult(Protocol):
  """Result of one call of a `Runner`; see `sandbox.base.Result`."""

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
  """Calls `module.function(*args)` for each of several args, isolated.

  Law: an answer depends on files and arguments alone, and the code that is
  called cannot reach the caller's objects.

  Attributes:
    level: name of the isolation from this machine.
  """

  level: str

  def call(
    self, files: dict[str, str], module: str, function: str, arguments: list
  ) -> RunResult: ...


class CodeCorpus(Protocol):
  """Text of continued pretraining, without code that tasks hold out."""

  @property
  def fim_rate(self) -> float:
    """Share of documents rearranged for fill-in-the-middle."""

  def train_tokenizer(self, extra_texts: list[str]) -> Any:
    """Learns a tokenizer from the corpus and other texts."""

  def documents(self, tokenizer: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns token ids of documents for training and of held-out ones."""


class StartingPoint(Protocol):
  """A model that a run starts from: weights, tokenizer and chat template."""

  def claim(self) -> dict[str, Any]:
    """Returns identities of the files that it takes; refuses another model."""

  def tokenizer(self, workdir: pathlib.Path) -> Any: ...

  def conversations(self, workdir: pathlib.Path) -> list[tuple[Any, Any]]:
    """Returns (tokens, loss mask) of the user's conversations."""

  def variables(self, like: Any) -> Any:
    """Returns float32 masters, placed like a tree of shapes and shardings."""


class Curriculum(Protocol):
  """Draws the task of each group by the outcomes of earlier groups.

  Law: the tasks of a step are a function of the seed and of the outcomes of all
  steps that were trained before any of its groups could be started.
  """

  def task_of(self, group: int) -> str: ...

  def record(self, step: int, groups: list[records.Group]) -> None: ...

  def measure(self, step: int) -> dict[str, Any]: ...

  def truncate(self, step: int) -> None:
    """Forgets outcomes from `step` on, which are trained again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReceivedPolicy:
  """A version of the policy as a rollout process received it.

  Attributes:
    version: policy version, the number of optimizer steps.
    target_id: Merkle root that the receiver computed of these weights.
    variables: variables of the decoder, on the device.
    received: metrics of the transfer: route, bytes and seconds.
  """

  version: int
  target_id: str
  variables: Any
  received: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedPolicy(ReceivedPolicy):
  """A policy whose `variables` are placed for `Engine.switch`."""


class WeightPublisher(Protocol):
  """Publishes the trainer's policies to a store.

  Laws: each version is published once and in order; only the next `publish`
  waits for the store.
  """

  def publish(self, state: Any, version: int) -> None:
    """Starts publishing the policy of a state, which may then be donated."""

  def check(self) -> None:
    """Writes metrics of finished publications; raises an error of any."""

  def wait(self) -> None:
    """Waits for all publications, then does `check`."""

  def fault_of(self, group: records.Group) -> str:
    """Says that other weights sampled a group; '' if they did not."""

  def collect_garbage(self, keep: int, say: Callable[[str], None]) -> None:
    """Deletes bundles that no receiver of the newest `keep` versions needs."""

  def close(self) -> None: ...


class WeightReceiver(Protocol):
  """Receives verified policies for rollouts, newest first.

  Law: the weights of a version are exactly those that were published.
  """

  def first(self, within_s: float) -> ReceivedPolicy:
    """Waits for a policy; raises a ValueError if none comes in time."""

  def follow(self, engine: Any) -> None:
    """Starts placing newer policies for an engine."""

  def look(self) -> None:
    """Receives the newest policy now, for receivers without a thread."""

  def take(self) -> PlacedPolicy | None:
    """Returns a newer policy if one is placed, without waiting."""

  def drop(self, weights_before: Any) -> None:
    """Frees weights that are no longer served."""

  def served(self, policy: ReceivedPolicy, **figures: float) -> dict[str, Any]:
    """Returns a policy's line of metrics, with figures of the rollouts."""

  def close(self) -> None: ...


class WeightTransport(Protocol):
  """Carries policies from the trainer to rollouts through one store."""

  def publisher(self, writer: Any, first: int) -> WeightPublisher:
    """Opens a publisher at version `first`; discards later versions."""

  def receiver(self, *, in_background: bool) -> WeightReceiver:
    """Opens a receiver, which works in a thread or when `look` is called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOrder:
  """What a group is, whoever samples it.

  Attributes:
    task_id: name of its task.
    min_version: oldest policy version that may sample a token of it.
    rewards: fields of its `agent.rewards.RewardOptions`.
  """

  group: int
  task_id: str
  min_version: int
  rewards: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
  """The right to sample some members of a group.

  Attributes:
    epoch: number of this lease, above that of every earlier one of the run. A
      result counts while its epoch is the newest of these members.
    first: first member.
    stop: number after the last member.
    saved: hash, bytes and newest policy version of the turns that an earlier
      lease of these members saved; None if it saved none.
  """

  epoch: int
  order: GroupOrder
  first: int
  stop: int
  saved: tuple[str, int, int] | None = None

  @property
  def size(self) -> int:
    return self.stop - self.first

  @property
  def span(self) -> tuple[int, int, int]:
    """Group, first member, and number after the last member."""
    return self.order.group, self.first, self.stop

  @property
  def min_version(self) -> int:
    """Oldest policy version that may go on with it."""
    order = self.order.min_version
    return max(order, self.saved[2]) if self.saved else order


class GroupExchange(Protocol):
  """The trainer's side of the groups that workers sample under leases.

  Laws: every admitted group ends with one fate, which is counted; what workers
  upload is validated, and what is refused is sampled anew.
  """

  def begin(
    self, version: int, first: int, ahead: Collection[int] = ()
  ) -> tuple[int, int]:
    """Goes on from a version; returns numbers of groups kept and voided.

    Args:
      first: number below which the version has trained on every group.
      ahead: groups above, on which it has trained, too.
    """

  def admit(self, orders: Sequence[GroupOrder]) -> None:
    """Lets groups be sampled; those known are left as they are."""

  def announce(self, version: int) -> None:
    """Tells that a version is being published, for which leases may wait."""

  def finished(self, groups: Sequence[int]) -> list[int]:
    """Returns those of the groups that are whole, unread, or given up."""

  def ready(
    self, groups: Sequence[int], fault_of: Callable[[records.Group], str]
  ) -> list[records.Group] | None:
    """Returns those of the groups that were not given up, once all are whole.

    Args:
      fault_of: says why a part of a group is refused; '' if it is right.
    """

  def unfinished(self, version: int) -> int:
    """Returns how many groups that this version may begin are not whole."""

  def num_uploads(self) -> int:
    """Returns the number of results so far, which rises with each."""

  def plan(self, groups: Sequence[int]) -> list[Any]:
    """Returns, as JSON has it, where the uploads of finished groups are."""

  def read(self, plan: Sequence[Any]) -> list[records.Group] | None:
    """Reads the groups of a plan in another process of the trainer.

    Returns None while the store does not answer.
    """

  def figures(self) -> dict[str, Any]:
    """Returns metrics of the fleet: workers, fates and leases lost so far."""

  def trained(self, groups: Sequence[int]) -> None:
    """Tells that a step has trained on groups."""

  def collect(self, below: int) -> None:
    """Counts fates and deletes uploads of groups below, for good."""

  def tick(self) -> None:
    """Hands out leases and takes in results, once."""

  def start(self) -> None:
    """Does so in a thread from now on."""

  def leases(self, capacity: int) -> 'LeaseHolder':
    """Returns the door of a worker in this process, whose loop ticks."""

  def blame(self, worker: str) -> None:
    """Tells that a worker's process has ended: its leases end at once."""

  def is_given_up(self, worker: str) -> bool:
    """Returns whether a worker hangs, so that its leases went to others."""

  def close(self, *, is_over: bool) -> None:
    """Ends; with `is_over` the run, too, which its workers then leave."""


class LeaseHolder(Protocol):
  """A worker's side: which leases it has, and what it made of them.

  Attributes:
    is_over: true once the run is over for this worker.
    name: name of the worker.
    has_lease: true if it has a lease, be it one that waits for its policy.
  """

  is_over: bool
  name: str

  @property
  def has_lease(self) -> bool: ...

  def leave(self) -> None:
    """Asks for no more leases, so that the worker may end."""

  def pause(self, is_paused: bool) -> None:
    """Asks for no leases while paused, and gives back those that it has.

    What is begun may end within the time that `leave` gives it.
    """

  def start(self) -> None:
    """Joins the fleet, for a worker in a process of its own."""

  def take(self, version: int) -> tuple[list[Lease], list[Lease]]:
    """Returns leases to begin at this served version, and those that ended."""

  def saved(self, lease: Lease) -> played.SavedTurns | None:
    """Returns the turns to go on from, of a lease that `take` returned."""

  def keep(self, lease: Lease, turns: Callable[[], played.SavedTurns]) -> None:
    """Saves now and then what `turns` returns, until the lease ends."""

  def deliver(self, lease: Lease, group: records.Group) -> None:
    """Uploads the members of a lease; blocks, while the lease lasts."""

  def note(self, row: dict[str, Any]) -> None:
    """Sends a line of metrics to the trainer."""

  def close(self) -> None:
    """Gives back what is unfinished."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Systems:
  """The systems of a run; `wiring.systems_of` makes it.

  Attributes:
    family: task family of the run, an `agent.environment.TaskFamily`.
    corpus: function from a workdir to the text of pretraining.
    initial: model that the run starts from; None for random weights.
    begin: function that refuses what a new run could not use, with a
      ValueError, and else copies to the workdir what it begins with.
    load_tokenizer: function from a file to its tokenizer.
    settle_judge: function from a workdir to the isolation level that judges its
      code, which is chosen once.
    open_runner: function from a level to a context manager of the runner.
    curriculum: function from (tasks, workdir, seed) to the curriculum; None
      draws tasks in order.
    hints: writer of hints, an `agent.environment.HintWriter`; None for none.
    judge: function from a tokenizer and a folder for its answers to a function
      from (group, reward options) to the group with a rubric's rewards; None
      without a rubric.
    transport: function from a workdir to the transport of weights.
    groups: function from a workdir and its judge's level to the groups that
      workers sample.
    worker_command: function from a workdir and a number to the command of that
      worker, which lacks a name.
    gate: function from functions and shape of RL to its `comparison.Gate`.
    write_report: function from a workdir to the path of the page that it makes.
  """

  family: Any
  corpus: Callable[[pathlib.Path], CodeCorpus]
  initial: StartingPoint | None
  begin: Callable[[pathlib.Path], None]
  load_tokenizer: Callable[[pathlib.Path], Any]
  settle_judge: Callable[[pathlib.Path], str]
  open_runner: Callable[[str], contextlib.AbstractContextManager[Runner]]
  curriculum: Callable[[Any, pathlib.Path, int], Curriculum] | None
  hints: Callable[..., tuple[turns.Hint, ...]] | None
  judge: (
    Callable[[Any, pathlib.Path | None], Callable[..., records.Group]] | None
  )
  transport: Callable[[pathlib.Path], WeightTransport]
  groups: Callable[[pathlib.Path, str], GroupExchange]
  worker_command: Callable[[pathlib.Path, int], list[str]]
  gate: Callable[..., Any]
  write_report: Callable[[pathlib.Path], pathlib.Path]
