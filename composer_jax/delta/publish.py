"""Publishes each version of a policy as a bundle; survives a kill anywhere.

The order of writes is packs, manifest, index, pointer. Until the pointer is
replaced, which is atomic, readers see the version before; afterwards the new
one. What a killed publisher leaves behind is unreachable and `gc` removes it.
Publishing the same weights under the same version again changes nothing, unless
the last version was damaged: then it is written anew, as a keyframe.

Every version but the first is one delta to the version before. Skips (deltas
over several versions) and keyframes are further bundles of a version, written
when its delta is out: who follows closely never waits for them nor reads them.

One publisher at a time writes to a run; a second one is noticed at its next
move of the pointer.
"""

import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Iterable

from composer_jax.delta import (
  codec,
  identity,
  manifest,
  publish_boxes,
  publish_crew,
  publish_encode,
  publish_gc,
  publish_index,
  publish_local,
  publish_others,
  publish_parts,
  publish_past,
  publish_run,
  publish_share,
  restore,
  signing,
)
from composer_jax.delta import store as stores

EXPIRES_S = 7 * 86400.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BundleInfo:
  """What one version cost.

  Attributes:
    version: of the policy.
    kind: manifest.KEY or manifest.DELTA.
    target_id: identity of the weights.
    base_id: identity of the version before; '' for a keyframe.
    bytes: of the bundle that followers read: manifest and packs.
    full_bytes: of the weights, uncompressed.
    changed: elements that differ from the version before; all of them in a
      keyframe; 0, like what follows, if the version had been published before.
    elements: of the weights.
    cut_bytes: of boxes that had to be completed from several blocks.
    encode_s: seconds from the call until all boxes were encoded.
    upload_s: seconds from then until the pointer had moved.
    keyframe_bytes: of the keyframe written besides.
    skip_bytes: of the skips written besides.
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

  def summary(self) -> str:
    """One line for people."""
    share = self.changed / max(self.elements, 1)
    return (
      f'version {self.version} ({self.target_id[:12]}), {self.kind} of '
      f'{self.bytes} bytes for {self.full_bytes}, {share:.2%} of the elements '
      f'changed; encoded in {self.encode_s:.2f} s, out in {self.upload_s:.2f} s'
    )


class Publisher:
  """Publishes one run; goes on from the last version the store committed.

  A trainer that resumes from a checkpoint of version v calls `rewind(v)` and
  publishes v: if the weights of later published versions differ from what it
  will train now, they are void; if it trains bit for bit the same, the same
  identities appear again. A damaged pointer, index or manifest ends the chain,
  and a keyframe starts another.

  Args:
    store: where to write.
    run_id: names the run and its pointer.
    signer: signs the pointer.
    verifier: reads it back; None if the signer verifies, too.
    tier: of the codec, in `codec.TIERS`.
    keyframe_every: versions from one keyframe to the next.
    skip_levels: at the multiples of each, a delta from the multiple before, of
      whose weights a copy is kept in memory. All are multiples of the least.
    expires_s: after which receivers believe the pointer no more; 0 for never.
    keep: so many last versions stay listed whole (see `publish_index`).
    grace_s: younger objects are not deleted by `gc`.
    threads: that encode.
    verify: decode each blob again and compare before anything is committed.
    parts: which of several processes this is; None if it is alone. All call
      `publish` and `rewind` alike, each with its own blocks; the other methods
      do something in process 0 only.
    base_blocks: weights of the last committed version, if the caller has them;
      others are ignored. Without, they are read from the store.
    now: unix seconds.
  """

  def __init__(
    self,
    store: stores.Store,
    run_id: str,
    signer: signing.Signer,
    *,
    verifier: signing.Verifier | None = None,
    tier: str = 'small',
    keyframe_every: int = 400,
    skip_levels: Iterable[int] = (8,),
    expires_s: float = EXPIRES_S,
    keep: int = 64,
    grace_s: float = stores.GRACE_S,
    threads: int = 2,
    verify: bool = True,
    parts: publish_parts.Parts | None = None,
    base_blocks: Iterable[identity.Block | tuple] | None = None,
    now: Callable[[], float] = time.time,
  ):
    levels = tuple(sorted(set(skip_levels)))
    _check(tier, keyframe_every, levels, keep, threads)
    self._store, self._threads, self._grace_s = store, threads, grace_s
    self._keyframe_every, self._keep = keyframe_every, keep
    self._verifier: signing.Verifier = verifier or signer  # pyrefly: ignore
    self._team = publish_parts.Team(store, run_id, parts or publish_parts.ALONE)
    self._local = publish_local.Local(
      store,
      publish_encode.Coder(tier, verify),
      threads=threads,
      levels=levels,
    )
    self._run = publish_run.Run(
      store, run_id, signer, self._verifier, expires_s=expires_s, now=now
    )
    self._crew = publish_crew.Crew(self._team, self._local, self._run)
    if base_blocks is not None and self._run.head is not None:
      head = restore.read_manifest(store, self._run.head.manifest)
      with self._team.round():
        self._local.set_base_blocks(base_blocks, head, self._team)

  @property
  def version(self) -> int | None:
    """The last committed version that counts, None before the first."""
    return None if self._run.head is None else self._run.head.version

  @property
  def target_id(self) -> str | None:
    """Identity of that version."""
    return None if self._run.head is None else self._run.head.target_id

  def publish(
    self,
    blocks: Iterable[identity.Block | tuple],
    version: int,
  ) -> BundleInfo:
    """Commits the weights of a version, or finds that they already are.

    Args:
      blocks: all pieces of all tensors that this process has; copied.
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
        self._make_sure()
        again = self.version is not None and version <= self.version
        if not again:
          if self._team.leads:
            self._run.check_alone()
          blocks = self._load_base(blocks)
        share = self._local.stage(blocks, self._team, as_delta=not again)
        if not self._team.leads:
          return BundleInfo(**self._crew.follow(share))
        whole = self._crew.gather(share)
        info = self._published(version, whole) if again else None
        if info is None:
          info = self._commit(version, whole, started)
        self._crew.end(dataclasses.asdict(info))
        return info
      finally:
        self._local.unstage()

  def rewind(self, version: int) -> None:
    """Makes published versions after `version` void; receivers follow.

    The newest listed version up to `version` becomes the last one and receivers
    go back to it. Does nothing if no later version was published. If all listed
    versions are later, the next publish starts a chain afresh with a keyframe,
    and until then receivers keep what they have.
    """
    with self._team.round():
      self._make_sure()
      if not self._team.leads:
        self._run.is_unsure = self._team.next_order()['moved']
        return
      moved = self.version is not None and self.version > version
      if moved:
        self._run.check_alone()
        publish_past.rewind(self._run, self._store, version)
        self._local.forget()
      self._team.order({'do': 'rewound', 'moved': moved})

  def renew(self) -> None:
    """Signs the pointer again, to expire later."""
    if not self._team.leads:
      return
    self._make_sure()
    if self._run.head is not None:
      self._run.check_alone()
      self._run.point_again(self._run.edges)

  def gc(self, keep: int | None = None) -> int:
    """Deletes what no run of the store needs; returns bytes freed.

    Of this run, bundles before the last `keep` versions leave the index as
    `publish_index` says; of others, only what no index names goes. A resumed
    trainer can rewind only to a version that is listed, so `keep` should span
    its checkpoints.

    Args:
      keep: None for the publisher's own.

    Raises:
      ValueError, OSError: something that would have to be followed is damaged
        or missing; nothing is deleted.
    """
    keep = self._keep if keep is None else keep
    if keep < 1:
      raise ValueError(f'keep must be at least 1, not {keep}.')
    if not self._team.leads:
      return 0
    self._make_sure()
    edges = publish_index.pruned(self._run.edges, keep)
    if edges != self._run.edges:
      self._run.check_alone()
      self._run.point_again(edges)
    return publish_gc.collect(
      self._store, self._verifier, self._grace_s, self._run.head
    )

  def _make_sure(self) -> None:
    """Asks the store where the run stands, if a failure left that open."""
    if self._run.is_unsure:
      self._run.open()
      self._local.forget()

  def _load_base(
    self, blocks: Iterable[identity.Block | tuple]
  ) -> Iterable[identity.Block | tuple]:
    """Reads the base from the store if it must; returns the blocks."""
    if self._run.head is None or self._local.has_base:
      return blocks
    wanted = None
    if self._team.count > 1:
      # A host may have no room for more than its part.
      blocks = tuple(blocks)
      wanted = publish_boxes.regions(blocks)
    held = publish_past.read_base(self._run, self._store, self._threads, wanted)
    if held is not None:
      self._local.set_base(held)
    return blocks

  def _published(
    self, version: int, whole: publish_share.Whole
  ) -> BundleInfo | None:
    """Returns what is published of a version; None if it has to be again."""
    edge = publish_past.check_same(
      self._run, self._store, version, whole.target_id()
    )
    if version == self.version:
      held = publish_past.read_head(self._run, self._store, self._threads)
      if held is None:
        self._local.forget()
        return None
      if not self._local.has_base:
        self._local.set_base(held)
    found = restore.read_manifest(self._store, edge.manifest)
    return BundleInfo(
      version=version,
      kind=found.kind,
      target_id=found.target_id,
      base_id=found.base_id,
      bytes=edge.bytes,
      full_bytes=found.full_bytes,
      elements=whole.elements,
    )

  def _commit(
    self,
    version: int,
    whole: publish_share.Whole,
    started: float,
  ) -> BundleInfo:
    run, base = self._run, None
    if run.head is not None and whole.base_id == run.head.target_id:
      base = run.head.version, run.head.target_id
    if base is None or whole.specs != run.specs:
      keyframe, base = self._crew.keyframe(), None
      whole = dataclasses.replace(keyframe, cut_bytes=whole.cut_bytes)
    encoded = time.monotonic()
    edge = run.write(whole, version, base)
    target_id, base_id = whole.target_id(), '' if base is None else base[1]
    last = publish_index.last_keyframe((*run.edges, edge))
    due = last is None or version - last >= self._keyframe_every
    run.point(
      publish_index.pruned((*run.edges, edge), self._keep),
      version=version,
      target_id=target_id,
      base_id=base_id,
      name=edge.manifest,
    )
    moved = time.monotonic()
    run.specs = whole.specs
    self._crew.commit()
    info = BundleInfo(
      version=version,
      kind=edge.kind,
      target_id=target_id,
      base_id=base_id,
      bytes=edge.bytes,
      full_bytes=whole.full_bytes,
      changed=whole.changed,
      elements=whole.elements,
      cut_bytes=whole.cut_bytes,
      encode_s=encoded - started,
      upload_s=moved - encoded,
    )
    _log.info('%s: %s', run.run_id, info.summary())
    others = publish_others.add(
      run,
      self._crew,
      starts=self._local.skip_starts(version, base_id),
      is_due=due,
      keep=self._keep,
    )
    return dataclasses.replace(
      info,
      keyframe_bytes=others[manifest.KEY],
      skip_bytes=others[manifest.DELTA],
    )


def _check(tier, keyframe_every, levels, keep, threads) -> None:
  if tier not in codec.TIERS:
    raise ValueError(f'tier {tier!r} must be one of {codec.TIERS}.')
  counts = dict(keyframe_every=keyframe_every, keep=keep, threads=threads)
  for name, value in counts.items():
    if value < 1:
      raise ValueError(f'{name} must be at least 1, not {value}.')
  if levels and (levels[0] < 2 or any(n % levels[0] for n in levels)):
    raise ValueError(
      f'skip_levels {levels} must be at least 2 and multiples of the least.'
    )
