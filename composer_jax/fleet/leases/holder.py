"""A worker's door to its fleet: a `core.seams.LeaseHolder`.

It reads orders, which name the leases that the worker has, and writes reports,
by which the reconciler sees that it lives and what it has uploaded. An upload
is told of until the orders no longer name its lease.

Consumes: orders from the store; rollouts and metrics from the worker's loop.
Woken by: its thread, or `sync` where trainer and worker share a process.
Produces: reports and uploads.
"""

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from composer_jax.core import group_bytes, played, records, seams
from composer_jax.fleet.leases import documents, turn_bytes, uploads

_ROWS = 8
# Seconds without orders after which a worker asks whether the run is over.
_UNHEARD_S = 60.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, eq=False)
class _SavedLease:
  """A lease whose finished turns are saved.

  Attributes:
    lease: lease that plays the turns.
    turns: returns the finished turns so far.
    saved: entries of `WorkerReport.saved`, the last two savings at most.
    count: number of turns of the newest saving.
  """

  lease: seams.Lease
  turns: Callable[[], played.SavedTurns]
  saved: list[tuple[int, str, int, int]] = dataclasses.field(
    default_factory=list
  )
  count: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HolderTimes:
  """How often a worker asks and tells.

  Attributes:
    beat_s: most seconds between two reports.
    poll_s: seconds between two looks for orders.
    drain_s: seconds in which leases that were begun may end after `leave`.
    save_s: seconds between two savings of the turns of a lease.
  """

  beat_s: float
  poll_s: float
  drain_s: float = 0.0
  save_s: float = math.inf


class StoredLeases:
  """The leases of one worker; thread-safe.

  Attributes:
    name: name of the worker, which no other may have had.
    is_over: true once the run is over, or what `leave` asked for is done.
  """

  def __init__(
    self,
    docs: documents.RunDocuments,
    name: str,
    times: HolderTimes,
    *,
    capacity: int,
    setup: str,
    rules: uploads.UploadRules | None = None,
    while_waiting: Callable[[], None] = lambda: None,
  ):
    """Joins with the first `sync`.

    Args:
      capacity: number of members that the worker wants under lease at once.
      setup: identity of the setup that it has read.
      rules: what saved turns can be; None begins every lease anew.
      while_waiting: what `take` does first where there is no thread.
    """
    documents.check_name(name)
    self.name, self.is_over = name, False
    self._docs, self._times, self._setup = docs, times, setup
    self._rules = rules if rules and rules.resumes else None
    self._leaving = threading.Event()
    self._leaves_at: float | None = None
    self._capacity, self._is_paused = capacity, False
    self._while_waiting = while_waiting
    self._report = documents.WorkerReport(
      ledger='',
      obeys=-1,
      beat=0,
      progress=0,
      version=None,
      capacity=capacity,
      is_leaving=False,
      results=(),
      saved=(),
      returned=(),
      rows=(),
    )
    self._num_rows = 0
    self._leases: dict[int, seams.Lease] = {}
    self._taken: dict[int, seams.Lease] = {}
    # Epochs that are given back, and those of them whose turns are saved.
    self._returned: set[int] = set()
    self._carried: set[int] = set()
    # By epoch: turns to go on from, and turns to save.
    self._resumed: dict[int, played.SavedTurns | None] = {}
    self._kept: dict[int, _SavedLease] = {}
    self._saves_at = self._came = 0.0
    self._lock = threading.Lock()
    self._stopping, self._wake = threading.Event(), threading.Event()
    self._problem: Exception | None = None
    self._thread: threading.Thread | None = None
    self._turns_thread: threading.Thread | None = None
    # Of what the store has.
    self._told: documents.WorkerReport | None = None

  def start(self) -> None:
    """Joins, and goes on in a thread."""
    self._thread = threading.Thread(
      target=self._run, name='leases', daemon=True
    )
    self._turns_thread = threading.Thread(
      target=self._run_turns, name='turns', daemon=True
    )
    self._thread.start()
    self._turns_thread.start()

  def _run(self) -> None:
    waited = self._times.beat_s
    while not self._stopping.is_set():
      is_due = waited >= self._times.beat_s
      try:
        is_due = self.sync(is_due) or is_due
      except OSError as error:
        _log.warning('The store cannot be reached: %s', error)
      except ValueError as error:
        self._problem = error
        return
      waited = 0.0 if is_due else waited + self._times.poll_s
      self._wake.wait(self._times.poll_s)
      self._wake.clear()

  def sync(self, is_due: bool = True) -> bool:
    """Reads orders, and reports if that is due or there is a result."""
    orders = self._docs.read(self._docs.place('orders', self.name))
    if orders is None and is_due:
      self._look_for_end()
    with self._lock:
      if orders is not None:
        self._obey(orders)
    if self._thread is None:
      self._carry()
    with self._lock:
      saved = tuple(
        k.saved[-1] for _, k in sorted(self._kept.items()) if k.saved
      )
      returned = tuple(sorted(self._returned & self._carried))
      self._report = dataclasses.replace(
        self._report, saved=saved, returned=returned
      )
      report, told = self._report, self._told
      key = lambda r: dataclasses.replace(
        r, obeys=0, beat=0, progress=0, version=None, saved=()
      )
      if not is_due and told is not None and key(told) == key(report):
        return False
      self._report = report = dataclasses.replace(report, beat=report.beat + 1)
    value = dataclasses.asdict(report)
    self._docs.write(self._docs.place('workers', self.name), value)
    self._told = report
    return True

  def _look_for_end(self) -> None:
    """Ends a worker that came when the run was over: nobody gives it orders."""
    now = time.monotonic()
    self._came = self._came or now
    if now - self._came >= _UNHEARD_S:
      found = self._docs.read_ledger()
      self.is_over |= bool(found and found[0] and found[0]['is_over'])

  def _obey(self, orders: dict[str, Any]) -> None:
    if orders['setup'] != self._setup:
      raise ValueError(
        'The run goes on with another setup than this worker has read: start '
        'the worker again.'
      )
    is_other = orders['ledger'] != self._report.ledger
    if orders['sequence'] < self._report.obeys and not is_other:
      return  # Of a reconciler that is behind another.
    self.is_over = orders['is_over']
    leases = documents.to_leases(orders['leases'])
    self._leases = {
      lease.epoch: lease
      for lease in leases
      if is_other or lease.epoch not in self._returned
    }
    # What was given back is told of until the reconciler has read it.
    named = set() if is_other else {lease.epoch for lease in leases}
    self._returned &= named
    for by_epoch in (self._resumed, self._kept):
      for epoch in by_epoch.keys() - named:
        del by_epoch[epoch]
    known = () if is_other else self._leases.keys()
    report = self._report
    self._report = dataclasses.replace(
      report,
      ledger=orders['ledger'],
      obeys=orders['sequence'],
      results=tuple(r for r in report.results if r[0] in known),
    )

  # Turns of unfinished episodes.

  def _run_turns(self) -> None:
    while not self._stopping.is_set():
      try:
        self._carry()
      except OSError as error:
        _log.warning('Turns cannot be read or saved: %s', error)
      except ValueError as error:
        self._problem = error
        return
      self._stopping.wait(self._times.poll_s)

  def _carry(self) -> None:
    """Reads and saves turns; may take long, beside reports."""
    with self._lock:
      returned = set(self._returned)
    self._resume()
    self._save(returned)
    with self._lock:
      # Told only now, since a lease that ends needs its last turns.
      self._carried = returned

  def _resume(self) -> None:
    """Reads the turns from which new leases go on."""
    with self._lock:
      new = [
        lease for e, lease in self._leases.items() if e not in self._resumed
      ]
    for lease in new:
      turns = None
      if lease.saved and self._rules:
        try:
          turns = self._read_saved(lease, lease.saved, self._rules)
        except OSError:
          raise  # Of the store, which is asked again.
        except Exception as error:  # noqa: BLE001
          # Whatever a stranger's record does, this worker samples anew.
          group = lease.order.group
          _log.warning('Group %d begins anew, its turns: %s', group, error)
      self._resumed[lease.epoch] = turns

  def _read_saved(
    self,
    lease: seams.Lease,
    saved: tuple[str, int, int],
    rules: uploads.UploadRules,
  ) -> played.SavedTurns:
    name, size, _ = saved
    most = uploads.max_saved_bytes(rules, lease)
    if size > most:
      raise ValueError(f'they have {size} bytes of at most {most}')
    data = self._docs.get_upload(*lease.span, (name, size), documents.TURNS)
    return uploads.read_saved(data, lease, rules)

  def _save(self, returned: set[int]) -> None:
    """Saves turns of leases that are given back, and of all now and then."""
    if self._rules is None:
      return
    now = time.monotonic()
    is_due = now >= self._saves_at
    with self._lock:
      done = {epoch for epoch, *_ in self._report.results}
      due = [
        kept
        for epoch, kept in sorted(self._kept.items())
        if epoch not in done and (is_due or epoch in returned)
      ]
    for kept in due:
      self._save_turns(kept, self._rules)
    if is_due:
      self._saves_at = now + self._times.save_s

  def _save_turns(self, kept: _SavedLease, rules: uploads.UploadRules) -> None:
    lease, turns = kept.lease, kept.turns()
    count = sum(map(len, turns.turns.values()))
    if count == kept.count:
      return
    data = turn_bytes.to_bytes(turns)
    if len(data) > uploads.max_saved_bytes(rules, lease):
      return  # Nobody would read it.
    saved = self._docs.upload(lease, data, documents.TURNS)
    with self._lock:
      kept.saved.append((lease.epoch, *saved, max(turns.versions)))
      # A reconciler may just have read of the one before.
      old, kept.saved = kept.saved[:-2], kept.saved[-2:]
      kept.count = count
    # Equal turns have one file: that of the lease, or of a newer saving.
    needed = {name for _, name, *_ in kept.saved} | {*(lease.saved or ())[:1]}
    gone = sorted({name for _, name, *_ in old} - needed)
    place = lambda name: self._docs.upload_place(
      *lease.span, name, documents.TURNS
    )
    self._docs.delete([*map(place, gone)])

  def saved(self, lease: seams.Lease) -> played.SavedTurns | None:
    return self._resumed.get(lease.epoch)

  def keep(
    self, lease: seams.Lease, turns: Callable[[], played.SavedTurns]
  ) -> None:
    with self._lock:
      self._kept[lease.epoch] = _SavedLease(lease=lease, turns=turns)

  # The worker's loop.

  @property
  def has_lease(self) -> bool:
    with self._lock:
      done = {epoch for epoch, *_ in self._report.results}
      return bool(self._leases.keys() - done)

  def take(self, version: int) -> tuple[list[seams.Lease], list[seams.Lease]]:
    if self._thread is None:
      self._while_waiting()
      self.sync()
    if self._problem is not None:
      raise self._problem
    with self._lock:
      progress = self._report.progress + 1
      self._report = dataclasses.replace(
        self._report, progress=progress, version=version
      )
      if self._leaving.is_set() or self._is_paused:
        self._drain()
      gone = self._taken.keys() - self._leases.keys()
      ended = [self._taken.pop(epoch) for epoch in sorted(gone)]
      new = [
        lease
        for epoch, lease in sorted(self._leases.items())
        if epoch not in self._taken
        and epoch in self._resumed
        and lease.min_version <= version
      ]
      self._taken |= {lease.epoch: lease for lease in new}
    return new, ended

  def leave(self) -> None:
    """Asks for no more leases; may be called by a signal's handler."""
    self._leaving.set()

  def pause(self, is_paused: bool) -> None:
    with self._lock:
      if is_paused != self._is_paused:
        self._is_paused = is_paused
        if not self._leaving.is_set():
          self._leaves_at = None
        capacity = 0 if is_paused else self._capacity
        self._report = dataclasses.replace(self._report, capacity=capacity)
        self._wake.set()

  def _drain(self) -> None:
    """Gives back what is not begun, and after a while what is not finished."""
    if self._leaves_at is None:
      self._leaves_at = time.monotonic() + self._times.drain_s
      self._wake.set()
    done = {epoch for epoch, *_ in self._report.results}
    kept = self._taken.keys() if time.monotonic() < self._leaves_at else ()
    back = [e for e in self._leases if e not in kept and e not in done]
    for epoch in back:
      del self._leases[epoch]
    self._returned |= set(back)
    if self._leaving.is_set():
      self._report = dataclasses.replace(self._report, is_leaving=True)
      self.is_over |= not self._leases.keys() - done

  def deliver(self, lease: seams.Lease, group: records.Group) -> None:
    data, wait_s = group_bytes.to_bytes(group), 0.1
    while lease.epoch in self._leases and not self._stopping.is_set():
      try:
        name, size = self._docs.upload(lease, data)
        break
      except OSError as error:
        # What was sampled is worth more than a wait.
        _log.warning('Group %d: %s; again soon', lease.order.group, error)
        self._stopping.wait(wait_s)
        wait_s = min(2 * wait_s, 10.0)
    else:
      return
    with self._lock:
      results = (*self._report.results, (lease.epoch, name, size))
      self._report = dataclasses.replace(self._report, results=results)
    self._wake.set()

  def note(self, row: dict[str, Any]) -> None:
    with self._lock:
      rows = (*self._report.rows, (self._num_rows, row))[-_ROWS:]
      self._num_rows += 1
      self._report = dataclasses.replace(self._report, rows=rows)

  def close(self) -> None:
    self._stopping.set()
    self._wake.set()
    for thread in (self._thread, self._turns_thread):
      if thread is not None:
        thread.join()
    try:
      # The first look may find orders with another lease; the second one gives
      # it back, and nobody leases to a worker that has said that it leaves.
      for _ in range(2):
        with self._lock:
          done = {epoch for epoch, *_ in self._report.results}
          self._returned |= self._leases.keys() - done
          self._report = dataclasses.replace(self._report, is_leaving=True)
        self._carry()
        self.sync()
    except (OSError, ValueError) as error:
      _log.warning('This worker leaves without a word: %s', error)
