"""The trainer's door to its fleet: a `core.seams.GroupExchange`.

Consumes: orders of groups, from the trainer; uploads of workers.
Woken by: its thread, or `tick` where trainer and worker share a process.
Produces: validated groups; lines of metrics of the workers.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from composer_jax.core import group_bytes, records, seams
from composer_jax.fleet.leases import documents, holder, reconciler, uploads
from composer_jax.fleet.leases import ledger as ledgers
from composer_jax.telemetry import append
from composer_jax.telemetry import writer as writers

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetOptions(reconciler.LeaseOptions):
  """The rollout workers of RL; no result depends on it at staleness 0.

  Attributes:
    workers: number of workers that the run starts on this machine; others join
      with `python -m experiments.worker`. 0 waits for those alone.
  """

  workers: int = 1

  def __post_init__(self):
    reconciler.LeaseOptions.__post_init__(self)
    if type(self.workers) is not int or self.workers < 0:
      raise ValueError(
        f'--config.fleet.workers must be at least 0, not {self.workers!r}.'
      )


def kept(docs: documents.RunDocuments) -> list[records.Group]:
  """Returns the groups whose uploads are still there, whole, in order."""
  found = docs.read_ledger()
  if found is None or found[0] is None:
    return []
  groups = []
  for group, entry in sorted(ledgers.from_json(found[0]).entries.items()):
    if entry.is_finished:
      uploaded = [
        docs.get_upload(group, part.first, part.stop, part.upload)
        for part in entry.parts
        if part.upload
      ]
      groups.append(uploads.join(list(map(group_bytes.from_bytes, uploaded))))
  return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSetup:
  """What a worker must know of a run, and be to join it.

  Attributes:
    fields: config, isolation level of the judge, and identity, as JSON.
    files: files that a worker needs, by their names; some may be absent.
  """

  fields: dict[str, Any]
  files: Sequence[pathlib.Path] = ()

  def show(self, docs: documents.RunDocuments) -> str:
    """Writes it to the store; returns its identity."""
    names = {
      path.name: docs.put_file(path.read_bytes())
      for path in self.files
      if path.exists()
    }
    return docs.write_setup(self.fields | {'files': names})


class StoredGroups:
  """The groups of a run in its store; thread-safe.

  What the trainer wants is remembered until it is counted for good, and wanted
  again at every tick: another reconciler, or a lost ledger, takes nothing away.
  """

  def __init__(
    self,
    docs: documents.RunDocuments,
    options: FleetOptions,
    rules: uploads.UploadRules,
    *,
    workdir: pathlib.Path,
    setup: RunSetup,
    poll_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    """Opens nothing yet.

    Args:
      workdir: folder of received.jsonl, with what workers report.
      setup: what a worker must know; `begin` shows it.
      poll_s: seconds between ticks of the thread.
    """
    self._docs, self._options, self._rules = docs, options, rules
    self._workdir, self._setup, self._say = workdir, setup, say
    self._poll_s, self._clock = poll_s, clock
    self._orders: dict[int, seams.GroupOrder] = {}
    self._fates: dict[int, str] = {}
    self._refused: set[tuple[int, int]] = set()
    self._version = self._below = 0
    self._deleted = -1
    self._whole_groups: dict[int, records.Group] = {}
    # Parts by group and epoch that are read and not judged; groups of a step.
    self._parts: dict[tuple[int, int], records.Group] = {}
    self._num_wanted = 0
    self._lock = threading.RLock()
    self._failure: BaseException | None = None
    self._told: dict[str, str] = {}
    self._stopping, self._wake = threading.Event(), threading.Event()
    self._thread: threading.Thread | None = None
    self._reconciler: Any = None

  # The trainer.

  def begin(
    self, version: int, first: int, ahead: Collection[int] = ()
  ) -> tuple[int, int]:
    self._digest = self._setup.show(self._docs)
    self._reconciler = reconciler.Reconciler(
      self._docs,
      self._options,
      setup=self._digest,
      clock=self._clock,
      say=self._say,
    )
    counts = 0, 0

    def rewind(ledger: ledgers.LeaseLedger) -> None:
      nonlocal counts
      is_void = self._is_void(version)
      counts = ledger.rewind(version, first, is_void, ahead)

    self._version = version
    self._reconciler.move(rewind)
    ledger = self._reconciler.ledger
    self._orders = {g: e.order for g, e in ledger.entries.items()}
    self._fates = dict.fromkeys(ahead, ledgers.TRAINED)
    self._rows = append.AppendFile(
      self._workdir / writers.RECEIVED, 'a line of received policies'
    )
    self._rows.cut_torn_line()
    return counts

  def _is_void(self, version: int) -> Callable[[int, ledgers.GroupPart], bool]:
    """Returns whether a finished part may not be kept at a version."""

    def is_void(group: int, part: ledgers.GroupPart) -> bool:
      try:
        read = self._read_part(self._reconciler.ledger.entries[group], part)
      except ValueError as error:
        _log.warning('%s', error)
        return True
      return max(read.versions) > version

    return is_void

  def admit(self, orders: Sequence[seams.GroupOrder]) -> None:
    with self._lock:
      self._orders |= {order.group: order for order in orders}
    self._wake.set()

  def announce(self, version: int) -> None:
    with self._lock:
      self._version = max(self._version, version)
    self._wake.set()

  def finished(self, groups: Sequence[int]) -> list[int]:
    with self._lock:
      return [g for g in groups if self._is_lost(g) or self._is_whole(g)]

  def ready(
    self, groups: Sequence[int], fault_of: Callable[[records.Group], str]
  ) -> list[records.Group] | None:
    self._raise_failure()
    try:
      with self._lock:
        self._num_wanted = max(self._num_wanted, len(groups))
        wanted = [g for g in groups if not self._is_lost(g)]
        whole = [self._whole(g, fault_of) for g in wanted]
    except OSError as error:
      self._tell_of_store('trainer', error)
      return None
    return [g for g in whole if g] if all(whole) else None

  def _tell_of_store(self, who: str, error: OSError) -> None:
    """Says, once for each error, that someone waits and will ask again."""
    if str(error) != self._told.get(who):
      self._say(f'the {who} waits for its store: {error}')
    self._told[who] = str(error)

  def unfinished(self, version: int) -> int:
    with self._lock:
      orders = self._orders.values()
      begun = [o.group for o in orders if o.min_version <= version]
      return len(begun) - len(self.finished(begun))

  def _is_whole(self, group: int) -> bool:
    entry, refused = self._reconciler.ledger.entries.get(group), self._refused
    return entry is not None and all(
      p.upload and (group, p.epoch) not in refused for p in entry.parts
    )

  def num_uploads(self) -> int:
    with self._lock:
      return self._reconciler.num_accepted

  def _is_lost(self, group: int) -> bool:
    entry = self._reconciler.ledger.entries.get(group)
    return entry is not None and entry.fate == ledgers.INFRASTRUCTURE

  def _whole(
    self, group: int, fault_of: Callable[[records.Group], str]
  ) -> records.Group | None:
    """Returns a group if all its members are there and right."""
    if group in self._whole_groups:
      return self._whole_groups[group]
    if not self._is_whole(group):
      return None
    entry, parts = self._reconciler.ledger.entries[group], []
    for part in entry.parts:
      try:
        read = self._parts.pop((group, part.epoch), None)
        read = read or self._read_part(entry, part)
      except ValueError as error:
        self._refuse(group, part, str(error))
        return None
      if fault := fault_of(read):
        self._refuse(group, part, f'{fault}.')
        return None
      parts.append(read)
    try:
      self._whole_groups[group] = uploads.join(parts)
    except ValueError as error:
      # Who is wrong cannot be told.
      for part in entry.parts:
        self._refuse(group, part, f'Group {group} is refused: {error}.')
      return None
    self._reconciler.trust({part.worker for part in entry.parts})
    return self._whole_groups[group]

  def _read_ahead(self) -> None:
    """Reads what the next step may want, while the trainer trains."""
    with self._lock:
      known = self._whole_groups.keys() | self._fates.keys()
      entries = self._reconciler.ledger.entries
      # A group with another fate than `trained` is not whole.
      wanted = filter(self._is_whole, sorted(entries.keys() - known))
      for group in itertools.islice(wanted, self._num_wanted):
        for part in entries[group].parts:
          key = group, part.epoch
          if key not in self._parts:
            # Whoever wants the group says what is wrong with it.
            with contextlib.suppress(ValueError):
              self._parts[key] = self._read_part(entries[group], part)

  def _read_part(self, entry: Any, part: ledgers.GroupPart) -> records.Group:
    most, group = self._rules.max_bytes(part.size), entry.order.group
    assert part.upload is not None
    where = f'members {part.first} to {part.stop - 1} of group {group}'
    try:
      if part.upload[1] > most:
        raise ValueError(f'they have {part.upload[1]} bytes of at most {most}')
      data = self._docs.get_upload(group, part.first, part.stop, part.upload)
      return uploads.read(data, entry.order, part, self._rules)
    except ValueError as error:
      raise ValueError(
        f'What worker {part.worker} uploaded as {where} is refused: {error}.'
      ) from error

  def _refuse(self, group: int, part: ledgers.GroupPart, fault: str) -> None:
    self._say(f'{fault} It is sampled anew.')
    self._refused.add((group, part.epoch))
    self._reconciler.distrust(group, part)
    self._wake.set()

  def plan(self, groups: Sequence[int]) -> list[Any]:
    with self._lock:
      entries = [self._reconciler.ledger.entries[g] for g in groups]
      return [
        [
          dataclasses.asdict(e.order),
          [[p.first, p.stop, p.worker, *(p.upload or ())] for p in e.parts],
        ]
        for e in entries
      ]

  def read(self, plan: Sequence[Any]) -> list[records.Group] | None:
    try:
      return self._read_plan(plan)
    except OSError as error:
      self._tell_of_store('trainer', error)
      return None

  def _read_plan(self, plan: Sequence[Any]) -> list[records.Group]:
    groups = []
    for order, parts in plan:
      entry = ledgers.GroupEntry(order=seams.GroupOrder(**order), parts=[])
      for first, stop, worker, name, size in parts:
        part = ledgers.GroupPart(first=first, stop=stop, worker=worker)
        part.upload = (name, size)
        entry.parts.append(part)
      read = [self._read_part(entry, part) for part in entry.parts]
      groups.append(uploads.join(read))
    return groups

  def figures(self) -> dict[str, Any]:
    with self._lock:
      ledger = self._reconciler.ledger
      fates = [
        [fate, family, count]
        for fate, counts in sorted(ledger.totals().items())
        for family, count in sorted(counts.items())
      ]
      return {
        'workers': len(self._reconciler.figures()),
        'fates': fates,
        'lost': [[reason, n] for reason, n in sorted(ledger.lost.items())],
        'late': self._reconciler.late,
      }

  def trained(self, groups: Sequence[int]) -> None:
    with self._lock:
      self._fates |= dict.fromkeys(groups, ledgers.TRAINED)
      for group in groups:
        self._whole_groups.pop(group, None)
    self._wake.set()

  def collect(self, below: int) -> None:
    with self._lock:
      self._below = max(self._below, below)
    self._wake.set()

  def _delete(self) -> None:
    """Deletes the uploads of groups that were counted for good."""
    floor = self._reconciler.ledger.floor
    if self._deleted == floor:
      return
    for known in (self._orders, self._fates):
      for group in [g for g in known if g < floor]:
        del known[group]
    self._refused = {key for key in self._refused if key[0] >= floor}
    self._parts = {k: g for k, g in self._parts.items() if k[0] >= floor}
    for kind in (documents.GROUPS, documents.TURNS):
      numbers = ((n.partition('.')[0], n) for n in self._docs.names(kind))
      old = [n for i, n in numbers if i.isdecimal() and int(i) < floor]
      self._docs.delete([self._docs.place(kind, name) for name in old])
    self._deleted = floor

  def blame(self, worker: str) -> None:
    with self._lock:
      self._reconciler.blame(worker)

  def is_given_up(self, worker: str) -> bool:
    with self._lock:
      return self._reconciler.is_given_up(worker)

  def leases(self, capacity: int) -> holder.StoredLeases:
    return holder.StoredLeases(
      self._docs,
      f'colocated-{secrets.token_hex(4)}',
      holder.HolderTimes(beat_s=0.0, poll_s=self._poll_s),
      capacity=capacity,
      setup=self._digest,
      rules=self._rules,
      while_waiting=self.tick,
    )

  # The reconciler.

  def _requests(self) -> list[Callable[[ledgers.LeaseLedger], Any]]:
    size = self._rules.members
    step = self._options.members or size
    orders, version = list(self._orders.values()), self._version

    def ask(ledger: ledgers.LeaseLedger) -> None:
      ledger.announce(version)
      for order in orders:
        ledger.admit(order, size, step)
      for group, epoch in self._refused:
        ledger.refuse(group, epoch)
      for group, fate in self._fates.items():
        ledger.settle(group, fate)
      ledger.fold(self._below)

    return [ask]

  def tick(self) -> None:
    with self._lock:
      self._reconciler.tick(*self._requests())
      for worker, row in self._reconciler.take_rows():
        line = json.dumps(row | {'worker': worker}) + '\n'
        self._rows.append(line.encode())
      self._delete()

  def start(self) -> None:
    self._thread = threading.Thread(target=self._run, name='fleet', daemon=True)
    self._thread.start()

  def _run(self) -> None:
    while not self._stopping.is_set():
      try:
        self.tick()
        self._read_ahead()
      except OSError as error:
        # Nobody is better off without a trainer: the store may come back.
        self._tell_of_store('fleet', error)
      except BaseException as error:
        # The trainer raises it, too, rather than wait for groups for ever.
        self._failure = error
        raise
      self._wake.wait(self._poll_s)
      self._wake.clear()

  def _raise_failure(self) -> None:
    if self._failure is not None:
      raise self._failure

  def close(self, *, is_over: bool) -> None:
    self._stopping.set()
    self._wake.set()
    if self._thread is not None:
      self._thread.join()
    if self._reconciler is None:
      return
    with self._lock, contextlib.closing(self._rows):
      try:
        if is_over:
          self._reconciler.tick(*self._requests(), ledgers.LeaseLedger.end)
      except OSError as error:
        self._say(f'workers are not told that the run is over: {error}')
