"""Frames on a socket: a JSON header, bytes beside it, descriptors with it.

Standard library only: both the host and what runs inside the sandbox speak it.
Neither end is untrusted code, which holds no such socket.
"""

import array
import json
import socket
import struct
from collections.abc import Sequence

MAX_FRAME = 1 << 30
_PREFIX = struct.Struct('!II')


def send(
  channel: socket.socket,
  header: dict,
  blobs: Sequence[bytes] = (),
  descriptors: Sequence[int] = (),
) -> None:
  text = json.dumps({**header, 'sizes': [len(x) for x in blobs]}).encode()
  body = b''.join(blobs)
  ancillary = []
  if descriptors:
    rights = array.array('i', descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
  channel.sendmsg([_PREFIX.pack(len(text), len(body))], ancillary)
  channel.sendall(text + body)


def receive(channel: socket.socket) -> tuple[dict, list[bytes], list[int]]:
  """Returns header, blobs and descriptors.

  Raises:
    ConnectionError: when the other end is closed.
  """
  prefix, descriptors, _, _ = socket.recv_fds(channel, _PREFIX.size, 16)
  if len(prefix) < _PREFIX.size:
    prefix += _exactly(channel, _PREFIX.size - len(prefix))
  text_size, body_size = _PREFIX.unpack(prefix)
  header = json.loads(_exactly(channel, text_size))
  body = _exactly(channel, body_size)
  blobs, position = [], 0
  for size in header.pop('sizes'):
    blobs.append(body[position : position + size])
    position += size
  return header, blobs, descriptors


def _exactly(channel: socket.socket, size: int) -> bytes:
  if size > MAX_FRAME:
    raise ConnectionError(f'a frame of {size} bytes exceeds {MAX_FRAME}')
  data = bytearray(size)
  view = memoryview(data)
  while view:
    count = channel.recv_into(view)
    if not count:
      raise ConnectionError('the other end closed the socket')
    view = view[count:]
  return bytes(data)
