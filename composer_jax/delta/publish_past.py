"""Versions that were published before: found again, healed, or made void."""

import logging

from composer_jax.delta import (
  manifest,
  publish_index,
  publish_run,
  restore,
  weights_held,
)
from composer_jax.delta import store as stores

_log = logging.getLogger(__name__)


def rewind(run: publish_run.Run, store: stores.Store, version: int) -> None:
  """Points to the newest listed version up to `version`.

  If none is listed or it is damaged, the next version starts a chain afresh.
  """
  edges = publish_index.up_to(run.edges, version)
  last = max((edge.version for edge in edges), default=-1)
  edge = publish_index.head(edges, last)
  if edge is None:
    run.start_afresh(f'no version up to {version} is listed.')
    return
  try:
    found = restore.read_manifest(store, edge.manifest)
  except (ValueError, OSError) as error:
    run.start_afresh(error)
    return
  run.rewinds += 1
  run.point(
    edges,
    version=edge.version,
    target_id=found.target_id,
    base_id=found.base_id,
    name=edge.manifest,
  )
  run.specs = found.signature()


def check_same(
  run: publish_run.Run, store: stores.Store, version: int, target_id: str
) -> manifest.Edge:
  """Returns the bundle of a version that has these weights.

  Raises:
    ValueError: it has others, or is not listed.
  """
  assert run.head is not None
  edge = publish_index.head(run.edges, version)
  if edge is None:
    oldest = min(edge.version for edge in run.edges)
    raise ValueError(
      f'version {version} of run {run.run_id!r} is neither new (the last is '
      f'{run.head.version}) nor kept (the oldest is {oldest}). A trainer '
      'resumed from checkpoint v calls rewind(v) first.'
    )
  if version == run.head.version:
    known = run.head.target_id
  else:
    known = restore.read_manifest(store, edge.manifest).target_id
  if target_id != known:
    raise ValueError(
      f'run {run.run_id!r} has published version {version} with other weights '
      f'({known}, now {target_id}). A trainer resumed from checkpoint v calls '
      'rewind(v) first.'
    )
  return edge


def read_base(
  run: publish_run.Run,
  store: stores.Store,
  threads: int,
  wanted: weights_held.Wanted | None,
) -> weights_held.Held | None:
  """Reads what is wanted of the last version; None if it is damaged."""
  assert run.head is not None
  try:
    return restore.load(store, run.head, wanted=wanted, threads=threads)
  except (ValueError, OSError) as error:
    _log.warning(
      '%s: version %d cannot be rebuilt, so the next one is a keyframe: %s',
      run.run_id,
      run.head.version,
      error,
    )
    return None


def read_head(
  run: publish_run.Run, store: stores.Store, threads: int
) -> weights_held.Held | None:
  """Reads the last version as a receiver would; heals pointer and index.

  A pointer that will expire, or has, while nobody published is renewed, too.

  Returns:
    Its weights; None if they are damaged: the next version starts afresh.
  """
  assert run.head is not None
  if not run.check_alone() or run.is_aging():
    run.point_again(run.edges)
  run.heal_index()
  try:
    restore.read_manifest(store, run.head.manifest)
    return restore.load(store, run.head, threads=threads)
  except (ValueError, OSError) as error:
    run.start_afresh(error)
    return None
