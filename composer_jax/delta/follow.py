"""Looks for newer weights in a thread of its own, so that no step waits.

Consumes: what `poll` finds, such as bundles of a store.
Waits for: the next look.
Woken by: the clock, `stop`.
Produces: the newest weights, once; older ones that nobody took are dropped.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

# Returns (version, variables) once there is a newer policy, else None; what
# cannot be used is a ValueError or an OSError.
Poll = Callable[[], tuple[int, Any] | None]
_log = logging.getLogger(__name__)


class Follower:
  """A thread that polls.

  Attributes:
    problem: why the last look found nothing that can be used; '' if it did not
      fail.
    thread: it; not started by the constructor.
  """

  def __init__(self, poll: Poll, interval_s: float, notify: Callable[[], None]):
    """Follows.

    Args:
      poll: called every `interval_s`.
      interval_s: seconds.
      notify: called after something new was found; `take` it.
    """
    self.problem = ''
    # A read that hangs must not keep the process from ending.
    self.thread = threading.Thread(
      target=self._run, name='follower', daemon=True
    )
    self._poll, self._interval_s, self._notify = poll, interval_s, notify
    self._stopping = threading.Event()
    self._lock = threading.Lock()
    self._newest: tuple[int, Any] | None = None

  def take(self) -> tuple[int, Any] | None:
    """Returns what is newest if nobody took it; from any thread."""
    with self._lock:
      newest, self._newest = self._newest, None
    return newest

  def stop(self) -> None:
    """Ends the thread after its look, which the caller may wait for."""
    self._stopping.set()

  def _run(self) -> None:
    try:
      self._follow()
    except BaseException as error:
      # Passed on to the log; but it is also why nothing newer will be served.
      self.problem = f'nothing is followed any more: {error!r}'
      raise

  def _follow(self) -> None:
    while not self._stopping.wait(self._interval_s):
      try:
        update = self._poll()
      except (ValueError, OSError) as error:
        if str(error) != self.problem:
          _log.warning('Nothing newer can be served: %s', error)
        self.problem = str(error)
        continue
      self.problem = ''
      if update is not None:
        with self._lock:
          self._newest = update
        self._notify()
