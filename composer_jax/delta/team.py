"""Several processes that publish one bundle together, through the store.

Each encodes the chunks of its own blocks and uploads its own packs. All run the
same code on what `exchange` gave to all, and process 0 alone writes manifests
and moves the pointer: what it decides the others learn from `lead`. They meet
in messages alone, small scratch files of the store.

  <attempt>.<round>.<n>-<p>     of process p to process 0, the n-th of the round
  <attempt>.<round>.<n>-all     of process 0 to all

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

import numpy as np

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
    timeout_s: seconds that process 0 waits for another's message, which must
      cover what the slowest has to encode and to upload; the others wait twice
      as long for that of process 0.
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
    self._is_told = False

  @contextlib.contextmanager
  def round(self) -> Iterator[None]:
    """Tells the others when what is done inside fails."""
    self._round, self._sent, self._is_told = self._round + 1, 0, False
    if self.count == 1:
      yield
      return
    try:
      yield
    except BaseException as error:
      if not self._is_told:
        self._tell_failure(error)
      raise

  def exchange(self, data: bytes) -> list[bytes]:
    """Returns what each process gave, in their order."""
    if self.count == 1:
      return [data]
    self._sent += 1
    if not self.leads:
      self._put(self._peers.process, _OK + data)
      _, messages = chunking.from_bytes(self._wait('all', 0))
      return [message.tobytes() for message in messages]
    found = [data, *(self._wait(p, p) for p in range(1, self.count))]
    if self._swept != self._round:
      self._swept = self._round
      # All have begun this round: nobody reads the last one, nor dead starts.
      self._store.drop_messages(self._run_id, self._prefix())
    messages = [np.frombuffer(message, np.uint8) for message in found]
    self._put('all', _OK + chunking.to_bytes(None, messages))
    return found

  def lead(self, decide: Callable[[], Any]) -> Any:
    """Returns what process 0 decides, as JSON has it, in all of them."""
    if self.count == 1:
      return decide()
    self._sent += 1
    if not self.leads:
      return json.loads(self._wait('all', 0))
    data = json.dumps(decide()).encode()
    self._put('all', _OK + data)
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
    wanted = cutter.waiting
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
    to = 'all' if self.leads else self._peers.process
    # The last message may have come through although it failed here.
    for n in (0, 1) if self._sent else (1,):
      try:
        self._put(to, mark + text.encode(), self._sent + n)
      except (ValueError, OSError) as error:
        _log.warning('%s: cannot tell the others: %s', self._run_id, error)

  def _prefix(self) -> str:
    return f'{self._peers.attempt}.{self._round}.'

  def _put(self, to: Any, data: bytes, number: int | None = None) -> None:
    key = f'{self._prefix()}{self._sent if number is None else number}-{to}'
    self._store.put_message(self._run_id, key, data)

  def _wait(self, kind: Any, process: int) -> bytes:
    key = f'{self._prefix()}{self._sent}-{kind}'
    # Process 0 waits itself, and the dead one is to be named.
    patience_s = self._peers.timeout_s * (1 if process else 2)
    deadline, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
    while (data := self._store.get_message(self._run_id, key)) is None:
      if time.monotonic() > deadline:
        raise TimeoutError(
          f'process {process} of {self.count} of run {self._run_id!r} gave no '
          f'answer within {patience_s:g} s; it died, hangs, or does not call '
          'publish and rewind as this process does. Start all processes again, '
          'with another attempt.'
        )
      time.sleep(wait_s)
      wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    if data[:1] == _OK:
      return data[1:]
    # From process 0 it is told to all already.
    self._is_told = not self.leads
    kind = OSError if data[:1] == _FAILED else ValueError
    raise kind(f'run {self._run_id!r}: {data[1:].decode()}')
