"""Keeping a bounded part of what untrusted code writes into pipes."""

import os
import signal

from composer_jax.sandbox import base


class Reader:
  """Keeps a bounded part of two pipes; owns their read ends.

  Output beyond the cap is read and dropped, so that a talkative program ends by
  itself. A result beyond it closes the pipe, if it may: its writer fails at
  once.
  """

  def __init__(
    self, result_fd: int, output_fd: int, cap: int, ends_result: bool = True
  ):
    self.result, self.output = bytearray(), bytearray()
    self.result_too_large, self.truncated = False, False
    self.descriptors = [result_fd, output_fd]
    self._result_fd = result_fd
    self._cap, self._ends_result = cap, ends_result
    for descriptor in self.descriptors:
      os.set_blocking(descriptor, False)

  def __enter__(self) -> 'Reader':
    return self

  def __exit__(self, *unused) -> None:
    for descriptor in self.descriptors:
      os.close(descriptor)

  def read(self, descriptor: int) -> bool:
    """Reads once; false when nothing more will come or lies there now."""
    try:
      piece = os.read(descriptor, 65536)
    except BlockingIOError:
      return False
    is_result = descriptor == self._result_fd
    kept = self.result if is_result else self.output
    room = self._cap - len(kept)
    kept += piece[:room]
    if is_result and self._ends_result and len(piece) > room:
      self.result_too_large = True
      return False
    if not is_result:
      self.truncated |= len(piece) > room
    return bool(piece)

  def close(self, descriptor: int) -> None:
    self.descriptors.remove(descriptor)
    os.close(descriptor)

  def drain(self) -> None:
    for descriptor in self.descriptors:
      while self.read(descriptor):
        pass


def signalled(number: int, limits: base.Limits) -> tuple[str, str]:
  if number == signal.SIGXCPU:
    return 'timeout', f'CPU limit of {limits.cpu_s} s'
  name = signal.Signals(number).name if number < 32 else f'signal {number}'
  return 'killed', f'killed by {name}'
