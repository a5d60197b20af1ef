"""The tokens of a trajectory that one chain of passes can score.

A record has three versions of each token (`core.records`). From them follows
what was in the cache when a token was sampled: entries are computed in order,
by the version that sampled the next token, until all are computed anew by one
version, as when a session lost its pages or a swap refreshes it. Each time
begins a part. Only of the last one are the routes recorded.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from composer_jax.core import records


class Part(NamedTuple):
  """Tokens of a trajectory that were sampled from one cache.

  Attributes:
    index: number of the trajectory among the candidates.
    trajectory: its record, without routes where these are not of this cache.
    consumed_T: version that computes each token.
    compared_T: true for the tokens to be compared.
    is_recorded: true if the routes are replayed.
    whole: the part of which this one is the beginning; None if it is whole.
  """

  index: int
  trajectory: records.Trajectory
  consumed_T: np.ndarray
  compared_T: np.ndarray
  is_recorded: bool
  whole: 'Part | None' = None

  @property
  def stop(self) -> int:
    """Number of tokens up to the last one compared; no pass needs others."""
    return int(np.flatnonzero(self.compared_T)[-1]) + 1

  @property
  def versions(self) -> list[int]:
    """Versions of the passes that score it, in order."""
    return np.unique(self.consumed_T[: self.stop - 1]).tolist()

  def beginning(self) -> 'Part':
    """The part with no later token than those of its first sampler."""
    sampled_by = self.trajectory.policy_version_T
    is_first_T = sampled_by == sampled_by[np.argmax(self.compared_T)]
    compared_T = self.compared_T & is_first_T
    return self._replace(compared_T=compared_T, whole=self)


def _sampler_T(consumed_T: np.ndarray) -> np.ndarray:
  """Version whose pass, over the token before, sampled each token."""
  return np.insert(consumed_T[:-1], 0, consumed_T[0])


def parts_of(
  index: int, trajectory: records.Trajectory, *, replay: bool
) -> Iterator[Part]:
  """Yields the parts that cover a trajectory's sampled tokens.

  Tokens whose versions contradict each other are in no part.
  """
  t = trajectory
  sampled_by, read, consumed_T = (getattr(t, name) for name in records.VERSIONS)
  left_T = t.loss_mask_T & (read == consumed_T[0])
  left_T &= sampled_by == _sampler_T(consumed_T)
  if left_T.any():
    yield Part(index, t, consumed_T, left_T, replay)
  left_T = t.loss_mask_T & ~left_T
  if not left_T.any():
    return
  lost = dataclasses.replace(
    t, expert_ids_TMA=np.full_like(t.expert_ids_TMA, records.NO_ROUTE)
  )
  # The first time: by the pass that sampled the next token; context by the one
  # that its label names.
  follows_T = np.append(sampled_by[1:], sampled_by[-1])
  first_T = np.where(t.loss_mask_T, follows_T, sampled_by)
  for version in np.unique(read[left_T]):
    of_version_T = left_T & (read == version)
    start = int(np.argmax(t.loss_mask_T & (read == version)))
    anew_T = first_T.copy()
    if (t.loss_mask_T & (read < version)).any():
      anew_T[:start] = version
    compared_T = of_version_T & (sampled_by == _sampler_T(anew_T))
    if anew_T[0] == version and compared_T.any():
      # No pass needs to compute what follows the last of them.
      needed_T = np.minimum(anew_T, sampled_by[compared_T].max())
      yield Part(index, lost, needed_T, compared_T, False)


def uncovered(trajectory: records.Trajectory) -> int:
  """Number of sampled tokens whose versions contradict each other.

  The last one counts if it was not sampled from the cache of the routes: what
  nothing was sampled from, no part would check.
  """
  t = trajectory
  covered_T = np.zeros(len(t), bool)
  for part in parts_of(0, t, replay=True):
    compared_T = part.compared_T.copy()
    if not part.is_recorded:
      compared_T[np.flatnonzero(t.loss_mask_T)[-1]] = False
    covered_T |= compared_T
  return int((t.loss_mask_T & ~covered_T).sum())
