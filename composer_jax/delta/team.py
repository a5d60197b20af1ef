"""Several processes that publish one bundle together, through the store.

Each encodes the chunks of its own blocks and uploads its own packs. All run the
same code on what `exchange` gave to all, and process 0 alone writes manifests
and moves the pointer: what it decides the others learn from `lead`. They meet
in messages alone, small scratch files of the store, which are named

  <attempt>.<round>.<n>-<p>     the n-th message of process p in the round

A round is one call of `publish` or `rewind`, which all processes make alike. A
process that fails says so in place of its next message; one that dies is missed
when `timeout_s` have passed.
"""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from composer_jax.delta import chunking
from composer_jax.delta.format import identity
from composer_jax.delta.store import objects

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.5
_OK, _REFUSED, _FAILED = b'+', b'-', b'!'

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
  """Says which of several publishing processes this one is.

  Attributes:
    process: number from 0, which leads.
    attempt: word for this start of all processes, the same in each and never
      used before: what a dead start left is not mistaken for an answer.
    timeout_s: seconds to wait for another's message, which must cover what the
      slowest has to encode and to upload.
  """

  process: int
  count: int
  attempt: str
  timeout_s: float = 600.0


ALONE = Peers(process=0, count=1, attempt='alone')


class Team:
  """The processes of one publisher, as one of them sees the others."""

  def __init__(self, store: objects.Store, run_id: str, peers: Peers):
    self._store, self._run_id, self._peers = store, run_id, peers
    self.leads, self.count = peers.process == 0, peers.count
    self._round = self._sent = self._swept = 0

  @contextlib.contextmanager
  def round(self) -> Iterator[None]:
    """Tells the others when what is done inside fails."""
    self._round, self._sent = self._round + 1, 0
    try:
      yield
    except BaseException as error:
      if self.count > 1:
        self._tell_failure(error)
      raise

  def exchange(self, data: bytes) -> list[bytes]:
    """Returns what each process gave, in their order."""
    if self.count == 1:
      return [data]
    self._send(data)
    found = [
      data if process == self._peers.process else self._wait(process)
      for process in range(self.count)
    ]
    if self.leads and self._swept != self._round:
      self._swept = self._round
      # All have begun this round: nobody reads the last one, nor dead starts.
      self._store.drop_messages(self._run_id, self._prefix())
    return found

  def lead(self, decide: Callable[[], Any]) -> Any:
    """Returns what process 0 decides, as JSON has it, in all of them."""
    if self.count == 1:
      return decide()
    if self.leads:
      data = json.dumps(decide()).encode()
      self._send(data)
    else:
      self._sent += 1
      data = self._wait(0)
    return json.loads(data)

  def complete(
    self, cutter: chunking.Cutter
  ) -> Iterator[tuple[chunking.Key, Any]]:
    """Yields chunks that were cut between processes and are completed here."""
    if self.count == 1:
      return
    cuts = cutter.take_foreign()
    data = chunking.to_bytes(
      [(key, index, str(values.dtype)) for key, index, values in cuts],
      [values.view(f'u{values.itemsize}') for _, _, values in cuts],
    )
    wanted = set(cutter.waiting)
    for message in self.exchange(data):
      heads, arrays = chunking.from_bytes(message)
      for (key, index, dtype), bits in zip(heads, arrays, strict=True):
        if tuple(key) in wanted:
          values = bits.view(identity.DTYPES[dtype])
          index = tuple(tuple(ends) for ends in index)
          yield from cutter.add_cut((tuple(key), index, values))

  def _tell_failure(self, reason: BaseException) -> None:
    text = f'process {self._peers.process} failed: {reason or repr(reason)}'
    mark = _FAILED if isinstance(reason, OSError) else _REFUSED
    # The last message may have come through although it failed here.
    for n in {max(self._sent, 1), self._sent + 1}:
      try:
        self._put(n, mark + text.encode())
      except (ValueError, OSError) as error:
        _log.warning('%s: cannot tell the others: %s', self._run_id, error)

  def _send(self, data: bytes) -> None:
    self._put(self._sent + 1, _OK + data)
    self._sent += 1

  def _prefix(self) -> str:
    return f'{self._peers.attempt}.{self._round}.'

  def _put(self, number: int, data: bytes) -> None:
    key = f'{self._prefix()}{number}-{self._peers.process}'
    self._store.put_message(self._run_id, key, data)

  def _wait(self, process: int) -> bytes:
    key = f'{self._prefix()}{self._sent}-{process}'
    timeout_s, wait_s = self._peers.timeout_s, _FIRST_WAIT_S
    deadline = time.monotonic() + timeout_s
    while (data := self._store.get_message(self._run_id, key)) is None:
      if time.monotonic() > deadline:
        raise TimeoutError(
          f'process {process} of {self.count} of run {self._run_id!r} gave no '
          f'answer within {timeout_s:g} s; it died, hangs, or does not call '
          'publish and rewind as this process does. Start all processes again, '
          'with another attempt.'
        )
      time.sleep(wait_s)
      wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    if data[:1] == _OK:
      return data[1:]
    kind = OSError if data[:1] == _FAILED else ValueError
    raise kind(f'run {self._run_id!r}: {data[1:].decode()}')
