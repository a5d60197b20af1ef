"""What `experiments/delta.py` does: bundles from and to checkpoints on disk."""

import os
import pathlib
import time

from composer_jax.delta import chain, checkpoints, follower, publisher
from composer_jax.delta.format import keys, manifest
from composer_jax.delta.store import objects


def publish(
  *,
  source: str,
  store: str,
  run: str,
  key: str | os.PathLike,
  version: int | None = None,
  tier: str = 'small',
  expires_days: float = 365.0,
) -> str:
  """Publishes the weights of a checkpoint, and frees what became too old.

  Args:
    source: checkpoint as `checkpoints.read` takes it.
    key: file of the key; made when missing.
    version: policy version; None for the one after the last.
    expires_days: days until receivers distrust the pointer; 0 for never.
  """
  options = chain.BundleOptions(tier=tier, expires_s=86400 * expires_days)
  place = objects.Store(store)
  place.check_writable()
  # A trainer that finds a pointer it cannot trust starts the run anew. Here a
  # mistyped --key would do that, and readers of the run would lose it.
  if place.read_pointer(run) is not None:
    _open_pointer(place, run, key)
  arrays = checkpoints.read(source)
  with publisher.Publisher(place, key, run, options) as sender:
    if version is None:
      version = 0 if sender.version is None else sender.version + 1
    sender.publish(arrays, version, owned=True)
    sender.gc(options.keep)
    sender.wait()
    (info,) = sender.results()
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
  tier: str = 'small',
) -> str:
  """Makes a store of two checkpoints: a keyframe and the delta to the other.

  The arguments are those of `publish`, which makes them versions 0 and 1.
  """
  if objects.Store(out).read_pointer(run) is not None:
    raise ValueError(f'{out} has a run {run!r} already; choose another --out.')
  place = dict(store=out, run=run, key=key, tier=tier)
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
  """Writes a version, None for the latest, as a plain orbax checkpoint."""
  checkpoints.check_local('out', out)
  out = pathlib.Path(out).absolute()
  if out.exists():
    raise ValueError(f'{out} exists; choose another --out or remove it.')
  place = objects.Store(store)
  pointer = _open_pointer(place, run, key)
  out.parent.mkdir(parents=True, exist_ok=True)
  held = follower.load(place, pointer, version=version)
  checkpoints.write(held.arrays(), out)
  said = (
    f'Version {held.version} of run {run!r}, target {held.target_id}: {out}'
  )
  late_s = time.time() - pointer.expires
  if pointer.expires and late_s > 0:
    said += f'\nIts pointer expired {late_s / 86400:.1f} days ago.'
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
    raise ValueError(f'{store.url} has no run {run_id!r}.')
  try:
    return manifest.unseal(found[0], key, run_id)
  except ValueError as error:
    raise ValueError(
      f'{store.url}: the pointer of run {run_id!r} cannot be trusted: {error}; '
      'name the --key that its publisher signs with. Where that is the one, '
      'its trainer writes the pointer anew, and others take another store.'
    ) from error
