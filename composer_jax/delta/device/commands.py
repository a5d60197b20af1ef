"""What `experiments/delta.py` does: bundles from and to checkpoints on disk."""

import os
import pathlib
import shutil
import time

import numpy as np

from composer_jax.delta import codec, restore, signing
from composer_jax.delta import manifest as manifests
from composer_jax.delta import publish as publishing
from composer_jax.delta import store as stores
from composer_jax.delta.device import audit, orbax_trees, sources
from composer_jax.delta.device import sender as bundles
from composer_jax.telemetry import progress


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
    source: as `delta.device.sources.read` has it.
    store: its URL.
    run: its name in the store.
    key: the file of the key; made when missing.
    version: None for the one after the last.
    dtype: as `delta.device.sources.read` has it.
    tier: of the codec.
    expires_days: after which receivers take the run for abandoned, unless
      something was published meanwhile; 0 for never.

  Returns:
    What was published, as a sentence; so do the others.
  """
  options = bundles.BundleOptions(tier=tier, expires_s=86400 * expires_days)
  place = stores.Store(store)
  if not place.is_writable:
    raise ValueError(
      f'{place.url} can only be read; publish to the store behind it.'
    )
  # A trainer that finds a pointer it cannot trust starts the run anew. Here a
  # mistyped --key would do that, and readers of the run would lose it.
  if place.read_pointer(run) is not None:
    _open_pointer(place, run, key)
  arrays = sources.read(source, dtype=dtype)
  sender = bundles.Sender(store, run, key, options)
  try:
    if version is None:
      version = 0 if sender.version is None else sender.version + 1
    with progress.Progress('publish', 1) as bar:
      sender.publish(arrays, version)
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
  sources.check_local('out', out)
  out = pathlib.Path(out).absolute()
  if out.exists():
    raise ValueError(f'{out} exists; choose another --out or remove it.')
  place = stores.Store(store)
  pointer = _open_pointer(place, run, key)
  out.parent.mkdir(parents=True, exist_ok=True)
  with progress.Progress('apply', 3) as bar:
    held = restore.load(place, pointer, version=version)
    bar.update(1, version=held.version)
    orbax_trees.write(held.arrays(), out)
    bar.update(2, version=held.version)
    try:
      orbax_trees.verify(out, held)
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
  store: stores.Store, run_id: str, key_path: str | os.PathLike
) -> manifests.Pointer:
  """Reads a run's pointer and verifies its signature."""
  if not pathlib.Path(key_path).exists():
    raise ValueError(
      f'{key_path}: there is no key; --key must name the file that the '
      'publisher signs with, or its public half.'
    )
  verifier = signing.open_key(key_path)
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
    dtype: of `source`, as `delta.device.sources.read` has it.

  Raises:
    ValueError: names all that is damaged, or the tensors that differ.
  """
  place = stores.Store(store)
  pointer = _open_pointer(place, run, key)
  text = audit.check_run(place, pointer)
  if source is not None:
    arrays = sources.read(source, dtype=dtype)
    held = restore.load(place, pointer, version=version)
    audit.check_same(source, arrays, held)
    text += f' Version {held.version} is {source}, bit for bit.'
  return text + _age(pointer)


def log(*, store: str, run: str, key: str | os.PathLike) -> str:
  """Returns a table of a run's live bundles, the oldest first."""
  place = stores.Store(store)
  pointer = _open_pointer(place, run, key)
  index = restore.read_index(place, pointer.index, run)
  rows = [('version', 'kind', 'base', 'bytes', 'ratio', 'chunks', 'target')]
  for edge in index.edges:
    base = '' if edge.base_version is None else str(edge.base_version)
    single = edge.base_version == edge.version - 1
    kind = edge.kind if not base or single else 'skip'
    try:
      manifest = restore.read_manifest(place, edge.manifest)
      ratio = f'{manifest.full_bytes / max(edge.bytes, 1):.1f}'
      changed = _changed(manifest)
    except audit.DAMAGE:
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
  codecs = [tensor.chunks['codec'] for tensor in manifest.tensors]
  total = sum(len(c) for c in codecs)
  changed = sum(int(np.count_nonzero(c != codec.SAME)) for c in codecs)
  return f'{changed}/{total}'


def gc(
  *,
  store: str,
  run: str,
  key: str | os.PathLike,
  keep: int,
  grace_s: float = stores.GRACE_S,
) -> str:
  """Deletes what the newest `keep` versions do not need."""
  place = stores.Store(store)
  _open_pointer(place, run, key)
  signer = bundles.open_signer(key)
  publisher = publishing.Publisher(place, run, signer, grace_s=grace_s)
  return f'Freed {publisher.gc(keep)} bytes.'


def keys(*, key: str | os.PathLike) -> str:
  """Makes an Ed25519 pair: receivers of the public half cannot publish."""
  public = f'{key}.public'
  if pathlib.Path(key).exists() or pathlib.Path(public).exists():
    raise ValueError(f'{key} or {public} exists; choose another --key.')
  signer = signing.make_ed25519()
  signing.write_key(key, signer)
  signing.write_key(public, signer.public)
  return f'{key} signs; give {public} to those who receive.'
