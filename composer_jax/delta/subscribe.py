"""Follows a run's bundles and never serves anything unverified.

Consumes: the run's pointer, then the manifests and blobs it leads to.
Waits for: nothing; `poll` returns at once when there is no news.
Woken by: the caller, as often as it likes.
Produces: whole verified weights, or None with the reason in `problem`.
"""

import logging
import os
import pathlib
from typing import NamedTuple

import numpy as np

from composer_jax.core import files
from composer_jax.delta import restore
from composer_jax.delta import store as store_lib

_log = logging.getLogger(__name__)


class Update(NamedTuple):
  """Weights of a version; the arrays are read-only."""

  version: int
  target_id: str
  weights: dict[str, np.ndarray]


class Subscriber:
  """Holds the last verified weights of a run and moves them forward.

  Args:
    store: where to read.
    run_id: names the run and its pointer.
    memory: a file that keeps the newest pointer seen, so that a restarted
      receiver refuses an older one too; None to remember only while it lives.

  Attributes:
    held: what it serves, None before the first success.
    problem: why the last poll was refused, None when it was not.
  """

  def __init__(
    self,
    store: store_lib.Store,
    run_id: str,
    *,
    memory: str | os.PathLike | None = None,
  ):
    self.held: Update | None = None
    self.problem: str | None = None
    self._store = store
    self._run_id = run_id
    self._memory = None if memory is None else pathlib.Path(memory)
    self._seen: store_lib.Pointer | None = None
    if self._memory is not None and self._memory.exists():
      try:
        self._seen = store_lib.unseal(self._memory.read_bytes(), run_id)
      except ValueError as error:
        raise ValueError(
          f'{self._memory}: {error}. Delete it to trust the store anew.'
        ) from error

  def poll(self) -> Update | None:
    """Returns newer weights, or None when there are none that can be trusted.

    After damage the old weights stay in `held`, `problem` says what is wrong
    and a warning says it once; the next poll tries again.
    """
    try:
      update = self._poll()
    except (ValueError, OSError) as error:
      if str(error) != self.problem:
        _log.warning('%s', self._keeping(error))
      self.problem = str(error)
      return None
    self.problem = None
    return update

  def _poll(self) -> Update | None:
    pointer = self._store.pointer(self._run_id)
    if pointer is None:
      if self._seen is not None:
        raise ValueError(
          f'{self._store.pointer_path(self._run_id)}: the pointer is gone; '
          f'it had reached version {self._seen.version}.'
        )
      return None
    self._check_order(pointer)
    if self.held is not None and pointer == self._seen:
      return None
    weights = self._weights(pointer)
    update = Update(pointer.version, pointer.target_id, weights)
    if self._memory is not None:
      files.write_atomic(self._memory, store_lib.seal(pointer))
    self._seen, self.held = pointer, update
    return update

  def _weights(self, pointer: store_lib.Pointer) -> dict[str, np.ndarray]:
    manifest = self._store.manifest(pointer.manifest)
    named = (manifest.run_id, manifest.version, manifest.target_id)
    wanted = (pointer.run_id, pointer.version, pointer.target_id)
    if named != wanted:
      raise ValueError(
        f'{self._store.objects / pointer.manifest}: the manifest is of '
        f'{named} and the pointer of {wanted}.'
      )
    if self.held is not None:
      try:
        return restore.weights(
          self._store, pointer.manifest, (self.held[1], self.held[2])
        )
      except (ValueError, OSError) as error:
        _log.warning('Starting over from a keyframe: %s', error)
    return restore.weights(self._store, pointer.manifest)

  def _check_order(self, pointer: store_lib.Pointer) -> None:
    """Refuses an older, a forked and an unexplained backward pointer."""
    seen = self._seen
    if seen is None or pointer == seen:
      return
    forward = pointer.rewinds > seen.rewinds or (
      pointer.rewinds == seen.rewinds and pointer.version > seen.version
    )
    if pointer.sequence <= seen.sequence or not forward:
      raise ValueError(
        f'{self._store.pointer_path(self._run_id)}: the pointer was rolled '
        f'back or forked: it names version {pointer.version}, move '
        f'{pointer.sequence}, rewinds {pointer.rewinds}, after version '
        f'{seen.version}, move {seen.sequence}, rewinds {seen.rewinds}.'
      )

  def _keeping(self, error: Exception) -> str:
    if self.held is None:
      return f'Run {self._run_id!r} has no weights to serve yet: {error}'
    return (
      f'Run {self._run_id!r} keeps serving version {self.held.version} '
      f'({self.held.target_id[:12]}): {error}'
    )
