"""The way of a run's weights: its section of the config, and both ends.

The trainer publishes every policy as a signed bundle in a store; whoever
samples follows the store. Both placements of a run use it.
"""

import collections
import contextlib
import dataclasses
import pathlib
from typing import Any

from composer_jax.core import seams
from composer_jax.delta.device import publication, received, receiver, sender
from composer_jax.models import config as model_config
from composer_jax.rollout import engine as engines
from composer_jax.telemetry import writer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaOptions(sender.BundleOptions):
  """How each policy of RL reaches the engine; no result depends on it.

  Attributes:
    store: folder or URL (s3://bucket/run) of this run alone; '' for `store` in
      the workdir.
    poll_s: seconds between looks of the rollout process; more for a URL.
    keyframe_every: versions from a full one to the next, which only receivers
      that join late and repairs read.
    threads: that encode, and that decode; each side has a core of two.
  """

  store: str = ''
  poll_s: float = 0.05
  keyframe_every: int = 100
  expires_s: float = 7 * 86400.0
  threads: int = 1

  def __post_init__(self):
    sender.BundleOptions.__post_init__(self)
    if not self.poll_s > 0:
      raise ValueError(
        f'--config.delta.poll_s must be positive, not {self.poll_s}.'
      )


class StoreTransport:
  """A `core.seams.WeightTransport` through the store of a run."""

  def __init__(
    self,
    workdir: pathlib.Path,
    model: model_config.ModelConfig,
    options: DeltaOptions,
  ):
    self._workdir, self._model, self._options = workdir, model, options
    self._memory = receiver.memory_of(workdir, options.store)

  def publisher(
    self, writer: writer.Writer, first: int
  ) -> publication.Publication:
    sending = sender.Sender(
      receiver.store_of(self._workdir, self._options.store),
      receiver.RUN_ID,
      self._workdir / receiver.KEY,
      self._options,
    )
    if sending.version is None:
      # A store that is new, or was deleted: older pointers are no measure.
      self._memory.unlink(missing_ok=True)
    # What a killed run received after `first` became void with it.
    received.truncate(self._workdir, first)
    return publication.Publication(sending, writer, self._workdir, first)

  def receiver(self, *, in_background: bool) -> seams.WeightReceiver:
    receiving = receiver.Receiver(
      self._workdir,
      self._model,
      self._options.store,
      memory=self._memory,
      threads=self._options.threads,
    )
    lines = received.Received(self._workdir)
    if in_background:
      return _InBackground(receiving, lines, self._options.poll_s)
    return _InTurn(receiving, lines)


class _InTurn:
  """Receives when it is asked to, in the process that also publishes."""

  def __init__(self, receiving: receiver.Receiver, lines: received.Received):
    self._receiving, self._lines = receiving, lines
    self._news: collections.deque[seams.PlacedPolicy] = collections.deque()
    self._engine: engines.Engine | None = None

  def first(self, within_s: float) -> seams.ReceivedPolicy:
    return self._receiving.first(within_s)

  def follow(self, engine: engines.Engine) -> None:
    self._engine = engine

  def look(self) -> None:
    assert self._engine is not None
    policy = self._receiving.poll()
    if self._receiving.problem is not None:
      # Published a moment ago by this process: waiting would not mend it, and
      # the policy before it may not sample what is due.
      raise ValueError(self._receiving.problem)
    if policy is not None:
      self._news.append(receiver.place(policy, self._engine))

  def take(self) -> seams.PlacedPolicy | None:
    return self._news.popleft() if self._news else None

  def drop(self, weights_before: Any) -> None:
    del weights_before

  def served(self, policy: seams.ReceivedPolicy, **seconds: float) -> None:
    fields = {'target_id': policy.target_id, **policy.received}
    self._lines.write(policy.version, **fields, **seconds)

  def close(self) -> None:
    self._lines.close()


class _InBackground(_InTurn):
  """Receives in a thread of its own, beside the engine's steps."""

  def __init__(
    self,
    receiving: receiver.Receiver,
    lines: received.Received,
    interval_s: float,
  ):
    super().__init__(receiving, lines)
    self._interval_s = interval_s
    self._stack = contextlib.ExitStack()

  def follow(self, engine: engines.Engine) -> None:
    self._news_of = receiver.Background(
      self._receiving, engine, self._interval_s
    )
    self._stack.enter_context(contextlib.closing(self._news_of))

  def look(self) -> None:
    """Does nothing: the thread looks."""

  def take(self) -> seams.PlacedPolicy | None:
    return self._news_of.take()

  def drop(self, weights_before: Any) -> None:
    self._news_of.drop(weights_before)

  def close(self) -> None:
    self._stack.close()
    super().close()
