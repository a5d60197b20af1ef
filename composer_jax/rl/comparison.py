"""Gathers a trainer's scores per trajectory, for comparison and judgement."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from composer_jax.core import batches, records
from composer_jax.rl import batching, mismatch
from composer_jax.rl import step as steps


class JudgedStep(NamedTuple):
  """A step before its update: the trained policy and what its pass gave.

  `advantages` and `group_ids` are those of the trained trajectories; `hinted`
  tells that hints are trained on, too.
  """

  version: int
  values: Any
  groups: list[records.Group]
  trained: batching.PackedTrajectories
  advantages: list[float]
  group_ids: list[int]
  scores: list[steps.Scores]
  hinted: bool
  metrics: dict[str, Any]


class Gate(Protocol):
  """Judges steps (system `gate`), before their update if `stops`."""

  stops: bool

  def keep(self, version: int, values: Any) -> None:
    """Keeps a copy of a policy, to judge later steps with."""

  def judge(self, step: JudgedStep) -> dict[str, Any]:
    """Returns metrics; raises a `mismatch.OutOfBand` if it stops the step."""


def per_token(
  packed: batching.PackedTrajectories, arrays: Sequence[Any]
) -> list[np.ndarray]:
  """The parts of each trajectory of arrays [B, T]; waits for these."""
  arrays = [np.asarray(array_BT) for array_BT in arrays]
  return [arrays[p.batch][p.row, p.span] for p in packed.places]


def logprobs(
  packed: batching.PackedTrajectories, scores: list[steps.Scores]
) -> list[np.ndarray]:
  """logprobs_T of each trajectory; waits for the scores."""
  return per_token(packed, [s.logprobs_BT for s in scores])


def ratios(
  packed: batching.PackedTrajectories, scores: list[steps.Scores]
) -> list[np.ndarray]:
  """`mismatch.log_ratios` of each trajectory; waits for the scores."""
  return mismatch.log_ratios(packed.trajectories, logprobs(packed, scores))


def fresh(batch: batches.RLBatch) -> batches.RLBatch:
  """The batch with every token routed by the trainer's own router.

  The routes stay an array (of NO_ROUTE), so that one program serves both.
  """
  return batch.replace(
    expert_ids_MBTA=np.full_like(batch.expert_ids_MBTA, records.NO_ROUTE)
  )


def both_ways(
  packed: batching.PackedTrajectories,
  replayed: list[steps.Scores],
  afresh: list[steps.Scores],
) -> dict[str, Any]:
  """Metrics of the same tokens with routes replayed, and routed afresh.

  Scores `afresh` give the agreement of the trainer's routes with the recorded
  ones; together with `replayed`, also the mismatch with and without replay.
  """
  metrics: dict[str, Any] = {}
  if replayed and afresh:
    for suffix, scores in (('_replay', replayed), ('_no_replay', afresh)):
      metrics |= mismatch.gap(np.concatenate(ratios(packed, scores)), suffix)
  if afresh:
    arrays = [np.asarray(s.expert_ids_MBTA) for s in afresh]
    metrics |= mismatch.route_agreement(
      [t.expert_ids_TMA for t in packed.trajectories],
      [
        arrays[p.batch][:, p.row, p.span].transpose(1, 0, 2)
        for p in packed.places
      ],
    )
  return metrics
