"""The boxes that one process publishes: their base, their next values, copies.

Three states of every box are kept on the host: the base (the last committed
version), the staged values (of the version being published, until its pointer
has moved) and, for skips, the version each of them starts from. Boxes that did
not change are the same array in all of them.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Iterable, Iterator

import numpy as np

from composer_jax.delta import (
  identity,
  manifest,
  publish_boxes,
  publish_encode,
  publish_parts,
  publish_share,
  weights_held,
)
from composer_jax.delta import store as stores
from composer_jax.delta import threads as threads_lib

Boxes = dict[publish_boxes.Key, np.ndarray]


class Local:
  """Stages, encodes and keeps the boxes of this process.

  Args:
    store: where packs go.
    coder: how boxes are encoded.
    threads: that encode.
    levels: of skips.
  """

  def __init__(
    self,
    store: stores.Store,
    coder: publish_encode.Coder,
    *,
    threads: int,
    levels: tuple[int, ...],
  ):
    self._store, self._coder, self._threads = store, coder, threads
    self._levels = levels
    self.forget()
    self.unstage()

  def forget(self) -> None:
    """Drops the base, and with it all that depends on it."""
    self._base: Boxes | None = None
    self._specs: publish_share.Specs = {}
    self._posts: dict[publish_boxes.Key, bytes] = {}
    self._base_id = ''
    # By level: version, identity and boxes.
    self._snapshots: dict[int, tuple[int, str, Boxes]] = {}

  def unstage(self) -> None:
    # There may be no boxes in what is staged, too.
    self._staged: Boxes | None = None
    self._staged_posts: dict[publish_boxes.Key, bytes] = {}
    self._staged_specs: publish_share.Specs = {}

  @property
  def has_base(self) -> bool:
    return self._base is not None

  def set_base(self, held: weights_held.Held) -> None:
    """Takes verified weights, whole or its own part, as the base."""
    self.forget()
    self._base, self._specs = {}, held.signature()
    self._base_id = held.target_id
    for name in held.names:
      tensor = held.tensors[name]
      numbers = tensor.numbers
      if numbers is None:
        numbers = np.arange(tensor.grid.num_boxes)
      for at, number in enumerate(numbers.tolist()):
        box = publish_boxes.flat(tensor.box(number))
        self._base[name, number] = box
        self._posts[name, number] = tensor.posts[at].tobytes()

  def set_base_blocks(
    self,
    blocks: Iterable[identity.Block | tuple],
    head: manifest.Manifest,
    team: publish_parts.Team,
  ) -> bool:
    """Takes blocks as the base if they are the weights of `head`."""
    self.forget()
    tensors, specs = {t.name: t for t in head.tensors}, head.signature()
    cutter = publish_boxes.Cutter()
    coded = threads_lib.in_order(
      lambda item: self._coder.keep(*item),
      _boxes(blocks, cutter, team),
      self._threads,
    )
    base, posts, good = {}, {}, True
    for one in coded:
      name, number = one.key
      good = (
        good
        and specs.get(name) == cutter.signature[name]
        and tensors[name].chunks['post'][number].tobytes() == one.post
      )
      base[one.key], posts[one.key] = one.values, one.post
    if good:
      self._base, self._posts, self._specs = base, posts, cutter.signature
      self._base_id = head.target_id
    return good

  def stage(
    self,
    blocks: Iterable[identity.Block | tuple],
    team: publish_parts.Team,
    *,
    as_delta: bool,
  ) -> publish_share.Share:
    """Copies all boxes of the next version; encodes them if there is a base.

    Args:
      blocks: of this process.
      team: completes the boxes that are cut between processes.
      as_delta: encode against the base; else only copy and hash.
    """
    self.unstage()
    self._staged = {}
    cutter = publish_boxes.Cutter()
    base = self._base if as_delta else None

    def encode(item) -> publish_encode.Coded:
      key, values = item
      spec = self._specs.get(key[0])
      if base is None or key not in base or spec != cutter.signature[key[0]]:
        return self._coder.keep(key, values)
      return self._coder.encode(key, values, base[key])

    with publish_encode.Packer(self._store, sorted(base or ())) as packer:
      share = self._gather(
        threads_lib.in_order(
          encode, _boxes(blocks, cutter, team), self._threads
        ),
        packer,
        base_id=self._base_id if as_delta else '',
        staged=self._staged,
      )
    if team.count == 1:
      cutter.check_whole()
    self._staged_specs = cutter.signature
    return dataclasses.replace(
      share,
      specs=cutter.signature,
      cut_bytes=cutter.cut_bytes,
    )

  def encode_key(self) -> publish_share.Share:
    """Encodes what is staged, else the base, to stand alone."""
    boxes, posts, specs = self._newest()
    return self._encode(boxes, posts, specs, lambda key: None, '')

  def encode_skip(self, start: int, target_id: str) -> publish_share.Share:
    """Encodes the base against one of `skip_starts`; only names it if gone."""
    boxes, posts, specs = self._newest()
    for version, base_id, base in self._snapshots.values():
      if (version, base_id) == (start, target_id):
        return self._encode(boxes, posts, specs, base.__getitem__, base_id)
    # After a failure this process had to ask the store where the run stands.
    none = publish_encode.UNCODED, 0, publish_encode.NO_BLOB
    made = {
      key: publish_encode.Made(*none, post) for key, post in posts.items()
    }
    return publish_share.Share(
      specs=specs, chunks=publish_encode.tables(made, {})
    )

  def commit(self, head: manifest.Pointer) -> None:
    """Makes what is staged, to which `head` leads, the base."""
    assert self._staged is not None
    base = self._base or {}
    # Blocks may go round the processes, and the boxes with them.
    if self._specs != self._staged_specs or self._staged.keys() - base:
      self._snapshots = {}
    self._base, self._posts = self._staged, self._staged_posts
    self._specs, self._base_id = self._staged_specs, head.target_id
    self.unstage()

  def skip_starts(self, version: int, base_id: str) -> dict[int, str]:
    """Returns {version: identity} from which skips to `version` are due.

    Not from `base_id`, from where the delta of that version leads already.
    """
    return {
      start: target_id
      for level, (start, target_id, _) in self._snapshots.items()
      if version % level == 0 and start < version and target_id != base_id
    }

  def take_snapshots(self, version: int, target_id: str) -> None:
    """Keeps the base, which is `version`, for the next skips due from it."""
    if self._base is None or self._base_id != target_id:
      return
    for level in self._levels:
      if version % level == 0:
        self._snapshots[level] = version, target_id, self._base

  def _newest(self):
    if self._staged is not None:
      return self._staged, self._staged_posts, self._staged_specs
    return self._base or {}, self._posts, self._specs

  def _encode(self, boxes, posts, specs, start, base_id) -> publish_share.Share:
    keys = sorted(boxes)

    def encode(key) -> publish_encode.Coded:
      return self._coder.encode(key, boxes[key], start(key), post=posts[key])

    with publish_encode.Packer(self._store, keys) as packer:
      share = self._gather(
        threads_lib.in_order(encode, keys, self._threads),
        packer,
        base_id=base_id,
      )
    return dataclasses.replace(share, specs=specs)

  def _gather(
    self,
    coded: Generator[publish_encode.Coded, None, None],
    packer: publish_encode.Packer,
    *,
    base_id: str,
    staged: Boxes | None = None,
  ) -> publish_share.Share:
    made, changed, elements, is_coded = {}, 0, 0, True
    # Closed here where a pack fails, its threads with it: whoever drops the
    # error later may be one of them, or hold what they wait for.
    with contextlib.closing(coded):
      for one in coded:
        if staged is not None:
          staged[one.key] = one.values
          self._staged_posts[one.key] = one.post
        is_coded = is_coded and one.codec != publish_encode.UNCODED
        changed += one.changed
        elements += one.values.size
        made[one.key] = publish_encode.Made.of(one)
        packer.add(one.key, one.blob)
    # Packs of boxes that do not make a bundle are left to `gc`.
    packs, places = packer.finish() if is_coded else ((), {})
    return publish_share.Share(
      specs={},
      base_id=base_id if is_coded else '',
      changed=changed,
      elements=elements,
      packs=packs,
      chunks=publish_encode.tables(made, places),
    )


def _boxes(
  blocks: Iterable[identity.Block | tuple],
  cutter: publish_boxes.Cutter,
  team: publish_parts.Team,
) -> Iterator[tuple[publish_boxes.Key, np.ndarray]]:
  for block in blocks:
    yield from cutter.add(block)
  yield from team.complete(cutter)
