"""Commits each version of a run as a bundle; survives a kill anywhere.

The order of writes is packs, manifest, pointer. Until the pointer is replaced,
which is atomic, readers see the version before; afterwards the new one. What a
killed publisher leaves behind is unreachable and `gc` removes it.
Publishing the same weights under the same version again changes nothing, unless
the last version was damaged: then it is written anew, as a keyframe.

Every version but the first is one delta to the version before. A further
keyframe follows the delta of its version, so that receivers that follow closely
never wait for it. A store that forgot something that joiners need gets one at
once. A second publisher of a run is noticed at its next move of the pointer.
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

# Versions between two looks whether all that joiners need is still there.
LOOK_EVERY = 4

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOptions:
  """How versions are encoded and kept.

  Attributes:
    tier: tier of the codec; 'small' has fewer bytes, 'fast' costs less time.
    keyframe_every: versions from a keyframe to the next; joiners start there.
    expires_s: seconds after which receivers doubt a pointer if nothing was
      published since; 0 for never.
    keep: number of last versions that `gc` leaves.
    grace_s: seconds for which it deletes no object.
    threads: number of threads that encode.
  """

  tier: str = 'small'
  keyframe_every: int = 400
  expires_s: float = 7 * 86400.0
  keep: int = 64
  grace_s: float = objects.GRACE_S
  threads: int = 2

  def __post_init__(self):
    if self.tier not in coding.TIERS:
      raise ValueError(
        f'tier is {self.tier!r}; it must be one of {", ".join(coding.TIERS)}.'
      )
    least = dict(keyframe_every=1, keep=1, threads=1, expires_s=0)
    for name, value in least.items():
      if getattr(self, name) < value:
        raise ValueError(
          f'BundleOptions.{name} must be at least {value}; '
          f'got {getattr(self, name)}.'
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BundleInfo:
  """Cost of one version.

  Attributes:
    kind: manifest.KEY or manifest.DELTA.
    target_id: identity of the weights.
    base_id: identity of the version before; '' for a keyframe.
    bytes: bytes of the bundle that followers read: manifest and packs.
    full_bytes: bytes of the weights, uncompressed.
    changed: elements that differ from the version before; all of them in a
      keyframe; 0, like what follows, if the version had been published before.
    elements: number of elements of the weights.
    cut_bytes: bytes of chunks that had to be completed from several blocks.
    encode_s: seconds from the call until all chunks were encoded.
    upload_s: seconds from then until the pointer had moved.
    keyframe_bytes: bytes of the keyframe written besides.
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


class BundleWriter:
  """Publishes one run; goes on from the last version the store committed.

  A trainer that resumes from a checkpoint of version v calls `rewind(v)`, which
  makes later versions void, and publishes v. A damaged pointer or manifest
  ends the chain, and a keyframe starts another.

  Of several processes each has one, with its `peers`. All call `publish` and
  `rewind` alike, each with its own blocks; `gc` works in process 0 alone.
  """

  def __init__(
    self,
    store: objects.Store,
    run_id: str,
    key: keys.Hmac,
    *,
    options: BundleOptions | None = None,
    peers: team.Peers | None = None,
    now: Callable[[], float] = time.time,
  ):
    self._store, self._options = store, options or BundleOptions()
    self._team = team.Team(store, run_id, peers or team.ALONE)
    self._run = runs.Run(
      store, run_id, key, expires_s=self._options.expires_s, now=now
    )
    self._encoder = chunking.Encoder(
      store=store, tier=self._options.tier, threads=self._options.threads
    )
    # The last committed version, and the one on its way.
    self._base: chunking.HostWeights | None = None
    self._staged: chunking.HostWeights | None = None
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
      version: policy version above the last one, or one published before.
    """
    version = operator.index(version)  # a numpy integer will do
    started = time.monotonic()
    with self._team.round():
      try:
        again = self._agree(lambda: self._begin(version))
        table = self._stage(blocks, again)
        info = self._agree(lambda: self._published(version, table, again))
        if info is None:
          self._base = None
          cut_bytes = table.cut_bytes
          table = dataclasses.replace(self._keyframe(), cut_bytes=cut_bytes)
        if not info:
          info = self._commit(version, table, started)
        elif version == self.version:
          self._take_over(info['target_id'])
        return BundleInfo(**info)
      finally:
        self._staged = None

  def rewind(self, version: int) -> None:
    """Makes published versions after `version` void; receivers follow.

    The newest version up to `version` becomes the last one. If all are later,
    the next publish starts a chain afresh with a keyframe, and until then
    receivers keep what they have.
    """

    def rewind() -> None:
      if self.version is not None and self.version > version:
        self._run.check_alone()
        self._run.rewind(version)

    with self._team.round():
      self._agree(rewind)

  def gc(self, keep: int | None = None) -> int:
    """Deletes what nobody needs any more; returns bytes freed.

    What stays are the last `keep` versions (None: as the options say), and all
    from the newest keyframe before them on. A resumed trainer can rewind only
    to a version that is there, so `keep` should span its checkpoints. If
    something that has to be followed is damaged, nothing is deleted.
    """
    keep = self._options.keep if keep is None else keep
    if keep < 1:
      raise ValueError(f'keep must be at least 1, not {keep}.')
    if not self._team.leads:
      return 0
    if self._run.is_unsure:
      self._run.open()
    return self._run.collect(keep, self._options.grace_s)

  def _agree(self, decide: Callable[[], Any]) -> Any:
    """Returns what process 0 decides, and takes over where the run stands."""

    def lead() -> Any:
      if self._run.is_unsure:
        self._run.open()
      decision = decide()
      head = self._run.head
      return decision, head and dataclasses.asdict(head)

    decision, head = self._team.lead(lead)
    self._run.head = None if head is None else manifest.Pointer(**head)
    if self._base is not None and self._base.target_id != self.target_id:
      self._base = None
    return decision

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
    if not again and self._run.head is not None and self._base is None:
      wanted = None
      if self._team.count > 1:
        # A host may have no room for more than its part.
        blocks = tuple(blocks)
        wanted = chunking.wanted_by(blocks)
      self._base = self._read_base(wanted)
    cutter = chunking.Cutter()

    def chunks() -> Iterator[tuple]:
      for block in blocks:
        yield from cutter.add(block)
      yield from self._team.complete(cutter)

    self._staged, table = self._encoder.stage(
      chunks(), cutter.specs, None if again else self._base
    )
    table = dataclasses.replace(
      table, specs=cutter.specs, cut_bytes=cutter.cut_bytes
    )
    return self._gather(lambda: table)

  def _keyframe(self) -> chunking.ChunkTable:
    """Encodes what is staged, or else the base, to stand alone."""
    weights = self._staged or self._base
    assert weights is not None
    return self._gather(lambda: self._encoder.encode_key(weights))

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
    failed = [one[1:].decode() for one in found if one[:1] == b'!']
    if failed:
      raise OSError('; '.join(failed))
    tables = [chunking.ChunkTable.from_bytes(one[1:]) for one in found]
    return chunking.merge(tables)

  def _read_base(
    self, wanted: rebuild.Wanted | None
  ) -> chunking.HostWeights | None:
    """Reads what is wanted of the last version; None if it is damaged."""
    head, threads = self._run.head, self._options.threads
    assert head is not None
    try:
      held = follower.load(self._store, head, wanted=wanted, threads=threads)
    except (ValueError, OSError) as error:
      _log.warning(
        '%s: version %d cannot be rebuilt, so the next one is a keyframe: %s',
        *(self._run.run_id, head.version, error),
      )
      return None
    return chunking.weights_of(held)

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
    if (version, table.target_id) == (self.version, self.target_id):
      # It is read as by a receiver; damaged, it starts a new chain.
      run.heal()
      if self._read_base(None) is None:
        run.start_afresh('its last version is damaged.')
        return None
    return _info(*run.found(version, table.target_id), elements=table.elements)

  def _commit(
    self, version: int, table: chunking.ChunkTable, started: float
  ) -> dict[str, Any]:
    encoded = time.monotonic()

    def point() -> tuple[dict[str, Any], bool]:
      run = self._run
      link, bundle = run.write(table, version, table.base_id)
      keyframe = run.head.keyframe if table.base_id and run.head else link
      run.point(keyframe, link, bundle)
      due = version - keyframe.version >= self._options.keyframe_every
      self._committed += 1
      if not due and self._committed % LOOK_EVERY == 0:
        with _forgiven(version):
          due = run.has_lost()
      self._take_over(bundle.target_id)
      _log.info('%s: version %d, %s', run.run_id, version, bundle.kind)
      info = _info(
        link,
        bundle,
        changed=table.changed,
        elements=table.elements,
        cut_bytes=table.cut_bytes,
        encode_s=encoded - started,
        upload_s=time.monotonic() - encoded,
      )
      return info, due

    info, due = self._agree(point)
    self._take_over(info['target_id'])
    added = self._add_keyframe() if due else 0
    return self._team.lead(lambda: info | {'keyframe_bytes': added})

  def _take_over(self, target_id: str) -> None:
    """Makes what is staged, to which the pointer now leads, the base."""
    if self._staged is not None:
      self._base, self._staged = self._staged, None
      self._base.target_id = target_id

  def _add_keyframe(self) -> int:
    """Writes a keyframe of the head; returns its bytes, 0 but in process 0.

    Where the store has no room for it, the next version gets one.
    """
    version = self.version
    assert version is not None
    with _forgiven(version):
      table = self._keyframe()
      if self._team.leads:
        link, bundle = self._run.write(table, version, '')
        self._run.point(link)
        return link.bytes + bundle.bundle_bytes
    return 0


def _info(
  link: manifest.Link, bundle: manifest.Manifest, **costs
) -> dict[str, Any]:
  """Returns fields of a BundleInfo, as JSON carries them between processes."""
  names = ('version', 'kind', 'target_id', 'base_id', 'full_bytes')
  fields = {name: getattr(bundle, name) for name in names}
  return {**fields, 'bytes': link.bytes + bundle.bundle_bytes, **costs}


@contextlib.contextmanager
def _forgiven(version: int) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    _log.warning('version %d is out, but no keyframe of it: %s', version, error)
