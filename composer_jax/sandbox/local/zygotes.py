"""A sandbox on this machine: a pool of zygotes, and boxes."""

import contextlib
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
    self._boxes = boxes.BoxPool(
      level, limits, size, self._scheduling, images, packages, self.about
    )
    for zygote in started:
      self._idle.put(zygote)

  def call(
    self,
    files: dict[str, str],
    module: str,
    function: str,
    arguments: list[list],
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
  ) -> base.Box:
    """See `base.Sandbox`."""
    return self._boxes.open(image, changes)

  def close(self) -> None:
    """Waits for running calls, then ends all zygotes; may be called twice."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
    self._boxes.close()
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
