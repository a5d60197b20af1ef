"""A sandbox on this machine: a pool of zygotes that keep boxes."""

import functools
import itertools
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.sandbox import base
from composer_jax.sandbox.local import boxes, process


class ZygotePool(base.Sandbox):
  """A sandbox of up to `size` zygotes, each of which runs a program at a time.

  All zygotes run on the cores of the thread that opened the pool, later
  replacements too: the thread that starts one may be pinned to one core.
  """

  def __init__(
    self,
    level: str,
    limits: base.Limits,
    size: int,
    images: pathlib.Path | None = None,
    packages: pathlib.Path | None = None,
    folders: Sequence[str] = (),
  ):
    """Starts one zygote; the others when they are needed.

    Raises:
      process.ZygoteError: the level does not work here.
    """
    self.level, self.limits = level, limits
    self._lock = threading.Lock()
    self._closed = False
    self._size = size
    self._scheduling = process.scheduling()
    self._options = {
        'images': str(images.resolve()) if images else None,
        'packages': str(packages) if packages else None, 'proc': True,
        'folders': list(folders),
    }  # fmt: skip
    self._seats = [self._start()]
    self.about: dict[str, Any] = self._seats[0].about
    self._numbers = itertools.count()

  def _start(self) -> boxes.BoxZygote:
    return boxes.BoxZygote(
      self.level, self.limits, self._scheduling, self._options
    )

  def open(
    self, image: str, changes: Mapping[str, bytes | None] | None = None
  ) -> boxes.LocalBox:
    """See `base.Sandbox`."""
    changes = changes or {}
    number = next(self._numbers)
    request = {
        'do': 'open', 'image': image, 'box': number,
        'changes': [[path, x is not None] for path, x in changes.items()],
    }  # fmt: skip
    blobs = tuple(x for x in changes.values() if x is not None)
    for is_last in (False, True):
      seat = self._least_taken()
      leave = functools.partial(self._leave, seat)
      try:
        seat.ask(request, blobs)
        return boxes.LocalBox(seat, number, leave)
      except base.SandboxLost:
        leave()
        if is_last or not seat.is_lost:
          raise  # otherwise the zygote died unseen: try another one
      except ValueError:
        leave()
        raise
    raise AssertionError

  def _least_taken(self) -> boxes.BoxZygote:
    """Returns the zygote with the fewest boxes and counts one more there.

    A zygote is started if all have boxes and there may be more.
    """
    with self._lock:
      if self._closed:
        raise ValueError('the sandbox is closed; open another one.')
      self._seats = [seat for seat in self._seats if not seat.is_lost]
      seat = min(self._seats, key=lambda seat: seat.num_boxes, default=None)
      if seat is None or (seat.num_boxes and len(self._seats) < self._size):
        try:
          seat = self._start()
        except (process.ZygoteError, OSError) as error:
          raise base.SandboxLost(f'no zygote of boxes: {error}') from error
        self._seats.append(seat)
      seat.num_boxes += 1
      return seat

  def _leave(self, seat: boxes.BoxZygote) -> None:
    with self._lock:
      seat.num_boxes -= 1

  def close(self) -> None:
    """Waits for what runs, then ends all zygotes; may be called twice."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
    for seat in self._seats:
      with seat.running:
        seat.close()
