"""Several processes that publish one bundle together, through the store.

Each encodes the boxes of its own blocks and uploads its own packs. Process 0
leads: it gives orders, gathers the tables of all, writes the manifest and moves
the pointer. They meet in parts, small scratch files of the store, and in
nothing else: no collective operation, and no connection between them.

  <attempt>/<round>/cut-<p>          pieces of boxes that others complete
  <attempt>/<round>/order-<n>        of process 0, the n-th of this round
  <attempt>/<round>/share-<n>-<p>    what process p made of it

A round is one call of `publish` or `rewind`, which all processes make alike. A
process that fails says so in place of its share; one that dies is missed when
`timeout_s` have passed.
"""

import contextlib
import dataclasses
import json
import logging
import math
import re
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from composer_jax.delta import identity, publish_boxes
from composer_jax.delta import store as stores

_ATTEMPT = re.compile('[A-Za-z0-9][A-Za-z0-9._-]{0,63}')
_ATTEMPTS = 'attempts'
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.5
# Times `timeout_s`.
_PATIENCE = {'cut': 1, 'share': 2, 'order': 4}
_OK, _REFUSED, _FAILED = b'+', b'-', b'!'

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
  """Says which of several publishing processes this one is.

  Attributes:
    process: from 0, which leads.
    count: of processes.
    attempt: names this start of all processes, the same in each and never used
      before: what a dead start left behind is not mistaken for an answer.
    timeout_s: how long one waits for another's pieces, which must cover what
      the slowest has to encode; twice as long for its table, which must cover
      its upload too, and four times for the word of process 0.
  """

  process: int
  count: int
  attempt: str
  timeout_s: float = 600.0

  def __post_init__(self):
    if not 0 <= self.process < self.count:
      raise ValueError(
        f'process ({self.process}) must be one of 0 to {self.count - 1}.'
      )
    if not _ATTEMPT.fullmatch(self.attempt):
      raise ValueError(
        f'attempt {self.attempt!r} must be 1 to 64 letters, digits, ".", "_" '
        'or "-", and begin with a letter or digit.'
      )
    if not self.timeout_s > 0:
      raise ValueError(f'timeout_s ({self.timeout_s}) must be above 0.')


ALONE = Parts(process=0, count=1, attempt='alone')


class Team:
  """The processes of one publisher, as one of them sees the others."""

  def __init__(self, store: stores.Store, run_id: str, parts: Parts):
    self._store, self._run_id, self._parts = store, run_id, parts
    self._round = self._orders = 0
    self._others = [p for p in range(parts.count) if p != parts.process]

  @property
  def leads(self) -> bool:
    return self._parts.process == 0

  @property
  def process(self) -> int:
    return self._parts.process

  @property
  def count(self) -> int:
    return self._parts.count

  @property
  def label(self) -> str:
    """Names this round of this start, the same in every process."""
    return f'{self._parts.attempt}-{self._round}'

  @contextlib.contextmanager
  def round(self) -> Iterator[None]:
    """Tells the others when what is done inside fails."""
    self._round, self._orders = self._round + 1, 0
    if self.leads and self._round == 1 and self._others:
      self._drop_dead_starts()
    try:
      yield
    except BaseException as error:
      if self._others:
        self._tell_failure(error)
      raise

  def order(self, fields: dict[str, Any]) -> None:
    """Tells the others what to do next."""
    if self._others:
      self._put(f'order-{self._orders + 1}', _OK + json.dumps(fields).encode())
    self._orders += 1

  def next_order(self) -> dict[str, Any]:
    self._orders += 1
    return json.loads(self._wait(f'order-{self._orders}', 0))

  def give(self, share: bytes) -> None:
    self._put(f'share-{self._orders}-{self.process}', _OK + share)

  def gather(self) -> list[bytes]:
    """Waits for what the others made of the last order."""
    found = [self._wait(f'share-{self._orders}-{p}', p) for p in self._others]
    if self._orders == 0 and self._round > 1 and self._others:
      # All have begun this round, so nobody reads the last one any more.
      self._store.drop_parts(self._run_id, self._prefix(self._round - 1))
    return found

  def complete(
    self, cutter: publish_boxes.Cutter
  ) -> Iterator[tuple[publish_boxes.Key, np.ndarray]]:
    """Yields boxes that were cut between processes and are completed here."""
    if not self._others:
      return
    self._put(f'cut-{self.process}', _OK + _to_bytes(cutter.take_foreign()))
    wanted = cutter.waiting
    # Layouts that cut no box, which is all we ship, read nothing here.
    for process in self._others if wanted else ():
      for piece in _from_bytes(self._wait(f'cut-{process}', process)):
        if piece.key in wanted:
          yield from cutter.add_piece(piece)

  def give_failure(self, reason: OSError) -> None:
    """Says in place of a share why there is none; the round goes on."""
    key = f'share-{self._orders}-{self.process}'
    text = f'process {self.process} failed: {reason}'
    self._put(key, _FAILED + text.encode())

  def _tell_failure(self, reason: BaseException) -> None:
    text = f'process {self.process} failed: {reason or repr(reason)}'
    mark = _FAILED if isinstance(reason, OSError) else _REFUSED
    keys = [f'cut-{self.process}']
    if self.leads:
      # The first of them may have come through although it failed here.
      keys += [f'order-{self._orders + n}' for n in (1, 2)]
    else:
      keys.append(f'share-{self._orders}-{self.process}')
    for key in keys:
      try:
        self._put(key, mark + text.encode())
      except (ValueError, OSError) as error:
        _log.warning('%s: cannot tell the others: %s', self._run_id, error)

  def _drop_dead_starts(self) -> None:
    """Deletes what earlier starts left; one key remembers their names."""
    mine = self._parts.attempt
    try:
      found = self._store.get_part(self._run_id, _ATTEMPTS)
    except ValueError:
      found = None
    known = found.decode().split() if found else []
    for attempt in known:
      if attempt != mine:
        self._store.drop_parts(self._run_id, f'{attempt}/')
    if known != [mine]:
      self._store.put_part(self._run_id, _ATTEMPTS, mine.encode())

  def _prefix(self, number: int) -> str:
    return f'{self._parts.attempt}/{number}/'

  def _put(self, key: str, data: bytes) -> None:
    key = self._prefix(self._round) + key
    self._store.put_part(self._run_id, key, data)

  def _wait(self, key: str, process: int) -> bytes:
    # Who is waited for may be waiting itself; the dead one is to be named.
    patience_s = self._parts.timeout_s * _PATIENCE[key.split('-')[0]]
    deadline = time.monotonic() + patience_s
    wait_s = _FIRST_WAIT_S
    while True:
      data = self._store.get_part(self._run_id, self._prefix(self._round) + key)
      if data is not None:
        break
      if time.monotonic() > deadline:
        raise TimeoutError(
          f'process {process} of {self.count} of run {self._run_id!r} gave no '
          f'{key.split("-")[0]} within {patience_s:g} s; it died, '
          'hangs, or does not call publish and rewind as this process does. '
          'Start all processes again, with another attempt.'
        )
      time.sleep(wait_s)
      wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    text = f'run {self._run_id!r}: '
    if data[:1] == _FAILED:
      raise OSError(text + data[1:].decode())
    if data[:1] == _REFUSED:
      raise ValueError(text + data[1:].decode())
    return data[1:]


def _to_bytes(pieces: Iterable[publish_boxes.Piece]) -> bytes:
  rows, bits = [], []
  for key, index, values in pieces:
    rows.append((key, str(values.dtype), index))
    bits.append(identity.flat_bits(values).tobytes())
  head = json.dumps(rows).encode()
  return b''.join([struct.pack('<I', len(head)), head, *bits])


def _from_bytes(data: bytes) -> Iterator[publish_boxes.Piece]:
  (length,) = struct.unpack_from('<I', data)
  at = 4 + length
  for (name, number), dtype, index in json.loads(data[4:at]):
    index = tuple(tuple(ends) for ends in index)
    sides = [stop - start for start, stop in index]
    values = np.frombuffer(data, identity.DTYPES[dtype], math.prod(sides), at)
    at += values.nbytes
    yield publish_boxes.Piece((name, number), index, values.reshape(sides))
