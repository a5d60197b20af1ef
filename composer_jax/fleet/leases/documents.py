"""What trainer and workers of a fleet tell each other, as documents of a store.

  fleet/<run>/ledger            all state of the reconciler, swapped
  fleet/<run>/setup             what a worker must know and be to join
  fleet/<run>/files/<hash>      files that the setup names
  fleet/<run>/orders/<worker>   its leases, written by the reconciler
  fleet/<run>/workers/<worker>  its report, written by the worker
  fleet/<run>/groups/<group>.<first>-<stop>.<hash>   what it sampled
  fleet/<run>/turns/<group>.<first>-<stop>.<hash>    what it has so far

Every document has one writer, but for the ledger, and is sealed by the key of
the run together with its place, so that none can stand for another. A report
is checked all the same: a worker may be broken, or of an attacker.
"""

import dataclasses
import itertools
import json
import re
from typing import Any

from composer_jax.core import files, seams
from composer_jax.delta.format import identity, keys, manifest
from composer_jax.fleet.leases import fleet_store

# Folders of what workers upload: rollouts, and turns of unfinished episodes.
GROUPS, TURNS = 'groups', 'turns'
MAX_DOCUMENT_BYTES = 2**20
# Of ten thousand groups under way some 3 MB.
MAX_LEDGER_BYTES = 2**27
_MAX_FILE_BYTES = 2**28
_SEAL = b'CJF1'
_NAME = re.compile(r'[A-Za-z0-9][\w.-]{0,99}', re.A)
_MAX_RESULTS, _MAX_ROWS = 10_000, 16
_MAX_ROW_BYTES = 2**13


def check_name(worker: str) -> None:
  if not (isinstance(worker, str) and _NAME.fullmatch(worker)):
    raise ValueError(
      f'the name of a worker must be 1 to 100 letters, digits, ".", "_" or "-" '
      f'and begin with a letter or digit, not {worker!r:.120}.'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerReport:
  """What a worker tells, again and again.

  Attributes:
    ledger: identity of the ledger whose orders it obeys; '' before the first.
    obeys: sequence of these orders; -1 before the first.
    beat: number of this report; the worker lives while it rises.
    progress: number that rises with the steps of its engine.
    version: policy version that it serves; None before the first.
    capacity: number of members that it wants under lease at once.
    is_leaving: true if it wants no more leases.
    results: (epoch, hash, length) of uploads that are not acknowledged yet.
    saved: (epoch, hash, length, newest version) of the turns that it saved.
    returned: epochs of leases that it gives back.
    rows: (number, line of metrics), the newest.
  """

  ledger: str
  obeys: int
  beat: int
  progress: int
  version: int | None
  capacity: int
  is_leaving: bool
  results: tuple[tuple[int, str, int], ...]
  saved: tuple[tuple[int, str, int, int], ...]
  returned: tuple[int, ...]
  rows: tuple[tuple[int, dict[str, Any]], ...]

  def __post_init__(self):
    counts = [
      self.obeys + 1,
      self.beat,
      self.progress,
      self.capacity,
      *self.returned,
    ]
    counts += [n for epoch, _, size in self.results for n in (epoch, size)]
    for epoch, _, size, version in self.saved:
      counts += [epoch, size, version]
    counts += [n for n, _ in self.rows]
    counts += [] if self.version is None else [self.version]
    names = [name for _, name, *_ in (*self.results, *self.saved)]
    named = max(len(self.results), len(self.saved))
    if not (all(map(identity.is_count, counts)) and self.capacity <= 2**20):
      raise ValueError('a report must hold counts where it counts.')
    if not all(map(identity.is_hash, names)):
      raise ValueError('a report must name uploads by their hash.')
    if named > _MAX_RESULTS or len(self.rows) > _MAX_ROWS:
      raise ValueError(
        f'a report may tell of {_MAX_RESULTS} results and {_MAX_ROWS} lines.'
      )
    is_right = type(self.is_leaving) is bool and type(self.ledger) is str
    if not (is_right and all(map(_is_row, self.rows))):
      raise ValueError('a report has a field of another type.')


def _is_row(row: tuple[int, Any]) -> bool:
  fields = row[1]
  return (
    isinstance(fields, dict)
    and {'stage', 'step', 'time'} <= fields.keys()
    and type(fields['step']) is int
  )


def _is_plain(value: Any) -> bool:
  is_number = isinstance(value, int | float)
  return abs(value) < 2**53 if is_number else isinstance(value, str)


def is_received(row: dict[str, Any]) -> bool:
  """Whether a line of a worker is short and of a policy that it received."""
  fields = [f if isinstance(f, list) else [f] for f in row.values()]
  return (
    row['stage'] == 'received'
    and type(row['time']) in (int, float)
    and all(map(_is_plain, itertools.chain(*fields)))
    and len(identity.canonical_json(row)) <= _MAX_ROW_BYTES
  )


def to_report(value: Any) -> WorkerReport:
  """Makes a report of JSON, or says in a ValueError why it is none."""
  try:
    fields: dict[str, Any] = dict(value)
    for name in ('results', 'saved', 'rows'):
      fields[name] = tuple(tuple(item) for item in value[name])
    fields['returned'] = tuple(value['returned'])
    return WorkerReport(**fields)
  except (TypeError, LookupError, ValueError) as error:
    raise ValueError(
      f'this is no report of a worker ({error!r:.200}).'
    ) from None


def to_leases(value: Any) -> list[seams.Lease]:
  leases = []
  for fields in value:
    span: dict[str, Any] = {n: fields[n] for n in ('epoch', 'first', 'stop')}
    order, saved = seams.GroupOrder(**fields['order']), fields['saved']
    saved = None if saved is None else (saved[0], saved[1], saved[2])
    leases.append(seams.Lease(order=order, saved=saved, **span))
  return leases


class RunDocuments:
  """Reads and writes the documents of one run.

  Attributes:
    run_id: name of the run.
    store: place of everything that is read.
  """

  def __init__(
    self,
    store: fleet_store.FleetStore,
    key: keys.Hmac,
    run_id: str,
    *,
    writes: fleet_store.FleetStore | None = None,
  ):
    """Opens them; nothing is asked yet.

    Args:
      writes: store behind a `store` that can only be read.
    """
    manifest.check_run_id(run_id)
    self.run_id, self.store, self._key = run_id, store, key
    self._writes = writes or store

  def place(self, *parts: str) -> str:
    return '/'.join(('fleet', self.run_id, *parts))

  def _seal(self, place: str, value: Any) -> bytes:
    body = identity.canonical_json(value)
    signature = self._key.sign(_SEAL + place.encode() + b'\n' + body)
    return b'%s %s\n%s' % (_SEAL, signature.hex().encode(), body)

  def unseal(self, place: str, data: bytes) -> Any:
    line, _, body = data.partition(b'\n')
    try:
      seal, signature = line.split(b' ')
      if seal != _SEAL:
        raise ValueError(f'it begins with {seal!r:.99}, not {_SEAL!r}')
      told = bytes.fromhex(signature.decode('ascii'))
      self._key.verify(_SEAL + place.encode() + b'\n' + body, told)
      return identity.parse_canonical(body)
    except ValueError as error:
      raise ValueError(
        f'{self.store.url}/{place}: this document cannot be trusted: {error}.'
      ) from error

  def write(self, place: str, value: Any) -> None:
    self._writes.put_at(place, self._seal(place, value))

  def read(self, place: str) -> Any:
    """Returns a document; None for none, a ValueError if it is not sealed."""
    data = self.read_sealed(place)
    return None if data is None else self.unseal(place, data)

  def read_sealed(self, place: str) -> bytes | None:
    return self.store.read_at(place, MAX_DOCUMENT_BYTES)

  def write_setup(self, setup: Any) -> str:
    """Shows what a worker must know; returns the identity of that."""
    plain = json.loads(json.dumps(setup))
    self.write(self.place('setup'), plain)
    return files.sha256(identity.canonical_json(plain))

  def read_setup(self) -> tuple[Any, str] | None:
    """Returns the setup and its identity; None if no run is there."""
    setup = self.read(self.place('setup'))
    if setup is None:
      return None
    return setup, files.sha256(identity.canonical_json(setup))

  def read_ledger(self) -> tuple[Any, str] | None:
    """Returns the ledger and its tag; its value is None if it is damaged."""
    place = self.place('ledger')
    found = self.store.read_tagged_at(place, MAX_LEDGER_BYTES)
    if found is None:
      return None
    try:
      return self.unseal(place, found[0]), found[1]
    except ValueError:
      return None, found[1]

  def swap_ledger(self, value: Any, tag: str | None) -> str:
    """Replaces the ledger of this tag, else Conflict; returns the new tag."""
    place = self.place('ledger')
    data = self._seal(place, value)
    return self._writes.swap_at(place, data, tag, MAX_LEDGER_BYTES)

  def names(self, folder: str) -> list[str]:
    top = self.place(folder) + '/'
    return [key.removeprefix(top) for key in self._writes.find_at(top)]

  def delete(self, places: list[str]) -> None:
    if places:
      self._writes.delete_at(places)

  # Content that is known by its hash.

  def put_file(self, data: bytes) -> str:
    name = files.sha256(data)
    self._writes.put_at(self.place('files', name), data)
    return name

  def get_file(self, name: str) -> bytes:
    return self._checked(self.place('files', name), name, _MAX_FILE_BYTES)

  def upload(
    self, lease: seams.Lease, data: bytes, folder: str = GROUPS
  ) -> tuple[str, int]:
    """Writes what a lease brought; returns its hash and length."""
    name = files.sha256(data)
    self._writes.put_at(self.upload_place(*lease.span, name, folder), data)
    return name, len(data)

  def upload_place(
    self, group: int, first: int, stop: int, name: str, folder: str = GROUPS
  ) -> str:
    return self.place(folder, f'{group:08d}.{first}-{stop}.{name}')

  def get_upload(
    self,
    group: int,
    first: int,
    stop: int,
    upload: tuple[str, int],
    folder: str = GROUPS,
  ) -> bytes:
    """Returns an upload; a ValueError if it is gone or not what was told."""
    place = self.upload_place(group, first, stop, upload[0], folder)
    return self._checked(place, *upload)

  def _checked(self, place: str, name: str, most: int) -> bytes:
    data = self.store.read_at(place, most)
    if data is None:
      raise ValueError(f'{self.store.url}/{place} is gone')
    if files.sha256(data) != name:
      raise ValueError(
        f'{self.store.url}/{place} is damaged, its hash is wrong'
      )
    return data
