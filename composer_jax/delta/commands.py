"""What `experiments/delta.py` does: bundles from and to checkpoints on disk."""

import collections
import os
import pathlib
import shutil
import time
from collections.abc import Iterator

import numpy as np

from composer_jax.delta import (
  chain,
  checkpoints,
  follower,
  publisher,
  rebuild,
)
from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity
from composer_jax.delta.format import keys as keys_lib
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects
from composer_jax.telemetry import progress

# Errors of a store that say that something of it is damaged or gone.
_DAMAGE = (ValueError, FileNotFoundError)
_LISTED = 8


def publish(
  *,
  source: str,
  store: str,
  run: str,
  key: str | os.PathLike,
  version: int | None = None,
  dtype: str | None = None,
  tier: str = 'small',
  expires_days: float = 365.0,
) -> str:
  """Publishes the weights of a checkpoint.

  Args:
    source: as `checkpoints.read` has it.
    store: its URL.
    run: its name in the store.
    key: the file of the key; made when missing.
    version: None for the one after the last.
    dtype: as `checkpoints.read` has it.
    tier: of the codec.
    expires_days: after which receivers take the run for abandoned, unless
      something was published meanwhile; 0 for never.

  Returns:
    What was published, as a sentence; so do the others.
  """
  options = chain.BundleOptions(tier=tier, expires_s=86400 * expires_days)
  place = objects.Store(store)
  place.check_writable()
  # A trainer that finds a pointer it cannot trust starts the run anew. Here a
  # mistyped --key would do that, and readers of the run would lose it.
  if place.read_pointer(run) is not None:
    _open_pointer(place, run, key)
  arrays = checkpoints.read(source, dtype=dtype)
  sender = publisher.Publisher(place, key, run, options)
  try:
    if version is None:
      version = 0 if sender.version is None else sender.version + 1
    with progress.Progress('publish', 1) as bar:
      sender.publish(arrays, version, owned=True)
      sender.wait()
      (info,) = sender.results()
      bar.update(1, MB=info.bytes / 1e6)
  finally:
    sender.close()
  ratio = info.full_bytes / max(info.bytes, 1)
  return (
    f'Version {info.version} of run {run!r}: {info.kind} of {info.bytes} '
    f'bytes, {ratio:.1f}x less than the weights; target {info.target_id}.'
  )


def diff(
  *,
  base: str,
  new: str,
  out: str,
  run: str,
  key: str | os.PathLike,
  dtype: str | None = None,
  tier: str = 'small',
) -> str:
  """Makes a store of two checkpoints: a keyframe and the delta to the other.

  Args:
    base: checkpoint, as `checkpoints.read` has it; version 0.
    new: checkpoint of the same tensors; version 1.
    out: URL of the store, in which there is no such run yet.
    run: name of the run in the store.
    key: file of the key; made when missing.
    dtype: dtype as `checkpoints.read` has it.
    tier: tier of the codec.
  """
  if objects.Store(out).read_pointer(run) is not None:
    raise ValueError(f'{out} has a run {run!r} already; choose another --out.')
  place = dict(store=out, run=run, key=key, dtype=dtype, tier=tier)
  first = publish(source=base, version=0, expires_days=0, **place)
  return f'{first}\n{publish(source=new, version=1, expires_days=0, **place)}'


def apply(
  *,
  store: str,
  run: str,
  key: str | os.PathLike,
  out: str | os.PathLike,
  version: int | None = None,
) -> str:
  """Writes a version as a plain orbax checkpoint.

  The checkpoint is read again and compared before this returns, since orbax
  would not notice what a disk damaged.

  Args:
    store: its URL.
    run: its name in the store.
    key: the file of a key that can verify.
    out: folder to make; must not exist.
    version: None for the latest.

  Raises:
    ValueError: nothing that can be trusted leads to that version, or `out`
      exists.
  """
  checkpoints.check_local('out', out)
  out = pathlib.Path(out).absolute()
  if out.exists():
    raise ValueError(f'{out} exists; choose another --out or remove it.')
  place = objects.Store(store)
  pointer = _open_pointer(place, run, key)
  out.parent.mkdir(parents=True, exist_ok=True)
  with progress.Progress('apply', 3) as bar:
    held = follower.load(place, pointer, version=version)
    bar.update(1, version=held.version)
    checkpoints.write(held.arrays(), out)
    bar.update(2, version=held.version)
    try:
      checkpoints.verify(out, held)
    except ValueError:
      shutil.rmtree(out)  # nobody is to take it for the weights
      raise
    bar.update(3, version=held.version)
  return (
    f'Version {held.version} of run {run!r}, target {held.target_id}: {out}'
    + _age(pointer)
  )


def _age(pointer: manifests.Pointer) -> str:
  """Says that a pointer has expired, which a receiver would refuse."""
  late_s = time.time() - pointer.expires
  if not pointer.expires or late_s < 0:
    return ''
  return (
    f'\nIts pointer expired {late_s / 86400:.1f} days ago: the publisher no '
    'longer renews it, or something keeps newer versions from here.'
  )


def _open_pointer(
  store: objects.Store, run_id: str, key_path: str | os.PathLike
) -> manifests.Pointer:
  """Reads a run's pointer and verifies its signature."""
  if not pathlib.Path(key_path).exists():
    raise ValueError(
      f'{key_path}: there is no key; --key must name the file that the '
      'publisher signs with, or its public half.'
    )
  verifier = keys_lib.open_key(key_path)
  found = store.read_pointer(run_id)
  if found is None:
    raise ValueError(
      f'{store.url} has no run {run_id!r}'
      + (f'; it has {store.run_ids()}.' if store.is_writable else '.')
    )
  try:
    return manifests.unseal(found[0], verifier, run_id)
  except ValueError as error:
    raise ValueError(
      f'{store.url}: the pointer of run {run_id!r} cannot be trusted: {error}; '
      'name the --key that its publisher signs with. Where that is the one, '
      'its trainer writes the pointer anew, and others take another --run.'
    ) from error


def verify(
  *,
  store: str,
  run: str,
  key: str | os.PathLike,
  source: str | None = None,
  version: int | None = None,
  dtype: str | None = None,
) -> str:
  """Checks every object of a run and that every bundle leads where it says.

  Args:
    store: its URL.
    run: its name in the store.
    key: the file of a key that can verify.
    source: a checkpoint to compare with a version; None for none.
    version: that `source` must be, None for the latest.
    dtype: of `source`, as `checkpoints.read` has it.

  Raises:
    ValueError: names all that is damaged, or the tensors that differ.
  """
  place = objects.Store(store)
  pointer = _open_pointer(place, run, key)
  text = _check_run(place, pointer)
  if source is not None:
    arrays = checkpoints.read(source, dtype=dtype)
    held = follower.load(place, pointer, version=version)
    _check_same(source, arrays, held)
    text += f' Version {held.version} is {source}, bit for bit.'
  return text + _age(pointer)


def log(*, store: str, run: str, key: str | os.PathLike) -> str:
  """Returns a table of a run's live bundles, the oldest first."""
  place = objects.Store(store)
  pointer = _open_pointer(place, run, key)
  index = rebuild.read_index(place, pointer)
  rows = [('version', 'kind', 'base', 'bytes', 'ratio', 'chunks', 'target')]
  for edge in index.edges:
    base = '' if edge.base_version is None else str(edge.base_version)
    single = edge.base_version == edge.version - 1
    kind = edge.kind if not base or single else 'skip'
    try:
      manifest = rebuild.read_manifest(place, edge)
      ratio = f'{manifest.full_bytes / max(edge.bytes, 1):.1f}'
      changed = _changed(manifest)
    except _DAMAGE:
      ratio = changed = 'damaged'
    mark = '*' if edge.version == pointer.version else ''
    rows.append(
      (f'{edge.version}{mark}', kind, base, str(edge.bytes), ratio, changed)
      + (edge.target,)
    )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return '\n'.join(
    '  '.join(text.rjust(w) for text, w in zip(row, widths, strict=True))
    for row in rows
  ) + _age(pointer)


def _changed(manifest: manifests.Manifest) -> str:
  """Says how many chunks a delta changes: less is not in a manifest."""
  if manifest.kind == manifests.KEY:
    return ''
  codecs = np.concatenate([[], *(t.chunks['codec'] for t in manifest.tensors)])
  return f'{np.count_nonzero(codecs != coding.SAME)}/{codecs.size}'


def gc(
  *,
  store: str,
  run: str,
  key: str | os.PathLike,
  keep: int,
  grace_s: float = objects.GRACE_S,
) -> str:
  """Deletes what the newest `keep` versions do not need."""
  place = objects.Store(store)
  _open_pointer(place, run, key)
  signer = keys_lib.open_signer(key)
  options = chain.BundleOptions(grace_s=grace_s)
  freed = chain.BundleWriter(place, run, signer, options=options).gc(keep)
  return f'Freed {freed} bytes.'


def keys(*, key: str | os.PathLike) -> str:
  """Makes an Ed25519 pair: receivers of the public half cannot publish."""
  public = f'{key}.public'
  if pathlib.Path(key).exists() or pathlib.Path(public).exists():
    raise ValueError(f'{key} or {public} exists; choose another --key.')
  signer = keys_lib.make_ed25519()
  keys_lib.write_key(key, signer)
  keys_lib.write_key(public, signer.public)
  return f'{key} signs; give {public} to those who receive.'


def _check_run(store: objects.Store, pointer: manifests.Pointer) -> str:
  """Follows every listed bundle of a run; says what it read and what not.

  Raises:
    ValueError: names what is damaged.
  """
  index = rebuild.read_index(store, pointer)
  problems, num_bytes = [], 0
  read = {pointer.index}
  found: dict[int, rebuild.Held] = {}
  edges = index.edges
  left = collections.Counter(e.base_version for e in edges)
  with progress.Progress('verify', len(edges)) as bar:
    for done, edge in enumerate(edges, start=1):
      read.add(edge.manifest)
      try:
        manifest = rebuild.read_manifest(store, edge)
        read.update(name for name, _ in manifest.packs)
        damaged = [
          f'its {what} is {found!r}, and what leads to it says {said!r}'
          for what, found, said in follower.mismatches(manifest, edge, pointer)
        ]
        damaged += _damaged(store, manifest)
        problems += [f'{follower.name_of(edge)}: {text}' for text in damaged]
        if not damaged:
          held = _follow(store, pointer, edge, manifest, found)
          found.setdefault(edge.version, held)
      except _DAMAGE as error:
        problems.append(f'{follower.name_of(edge)}: {error}')
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


def _unread(store: objects.Store, read: set[str]) -> str:
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


def _follow(
  store: objects.Store,
  pointer: manifests.Pointer,
  edge: manifests.Edge,
  manifest: manifests.Manifest,
  found: dict[int, rebuild.Held],
) -> rebuild.Held:
  """Returns what a bundle makes of its base; ValueError if it is not that."""
  version, base = edge.base_version, None
  if version is not None:
    if version not in found:
      found[version] = follower.load(store, pointer, version=version)
    base = found[version]
  with rebuild.Fetcher(store) as fetcher:
    return rebuild.apply(fetcher, manifest, base)


def _damaged(
  store: objects.Store, manifest: manifests.Manifest
) -> Iterator[str]:
  """Yields what is wrong with the objects of a bundle."""
  for name, length in manifest.packs:
    try:
      store.get(name, length)
    except _DAMAGE as error:
      yield str(error)


def _check_same(
  source: str, arrays: dict[str, np.ndarray], held: rebuild.Held
) -> None:
  """Raises ValueError, with the tensors that differ, unless they are equal."""
  ours = identity.nodes(arrays)
  theirs = {
    name: identity.tensor_node(name, t.dtype, t.shape, t.posts.tobytes())
    for name, t in held.tensors.items()
  }
  names = sorted({*ours, *theirs})
  differing = [name for name in names if ours.get(name) != theirs.get(name)]
  if differing:
    raise ValueError(
      f'{source} is not version {held.version}: {len(differing)} tensors '
      f'differ, such as {differing[:_LISTED]}. Name the checkpoint of that '
      'version, or another --version or --dtype.'
    )
