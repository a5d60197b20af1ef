"""Gathers a trainer's scores per trajectory, for comparison and judgement."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from composer_jax.core import batches, records
from composer_jax.rl import batching, mismatch
from composer_jax.rl import step as steps
from composer_jax.rl.hints import batching as hint_batching


class Hinted(NamedTuple):
  """Windows that hints are trained on, and scores of their microbatches."""

  students: list[hint_batching.Student]
  scores: list[steps.Scores]


class JudgedStep(NamedTuple):
  """A step before its update: the trained policy and what its pass gave.

  `others` are scores without replay where `scores` are with it, or none.
  """

  version: int
  values: Any
  groups: list[records.Group]
  trained: batching.PackedTrajectories
  advantages: list[float]
  scores: list[steps.Scores]
  others: list[steps.Scores]
  hinted: Hinted
  hint_weight: float
  metrics: dict[str, Any]


class Gate(Protocol):
  """Judges steps (system `gate`), before their update if `stops`."""

  stops: bool

  def keep(self, version: int, values: Any) -> None:
    """Keeps a copy of a policy, to judge later steps with."""

  def judge(self, step: JudgedStep) -> dict[str, Any]:
    """Returns metrics; raises a `mismatch.OutOfBand` if it stops the step."""


def per_token(
  places: Sequence[batching.RowSpan], arrays: Sequence[Any]
) -> list[np.ndarray]:
  """The part at each place of arrays [B, T]; waits for these."""
  arrays = [np.asarray(array_BT) for array_BT in arrays]
  return [arrays[p.batch][p.row, p.span] for p in places]


def logprobs(
  packed: batching.PackedTrajectories, scores: list[steps.Scores]
) -> list[np.ndarray]:
  """logprobs_T of each trajectory; waits for the scores."""
  return per_token(packed.places, [s.logprobs_BT for s in scores])


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
