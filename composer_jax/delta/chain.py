"""Commits each version of a run as a bundle; survives a kill anywhere.

The order of writes is packs, manifest, index, pointer. Until the pointer is
replaced, which is atomic, readers see the version before; afterwards the new
one. What a killed publisher leaves behind is unreachable and `gc` removes it.
Publishing the same weights under the same version again changes nothing, unless
the last version was damaged: then it is written anew, as a keyframe.

Every version but the first is one delta to the version before. Skips (deltas
over several versions) and keyframes are further bundles of a version, written
when its delta is out: who follows closely never waits for them nor reads them.
A store that forgot something that is listed gets a keyframe at once.

One publisher at a time writes to a run; a second one is noticed at its next
move of the pointer.
"""

import contextlib
import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from composer_jax.delta import chunking, follower, rebuild, team
from composer_jax.delta import run as runs
from composer_jax.delta.codec import coding
from composer_jax.delta.format import keys, manifest
from composer_jax.delta.store import objects

# Versions between two looks whether all that is listed is still there.
LOOK_EVERY = 4

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOptions:
  """How versions are encoded and kept.

  Attributes:
    tier: tier of the codec; 'small' has fewer bytes, 'fast' costs less time.
    keyframe_every: versions from a keyframe to the next; joiners start there.
    skip_levels: a version divisible by one of them also gets a delta from that
      many versions before, for receivers that lag; all multiples of the least.
    expires_s: seconds after which receivers doubt a pointer that no one
      renewed; 0 for never.
    keep: number of last versions that stay listed whole.
    grace_s: seconds for which `gc` deletes no object.
    threads: number of threads that encode.
  """

  tier: str = 'small'
  keyframe_every: int = 400
  skip_levels: tuple[int, ...] = (8,)
  expires_s: float = 7 * 86400.0
  keep: int = 64
  grace_s: float = objects.GRACE_S
  threads: int = 2

  def __post_init__(self):
    levels = tuple(sorted(set(self.skip_levels)))
    object.__setattr__(self, 'skip_levels', levels)
    if self.tier not in coding.TIERS:
      raise ValueError(
        f'tier is {self.tier!r}; it must be one of {", ".join(coding.TIERS)}.'
      )
    for name in ('keyframe_every', 'keep', 'threads'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'BundleOptions.{name} must be at least 1; got {getattr(self, name)}.'
        )
    if levels and (levels[0] < 2 or any(n % levels[0] for n in levels)):
      raise ValueError(
        f'skip_levels are {levels}; they must be multiples of the least, which '
        'is 2 or more: every version has a delta of 1 anyway.'
      )
    if self.expires_s < 0:
      raise ValueError(
        f'expires_s is {self.expires_s}; it must be positive, or 0 for never.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BundleInfo:
  """What one version cost.

  Attributes:
    version: policy version.
    kind: manifest.KEY or manifest.DELTA.
    target_id: identity of the weights.
    base_id: identity of the version before; '' for a keyframe.
    bytes: bytes of the bundle that followers read: manifest and packs.
    full_bytes: bytes of the weights, uncompressed.
    changed: elements that differ from the version before; all of them in a
      keyframe; 0, like what follows, if the version had been published before.
    elements: elements of the weights.
    cut_bytes: bytes of chunks that had to be completed from several blocks.
    encode_s: seconds from the call until all chunks were encoded.
    upload_s: seconds from then until the pointer had moved.
    keyframe_bytes: bytes of the keyframe written besides.
    skip_bytes: bytes of the skips written besides.
  """

  version: int
  kind: str
  target_id: str
  base_id: str
  bytes: int
  full_bytes: int
  changed: int = dataclasses.field(default=0, compare=False)
  elements: int = dataclasses.field(default=0, compare=False)
  cut_bytes: int = dataclasses.field(default=0, compare=False)
  encode_s: float = dataclasses.field(default=0.0, compare=False)
  upload_s: float = dataclasses.field(default=0.0, compare=False)
  keyframe_bytes: int = dataclasses.field(default=0, compare=False)
  skip_bytes: int = dataclasses.field(default=0, compare=False)


class BundleWriter:
  """Publishes one run; goes on from the last version the store committed.

  A trainer that resumes from a checkpoint of version v calls `rewind(v)` and
  publishes v: if the weights of later published versions differ from what it
  will train now, they are void; if it trains bit for bit the same, the same
  identities appear again. A damaged pointer, index or manifest ends the chain,
  and a keyframe starts another.

  Args:
    store: where to write.
    run_id: name of the run and of its pointer.
    signer: signs the pointer, and verifies what it reads back.
    options: how versions are encoded and kept.
    peers: which of several processes this is; None if it is alone. All call
      `publish` and `rewind` alike, each with its own blocks; the other methods
      do something in process 0 only.
    now: unix seconds.
  """

  def __init__(
    self,
    store: objects.Store,
    run_id: str,
    signer: keys.Signer,
    *,
    options: BundleOptions | None = None,
    peers: team.Peers | None = None,
    now: Callable[[], float] = time.time,
  ):
    self._store, self._options = store, options or BundleOptions()
    self._team = team.Team(store, run_id, peers or team.ALONE)
    self._run = runs.Run(
      store, run_id, signer, expires_s=self._options.expires_s, now=now
    )
    self._encoder = chunking.Encoder(
      store=store, tier=self._options.tier, threads=self._options.threads
    )
    # The last committed version, the one on its way, and by level the version
    # from which the next skip starts.
    self._base: chunking.HostWeights | None = None
    self._staged: chunking.HostWeights | None = None
    self._snapshots: dict[int, tuple[int, chunking.HostWeights]] = {}
    self._committed = 0

  @property
  def version(self) -> int | None:
    """The last committed version that counts, None before the first."""
    return None if self._run.head is None else self._run.head.version

  @property
  def target_id(self) -> str | None:
    """Identity of that version."""
    return None if self._run.head is None else self._run.head.target_id

  def publish(
    self, blocks: Iterable[chunking.AnyBlock], version: int
  ) -> BundleInfo:
    """Commits the weights of a version, or finds that they already are.

    Args:
      blocks: all blocks of all tensors that this process has; copied.
      version: above the last one, or one published before.

    Raises:
      ValueError: other weights stand under this version, another publisher
        moved the pointer, or blocks disagree, overlap or leave holes.
      OSError: the store is full or refuses; what was committed stays, and
        publishing this version again is the cure once there is room.
    """
    version = operator.index(version)  # a numpy integer will do
    started = time.monotonic()
    with self._team.round():
      try:
        again = self._agree(lambda: self._begin(version))
        table = self._stage(blocks, again)
        info = self._team.lead(lambda: self._published(version, table, again))
        if info is None:
          self._forget_base()
          info = self._commit(version, self._keyframe(table), started)
        elif not info:
          info = self._commit(version, table, started)
        return BundleInfo(**info)
      finally:
        self._staged = None

  def rewind(self, version: int) -> None:
    """Makes published versions after `version` void; receivers follow.

    The newest listed version up to `version` becomes the last one and receivers
    go back to it. Does nothing if no later version was published. If all listed
    versions are later, the next publish starts a chain afresh with a keyframe,
    and until then receivers keep what they have.
    """

    def rewind() -> None:
      if self.version is not None and self.version > version:
        self._run.check_alone()
        self._run.rewind(version)

    with self._team.round():
      self._agree(rewind)

  def renew(self) -> None:
    """Signs the pointer again, to expire later."""
    if self._team.leads:
      self._make_sure()
      if self._run.head is not None:
        self._run.check_alone()
        self._run.point(self._run.edges)

  def gc(self, keep: int | None = None) -> int:
    """Deletes what no run of the store needs; returns bytes freed.

    Of this run, bundles before the last `keep` versions leave the index as
    `run.pruned` says; of others, only what no index names goes. A resumed
    trainer can rewind only to a version that is listed, so `keep` should span
    its checkpoints.

    Args:
      keep: number of versions; None for that of the options.

    Raises:
      ValueError, OSError: something that would have to be followed is damaged
        or missing; nothing is deleted.
    """
    keep = self._options.keep if keep is None else keep
    if keep < 1:
      raise ValueError(f'keep must be at least 1, not {keep}.')
    if not self._team.leads:
      return 0
    self._make_sure()
    edges = runs.pruned(self._run.edges, keep)
    if edges != self._run.edges:
      self._run.check_alone()
      self._run.point(edges)
    return self._run.collect(self._options.grace_s)

  def _make_sure(self) -> None:
    """Asks the store where the run stands, if a failure left that open."""
    if self._run.is_unsure:
      self._run.open()

  def _agree(self, decide: Callable[[], Any]) -> Any:
    """Returns what process 0 decides, and takes over where the run stands."""

    def lead() -> Any:
      self._make_sure()
      decision = decide()
      head = self._run.head
      return decision, head and dataclasses.asdict(head)

    decision, head = self._team.lead(lead)
    self._run.head = None if head is None else manifest.Pointer(**head)
    if self._base is None or self._base.target_id != self.target_id:
      self._forget_base()
    return decision

  def _forget_base(self) -> None:
    self._base, self._snapshots = None, {}

  def _begin(self, version: int) -> bool:
    """Returns whether the version is one that was published before."""
    if self.version is not None and version <= self.version:
      return True
    self._run.check_alone()
    return False

  def _stage(
    self, blocks: Iterable[chunking.AnyBlock], again: bool
  ) -> chunking.ChunkTable:
    """Copies the version of all processes; encodes it if there is a base."""
    head = self._run.head
    if not again and head is not None and self._base is None:
      wanted = None
      if self._team.count > 1:
        # A host may have no room for more than its part.
        blocks = tuple(blocks)
        wanted = chunking.regions(blocks)
      self._read_base(wanted)
    cutter = chunking.Cutter()

    def chunks() -> Iterator[tuple]:
      for block in blocks:
        yield from cutter.add(block)
      yield from self._team.complete(cutter)

    staged, table = self._encoder.stage(
      chunks(), cutter.specs, None if again else self._base
    )
    if self._team.count == 1:
      cutter.check_whole()
    self._staged = staged
    starts = {v: weights.target_id for v, weights in self._snapshots.values()}
    table = dataclasses.replace(
      table, specs=cutter.specs, cut_bytes=cutter.cut_bytes, starts=starts
    )
    return self._gather(lambda: table)

  def _gather(
    self, encode: Callable[[], chunking.ChunkTable]
  ) -> chunking.ChunkTable:
    """Returns the table of all processes; an OSError of one is one of all."""
    if self._team.count == 1:
      return chunking.merge([encode()])
    try:
      data = b'+' + encode().to_bytes()
    except OSError as error:
      data = b'!' + str(error).encode()
    found = self._team.exchange(data)
    failed = [part[1:].decode() for part in found if part[:1] == b'!']
    if failed:
      raise OSError('; '.join(failed))
    tables = [chunking.ChunkTable.from_bytes(part[1:]) for part in found]
    return chunking.merge(tables)

  def _read_base(self, wanted: rebuild.Wanted | None) -> bool:
    """Reads what is wanted of the last version; False if it is damaged."""
    assert self._run.head is not None
    try:
      held = follower.load(
        self._store,
        self._run.head,
        wanted=wanted,
        threads=self._options.threads,
      )
    except (ValueError, OSError) as error:
      _log.warning(
        '%s: version %d cannot be rebuilt, so the next one is a keyframe: %s',
        *(self._run.run_id, self._run.head.version, error),
      )
      return False
    self._base = chunking.weights_of(held)
    return True

  def _published(
    self, version: int, table: chunking.ChunkTable, again: bool
  ) -> dict[str, Any] | None:
    """Returns what is published of a version; {} for a new one.

    None if a keyframe is due instead of a delta.
    """
    run = self._run
    if not again:
      fits = run.head is not None and table.base_id == run.head.target_id
      return {} if fits and table.specs == run.specs else None
    edge = self._check_same(version, table.target_id)
    if version == self.version and not self._heal():
      return None
    bundle = rebuild.read_manifest(self._store, edge)
    return dict(
      version=version,
      kind=bundle.kind,
      target_id=bundle.target_id,
      base_id=bundle.base_id,
      bytes=edge.bytes,
      full_bytes=bundle.full_bytes,
      elements=table.elements,
    )

  def _check_same(self, version: int, target_id: str) -> manifest.Edge:
    """Returns the bundle of a version that has these weights."""
    run = self._run
    assert run.head is not None
    edge = runs.head_of(run.edges, version)
    if edge is None:
      oldest = min(edge.version for edge in run.edges)
      raise ValueError(
        f'version {version} of run {run.run_id!r} is neither new (the last is '
        f'{run.head.version}) nor kept (the oldest is {oldest}). A trainer '
        'resumed from checkpoint v calls rewind(v) first.'
      )
    known = run.head.target_id
    if version != run.head.version:
      known = rebuild.read_manifest(self._store, edge).target_id
    if target_id != known:
      raise ValueError(
        f'run {run.run_id!r} has published version {version} with other '
        f'weights ({known}, now {target_id}). A trainer resumed from '
        'checkpoint v calls rewind(v) first.'
      )
    return edge

  def _heal(self) -> bool:
    """Reads the last version as a receiver would; heals pointer and index.

    A pointer that will expire, or has, while nobody published is renewed, too.
    False if the weights are damaged: the version starts a new chain then.
    """
    run, base = self._run, self._base
    if not run.check_alone() or run.is_aging():
      run.point(run.edges)
    run.heal_index()
    assert run.head is not None
    try:
      rebuild.read_manifest(self._store, run.head)
    except (ValueError, OSError) as error:
      run.start_afresh(error)
      return False
    if not self._read_base(None):
      run.start_afresh('its last version is damaged.')
      return False
    if base is not None or self._team.count > 1:
      self._base = base
    return True

  def _keyframe(self, table: chunking.ChunkTable) -> chunking.ChunkTable:
    """Encodes what is staged, whose table this is, to stand alone."""
    weights = self._staged
    assert weights is not None
    made = self._gather(lambda: self._encoder.encode(weights, None))
    return dataclasses.replace(made, cut_bytes=table.cut_bytes)

  def _commit(
    self, version: int, table: chunking.ChunkTable, started: float
  ) -> dict[str, Any]:
    encoded = time.monotonic()
    times = {'encode_s': encoded - started}

    def point() -> tuple[dict[str, Any], dict[str, Any], Any]:
      run, head = self._run, self._run.head
      base = (head.version, head.target_id) if table.base_id and head else None
      edge = run.write(table, version, base)
      edges = *run.edges, edge
      last = max(
        (e.version for e in edges if e.kind == manifest.KEY), default=None
      )
      due = last is None or version - last >= self._options.keyframe_every
      run.point(runs.pruned(edges, self._options.keep), edge, table)
      run.specs = table.specs
      times['upload_s'] = time.monotonic() - encoded
      starts = {
        start: target_id
        for level in self._options.skip_levels
        for start, target_id in table.starts.items()
        if start == version - level
        and version % level == 0
        and target_id != table.base_id
      }
      self._take_over(table.target_id)
      _log.info('%s: version %d, %s', run.run_id, version, edge.kind)
      info = BundleInfo(
        version=version,
        kind=edge.kind,
        target_id=table.target_id,
        base_id=table.base_id,
        bytes=edge.bytes,
        full_bytes=table.full_bytes,
        changed=table.changed,
        elements=table.elements,
        cut_bytes=table.cut_bytes,
        **times,
      )
      assert run.head is not None
      plan = sorted(starts.items()), due or self._has_lost()
      return dataclasses.asdict(info), dataclasses.asdict(run.head), plan

    info, head, (starts, due) = self._team.lead(point)
    self._run.head = manifest.Pointer(**head)
    self._take_over(head['target_id'])
    added = self._add_others(starts, due)
    if self._base is not None:
      for level in self._options.skip_levels:
        if version % level == 0:
          self._snapshots[level] = version, self._base
    return self._team.lead(lambda: info | added)

  def _take_over(self, target_id: str) -> None:
    """Makes what is staged, to which the pointer now leads, the base."""
    if self._staged is None:
      return
    old, self._base, self._staged = self._base, self._staged, None
    self._base.target_id = target_id
    # Blocks may go round the processes, and the chunks with them.
    if (
      old is None
      or old.specs != self._base.specs
      or (self._base.chunks.keys() - old.chunks.keys())
    ):
      self._snapshots = {}

  def _has_lost(self) -> bool:
    """Looks now and then whether the store forgot what is listed."""
    self._committed += 1
    if self._committed % LOOK_EVERY or not self._store.is_writable:
      return False
    with _forgiven(self.version):
      lost = self._run.lost()
      if lost:
        names = ', '.join(map(follower.name_of, lost[:8]))
        _log.warning(
          '%s: objects of %s are gone from %s; a keyframe is written.',
          *(self._run.run_id, names, self._store.url),
        )
        self._run.edges = tuple(e for e in self._run.edges if e not in lost)
        return True
    return False

  def _add_others(
    self, starts: list[tuple[int, str]], due: bool
  ) -> dict[str, int]:
    """Writes skips and the keyframe of the head; returns their bytes.

    They are listed by a second move of the pointer. What the store has no room
    for is left out, since the version is committed all the same: a skip for
    good, a keyframe until the next version.
    """
    run, weights, added = self._run, self._base, []
    assert run.head is not None and weights is not None
    older = {None: None, **dict(self._snapshots.values())}
    for base in [*starts, None][: len(starts) + due]:
      with _forgiven(run.head.version):
        start = older[base and base[0]]
        table = self._gather(
          lambda start=start: self._encoder.encode(weights, start)
        )
        if self._team.leads:
          base = base and tuple(base)
          added.append(run.write(table, run.head.version, base))
    if added:
      with _forgiven(run.head.version):
        run.point(runs.pruned((*run.edges, *added), self._options.keep))
    sizes = {'keyframe_bytes': 0, 'skip_bytes': 0}
    for edge in added:
      name = 'keyframe' if edge.kind == manifest.KEY else 'skip'
      sizes[f'{name}_bytes'] += edge.bytes if edge in run.edges else 0
    return sizes


@contextlib.contextmanager
def _forgiven(version: int | None) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    _log.warning(
      'version %s is out, but a skip or keyframe of it is not: %s',
      *(version, error),
    )
