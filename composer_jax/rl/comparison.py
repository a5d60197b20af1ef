"""Rollout against trainer about the same packed trajectories.

Between the device's passes over microbatches and `rl.mismatch`, which knows
trajectories alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from composer_jax.core import batches, records
from composer_jax.kernels.attention import grouped_query
from composer_jax.models import config as model_config
from composer_jax.rl import batching, mismatch
from composer_jax.rl import step as steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
  """Trajectories, the microbatches that hold them, and where each lies."""

  trajectories: list[records.Trajectory]
  microbatches: list[batches.RLBatch]
  places: list[batching.Place]

  def logprobs(self, scores: list[steps.Scores]) -> list[np.ndarray]:
    """logprobs_T of each trajectory; waits for the scores."""
    found = [np.asarray(s.logprobs_BT) for s in scores]
    return [found[p.batch][p.row, p.span] for p in self.places]

  def routes(self, scores: list[steps.Scores]) -> list[np.ndarray]:
    """expert_ids_TMA of each trajectory; waits for the scores."""
    found = [np.asarray(s.expert_ids_MBTA) for s in scores]
    return [
      found[p.batch][:, p.row, p.span].transpose(1, 0, 2) for p in self.places
    ]


def shape_of(
  model: model_config.ModelConfig, *, rows: int, seq_len: int
) -> batching.BatchShape:
  """The microbatches that a model trains on."""
  is_invariant = model.numerics == 'batch_invariant'
  return batching.BatchShape(
    rows=rows,
    seq_len=seq_len,
    num_moe_layers=model.num_moe_layers,
    num_active=model.moe.num_active,
    num_experts=model.moe.num_experts,
    # Keys are summed block by block: a trajectory has blocks of its own.
    align=grouped_query.KEY_BLOCK if is_invariant else 1,
  )


def pack(
  trajectories: list[records.Trajectory],
  advantages: list[float],
  shape: batching.BatchShape,
) -> Packed:
  """Packs as `batching.pack` does, and remembers what lies where."""
  return Packed(
    trajectories=trajectories,
    microbatches=batching.pack(trajectories, advantages, shape),
    places=batching.places([len(t) for t in trajectories], shape),
  )


def fresh(batch: batches.RLBatch) -> batches.RLBatch:
  """The batch with every token routed by the trainer's own router.

  The routes stay an array (of NO_ROUTE), so that the same compiled program
  serves both.
  """
  return batch.replace(
    expert_ids_MBTA=np.full_like(batch.expert_ids_MBTA, records.NO_ROUTE)
  )


def replay_metrics(sums: steps.StepSums) -> dict[str, Any]:
  """What the routers said of the records that they replayed.

  Args:
    sums: of the step, on the host.
  """
  num_routed = float(sums.num_routed)
  agreement_M = np.float64(sums.replay_agreement_M) / num_routed
  return {
    'replay_agreement': float(agreement_M.min()),
    'replay_agreement_layers': agreement_M.tolist(),
    'replay_replaced': float(sums.replay_replaced_M.max()) / num_routed,
    'replay_no_route': float(sums.no_route_M.max()) / num_routed,
  }


def both_ways(
  packed: Packed, replayed: list[steps.Scores], afresh: list[steps.Scores]
) -> dict[str, float]:
  """The mismatch of the same tokens with routes replayed, and routed afresh."""
  found: dict[str, float] = {}
  for suffix, scores in (('_replay', replayed), ('_no_replay', afresh)):
    gap = mismatch.total(packed.trajectories, packed.logprobs(scores))
    found |= gap.metrics(suffix)
  return found


def route_metrics(packed: Packed, afresh: list[steps.Scores]) -> dict[str, Any]:
  """How far the trainer's own routes are those that were recorded."""
  agreement = mismatch.route_agreement(
    [t.expert_ids_TMA for t in packed.trajectories], packed.routes(afresh)
  )
  return agreement.metrics() if agreement else {}


def shifted(trajectory: records.Trajectory) -> records.Trajectory:
  """With every route under the token after its own: what a gate must catch."""
  ids_TMA = trajectory.expert_ids_TMA.copy()
  ids_TMA[1:-1] = trajectory.expert_ids_TMA[:-2]
  return dataclasses.replace(trajectory, expert_ids_TMA=ids_TMA)


def probe(
  score: Callable[..., steps.Scores],
  values: Any,
  trajectories: list[records.Trajectory],
  shape: batching.BatchShape,
) -> dict[str, Any]:
  """Compares trajectories with the weights that sampled them.

  Args:
    score: of `rl.step.scorer`.
    values: of the policy that sampled.
    trajectories: with their routes.
    shape: of the microbatches.

  Returns:
    The metrics of `both_ways` and `route_metrics`, and for scale those of a
    replay of `shifted` routes.
  """

  def scored(batches_of):
    return [score(values, batch) for batch in batches_of]

  nothing = [0.0] * len(trajectories)
  packed = pack(trajectories, nothing, shape)
  afresh = scored(map(fresh, packed.microbatches))
  moved = [shifted(t) for t in trajectories]
  lying = pack(moved, nothing, shape)
  wrong = mismatch.total(moved, lying.logprobs(scored(lying.microbatches)))
  agreement = route_metrics(lying, afresh).get('route_agreement')
  return {
    'sampled_tokens': int(sum(t.loss_mask_T.sum() for t in trajectories)),
    **both_ways(packed, scored(packed.microbatches), afresh),
    **route_metrics(packed, afresh),
    **wrong.metrics('_shifted'),
    'route_agreement_shifted': agreement,
  }
