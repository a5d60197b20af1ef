"""Reads all that a run keeps in its store, and names what is damaged."""

import collections
from collections.abc import Iterator

import numpy as np

from composer_jax.delta import manifest as manifests
from composer_jax.delta import restore, weights_held
from composer_jax.delta import store as stores
from composer_jax.telemetry import progress

# Errors of a store that say that something of it is damaged or gone.
DAMAGE = (ValueError, FileNotFoundError)
_LISTED = 8


def check_run(store: stores.Store, pointer: manifests.Pointer) -> str:
  """Follows every listed bundle of a run; says what it read and what not.

  Raises:
    ValueError: names what is damaged.
  """
  index = restore.read_index(store, pointer.index, pointer.run_id)
  problems, num_bytes = [], 0
  read = {pointer.index}
  found: dict[int, weights_held.Held] = {}
  edges = index.edges
  left = collections.Counter(e.base_version for e in edges)
  with progress.Progress('verify', len(edges)) as bar:
    for done, edge in enumerate(edges, start=1):
      read.add(edge.manifest)
      try:
        manifest = restore.read_manifest(store, edge.manifest)
        read.update(name for name, _ in manifest.packs)
        damaged = [*_wrong(edge, manifest, pointer), *_damaged(store, manifest)]
        problems += [f'{_name(edge)}: {text}' for text in damaged]
        if not damaged:
          held = _follow(store, pointer, edge, manifest, found)
          found.setdefault(edge.version, held)
      except DAMAGE as error:
        problems.append(f'{_name(edge)}: {error}')
      num_bytes += edge.bytes
      left[edge.base_version] -= 1
      for old in [v for v in found if not left[v] and v != pointer.version]:
        del found[old]
      bar.update(done, MB=num_bytes / 1e6, damaged=len(problems))
  if pointer.version not in {e.version for e in edges}:
    problems.append(f'no bundle of the index leads to {pointer.version}')
  if problems:
    more = len(problems) - _LISTED
    raise ValueError(
      f'{store.url}: {len(problems)} things of run {pointer.run_id!r} are '
      f'damaged: {"; ".join(problems[:_LISTED])}'
      + (f'; and {more} more' if more > 0 else '')
      + '. Receivers go around them where they can; publish the last version '
      'again, and it starts a chain without them.'
    )
  return (
    f'Run {pointer.run_id!r} is sound up to version {pointer.version}, target '
    f'{pointer.target_id}: {len(edges)} bundles of {num_bytes} bytes. '
    + _unread(store, read)
  )


def _unread(store: stores.Store, read: set[str]) -> str:
  """Says which objects of a store were not looked at."""
  if not store.is_writable:
    return (
      f'Objects that the list of bundles does not name were not read, and '
      f'{store.url} cannot list them: verify the store behind it.'
    )
  sizes = store.sizes()
  if not (unread := sizes.keys() - read):
    return f'All {len(sizes)} objects of {store.url} were read.'
  num_bytes = sum(sizes[name] for name in unread)
  return (
    f'{len(unread)} of the {len(sizes)} objects of {store.url} '
    f'({num_bytes} bytes) were not read, since no listed bundle of this run '
    'names them; they are of other runs, or older, and `gc` deletes those that '
    'no run needs.'
  )


def _wrong(
  edge: manifests.Edge, manifest: manifests.Manifest, pointer: manifests.Pointer
) -> Iterator[str]:
  """Yields why receivers would refuse a manifest for what leads to it."""
  pairs = [
    ('run', manifest.run_id, pointer.run_id),
    ('version', manifest.version, edge.version),
    ('base version', manifest.base_version, edge.base_version),
    ('target', manifest.target_id[:16], edge.target),
    ('kind', manifest.kind, edge.kind),
  ]
  if edge.version == pointer.version:
    pairs.append(('target', manifest.target_id, pointer.target_id))
  for what, found, named in pairs:
    if found != named:
      yield f'its {what} is {found!r}, and what leads to it says {named!r}'


def _follow(
  store: stores.Store,
  pointer: manifests.Pointer,
  edge: manifests.Edge,
  manifest: manifests.Manifest,
  found: dict[int, weights_held.Held],
) -> weights_held.Held:
  """Returns what a bundle makes of its base; ValueError if it is not that."""
  version, base = edge.base_version, None
  if version is not None:
    if version not in found:
      found[version] = restore.load(store, pointer, version=version)
    base = found[version]
  return restore.apply(store, manifest, base)


def _damaged(
  store: stores.Store, manifest: manifests.Manifest
) -> Iterator[str]:
  """Yields what is wrong with the objects of a bundle."""
  for name, length in manifest.packs:
    try:
      store.get(name, length)
    except DAMAGE as error:
      yield str(error)


def check_same(
  source: str, arrays: dict[str, np.ndarray], held: weights_held.Held
) -> None:
  """Raises ValueError, with the tensors that differ, unless they are equal."""
  other = weights_held.from_arrays(arrays)
  if other.target_id == held.target_id:
    return
  ours, theirs = other.tensors, held.tensors
  differing = [
    name
    for name in sorted({*ours, *theirs})
    if name not in ours
    or name not in theirs
    or (ours[name].dtype, ours[name].shape)
    != (theirs[name].dtype, theirs[name].shape)
    or not np.array_equal(ours[name].posts, theirs[name].posts)
  ]
  raise ValueError(
    f'{source} is not version {held.version}: {len(differing)} tensors differ, '
    f'such as {differing[:_LISTED]}. Name the checkpoint of that version, or '
    'another --version or --dtype.'
  )


def _name(edge: manifests.Edge) -> str:
  if edge.base_version is None:
    return f'keyframe {edge.version}'
  return f'delta {edge.base_version}-{edge.version}'
