"""Policies as they leave the store: fetched, verified and on the device.

What a workdir has of them: `delta.key`, which signs and verifies, and, unless
the config says otherwise, the bundles themselves in `store`.
"""

import pathlib
import queue
import time
from typing import Any

import jax

from composer_jax.core import files, seams
from composer_jax.delta import follow, signing, subscribe
from composer_jax.delta import store as stores
from composer_jax.delta.device import tensors
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from composer_jax.rollout import placing

RUN_ID = 'policy'
KEY = 'delta.key'
_STORE, _MEMORY = 'store', 'received'
# Between two looks of who waits for the first policy.
_LOOK_S = 0.05


def store_of(workdir: pathlib.Path, store: str) -> str:
  """Where a run keeps its bundles: what its config says, '' for its workdir."""
  return store or str(workdir / _STORE)


def memory_of(workdir: pathlib.Path, store: str) -> pathlib.Path:
  """File where a run's rollouts remember the newest pointer of one store."""
  name = files.sha256(store_of(workdir, store).encode())[:16]
  return workdir / _MEMORY / f'{name}.pointer'


class Receiver:
  """Follows a run's bundles and rebuilds its policies as device arrays.

  Attributes:
    store: where it looks.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    model: model_config.ModelConfig,
    store: str = '',
    *,
    memory: pathlib.Path | None = None,
    threads: int = 2,
  ):
    """Reads nothing yet: the run may not have begun to publish.

    Args:
      workdir: of the run; its key is read from there.
      model: whose policies they are.
      store: as the run's config has it.
      memory: file of the newest pointer seen, so that not even a receiver that
        was started again takes an older one; None remembers while it lives.
      threads: that decode.
    """
    self.store = store_of(workdir, store)
    self._key = workdir / KEY
    self._memory, self._threads = memory, threads
    self._like = jax.eval_shape(decoder.policy, decoder.abstract(model)[0])
    self._subscriber: subscribe.Subscriber | None = None
    # Received, and not yet handed over as a policy.
    self._pending: subscribe.Update | None = None

  @property
  def problem(self) -> str | None:
    """Why the last look found nothing that can be used; None if it did not."""
    if self._subscriber is None:
      return None if self._key.exists() else f'there is no {self._key} yet'
    return self._subscriber.problem

  def poll(self) -> seams.ReceivedPolicy | None:
    """Returns the newest policy if it is newer than the last, else None.

    Raises:
      ValueError: the weights are not those of the model; at every look, as long
        as nothing newer comes.
    """
    if self._subscriber is None:
      if not self._key.exists():
        return None
      self._subscriber = subscribe.Subscriber(
        stores.Store(self.store),
        RUN_ID,
        signing.open_key(self._key),
        memory=self._memory,
        threads=self._threads,
      )
    self._pending = self._subscriber.poll() or self._pending
    if self._pending is None or self._pending is not self._subscriber.held:
      return None
    assert self._subscriber.stats is not None
    stats = self._subscriber.stats._asdict()
    policy = self._policy(self._pending, stats)
    self._pending = None
    return policy

  def first(self, within_s: float) -> seams.ReceivedPolicy:
    """Waits for a trainer to publish.

    Raises:
      ValueError: it did not in time.
    """
    deadline = time.monotonic() + within_s
    while (policy := self.poll()) is None:
      if time.monotonic() > deadline:
        raise ValueError(
          f'No usable policy in {self.store} within {within_s:g} s '
          f'({self.problem or "nothing there"}); is RL running?'
        )
      time.sleep(_LOOK_S)
    return policy

  def roll_back(self, version: int) -> seams.ReceivedPolicy:
    """Goes back from a version to the one received before, from any thread.

    Nothing is fetched. The version is not taken again, a newer one is.

    Raises:
      ValueError: another version is held, or none from before it.
    """
    if self._subscriber is None:
      raise ValueError(
        f'Version {version} cannot be left: the newest that was received is '
        'nothing.'
      )
    older = self._subscriber.rollback(version)
    return self._policy(older, {'route': ('rollback',)})

  def _policy(
    self, update: subscribe.Update, received: dict[str, Any]
  ) -> seams.ReceivedPolicy:
    began = time.perf_counter()
    variables = tensors.to_tree(update.weights, self._like)
    jax.block_until_ready(variables)
    return seams.ReceivedPolicy(
      version=update.version,
      target_id=update.target_id,
      variables=variables,
      received={**received, 'transfer_s': time.perf_counter() - began},
    )


def place(
  policy: seams.ReceivedPolicy, engine: engines.Engine
) -> seams.PlacedPolicy:
  """Copies a policy to where the engine serves it; from any thread."""
  began = time.perf_counter()
  weights_there = engine.place(policy.variables, policy.version)
  return seams.PlacedPolicy(
    version=policy.version,
    target_id=policy.target_id,
    variables=weights_there,
    received={**policy.received, 'place_s': time.perf_counter() - began},
  )


class Background:
  """Fetches, decodes, verifies and places policies beside an engine's steps."""

  def __init__(
    self, receiver: Receiver, engine: engines.Engine, interval_s: float
  ):
    self._receiver = receiver
    self._engine = engine
    self._dropped: queue.SimpleQueue[placing.PlacedWeights] = (
      queue.SimpleQueue()
    )
    self._follower = follow.Follower(self._look, interval_s, lambda: None)
    self._follower.thread.start()

  def _look(self) -> tuple[int, seams.PlacedPolicy] | None:
    while not self._dropped.empty():
      self._dropped.get()
    policy = self._receiver.poll()
    if policy is not None:
      return policy.version, place(policy, self._engine)
    if self._receiver.problem is not None:
      raise ValueError(self._receiver.problem)
    return None

  def take(self) -> seams.PlacedPolicy | None:
    """Returns what is newest if nobody took it; waits for nothing.

    Raises:
      RuntimeError: nothing newer will come.
    """
    if not self._follower.thread.is_alive():
      raise RuntimeError(
        f'What follows {self._receiver.store} ended: {self._follower.problem}.'
      )
    newest = self._follower.take()
    return None if newest is None else newest[1]

  def drop(self, weights_before: placing.PlacedWeights) -> None:
    """Has weights freed where no step waits for it."""
    self._dropped.put(weights_before)

  def close(self) -> None:
    """Ends the thread after its look, which nobody waits for."""
    self._follower.stop()
