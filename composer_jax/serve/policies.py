"""The weights that a service serves: newer ones as they come.

Consumes: newer policies that a receiver finds.
Waits for: nothing; weights are fetched, verified and placed beside the steps.
Woken by: the follower's thread.
Produces: a reference swap in the engine's thread.
"""

import logging
import queue
import threading
from collections.abc import Callable

from composer_jax.delta import subscriber
from composer_jax.delta import transport as receivers
from composer_jax.rollout import engine as engines
from composer_jax.rollout import placing

_log = logging.getLogger(__name__)


class Policies:
  """Keeps an engine on the newest weights of a receiver, if it has one."""

  def __init__(
    self,
    engine: engines.Engine,
    receiver: receivers.Receiver | None,
    interval_s: float,
    notify: Callable[[], None],
  ):
    """Wraps an engine, which the thread that calls `serve_newest` steps.

    `notify` is called when that has something to serve.
    """
    self.version = engine.version
    self.threads: list[threading.Thread] = []
    self._engine, self._receiver, self._refused = engine, receiver, ''
    # Old weights, which the follower frees: no step waits for that.
    self._dropped = queue.SimpleQueue[placing.PlacedWeights]()
    self._follower = None
    if receiver is not None:
      self._follower = subscriber.Poller(self._look, interval_s, notify)
      self.threads.append(self._follower.thread)

  @property
  def problem(self) -> str:
    """Why newer weights are not served; '' where none are known."""
    return (self._follower.problem if self._follower else '') or self._refused

  def stop(self) -> None:
    if self._follower is not None:
      self._follower.stop()

  def _look(self) -> placing.PlacedWeights | None:
    """Called by the follower."""
    assert self._receiver is not None
    while not self._dropped.empty():
      self._dropped.get()
    policy = self._receiver.poll()
    if policy is None:
      if self._receiver.problem is not None:
        raise ValueError(self._receiver.problem)
      return None
    try:
      return self._engine.place(policy.variables, policy.version)
    except ValueError as error:
      self._refuse(error)
      return None

  def serve_newest(self) -> None:
    """Called by the engine's thread."""
    placed = self._follower.take() if self._follower else None
    # An earlier call may have taken the newest already.
    if placed is not None:
      try:
        self._dropped.put(self._engine.switch(placed))
        self.version, self._refused = placed.version, ''
      except ValueError as error:
        self._refuse(error)

  def _refuse(self, error: ValueError) -> None:
    _log.warning('Version %d is served on: %s', self.version, error)
    self._refused = str(error)
