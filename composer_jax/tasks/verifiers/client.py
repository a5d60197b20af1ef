"""A client of verifiers' env server: one episode, asked for and received.

A request is three frames to a ROUTER: id, method, msgpack. The answer is frames
[id, 'delta', msgpack], each with what was added to one of the episode's traces,
and at last [id, 'reply', msgpack] with the sizes that they must have.
"""

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import zmq

from composer_jax.tasks.verifiers import traces as traces_lib

# Lists of a trace that only grow.
_LISTS = (
  *('nodes', 'calls', 'errors', 'extra_usage'),
  *('request_rewrites', 'response_rewrites'),
)
_POLL_MS = 100


def play(
  address: str,
  request: dict[str, Any],
  limit_s: float,
  check: Callable[[], None],
) -> dict[str, Any]:
  """Has an env server play an episode; blocks.

  Args:
    check: called while waiting; what it raises cancels the episode.

  Returns:
    The episode as verifiers dumps it; its `traces` have all their nodes.

  Raises:
    TimeoutError: it took longer than `limit_s`.
    ValueError: the server refused, or what it sent is not whole.
  """
  name = secrets.token_hex(16).encode()
  with contextlib.closing(zmq.Context.instance().socket(zmq.DEALER)) as socket:
    # A cancellation is sent even if the socket closes at once.
    socket.setsockopt(zmq.LINGER, 1000)
    for limit in (zmq.SNDHWM, zmq.RCVHWM):
      socket.setsockopt(limit, 0)
    socket.connect(address)
    socket.send_multipart([name, b'run', msgpack.packb(request)])
    try:
      return _receive(socket, name, time.monotonic() + limit_s, check)
    except BaseException:
      cancelled = msgpack.packb({'request_id': name.decode()})
      socket.send_multipart(
        [secrets.token_hex(16).encode(), b'cancel', cancelled]
      )
      raise


def _receive(
  socket: zmq.Socket, name: bytes, end: float, check: Callable[[], None]
) -> dict[str, Any]:
  traces = GrowingTraces()
  while True:
    check()
    if time.monotonic() > end:
      raise TimeoutError('the env server did not finish the episode in time')
    if not socket.poll(_POLL_MS):
      continue
    frames = socket.recv_multipart()
    if len(frames) != 3:
      raise ValueError(
        f'An env server sent {len(frames)} frames instead of 3: is it of '
        'verifiers 0.4?'
      )
    of, kind, data = frames
    # Keys of updates are numbers of nodes.
    fields = msgpack.unpackb(data, strict_map_key=False)
    if of != name:
      continue
    if kind == b'delta':
      traces.add(fields)
      continue
    if not fields.get('success'):
      raise ValueError(f'The env server refused: {fields.get("error")}')
    return traces.whole(fields['head'], fields['traces'])


class GrowingTraces:
  """The traces of one episode as their parts come in."""

  def __init__(self) -> None:
    self._traces: dict[str, dict[str, Any]] = {}

  def add(self, delta: dict[str, Any]) -> None:
    """Takes in a delta; a ValueError if it does not fit what came before."""
    name = str(delta.get('trace'))
    if delta.get('discard'):
      self._traces.pop(name, None)  # The server plays it once more.
      return
    if name not in self._traces:
      if 'open' not in delta:
        raise ValueError(f'Trace {name!r} begins without a header.')
      self._traces[name] = delta['open'] | {field: [] for field in _LISTS}
    trace = self._traces[name]
    nodes = trace['nodes']
    for index, links in (delta.get('links') or {}).items():
      node = nodes[index]
      node['semantic_parents'] = [*node.get('semantic_parents', ()), *links]
    for index, row in (delta.get('routing_repairs') or {}).items():
      old_TMA = traces_lib.array(nodes[index]['routed_experts'])
      nodes[index]['routed_experts'] = np.concatenate(
        [old_TMA[:-1], traces_lib.array(row)]
      )
    for field in _LISTS:
      trace[field].extend(delta.get(field, ()))
    trace.update(delta.get('set') or {})

  def whole(
    self, head: dict[str, Any], sizes: list[dict[str, Any]]
  ) -> dict[str, Any]:
    """Returns the episode; a ValueError if a part of it was lost."""
    traces = []
    for size in sizes:
      trace = self._traces.get(size['id'], {'nodes': (), 'calls': ()})
      have = {field: len(trace[field]) for field in ('nodes', 'calls')}
      if have != {field: size[field] for field in have}:
        raise ValueError(
          f'Trace {size["id"]!r} came with {have}, and the env server says '
          f'{size}: a part of it was lost.'
        )
      traces.append(trace)
    return {**head, 'traces': traces}
