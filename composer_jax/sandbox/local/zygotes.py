"""The host's side: a pool of zygotes, and one call through one of them."""

import array
import contextlib
import json
import logging
import os
import pathlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from composer_jax.sandbox import base, results
from composer_jax.sandbox.local import boxes, pipes, process

_MAX_REQUEST = 16 << 20


class Zygote(process.Process):
  """One zygote of calls."""

  def run(self, request: bytes, num_calls: int) -> base.Result:
    """Sends a request and reads its pipes until the call is dead.

    Raises:
      ZygoteError: when the call says nothing about the code.
    """
    start = time.monotonic()
    result_read, result_write = os.pipe()
    output_read, output_write = os.pipe()
    with pipes.Reader(
      result_read, output_read, self.limits.output_bytes
    ) as reader:
      try:
        self.control.settimeout(process.GRACE_S)
        self._send(request, (result_write, output_write))
      except OSError as error:
        raise process.ZygoteError(
          f'cannot send the request: {error}'
        ) from error
      finally:
        os.close(result_write)
        os.close(output_write)
      report = self.attend(reader, start, self.limits.wall_s)
    return self._judge(report, reader, num_calls, time.monotonic() - start)

  def _send(self, request: bytes, descriptors: tuple[int, int]) -> None:
    rights = array.array('i', descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    self.control.sendmsg([struct.pack('!I', len(request))], ancillary)
    self.control.sendall(request)

  def _judge(self, report, reader, num_calls, wall_s) -> base.Result:
    status, value, error = 'ok', None, ''
    code = int(report['status']) if 'status' in report else None
    if 'timed_out' in report:
      status, error = 'timeout', f'wall limit of {self.limits.wall_s} s'
    elif reader.result_too_large:
      status = 'exit'
      error = f'result larger than {self.limits.output_bytes} bytes'
    elif code is None:  # its init went too
      status, error = 'killed', 'killed, out of memory most likely'
    elif os.WIFSIGNALED(code):
      status, error = pipes.signalled(os.WTERMSIG(code), self.limits)
    else:
      try:
        value = results.parse(bytes(reader.result), num_calls)
      except ValueError as reason:
        status = 'exit'
        error = f'exit code {os.waitstatus_to_exitcode(code)}: {reason}'
    return base.Result(
        level=self.level, status=status, value=value, error=error,
        stdout=reader.output.decode('utf-8', 'replace'), wall_s=wall_s,
    )  # fmt: skip


class ZygotePool:
  """A sandbox of `size` zygotes; further threads wait their turn.

  All zygotes run where the thread that opened the pool ran, also those that
  replace a dead one: the thread that finds it dead may be pinned to a core.
  """

  def __init__(
    self,
    level: str,
    limits: base.Limits,
    size: int,
    images: pathlib.Path | None = None,
    packages: pathlib.Path | None = None,
  ):
    self.level = level
    self._limits = limits
    self._lock = threading.Lock()
    self._closed = False
    self._idle: queue.LifoQueue = queue.LifoQueue()
    self._size = size
    self._place = process.Place.current()
    started = []
    with contextlib.ExitStack() as unless_started:
      for _ in range(size):
        started.append(Zygote(level, limits, self._place))
        unless_started.callback(started[-1].close)
      unless_started.pop_all()
    self.about: dict[str, Any] = started[0].about
    self._boxes = boxes.BoxPool(
      level, limits, size, self._place, images, packages, self.about
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
    """Calls `module.function(*arguments[i])` for each i in a fresh process.

    Args:
      files: relative path -> text; the whole workspace of the call.
      module: dotted name, imported from the workspace.
      function: attribute of the module.
      arguments: JSON values only. Expected results have no place here: they
        are compared by the caller.
    """
    request = _encode(files, module, function, arguments)
    zygote = self._idle.get()
    try:
      if self._closed:
        raise ValueError('the sandbox is closed; open another one.')
      for attempt in range(2):
        try:
          zygote = zygote or Zygote(self.level, self._limits, self._place)
          return zygote.run(request, len(arguments))
        except (process.ZygoteError, OSError) as error:
          reason = str(error)
          logging.warning(
            'Sandbox zygote failed (%s), attempt %d of 2: restarting it.',
            reason,
            attempt + 1,
          )
          if zygote:
            zygote.close()
          zygote = None
      return base.Result(
        level=self.level, status='infrastructure', error=reason
      )
    finally:
      self._idle.put(zygote)

  def open(
    self, image: str, changes: Mapping[str, bytes | None] | None = None
  ) -> base.Box:
    """A box that begins as a folder below the sandbox's folder of images."""
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
    for _ in range(self._size):  # callers that wait get their error
      self._idle.put(None)

  def __enter__(self) -> 'ZygotePool':
    return self

  def __exit__(self, *unused) -> None:
    self.close()


def _encode(files, module, function, arguments) -> bytes:
  for name, text in files.items():
    parts = pathlib.PurePosixPath(name).parts
    if not parts or parts[0] == '/' or '..' in parts or '\0' in name:
      raise ValueError(
        f'file name {name!r} must be relative and stay in the workspace.'
      )
    if not isinstance(text, str):
      raise ValueError(f'file {name!r} must be text, not {type(text)}.')
  request = json.dumps({
      'files': files, 'module': module, 'function': function,
      'arguments': [list(each) for each in arguments],
  }).encode()  # fmt: skip
  if len(request) > _MAX_REQUEST:
    raise ValueError(
      f'the request ({len(request)} bytes) must not exceed {_MAX_REQUEST}.'
    )
  return request
