"""The mismatch with and without replay, and routes that differ."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.rl import batching, comparison, mismatch
from composer_jax.rl import step as steps


def route_agreement(
  recorded: Sequence[np.ndarray], routed: Sequence[np.ndarray]
) -> dict[str, Any]:
  """Compares recorded routes_TMA with the trainer's, as sets of experts.

  `routed` are from a pass that routed every token afresh. Returns the share of
  recorded tokens with the same experts, for the worst and for each MoE layer,
  and the share that differs in at least one layer; {} without records.
  """
  recorded_ZMA = np.concatenate(recorded)
  known_Z = (recorded_ZMA != records.NO_ROUTE).all((-2, -1))
  if not known_Z.any():
    return {}
  recorded_ZMA, routed_ZMA = (
    np.sort(ids_ZMA[known_Z], -1)
    for ids_ZMA in (recorded_ZMA, np.concatenate(routed))
  )
  same_ZM = (recorded_ZMA == routed_ZMA).all(-1)
  return {
    'route_agreement': float(same_ZM.mean(0).min()),
    'route_agreement_layers': same_ZM.mean(0).tolist(),
    'routed_differently': float(1 - same_ZM.all(-1).mean()),
  }


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
      metrics |= mismatch.gap(
        np.concatenate(comparison.ratios(packed, scores)), suffix
      )
  if afresh:
    arrays = [np.asarray(s.expert_ids_MBTA) for s in afresh]
    metrics |= route_agreement(
      [t.expert_ids_TMA for t in packed.trajectories],
      [
        arrays[p.batch][:, p.row, p.span].transpose(1, 0, 2)
        for p in packed.places
      ],
    )
  return metrics
