"""Hands out leases and takes in results: the moves of a ledger in a store.

All state is in the store: a reconciler that dies leaves a ledger with which
another goes on. Each tick makes moves in memory and writes them by one
comparison and swap; what that refuses was moved by another reconciler, whose
ledger is then read, and the tick is made again. So two of them do no harm.

Time is this process's own: a worker is silent if its report has not changed for
`lease_s` seconds of this clock, while it was looked at. No clock of another
machine is asked, and what passes between two ticks counts as at most a quarter
of a lease: a reconciler that stood still itself takes nobody's lease.

  Consumes: reports of workers; requests of the trainer.
  Woken by: `tick`.
  Produces: the ledger; orders, which are the leases of a worker.
"""

import dataclasses
import heapq
import logging
import time
from collections.abc import Callable
from typing import Any

from composer_jax.core import checks
from composer_jax.delta.store import folder
from composer_jax.fleet.leases import documents
from composer_jax.fleet.leases import ledger as ledgers

# After so many leases of silence, what a worker left is deleted.
_FORGOTTEN = 20
_TRIES = 20
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaseOptions:
  """How long a lease lasts without a sign of its worker, and how large it is.

  Attributes:
    lease_s: seconds without a report after which a worker's leases go to
      others.
    stall_s: seconds in which a worker reports, but its engine does nothing for
      a lease that it could begin; compilation must fit.
    members: most members of a group in one lease; 0 for whole groups.
    longest_s: seconds after which a lease goes to another worker, whatever its
      worker reports; the longest group must fit.
    save_s: seconds between two savings of the turns of an unfinished lease,
      from which another worker goes on; they are saved at a notice, too.
    max_lost: leases of the same members that may bring nothing before their
      group is given up, with the fate 'infrastructure'.
  """

  lease_s: float = 20.0
  stall_s: float = 600.0
  longest_s: float = 7200.0
  save_s: float = 30.0
  members: int = 0
  max_lost: int = 5

  def __post_init__(self):
    checks.positive(self, 'lease_s', 'stall_s', 'longest_s', 'save_s')
    checks.at_least(self, 0, 'members', 'max_lost')


@dataclasses.dataclass(slots=True)
class _Seen:
  """What is known of a worker, and since when, by the reconciler's time."""

  report: documents.WorkerReport
  beaten: float
  moved: float
  # False until a worker, whose report was there before us, reports again.
  is_live: bool
  gone: str = ''


class Reconciler:
  """The moves of one run's ledger.

  Attributes:
    ledger: the state as this process knows it.
    num_accepted: number of results that this process took in.
    late: number of results that came after their lease, if it ended here.
  """

  def __init__(
    self,
    docs: documents.RunDocuments,
    options: LeaseOptions = LeaseOptions(),
    *,
    setup: str = '',
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = _log.warning,
  ):
    """Reads where the run stands.

    Args:
      setup: identity of the setup that workers must have read.
      say: told of workers that come, leave or fall silent.
    """
    self._docs, self._options, self._setup = docs, options, setup
    self._clock, self._say = clock, say
    self._last, self._time = clock(), 0.0
    self._seen: dict[str, _Seen] = {}
    self._is_first_look = True
    self._since: dict[int, float] = {}  # of leases, by epoch
    self._distrusted: set[str] = set()
    self._refusers: dict[tuple[int, int], set[str]] = {}  # by group, first
    self._told: Any = None  # What all orders say alike.
    self.num_accepted = self.late = 0
    self._read: dict[str, bytes] = {}
    self._sent: dict[str, int] = {}
    self._rows: dict[str, int] = {}
    self._new_rows: list[tuple[str, dict[str, Any]]] = []
    self.ledger = ledgers.LeaseLedger()
    self._load()

  def _load(self) -> None:
    found, before = self._docs.read_ledger(), self.ledger
    self._tag = None if found is None else found[1]
    if found is None or found[0] is None:
      self.ledger = ledgers.LeaseLedger(self._options.max_lost)
      if found is not None:
        self._say('The ledger of the fleet is damaged: it is begun anew.')
    else:
      self.ledger = ledgers.from_json(found[0], self._options.max_lost)
    ours, is_same = self.ledger, before.identity == self.ledger.identity
    ours.touched |= before.touched
    ours.ended = before.ended if is_same else {}
    ours.touched |= {
      name
      for name in self._seen
      if not is_same or before.epochs_of(name) != ours.epochs_of(name)
    }
    self._is_unsure, self._sure = False, self._time

  def move(self, *moves: Callable[[ledgers.LeaseLedger], Any]) -> None:
    """Makes moves and writes them, on the ledger of whoever wrote last.

    Moves may be made more than once, so that a second time changes nothing.
    After an OSError they may or may not be written.
    """
    for _ in range(_TRIES):
      if self._is_unsure:
        self._load()
      for move in moves:
        move(self.ledger)
      if not self.ledger.has_moved:
        # Another may have moved what is nothing to move here.
        self._is_unsure = self._time - self._sure > self._options.lease_s / 4
        if self._is_unsure:
          continue
        return
      self.ledger.sequence += 1
      # Until the answer comes, only the store knows where the run stands.
      self._is_unsure = True
      try:
        self._tag = self._docs.swap_ledger(self.ledger.to_json(), self._tag)
      except folder.Conflict:
        continue
      self._is_unsure = self.ledger.has_moved = False
      self._sure = self._time
      return
    raise ValueError(
      f'{self._docs.store.url}: the ledger of run {self._docs.run_id!r} was '
      f'changed by others {_TRIES} times in a row; stop other trainers of it.'
    )

  def tick(self, *requests: Callable[[ledgers.LeaseLedger], Any]) -> None:
    """Looks at all workers and moves what is due, with the trainer's requests.

    An OSError or a Conflict leaves everything to the next tick.
    """
    now = self._clock()
    step = min(max(now - self._last, 0.0), self._options.lease_s / 4)
    self._last, self._time = now, self._time + step
    self._look()
    self.move(*requests, self._take_in, self._end_leases, self._hand_out)
    self._send_orders()
    self._forget()

  # Workers.

  def _look(self) -> None:
    for name in self._docs.names('workers'):
      place = self._docs.place('workers', name)
      try:
        documents.check_name(name)
        data = self._docs.read_sealed(place)
        if data is not None and data != self._read.get(name):
          report = documents.to_report(self._docs.unseal(place, data))
          self._note(name, report)
          self._read[name] = data
      except ValueError as error:
        # As if it had not reported: it falls silent.
        _log.warning('A report is not read: %s', error)
    # Who is not listed, as a store may be behind, falls silent in its time.
    self._is_first_look = False

  def _note(self, name: str, report: documents.WorkerReport) -> None:
    seen = self._seen.get(name)
    if seen is None:
      is_live = not self._is_first_look
      self._seen[name] = _Seen(report, self._time, self._time, is_live)
      self.ledger.touched.add(name)
      if self._is_first_look:
        self._rows[name] = max((n for n, _ in report.rows), default=-1)
    elif report.beat > seen.report.beat:
      before, seen.report = seen.report, report
      seen.beaten, seen.is_live = self._time, True
      is_moving = self._is_moving(name, before, report)
      if is_moving:
        seen.moved = self._time
      if report.obeys != self._sent.get(name):
        # It has not read them yet, or another's orders are in their place.
        self.ledger.touched.add(name)
      if seen.gone == ledgers.SILENT or (
        seen.gone == ledgers.STALLED and is_moving
      ):
        seen.gone, seen.moved = '', self._time
    for number, row in report.rows:
      if number > self._rows.get(name, -1):
        self._rows[name] = number
        self._new_rows += [(name, row)] if documents.is_received(row) else []

  def _is_moving(
    self,
    name: str,
    before: documents.WorkerReport,
    report: documents.WorkerReport,
  ) -> bool:
    """Returns whether a worker does what it can for its leases."""
    if (before.version, before.results) != (report.version, report.results):
      return True
    due = [lease.min_version for lease in self.ledger.leases_of(name)]
    if due and report.version is not None and min(due) <= report.version:
      return before.progress != report.progress
    # Else it waits for a policy, which must come once it is announced.
    is_stalled = self._seen[name].gone == ledgers.STALLED
    return not is_stalled and not any(v <= self.ledger.version for v in due)

  def blame(self, name: str) -> None:
    """Notes that a worker's process has ended."""
    if name in self._seen:
      self._seen[name].gone = ledgers.LEFT

  def distrust(self, group: int, part: ledgers.GroupPart) -> None:
    """Has a worker, whose result is refused, come after all others.

    Until it is trusted it has one lease at a time, and the members go to it
    again only if all who could take them had them refused.
    """
    self._distrusted.add(part.worker)
    self._refusers.setdefault((group, part.first), set()).add(part.worker)
    floor = self.ledger.floor
    for key in [key for key in self._refusers if key[0] < floor]:
      del self._refusers[key]

  def trust(self, names: set[str]) -> None:
    self._distrusted -= names

  def is_given_up(self, name: str) -> bool:
    """Returns whether a worker was given up though nobody said it ended."""
    seen = self._seen.get(name)
    return seen is not None and seen.gone in (ledgers.SILENT, ledgers.STALLED)

  def take_rows(self) -> list[tuple[str, dict[str, Any]]]:
    """Returns (worker, line of metrics) that came since the last call."""
    rows, self._new_rows = self._new_rows, []
    return rows

  def figures(self) -> dict[str, documents.WorkerReport]:
    """Returns the last report of each worker that takes part."""
    return {n: s.report for n, s in self._seen.items() if not s.gone}

  # Moves.

  def _take_in(self, ledger: ledgers.LeaseLedger) -> None:
    for name, seen in self._seen.items():
      if seen.report.ledger != ledger.identity:
        continue  # Its epochs are of another.
      for epoch, upload, size in seen.report.results:
        if ledger.accept(name, epoch, (upload, size)):
          self.num_accepted += 1
        elif ledger.ended.pop(epoch, '') == name:
          self.late += 1
      for epoch in set(seen.report.returned) & ledger.epochs_of(name):
        self._lose(ledger, name, epoch, ledgers.LEFT)

  def _lose(
    self, ledger: ledgers.LeaseLedger, worker: str, epoch: int, reason: str
  ) -> None:
    """Ends a lease that brought nothing but, perhaps, saved turns."""
    seen, saved = self._seen.get(worker), None
    if seen is not None and seen.report.ledger == ledger.identity:
      for saved_of, name, size, version in seen.report.saved:
        # A policy that was never published waits for ever.
        if saved_of == epoch and version <= ledger.version:
          saved = name, size, version
    ledger.lose(epoch, reason, saved)

  def _lose_all(
    self, ledger: ledgers.LeaseLedger, name: str, reason: str
  ) -> None:
    for epoch in ledger.epochs_of(name):
      self._lose(ledger, name, epoch, reason)

  def _end_leases(self, ledger: ledgers.LeaseLedger) -> None:
    for name, seen in self._seen.items():
      if not seen.gone and seen.report.is_leaving and not ledger.load_of(name):
        seen.gone = ledgers.LEFT
      elif not seen.gone and self._time - seen.beaten > self._options.lease_s:
        seen.gone = ledgers.SILENT
        self._say(f'worker {name} is silent; its leases go to others')
      elif not seen.gone and self._time - seen.moved > self._options.stall_s:
        seen.gone = ledgers.STALLED
        self._say(f'worker {name} makes no progress; its leases go to others')
      if seen.gone:
        self._lose_all(ledger, name, seen.gone)
    self._end_old_leases(ledger)

  def _end_old_leases(self, ledger: ledgers.LeaseLedger) -> None:
    held = {e: n for n in ledger.holders() for e in ledger.epochs_of(n)}
    self._since = {e: self._since.get(e, self._time) for e in held}
    for epoch, since in self._since.items():
      if self._time - since > self._options.longest_s:
        self._say(f'worker {held[epoch]} takes too long; a lease goes on')
        self._lose(ledger, held[epoch], epoch, ledgers.STALLED)
      elif held[epoch] not in self._seen and (
        self._time - since > self._options.lease_s
      ):
        # Its report is gone or was never readable.
        self._lose(ledger, held[epoch], epoch, ledgers.SILENT)

  def _hand_out(self, ledger: ledgers.LeaseLedger) -> None:
    """Leases what waits, in order, each to who has the least for its size."""
    takers, held, live = _Takers(), [], set[str]()
    for name, seen in self._seen.items():
      if seen.is_live and not seen.gone and not seen.report.is_leaving:
        load, last = ledger.load_of(name), name in self._distrusted
        takers.add(name, load, seen.report.capacity, last)
        live |= {name} if seen.report.capacity else set()
    for group, part in ledger.waiting():
      refusers = self._refusers.get((group, part.first), set())
      worker = takers.take(part, set() if live <= refusers else refusers)
      if worker is not None:
        ledger.lease(group, part, worker)
        continue
      held.append((group, part))
      if not takers.heap:
        break
    for group, part in held:
      ledger.put_back(group, part)

  def _send_orders(self) -> None:
    ledger = self.ledger
    if self._told != (ledger.is_over, self._setup):
      ledger.touched |= self._seen.keys()
    for name in sorted(ledger.touched & self._seen.keys()):
      leases = [dataclasses.asdict(lease) for lease in ledger.leases_of(name)]
      told = dict(ledger=ledger.identity, sequence=ledger.sequence)
      told |= dict(leases=leases, is_over=ledger.is_over, setup=self._setup)
      self._docs.write(self._docs.place('orders', name), told)
      self._sent[name] = ledger.sequence
      ledger.touched.discard(name)
    self._told = (ledger.is_over, self._setup)

  def _forget(self) -> None:
    limit_s = _FORGOTTEN * self._options.lease_s
    for name, seen in list(self._seen.items()):
      if seen.gone and self._time - seen.beaten > limit_s:
        kinds = ('orders', 'workers')
        self._docs.delete([self._docs.place(kind, name) for kind in kinds])
        for known in (self._seen, self._read, self._rows, self._sent):
          known.pop(name, None)


class _Takers:
  """Workers by how much they have of what they want."""

  def __init__(self):
    self.heap: list[tuple[bool, float, str, int, int]] = []

  def add(self, name: str, load: int, capacity: int, is_last: bool) -> None:
    # Who has nothing gets even what is larger than it wants.
    if (load < capacity and not is_last) or (not load and capacity):
      order = (is_last, load / capacity)
      heapq.heappush(self.heap, (*order, name, load, capacity))

  def take(self, part: ledgers.GroupPart, refusers: set[str]) -> str | None:
    """Returns who gets a part: rather another than who lost it before."""
    second, aside = None, []
    while self.heap:
      taken = heapq.heappop(self.heap)
      _, _, name, load, capacity = taken
      if load and load + part.size > capacity:
        continue
      if name in refusers:
        aside.append(taken)
      elif name == part.worker and second is None:
        second = taken
      else:
        break
    else:
      taken, second = second, None
    for other in (*aside, second) if second else aside:
      heapq.heappush(self.heap, other)
    if taken is None:
      return None
    is_last, _, name, load, capacity = taken
    self.add(name, load + part.size, capacity, is_last)
    return name
