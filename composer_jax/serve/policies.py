"""The weights that a service serves: newer ones as they come.

Consumes: newer policies that a receiver finds.
Waits for: nothing; weights are fetched, verified and placed beside the steps.
Woken by: the receiver's thread.
Produces: a reference swap in the engine's thread.
"""

import logging
import threading
from collections.abc import Callable, Mapping

from composer_jax.delta import transport as receivers
from composer_jax.rollout import engine as engines

_log = logging.getLogger(__name__)


class Policies:
  """Keeps an engine on the newest weights of a receiver, if it has one."""

  def __init__(
    self,
    engine: engines.Engine,
    receiver: receivers.Receiver | None,
    interval_s: float,
    notify: Callable[[], None],
    target_id: str = '',
  ):
    """Wraps an engine, which the thread that calls `serve_newest` steps.

    `notify` is called when that has something to serve; `target_id` is the
    identity of the engine's weights, '' if nobody published them.
    """
    # Of every version that was served: replaced, not changed, so that readers
    # in other threads may keep it.
    self.identities: Mapping[int, str] = {engine.version: target_id}
    self.threads: list[threading.Thread] = []
    self._engine, self._refused, self._placing = engine, '', None
    if receiver is not None:
      self._placing = receivers.Placing(receiver, interval_s, notify)
      self.threads.append(self._placing.thread)

  @property
  def problem(self) -> str:
    """Why newer weights are not served; '' where none are known."""
    return (self._placing.problem if self._placing else '') or self._refused

  def start(self) -> None:
    if self._placing is not None:
      self._placing.follow(self._engine)

  def stop(self) -> None:
    if self._placing is not None:
      self._placing.close()

  def serve_newest(self) -> None:
    """Called by the engine's thread."""
    policy = self._placing.newest() if self._placing else None
    # An earlier call may have taken the newest already.
    if self._placing is not None and policy is not None:
      try:
        self._placing.drop(self._engine.switch(policy.variables))
        self._refused = ''
        served = {policy.version: policy.target_id}
        self.identities = {**self.identities, **served}
      except ValueError as error:
        version = self._engine.version
        _log.warning('Version %d is served on: %s', version, error)
        self._refused = str(error)
