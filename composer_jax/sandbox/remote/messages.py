"""Messages over a stream: to a guest, or to another process.

A message is a JSON header and some parts of bytes. The side that asks trusts
nothing it is answered: the other one may be a machine that the code it ran has
taken over. Lengths are bounded before anything is read, and every wait ends.
Standard library only: the guest has nothing else.
"""

import contextlib
import itertools
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from composer_jax.sandbox import base

MAX_HEADER = 20 << 20  # a call's arguments are part of it
MAX_PARTS = 256 << 20  # a snapshot is the largest
_LENGTHS = struct.Struct('!IIH')

Message = tuple[dict[str, Any], tuple[bytes, ...]]


def encode(header: Mapping[str, Any], parts: Sequence[bytes] = ()) -> bytes:
  """Raises ValueError for a message that the other side would refuse."""
  text = json.dumps(header).encode()
  size = sum(map(len, parts))
  if len(text) > MAX_HEADER or size > MAX_PARTS or len(parts) > 0xFFFF:
    raise ValueError(
      f'a message of {len(text)} + {size} bytes in {len(parts)} parts must not '
      f'exceed {MAX_HEADER} + {MAX_PARTS} bytes in {0xFFFF}.'
    )
  sizes = struct.pack(f'!{len(parts)}I', *map(len, parts))
  return b''.join(
    [_LENGTHS.pack(len(text), size, len(parts)), sizes, text, *parts]
  )


def decode(read: Callable[[int], bytes]) -> Message:
  """Reads one message.

  Args:
    read: returns exactly that many bytes or raises.

  Raises:
    ValueError: for what is no message, with the rule it breaks.
  """
  length, total, count = _LENGTHS.unpack(read(_LENGTHS.size))
  if length > MAX_HEADER or total > MAX_PARTS:
    raise ValueError(
      f'a message of {length} + {total} bytes exceeds '
      f'{MAX_HEADER} + {MAX_PARTS}'
    )
  sizes = struct.unpack(f'!{count}I', read(4 * count))
  if sum(sizes) != total:
    raise ValueError(f'parts of {sum(sizes)} bytes were announced as {total}')
  try:
    header = json.loads(read(length))
  except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
    raise ValueError(f'the header is not JSON: {error}') from error
  if type(header) is not dict:
    raise ValueError(f'the header is a {type(header).__name__}, not an object')
  return header, tuple(read(size) for size in sizes)


class MessageStream:
  """Exact reads and whole writes on two descriptors or one."""

  def __init__(
    self, receive: Callable[[int], bytes], send: Callable[[memoryview], int]
  ):
    self._receive, self._send = receive, send
    self._lock = threading.Lock()

  @classmethod
  def of_socket(cls, end: socket.socket) -> 'MessageStream':
    return cls(end.recv, end.send)

  def read(self, count: int) -> bytes:
    pieces = []
    while count:
      piece = self._receive(min(count, 1 << 20))
      if not piece:
        raise EOFError('the other side closed the stream')
      pieces.append(piece)
      count -= len(piece)
    return b''.join(pieces)

  def write(self, data: bytes) -> None:
    with self._lock:
      view = memoryview(data)
      while view:
        view = view[self._send(view[: 1 << 20]) :]


class Transport(Protocol):
  """Carries one message there and its answer back."""

  def ask(
    self, header: dict, parts: Sequence[bytes], timeout_s: float
  ) -> Message:
    """Raises `base.SandboxLost` at once when no answer will come."""

  def close(self) -> None: ...


class StreamTransport:
  """Many requests at a time over one stream; a thread reads the answers.

  One request that is not answered in time ends them all: what does not keep
  its own wall limit cannot be trusted to answer anything else.
  """

  def __init__(self, end: socket.socket):
    self._end = end
    self._stream = MessageStream.of_socket(end)
    self._lock = threading.Lock()
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
    # A stream that is not read would hold a writer for ever.
    watch = threading.Timer(timeout_s, self._fail, ['no answer in time'])
    watch.daemon = True
    watch.start()
    try:
      self._stream.write(data)
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
      while True:
        header, parts = decode(self._stream.read)
        serial = header.pop('id', None)
        with self._lock:
          answers = self._waiting.pop(serial, None)
        if answers is None:
          raise ValueError(f'an answer to no question ({serial})')
        answers.put((header, parts))
    except (EOFError, OSError, ValueError, TypeError) as error:
      self._fail(str(error))

  def _fail(self, reason: str) -> None:
    with self._lock:
      self._lost = self._lost or reason
      waiting, self._waiting = list(self._waiting.values()), {}
    # Wakes the reader and a writer that the other side lets wait.
    with contextlib.suppress(OSError):
      self._end.shutdown(socket.SHUT_RDWR)
    for answers in waiting:
      answers.put(None)

  def close(self) -> None:
    self._fail('the stream is closed')
    self._end.close()
