"""Messages over a stream: to a guest, or to another process.

The asking side does not trust the answers, because code may have taken over the
machine at the other end: lengths are bounded, and every wait ends. Standard
library only: the guest has nothing else.
"""

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from composer_jax.sandbox import base
from composer_jax.sandbox.inside import wire

MAX_PARTS = 256 << 20  # files that a box begins with

Message = tuple[dict[str, Any], tuple[bytes, ...]]


def encode(header: Mapping[str, Any], parts: Sequence[bytes] = ()) -> bytes:
  return wire.encode(header, parts, MAX_PARTS)


def decode(read: Callable[[int], bytes]) -> Message:
  """Reads a message by a function that gives fewer bytes only at the end."""

  def read_exactly(count: int) -> bytes:
    if len(data := read(count)) < count:
      raise EOFError('the other side closed the stream')
    return data

  return wire.decode(read_exactly, MAX_PARTS)


class Transport(Protocol):
  """Carries one message to the other side and its answer back."""

  def ask(
    self, header: dict, parts: Sequence[bytes], timeout_s: float
  ) -> Message:
    """Returns the answer; `base.SandboxLost` if none comes in time."""

  def close(self) -> None: ...


class StreamTransport:
  """Many requests at a time over one stream; a thread reads the answers.

  One request without an answer in time fails them all: a side that exceeds its
  own wall limit cannot be trusted to answer the others.
  """

  def __init__(self, end: socket.socket):
    self._end = end
    self._lock, self._sending = threading.Lock(), threading.Lock()
    self._waiting: dict[int, queue.SimpleQueue] = {}
    self._serials = itertools.count(1)
    self._lost = ''
    threading.Thread(target=self._listen, daemon=True).start()

  def ask(
    self, header: dict, parts: Sequence[bytes], timeout_s: float
  ) -> Message:
    answers: queue.SimpleQueue = queue.SimpleQueue()
    serial = next(self._serials)
    data = encode({**header, 'id': serial}, parts)
    with self._lock:
      if self._lost:
        raise base.SandboxLost(self._lost)
      self._waiting[serial] = answers
    # If the other side does not read, the write would block for ever.
    watch = threading.Timer(timeout_s, self._fail, ['no answer in time'])
    watch.daemon = True
    watch.start()
    try:
      with self._sending:
        self._end.sendall(data)
      message = answers.get()
    except OSError as error:
      self._fail(str(error))
      raise base.SandboxLost(self._lost) from error
    finally:
      watch.cancel()
      with self._lock:
        self._waiting.pop(serial, None)
    if message is None:
      raise base.SandboxLost(self._lost)
    return message

  def _listen(self) -> None:
    try:
      stream = self._end.makefile('rb')
      while True:
        header, parts = decode(stream.read)
        serial = header.pop('id', None)
        with self._lock:
          answers = self._waiting.pop(serial, None)
        if answers is None:
          raise ValueError(f'an answer without a question ({serial})')
        answers.put((header, parts))
    except (EOFError, OSError, ValueError, TypeError) as error:
      self._fail(str(error))

  def _fail(self, reason: str) -> None:
    with self._lock:
      self._lost = self._lost or reason
      waiting, self._waiting = list(self._waiting.values()), {}
    # Wakes the reader and a blocked writer.
    with contextlib.suppress(OSError):
      self._end.shutdown(socket.SHUT_RDWR)
    for answers in waiting:
      answers.put(None)

  def close(self) -> None:
    self._fail('the stream is closed')
    self._end.close()
