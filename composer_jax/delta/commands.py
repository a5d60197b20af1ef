"""What `experiments/delta.py` does: bundles from and to checkpoints on disk."""

import os
import pathlib
import shutil
import time

from composer_jax.delta import chain, checkpoints, follower, publisher
from composer_jax.delta.format import keys, manifest
from composer_jax.delta.store import objects
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
  """Publishes the weights of a checkpoint, and frees what became too old.

  Args:
    source: checkpoint, as `checkpoints.read` has it.
    store: URL of the store.
    run: name of the run in the store.
    key: file of the key; made when missing.
    version: policy version; None for the one after the last.
    dtype: dtype, as `checkpoints.read` has it.
    tier: tier of the codec.
    expires_days: days after which receivers take the run for abandoned, unless
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
  with (
    publisher.Publisher(place, key, run, options) as sender,
    progress.Progress('publish', 1) as bar,
  ):
    if version is None:
      version = 0 if sender.version is None else sender.version + 1
    sender.publish(arrays, version, owned=True)
    sender.gc(options.keep)
    sender.wait()
    (info,) = sender.results()
    bar.update(1, MB=info.bytes / 1e6)
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
    store: URL of the store.
    run: name of the run in the store.
    key: file of the key.
    out: folder to make; must not exist.
    version: policy version; None for the latest.

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
  said = (
    f'Version {held.version} of run {run!r}, target {held.target_id}: {out}'
  )
  late_s = time.time() - pointer.expires
  if pointer.expires and late_s > 0:
    said += (
      f'\nIts pointer expired {late_s / 86400:.1f} days ago: nobody publishes '
      'any more, or something keeps newer versions from here.'
    )
  return said


def _open_pointer(
  store: objects.Store, run_id: str, key_path: str | os.PathLike
) -> manifest.Pointer:
  """Reads a run's pointer and verifies its signature."""
  if not pathlib.Path(key_path).exists():
    raise ValueError(
      f'{key_path}: there is no key; --key must name the file that the '
      'publisher signs with.'
    )
  key = keys.open_key(key_path)
  found = store.read_pointer(run_id)
  if found is None:
    raise ValueError(
      f'{store.url} has no run {run_id!r}'
      + (f'; it has {store.run_ids()}.' if store.is_writable else '.')
    )
  try:
    return manifest.unseal(found[0], key, run_id)
  except ValueError as error:
    raise ValueError(
      f'{store.url}: the pointer of run {run_id!r} cannot be trusted: {error}; '
      'name the --key that its publisher signs with. Where that is the one, '
      'its trainer writes the pointer anew, and others take another --run.'
    ) from error
