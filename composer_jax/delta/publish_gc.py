"""Deletes the objects of a store that no run needs any more."""

import logging

from composer_jax.delta import manifest, restore, signing
from composer_jax.delta import store as stores

_log = logging.getLogger(__name__)


def collect(
  store: stores.Store,
  verifier: signing.Verifier,
  grace_s: float,
  head: manifest.Pointer | None,
) -> int:
  """Deletes what the pointer of no run leads to; returns bytes freed.

  Args:
    store: all of whose runs are looked at.
    verifier: of their pointers.
    grace_s: younger objects stay, as another publisher may be about to point
      to them.
    head: of a run that must be listed; None if none must.

  Raises:
    ValueError, OSError: a pointer, index or manifest is damaged, missing or
      signed by another key, so that nobody knows what it needs; nothing is
      deleted.
  """
  needed = set()
  runs = store.run_ids()
  # Some file systems list a folder that they cannot read as if it were empty.
  if head is not None and head.run_id not in runs:
    raise ValueError(
      f'{store.url} lists the runs {runs} and not {head.run_id!r}, which has '
      'a pointer there, so nothing is deleted; look whether refs/ can be read.'
    )
  for run_id in runs:
    needed |= _needed(store, verifier, run_id)
  sizes = store.sizes()
  gone = store.delete(sizes.keys() - needed, grace_s=grace_s)
  freed = sum(sizes.get(name, 0) for name in gone)
  _log.info('%s: freed %d bytes in %d objects', store.url, freed, len(gone))
  return freed


def _needed(store, verifier, run_id: str) -> set[str]:
  """Returns the objects that the bundles of a run consist of."""
  found = store.read_pointer(run_id)
  if found is None:
    return set()
  try:
    pointer = manifest.unseal(found[0], verifier, run_id)
  except ValueError as error:
    raise ValueError(
      f'the pointer of run {run_id!r} cannot be read, so nothing is deleted: '
      f'{error}'
    ) from error
  index = restore.read_index(store, pointer.index, run_id)
  names = {pointer.manifest, *(edge.manifest for edge in index.edges)}
  needed = {pointer.index, *names}
  for name in names:
    bundle = restore.read_manifest(store, name)
    needed |= {pack for pack, _ in bundle.packs}
  return needed
