"""A sandbox on this machine: a pool of zygotes, and boxes."""

import contextlib
import functools
import itertools
import json
import logging
import pathlib
import queue
import threading
from collections.abc import Mapping
from typing import Any

from composer_jax.sandbox import base, results
from composer_jax.sandbox.local import boxes, process

_MAX_REQUEST = 16 << 20


class ZygotePool(base.Closing):
  """A sandbox of `size` zygotes; further threads wait their turn.

  Boxes have zygotes of their own, up to `size`, started when they are needed.
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
  ):
    self.level, self._limits = level, limits
    self._lock = threading.Lock()
    self._closed = False
    self._idle: queue.LifoQueue = queue.LifoQueue()
    self._size = size
    self._scheduling = process.scheduling()
    started = []
    with contextlib.ExitStack() as unless_started:
      for _ in range(size):
        started.append(self._start())
        unless_started.callback(started[-1].close)
      unless_started.pop_all()
    self.about: dict[str, Any] = started[0].about
    # Configuration that zygotes of calls do not have.
    self._box_options = {
        'images': str(images.resolve()) if images else None,
        'packages': str(packages) if packages else None, 'proc': True,
    }  # fmt: skip
    self._seats: list[boxes.BoxZygote] = []
    self._numbers = itertools.count()
    for zygote in started:
      self._idle.put(zygote)

  def call(
    self, files: dict[str, str], module: str, function: str, arguments: list
  ) -> base.Result:
    """See `base.Sandbox`."""
    request = _checked(files, module, function, arguments)
    zygote = self._idle.get()
    try:
      if self._closed:
        raise ValueError('the sandbox is closed; open another one.')
      for attempt in range(2):
        try:
          zygote = zygote or self._start()
          return self._run(zygote, request, len(arguments))
        except (process.ZygoteError, OSError) as error:
          reason = str(error)
          logging.warning(
              'Sandbox zygote failed (%s), attempt %d of 2: restarting it.',
              reason, attempt + 1,
          )  # fmt: skip
          if zygote:
            zygote.close()
          zygote = None
      return base.Result(
        level=self.level, status='infrastructure', error=reason
      )
    finally:
      self._idle.put(zygote)

  def _start(self) -> process.Process:
    return process.Process(self.level, self._limits, self._scheduling)

  def _run(
    self, zygote: process.Process, request: dict, num_calls: int
  ) -> base.Result:
    ending = zygote.run(request, wall_s=self._limits.wall_s)
    status, value, error = ending.status, None, ending.error
    if status == 'ok':
      try:
        if len(ending.report) == self._limits.output_bytes:
          raise ValueError(f'the result fills {len(ending.report)} bytes')
        value = results.parse(ending.report, num_calls)
      except ValueError as reason:
        status, error = 'exit', f'exit code {ending.exit_code}: {reason}'
    return base.Result(
        level=self.level, status=status, value=value, error=error,
        stdout=ending.output, wall_s=ending.wall_s,
    )  # fmt: skip

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
        reopen = functools.partial(self.open, image)
        return boxes.LocalBox(seat, number, reopen, leave)
      except base.SandboxLost:
        leave()
        if is_last or not seat.is_lost:
          raise  # otherwise the zygote died unseen: try another one
      except ValueError:
        leave()
        raise
    raise AssertionError

  def _least_taken(self) -> boxes.BoxZygote:
    """Returns the zygote with the fewest boxes and counts one more there."""
    with self._lock:
      if self._closed:
        raise ValueError('the sandbox is closed; open another one.')
      self._seats = [seat for seat in self._seats if not seat.is_lost]
      if len(self._seats) < self._size:
        try:
          seat = boxes.BoxZygote(
            self.level, self._limits, self._scheduling, self._box_options
          )
        except (process.ZygoteError, OSError) as error:
          raise base.SandboxLost(f'no zygote of boxes: {error}') from error
        self._seats.append(seat)
        self.about['boxes'] = seat.about
      else:
        seat = min(self._seats, key=lambda seat: seat.num_boxes)
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
    for _ in range(self._size):
      zygote = self._idle.get()
      if zygote:
        zygote.close()
    for _ in range(self._size):  # wakes waiting callers to their error
      self._idle.put(None)


def _checked(files, module, function, arguments) -> dict:
  for name, text in files.items():
    parts = pathlib.PurePosixPath(name).parts
    if not parts or parts[0] == '/' or '..' in parts or '\0' in name:
      raise ValueError(
        f'file name {name!r} must be relative and stay in the workspace.'
      )
    if not isinstance(text, str):
      raise ValueError(
        f'file {name!r} must be a str, not {type(text).__name__}.'
      )
  request = {
      'files': files, 'module': module, 'function': function,
      'arguments': [list(each) for each in arguments],
  }  # fmt: skip
  if (size := len(json.dumps(request))) > _MAX_REQUEST:
    raise ValueError(
      f'the request has {size} bytes; {_MAX_REQUEST} are allowed: send less '
      'in files or arguments.'
    )
  return request
