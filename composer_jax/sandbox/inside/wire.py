"""Messages of a JSON header and parts of bytes, with descriptors on a socket.

Standard library only: the host, the processes inside the sandbox and the agent
of a guest use it. A reader that does not trust its peer is safe: lengths are
bounded before anything is read.
"""

import array
import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_HEADER = 20 << 20  # the arguments of a call are part of it
MAX_FRAME = 1 << 30
_LENGTHS = struct.Struct('!IIH')


def encode(
  header: Mapping[str, Any], parts: Sequence[bytes], max_bytes: int
) -> bytes:
  """Encodes a message; ValueError if `decode` would refuse it."""
  text = json.dumps(header).encode()
  size = sum(map(len, parts))
  if len(text) > MAX_HEADER or size > max_bytes or len(parts) > 0xFFFF:
    raise ValueError(
      f'a message of {len(text)} + {size} bytes in {len(parts)} parts must not '
      f'exceed {MAX_HEADER} + {max_bytes} bytes in {0xFFFF}; send fewer.'
    )
  sizes = struct.pack(f'!{len(parts)}I', *map(len, parts))
  lengths = _LENGTHS.pack(len(text), size, len(parts))
  return b''.join([lengths, sizes, text, *parts])


def decode(
  read: Callable[[int], bytes], max_bytes: int
) -> tuple[dict[str, Any], tuple[bytes, ...]]:
  """Reads the header and the parts of one message.

  Args:
    read: function that returns exactly that many bytes or raises.
    max_bytes: largest size of all parts together.

  Raises:
    ValueError: the bytes are no message.
  """
  length, total, count = _LENGTHS.unpack(read(_LENGTHS.size))
  if length > MAX_HEADER or total > max_bytes:
    raise ValueError(
      f'a message of {length} + {total} bytes exceeds '
      f'{MAX_HEADER} + {max_bytes}'
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


def send(
  channel: socket.socket,
  header: dict,
  blobs: Sequence[bytes] = (),
  descriptors: Sequence[int] = (),
) -> None:
  data = memoryview(encode(header, blobs, MAX_FRAME))
  ancillary = []
  if descriptors:
    rights = array.array('i', descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
  sent = channel.sendmsg([data[: _LENGTHS.size]], ancillary)
  channel.sendall(data[sent:])


def receive(channel: socket.socket) -> tuple[dict, list[bytes], list[int]]:
  """Returns header, blobs and descriptors.

  Raises:
    ConnectionError: the other end is closed.
  """
  first, descriptors, _, _ = socket.recv_fds(channel, _LENGTHS.size, 16)

  def read(size: int) -> bytes:
    nonlocal first
    data = bytearray(size)
    data[: len(first)] = first
    view = memoryview(data)[len(first) :]
    first = b''
    while view:
      count = channel.recv_into(view)
      if not count:
        raise ConnectionError('the other end closed the socket')
      view = view[count:]
    return bytes(data)

  header, blobs = decode(read, MAX_FRAME)
  return header, list(blobs), descriptors
