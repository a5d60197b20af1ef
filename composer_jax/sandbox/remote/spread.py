"""A sandbox that is as many places as its boxes need, on any machines.

Whoever opens a box gets the place with the fewest. Where all are well filled,
another is asked for, beside the work: a cluster that scales itself sees that
demand. A place that nobody uses for a while is given back.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from composer_jax.sandbox import base

# A box is idle most of the time, while the policy samples.
_BOXES = 2
_IDLE_S = 120.0


class _Place:
  """One place, and how many boxes are open there."""

  def __init__(self, sandbox: base.Sandbox, now: float):
    self.sandbox, self.count, self.used = sandbox, 0, now


class _SpreadBox:
  """A box that tells its place when it is closed."""

  def __init__(self, box: base.Box, on_close: Callable[[], None]):
    self._box, self._on_close = box, on_close

  def __getattr__(self, name: str) -> Any:
    return getattr(self._box, name)

  def __enter__(self) -> '_SpreadBox':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    on_close, self._on_close = self._on_close, lambda: None
    try:
      self._box.close()
    finally:
      on_close()


class SpreadSandbox(base.Sandbox):
  """Boxes over up to `most` places, each of one call at a time."""

  def __init__(
    self,
    begin: Callable[[], base.Sandbox],
    most: int,
    *,
    idle_s: float = _IDLE_S,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the first place; an error of `begin` is raised."""
    self._begin, self._most, self._idle_s = begin, most, idle_s
    self._clock, self._lock = clock, threading.Lock()
    first = begin()
    self.level, self.limits = first.level, first.limits
    self.about = dict(first.about)
    self._places = [_Place(first, clock())]
    self._num_coming, self._closed = 0, False

  def open(
    self, image: str, changes: Mapping[str, bytes | None] | None = None
  ) -> Any:
    now, idle = self._clock(), []
    with self._lock:
      if self._closed:
        raise ValueError('the sandbox is closed; open another one.')
      place = min(self._places, key=lambda p: p.count)
      num_all = len(self._places) + self._num_coming
      if place.count >= _BOXES and num_all < self._most:
        self._num_coming += 1
        threading.Thread(target=self._grow, daemon=True).start()
      place.count += 1
      for other in self._places[1:]:
        if not other.count and now - other.used > self._idle_s:
          idle.append(other)
      self._places = [p for p in self._places if p not in idle]
    for other in idle:
      other.sandbox.close()
    try:
      box = place.sandbox.open(image, changes)
    except BaseException:
      # Whatever it is is raised again; the place must not count the box.
      self._left(place)
      raise
    return _SpreadBox(box, lambda: self._left(place))

  def _left(self, place: _Place) -> None:
    with self._lock:
      place.count -= 1
      place.used = self._clock()

  def _grow(self) -> None:
    sandbox = None
    try:
      sandbox = self._begin()
    except (base.SandboxLost, ValueError) as error:
      # There is no room now; the next box asks again.
      logging.warning('No further place for boxes: %s', error)
    with self._lock:
      self._num_coming -= 1
      if sandbox is not None and not self._closed:
        self._places.append(_Place(sandbox, self._clock()))
        return
    if sandbox is not None:
      sandbox.close()

  def close(self) -> None:
    """May be called twice."""
    with self._lock:
      self._closed = True
      places, self._places = self._places, []
    for place in places:
      place.sandbox.close()
