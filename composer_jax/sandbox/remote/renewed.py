"""A sandbox that starts another place (a guest, an actor) when one is lost."""

import logging
import threading
from collections.abc import Callable, Mapping

from composer_jax.sandbox import base
from composer_jax.sandbox.remote import protocol


class RenewedSandbox(base.Sandbox):
  """Calls and boxes of one place at a time.

  The boxes of a lost place are lost: their runs return 'infrastructure'. The
  next call or box starts another place, and is tried there once.
  """

  def __init__(self, begin: Callable[[], protocol.RemoteSandbox], what: str):
    """Starts the first place.

    Args:
      begin: function that starts a place, which ends when its sandbox is
        closed; raises `base.SandboxLost` if it cannot.
      what: name of a place in the log.
    """
    self._begin, self._what = begin, what
    self._lock = threading.Lock()
    self._closed = False
    self._place: protocol.RemoteSandbox | None = begin()
    self.level, self.limits = self._place.level, self._place.limits
    self.about = dict(self._place.about)

  def _current(
    self, lost: protocol.RemoteSandbox | None = None
  ) -> protocol.RemoteSandbox:
    with self._lock:
      if self._closed:
        raise ValueError('the sandbox is closed; open another one.')
      if self._place is not None and self._place is lost:
        logging.warning('%s was lost: starting another one.', self._what)
        self._place.close()
        self._place = None
      if self._place is None:
        self._place = self._begin()
      return self._place

  def open(
    self, image: str, changes: Mapping[str, bytes | None] | None = None
  ) -> protocol.RemoteBox:
    current = self._current()
    try:
      return current.open(image, changes)
    except base.SandboxLost:
      return self._current(current).open(image, changes)

  def close(self) -> None:
    """May be called twice."""
    with self._lock:
      self._closed = True
      if self._place is not None:
        self._place.close()
        self._place = None
