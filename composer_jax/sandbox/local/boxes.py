"""The host's side of boxes: zygotes that keep them, and programs in them."""

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from composer_jax.sandbox import base
from composer_jax.sandbox.inside import wire
from composer_jax.sandbox.local import cgroups, process

# Wait for an answer of the keeper, which only copies files.
_ANSWER_S = 60.0 * process.PATIENCE


class BoxZygote:
  """A zygote of boxes and the process that keeps their files.

  When it dies its boxes are lost; the pool starts another for the next box.
  """

  def __init__(self, level, limits, scheduling, options: dict[str, Any]):
    self.level, self.limits = level, limits
    try:
      self.process = process.Process(level, limits, scheduling, options)
    except process.ZygoteError:
      # Containers that hide parts of /proc allow no other one to be mounted.
      options = {**options, 'proc': False}
      self.process = process.Process(level, limits, scheduling, options)
    self.about = self.process.about
    self.running, self._asking = threading.Lock(), threading.Lock()
    self.is_lost = False
    self.num_boxes = 0
    self._groups: dict[int, cgroups.ControlGroup] = {}

  def ask(
    self, request: dict, blobs: tuple[bytes, ...] = ()
  ) -> tuple[dict, bytes]:
    """Sends one request to the keeper and returns its answer.

    Raises:
      FileRefused: the request is not allowed.
      SandboxLost: the keeper is gone.
    """
    if (size := sum(map(len, blobs))) > wire.MAX_FRAME:
      raise base.FileRefused(
        f'{size} bytes at once exceed {wire.MAX_FRAME}; write fewer files.'
      )
    with self._asking:
      if self.is_lost:
        raise base.SandboxLost('the zygote that kept this box is gone')
      try:
        channel = self.process.keeper
        channel.settimeout(_ANSWER_S)
        wire.send(channel, request, blobs)
        header, (data,), _ = wire.receive(channel)
      except OSError as error:
        self.lose(error)
        raise base.SandboxLost(f'the keeper of files ended: {error}') from error
    if 'refused' in header:
      raise base.FileRefused(f'{header["refused"]}.')
    if 'failed' in header:
      raise base.SandboxLost(f'the keeper of files failed: {header["failed"]}')
    return header, data

  def lose(self, reason: Exception) -> None:
    if not self.is_lost:
      logging.warning('Sandbox zygote of boxes failed (%s).', reason)
      self.close()

  def _group_of(self, box: int) -> cgroups.ControlGroup | None:
    """Returns the box's cgroup, which counts its files in memory as well."""
    if self.about['cgroup'] == 'none':
      return None
    if box not in self._groups:
      group = cgroups.make(
        f'{self.process.serial}.{box}',
        self.limits.memory_bytes,
        self.limits.processes,
      )
      if group.counts_memory < self.process.counts_memory:
        group.remove()
        # Otherwise its programs would run without a limit of memory.
        raise OSError('no cgroup could be made for the box')
      self._groups[box] = group
    return self._groups[box]

  def drop_group(self, box: int) -> None:
    if group := self._groups.pop(box, None):
      group.remove()

  def run(self, box: int, command: base.Command) -> base.CommandResult:
    """Runs one program.

    Raises:
      ZygoteError: the sandbox failed, which says nothing about the program.
      OSError: the same.
      ValueError: the command cannot be sent.
    """
    wall_s = min(command.wall_s or self.limits.wall_s, self.limits.wall_s)
    request = {
        'box': box, 'argv': list(command.argv), 'warm': command.warm,
        'environment': dict(command.environment), 'wall_s': wall_s,
    }  # fmt: skip
    if not command.argv or len(command.stdin) > wire.MAX_FRAME:
      raise ValueError(
        f'a command must have a program in argv {command.argv} and at most '
        f'{wire.MAX_FRAME} bytes of stdin.'
      )
    group = self._group_of(box)
    return self.process.run(
        request, [command.stdin], wall_s=wall_s,
        entrances=group.entrances() if group else (),
    )  # fmt: skip

  def close(self) -> None:
    self.is_lost = True
    self.process.close()
    for box in list(self._groups):
      self.drop_group(box)


class LocalBox(base.Closing):
  """A box of one zygote; see `base.Box`."""

  def __init__(
    self,
    seat: BoxZygote,
    number: int,
    leave: Callable[[], None],
  ):
    """Names a box that the zygote's keeper has made.

    Args:
      seat: zygote of the box.
      number: number of the box in its pool.
      leave: tells the pool that the box is gone.
    """
    self.level = seat.level
    self._seat, self._number = seat, number
    self._leave = leave
    self._lock = threading.Lock()
    self._is_open = True

  def run(self, command: base.Command) -> base.CommandResult:
    with self._lock, self._seat.running:
      self._check_open()
      if self._seat.is_lost:
        return self._infrastructure('the zygote that kept this box is gone')
      try:
        return self._seat.run(self._number, command)
      except (process.ZygoteError, OSError) as error:
        self._seat.lose(error)
        return self._infrastructure(str(error))

  def _infrastructure(self, error: str) -> base.CommandResult:
    return base.CommandResult(
      level=self.level, status='infrastructure', error=error
    )

  def _check_open(self) -> None:
    if not self._is_open:
      raise ValueError('the box is closed; open another one.')

  def _ask(self, operation: str, *blobs: bytes, **more) -> bytes:
    with self._lock:
      self._check_open()
      request = {'do': operation, 'box': self._number, **more}
      return self._seat.ask(request, blobs)[1]

  def read(self, path: str, max_bytes: int) -> bytes:
    return self._ask('read', path=path, max_bytes=max_bytes)

  def write(self, path: str, data: bytes) -> None:
    self._ask('write', data, path=path)

  def remove(self, path: str) -> None:
    self._ask('remove', path=path)

  def files(self, folder: str = '.') -> tuple[str, ...]:
    return tuple(json.loads(self._ask('files', path=folder)))

  def changes(self) -> dict[str, str]:
    return json.loads(self._ask('changes'))

  def close(self) -> None:
    """Forgets the box; may be called twice."""
    with self._lock:
      if not self._is_open:
        return
      self._is_open = False
      with contextlib.suppress(base.SandboxLost):
        self._seat.ask({'do': 'close', 'box': self._number})
      self._seat.drop_group(self._number)
      self._leave()
