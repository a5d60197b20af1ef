"""Links of a simulated world: TCP through a bandwidth and a round trip.

A link listens on a port of its own and forwards bytes to another one. Both ends
are real sockets, so clients and servers run unchanged. All connections of a
link share its bandwidth, separately in each direction; bytes arrive half a
round trip after they left, and a new connection waits a whole one for its
handshake.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

_PIECE = 16 * 2**10


class Link:
  """One link; direction `down` carries the answers of the target.

  Attributes:
    port: port to connect to instead of the target's.
    bytes_down: bytes carried so far from the target, HTTP's headers included.
    bytes_up: bytes carried so far towards the target.
  """

  def __init__(self, target: int, *, round_trip_s: float):
    self.port = 0
    self.bytes_down = self.bytes_up = 0
    self.bytes_per_s = math.inf
    self._target = target
    self._round_trip_s = round_trip_s
    self._free_at = {'down': 0.0, 'up': 0.0}

  async def open(self) -> asyncio.Server:
    server = await asyncio.start_server(self._carry, '127.0.0.1', 0)
    self.port = server.sockets[0].getsockname()[1]
    return server

  async def _carry(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    await asyncio.sleep(self._round_trip_s)
    try:
      far_reader, far_writer = await asyncio.open_connection(
        '127.0.0.1', self._target
      )
    except OSError:
      writer.close()
      return
    # The network cancels it when it closes; asyncio would log that.
    with contextlib.suppress(asyncio.CancelledError):
      await asyncio.gather(
        self._pump(reader, far_writer, 'up'),
        self._pump(far_reader, writer, 'down'),
      )

  async def _pump(
    self,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    direction: str,
  ) -> None:
    """Carries one direction of a connection until either end closes it."""
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    arriving = asyncio.create_task(self._arrive(waiting, writer))
    clock = asyncio.get_running_loop().time
    with contextlib.suppress(OSError):
      while data := await reader.read(_PIECE):
        if direction == 'down':
          self.bytes_down += len(data)
        else:
          self.bytes_up += len(data)
        sent = (
          max(clock(), self._free_at[direction]) + len(data) / self.bytes_per_s
        )
        self._free_at[direction] = sent
        waiting.put_nowait((sent + self._round_trip_s / 2, data))
        # The sender waits, as for a full link.
        await asyncio.sleep(max(sent - clock(), 0))
    waiting.put_nowait((clock() + self._round_trip_s / 2, b''))
    await arriving

  async def _arrive(
    self, waiting: asyncio.Queue, writer: asyncio.StreamWriter
  ) -> None:
    clock = asyncio.get_running_loop().time
    with contextlib.suppress(OSError):
      while True:
        at, data = await waiting.get()
        await asyncio.sleep(max(at - clock(), 0))
        if not data:
          break
        writer.write(data)
        await writer.drain()
    writer.close()


class Network:
  """Links, on an event loop in a thread of its own."""

  def __init__(self):
    self.links: list[Link] = []
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='links', daemon=True
    )
    self._thread.start()

  def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

  def link(self, target: int, *, round_trip_s: float) -> Link:

    opened = Link(target, round_trip_s=round_trip_s)
    self._run(opened.open())
    self.links.append(opened)
    return opened

  def close(self) -> None:
    async def end() -> None:
      tasks = asyncio.all_tasks() - {asyncio.current_task()}
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

    self._run(end())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(10)


@contextlib.contextmanager
def network() -> Iterator[Network]:
  world = Network()
  try:
    yield world
  finally:
    world.close()
