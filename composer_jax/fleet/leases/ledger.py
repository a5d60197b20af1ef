"""Who samples what: the state of a fleet and every move of it, without a clock.

A group is admitted once, and is divided into parts, which are ranges of its
members. A part waits, is leased to a worker, or is finished. Every lease has an
epoch, the next whole number of the run; a result counts only if it has the
epoch of its part's present lease. So a result that is late or comes twice moves
nothing. A group ends with one fate, counted by the family of its task.

`reconciler` keeps the ledger in a store and decides when to move.
"""

import collections
import copy
import dataclasses
import heapq
import secrets
from collections.abc import Callable, Collection, Iterator
from typing import Any

from composer_jax.core import checks, seams

FORMAT = 2
TRAINED, STALE = 'trained', 'stale'
INFRASTRUCTURE, CANCELLED = 'infrastructure', 'cancelled'
FATES = (TRAINED, STALE, INFRASTRUCTURE, CANCELLED)
# Ended leases, and counted groups, that are remembered one by one.
_ENDED, _FOLDED = 100_000, 10_000
# Savings of lower versions that are remembered of a part.
_OLDER = 3
# Why a lease ended without a result that was kept.
SILENT, STALLED, LEFT, REFUSED, REWOUND = REASONS = (
  *('silent', 'stalled', 'left', 'refused', 'rewound'),
)


def family_of(task_id: str) -> str:
  """Returns the family of a task, which its name begins with."""
  return task_id.partition('/')[0]


@dataclasses.dataclass(kw_only=True, slots=True)
class GroupPart:
  """Members `first` to `stop` - 1 of a group.

  Attributes:
    epoch: epoch of the last lease; 0 before the first.
    worker: who has or had that lease.
    is_leased: true while the lease lasts.
    upload: hash and length of the accepted result; None before.
    lost: number of leases that brought nothing.
    saved: hash, bytes and newest version of turns that a lost lease saved.
    older: records as in `saved`, of lower versions, the newest first, for a run
      that goes back.
  """

  first: int
  stop: int
  epoch: int = 0
  worker: str = ''
  is_leased: bool = False
  upload: tuple[str, int] | None = None
  lost: int = 0
  saved: tuple[str, int, int] | None = None
  older: tuple[tuple[str, int, int], ...] = ()

  @property
  def size(self) -> int:
    return self.stop - self.first

  @property
  def savings(self) -> list[tuple[str, int, int]]:
    """All savings that are remembered, the newest first."""
    return [self.saved, *self.older] if self.saved else []


@dataclasses.dataclass(kw_only=True, slots=True)
class GroupEntry:
  """A group of the ledger; `fate` is '' until it has one."""

  order: seams.GroupOrder
  parts: list[GroupPart]
  fate: str = ''

  @property
  def is_finished(self) -> bool:
    return all(part.upload for part in self.parts)

  @property
  def counted_as(self) -> tuple[str, str]:
    """Fate and family."""
    return self.fate, family_of(self.order.task_id)


class LeaseLedger:
  """The groups that are not yet counted for good, and the counts of others.

  Attributes:
    identity: random name of this ledger, which epochs are of.
    entries: groups by number.
    sequence: number of times that the ledger was written.
    epoch: epoch of the newest lease.
    version: newest policy version that was announced.
    floor: number below which every group is counted and forgotten.
    is_over: true once the run has ended.
    folded: fate and family of groups that are counted, for a run that goes
      back; those of the highest numbers alone.
    fates: number of groups below those, by fate and family.
    lost: number of leases that brought nothing, by reason.
    has_moved: true if anything changed since the ledger was made or saved.
    touched: workers whose leases changed.
    ended: worker of each lease that ended here without a result, by epoch; has
      the newest leases alone, and is not stored.
  """

  def __init__(self, max_lost: int = 5):
    """Begins empty; a group that loses more leases is given up."""
    self.identity = secrets.token_hex(8)
    self.entries: dict[int, GroupEntry] = {}
    self.sequence = self.epoch = self.version = self.floor = 0
    self.is_over = self.has_moved = False
    self.folded: dict[int, tuple[str, str]] = {}
    self.fates: dict[str, dict[str, int]] = {}
    self.lost: dict[str, int] = {}
    self.touched: set[str] = set()
    self.ended: dict[int, str] = {}
    self._max_lost = max_lost
    # Indices: parts by epoch and by worker, and those that wait, in order.
    self._leased: dict[int, tuple[int, GroupPart]] = {}
    self._held = collections.defaultdict[str, dict[int, int]](dict)
    self._waiting: list[tuple[int, int]] = []

  # What is there.

  def leases_of(self, worker: str) -> list[seams.Lease]:
    leases = []
    for epoch, group in self._held.get(worker, {}).items():
      part, order = self._leased[epoch][1], self.entries[group].order
      span: dict[str, Any] = dict(first=part.first, stop=part.stop)
      span |= dict(order=order, saved=part.saved)
      leases.append(seams.Lease(epoch=epoch, **span))
    return leases

  def epochs_of(self, worker: str) -> set[int]:
    return set(self._held.get(worker, ()))

  def load_of(self, worker: str) -> int:
    """Returns the number of members that a worker has under lease."""
    held = self._held.get(worker, ())
    return sum(self._leased[epoch][1].size for epoch in held)

  def holders(self) -> list[str]:
    return [worker for worker, held in self._held.items() if held]

  def waiting(self) -> Iterator[tuple[int, GroupPart]]:
    """Yields waiting parts in order, each until it is leased or `put_back`."""
    while self._waiting:
      group, first = heapq.heappop(self._waiting)
      entry = self.entries.get(group)
      if entry is None or entry.fate:
        continue
      part = next(p for p in entry.parts if p.first == first)
      if not part.is_leased and part.upload is None:
        yield group, part

  def put_back(self, group: int, part: GroupPart) -> None:
    heapq.heappush(self._waiting, (group, part.first))

  # Moves.

  def admit(self, order: seams.GroupOrder, size: int, step: int) -> None:
    """Adds a group of `size` members, leased by `step` of them."""
    known = order.group in self.entries or order.group in self.folded
    if order.group < self.floor or known or self.is_over:
      return
    ranges = [(i, min(i + step, size)) for i in range(0, size, step)]
    parts = [GroupPart(first=first, stop=stop) for first, stop in ranges]
    self.entries[order.group] = GroupEntry(order=order, parts=parts)
    for part in parts:
      self.put_back(order.group, part)
    self.has_moved = True

  def announce(self, version: int) -> None:
    self.has_moved |= version > self.version
    self.version = max(self.version, version)

  def lease(self, group: int, part: GroupPart, worker: str) -> None:
    self.epoch += 1
    part.epoch, part.worker, part.is_leased = self.epoch, worker, True
    self._leased[part.epoch] = (group, part)
    self._held[worker][part.epoch] = group
    self.touched.add(worker)
    self.has_moved = True

  def accept(self, worker: str, epoch: int, upload: tuple[str, int]) -> bool:
    """Takes in a result; False, and nothing moves, if its lease has ended."""
    if epoch not in self._held.get(worker, ()):
      return False
    _, part = self._end(epoch)
    del self.ended[epoch]
    part.upload, part.saved, part.older = upload, None, ()
    return True

  def lose(
    self, epoch: int, reason: str, saved: tuple[str, int, int] | None = None
  ) -> None:
    """Ends a lease that brought nothing but, perhaps, saved turns.

    Its members wait again, without the turns that it began from if it fell
    silent over them: what ends one worker may end the next.
    """
    group, part = self._end(epoch)
    if saved is not None:
      older = [record for record in part.savings if record[2] < saved[2]]
      part.saved, part.older = saved, tuple(older[:_OLDER])
    elif reason in (SILENT, STALLED):
      part.saved, part.older = None, ()
    self._again(group, part, reason)

  def refuse(self, group: int, epoch: int) -> None:
    """Voids a result that does not hold what it must."""
    entry = self.entries.get(group)
    for part in entry.parts if entry else ():
      if part.epoch == epoch and part.upload and not part.is_leased:
        part.upload = None
        self._again(group, part, REFUSED)

  def settle(self, group: int, fate: str) -> None:
    """Gives a group its fate; its first one stays."""
    entry = self.entries.get(group)
    if entry is None or entry.fate:
      return
    entry.fate, self.has_moved = fate, True
    for part in entry.parts:
      if part.is_leased:
        self._end(part.epoch)

  def fold(self, below: int) -> None:
    """Counts the groups below for good; those without a fate are cancelled."""
    for group in [g for g in self.entries if g < below]:
      self.settle(group, CANCELLED)
      self.folded[group] = self.entries.pop(group).counted_as
    for group in sorted(self.folded)[:-_FOLDED]:
      _count(self.folded.pop(group), self.fates)
    self.has_moved |= below > self.floor
    self.floor = max(self.floor, below)

  def rewind(
    self,
    version: int,
    first: int,
    is_void: Callable[[int, GroupPart], bool],
    ahead: Collection[int] = (),
  ) -> tuple[int, int]:
    """Goes back to a version that has trained on the groups below `first`.

    Later fates never were; of more groups than are remembered, none was counted
    that comes before. Leases end if the version had been surpassed, since what
    they sample may be of a policy that is void.

    Args:
      ahead: groups above, on which the version has trained, too.
      is_void: (group, finished part) -> whether its result may not be kept.

    Returns:
      The numbers of finished groups that are kept and that are void.
    """
    if first < min(self.folded, default=self.floor):
      self.fates = {}
    for group in [g for g in self.folded if g >= first and g not in ahead]:
      del self.folded[group]
    self.floor = min(self.floor, first)
    for group in self.entries:
      if group < first or group in ahead:
        # The checkpoint has them, though nobody came to say so.
        self.settle(group, TRAINED)
    self.fold(first)
    self._waiting.clear()
    kept = voided = 0
    for group, entry in sorted(self.entries.items()):
      if group in ahead:
        continue
      entry.fate, was_finished = '', entry.is_finished
      for part in entry.parts:
        left = [record for record in part.savings if record[2] <= version]
        part.saved, part.older = left[0] if left else None, tuple(left[1:])
        if part.is_leased and version < self.version:
          self.lose(part.epoch, REWOUND)
        elif part.upload and is_void(group, part):
          part.upload = None
          self._again(group, part, REWOUND)
        elif not part.is_leased and part.upload is None:
          self.put_back(group, part)
      kept += entry.is_finished
      voided += was_finished and not entry.is_finished
    self.version, self.is_over, self.has_moved = version, False, True
    return kept, voided

  def end(self) -> None:
    """Ends the run: what has no fate is cancelled, and no lease lasts."""
    for group in list(self.entries):
      self.settle(group, CANCELLED)
    self.has_moved |= not self.is_over
    self.is_over = True

  def totals(self) -> dict[str, dict[str, int]]:
    """Returns the number of groups that have a fate, by fate and family."""
    totals = copy.deepcopy(self.fates)
    settled = [e.counted_as for e in self.entries.values() if e.fate]
    for counted_as in (*self.folded.values(), *settled):
      _count(counted_as, totals)
    return totals

  def _end(self, epoch: int) -> tuple[int, GroupPart]:
    group, part = self._leased.pop(epoch)
    del self._held[part.worker][epoch]
    self.ended[epoch] = part.worker
    if len(self.ended) > _ENDED:
      del self.ended[next(iter(self.ended))]
    self.touched.add(part.worker)
    part.is_leased, self.has_moved = False, True
    return group, part

  def _again(self, group: int, part: GroupPart, reason: str) -> None:
    self.lost[reason] = self.lost.get(reason, 0) + 1
    self.has_moved = True
    # No fault of the group.
    part.lost += reason not in (LEFT, REWOUND)
    if part.lost > self._max_lost:
      self.settle(group, INFRASTRUCTURE)
    else:
      self.put_back(group, part)

  # As JSON.

  def to_json(self) -> dict[str, Any]:
    entries = [
      [dataclasses.asdict(e.order), [_plain(p) for p in e.parts], e.fate]
      for e in self.entries.values()
    ]
    names = ('identity', 'sequence', 'epoch', 'version', 'floor', 'is_over')
    names = (*names, 'fates', 'lost')
    plain = {name: getattr(self, name) for name in names}
    folded: dict[str, dict[str, list[int]]] = {}
    for group, (fate, family) in self.folded.items():
      folded.setdefault(fate, {}).setdefault(family, []).append(group)
    plain |= {'folded': folded, 'format': FORMAT, 'entries': entries}
    return plain


def _count(
  counted_as: tuple[str, str], fates: dict[str, dict[str, int]]
) -> None:
  fate, family = counted_as
  counts = fates.setdefault(fate, {})
  counts[family] = counts.get(family, 0) + 1


def _plain(part: GroupPart) -> list[Any]:
  upload = list(part.upload) if part.upload else None
  span = [part.first, part.stop, part.epoch, part.worker]
  saved = list(part.saved) if part.saved else None
  older = list(map(list, part.older))
  return [*span, part.is_leased, upload, part.lost, saved, older]


def from_json(value: Any, max_lost: int = 5) -> LeaseLedger:
  """Reads a ledger that `to_json` made; a ValueError for another format."""
  if not isinstance(value, dict) or value.get('format') not in (1, FORMAT):
    found = value.get('format') if isinstance(value, dict) else value
    raise ValueError(
      f'a ledger of format {found!r:.99}; this version reads 1 and {FORMAT}'
    )
  ledger = LeaseLedger(max_lost)
  for name in ('sequence', 'epoch', 'version', 'floor'):
    setattr(ledger, name, value[name])
  checks.at_least(ledger, 0, 'sequence', 'epoch', 'version', 'floor')
  for name in ('identity', 'is_over', 'fates', 'lost'):
    setattr(ledger, name, value[name])
  # Other commits write format 2 without this, and without `older` below.
  for fate, families in value.get('folded', {}).items():
    for family, groups in families.items():
      ledger.folded |= dict.fromkeys(groups, (fate, family))
  for order, parts, fate in value['entries']:
    entry = GroupEntry(order=seams.GroupOrder(**order), parts=[], fate=fate)
    ledger.entries[entry.order.group] = entry
    # Format 1 knows no saved turns.
    for first, stop, epoch, worker, is_leased, upload, lost, *more in parts:
      part = GroupPart(
        first=first, stop=stop, epoch=epoch, worker=worker, lost=lost
      )
      part.upload = (upload[0], upload[1]) if upload else None
      saved = more[0] if more else None
      part.saved = (saved[0], saved[1], saved[2]) if saved else None
      older = more[1] if len(more) > 1 else ()
      part.older = tuple((name, size, v) for name, size, v in older)
      part.is_leased = is_leased
      entry.parts.append(part)
      if is_leased:
        ledger._leased[epoch] = (entry.order.group, part)
        ledger._held[worker][epoch] = entry.order.group
      elif not upload and not fate:
        ledger.put_back(entry.order.group, part)
  return ledger
