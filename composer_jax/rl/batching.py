"""Packs trajectories of finished groups into fixed microbatches.

Groups come sorted by id and the packing is a function of their lengths alone,
so the same groups give the same bits, whoever sampled them and in which order
they finished. Arrays keep the alignment of `core.records`: about the token.
Routes turn from token-major to layer-major here.
"""

import dataclasses
from typing import Any

import numpy as np

from composer_jax.core import batches, records


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
  """Static shape of one microbatch.

  Attributes:
    rows: B.
    seq_len: T; the longest trajectory that fits.
    num_moe_layers: M of the recorded routes.
    num_active: A of the recorded routes.
  """

  rows: int
  seq_len: int
  num_moe_layers: int
  num_active: int


def assign_rows(lengths: list[int], seq_len: int) -> list[list[int]]:
  """First-fit decreasing: which trajectories share a row.

  Ties keep the given order. Rows are returned with members in given order.

  Raises:
    ValueError: when a trajectory is longer than a row.
  """
  order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
  rows: list[list[int]] = []
  room: list[int] = []
  for i in order:
    if lengths[i] > seq_len:
      raise ValueError(
        f'A trajectory of {lengths[i]} tokens does not fit a row of '
        f'{seq_len}; raise --config.rl.seq_len or lower '
        '--config.rl.episode.max_tokens.'
      )
    fits = next((r for r, free in enumerate(room) if free >= lengths[i]), None)
    if fits is None:
      rows.append([])
      room.append(seq_len)
      fits = len(rows) - 1
    rows[fits].append(i)
    room[fits] -= lengths[i]
  return [sorted(row) for row in rows]


def _padding(shape: BatchShape) -> dict[str, Any]:
  """Numpy arrays of a microbatch of padding alone; what packing fills."""
  B, T = shape.rows, shape.seq_len
  return {
    'tokens_BT': np.zeros((B, T), np.int32),
    'segment_ids_BT': np.zeros((B, T), np.int32),
    'positions_BT': np.zeros((B, T), np.int32),
    'loss_weights_BT': np.zeros((B, T), np.float32),
    'rollout_logprobs_BT': np.zeros((B, T), np.float32),
    'advantages_BT': np.zeros((B, T), np.float32),
    'temperatures_BT': np.ones((B, T), np.float32),
    'expert_ids_MBTA': np.full(
      (shape.num_moe_layers, B, T, shape.num_active),
      records.NO_ROUTE,
      np.uint16,
    ),
  }


def _write(
  arrays: dict[str, Any],
  row: int,
  span: slice,
  segment: int,
  trajectory: records.Trajectory,
  advantage: float,
) -> None:
  arrays['tokens_BT'][row, span] = trajectory.tokens_T
  arrays['segment_ids_BT'][row, span] = segment
  arrays['positions_BT'][row, span] = np.arange(len(trajectory))
  arrays['loss_weights_BT'][row, span] = trajectory.loss_mask_T
  arrays['rollout_logprobs_BT'][row, span] = trajectory.logprobs_T
  arrays['advantages_BT'][row, span] = advantage
  arrays['temperatures_BT'][row, span] = trajectory.temperature
  # Token-major on the host, layer-major on the device.
  arrays['expert_ids_MBTA'][:, row, span] = trajectory.expert_ids_TMA.transpose(
    1, 0, 2
  )


def pack(
  trajectories: list[records.Trajectory],
  advantages: list[float],
  shape: BatchShape,
) -> list[batches.RLBatch]:
  """Packs trajectories into as many microbatches of `shape` as they need.

  Args:
    trajectories: in order of (group, member, window).
    advantages: one per trajectory.
    shape: of every microbatch; the last is filled up with padding.

  Returns:
    numpy RLBatches in a fixed order.

  Raises:
    ValueError: a trajectory too long, or routes of other layers or experts.
  """
  want = (shape.num_moe_layers, shape.num_active)
  for trajectory in trajectories:
    if trajectory.expert_ids_TMA.shape[1:] != want:
      raise ValueError(
        'Recorded routes have (MoE layers, active experts) = '
        f'{trajectory.expert_ids_TMA.shape[1:]}, the trainer has {want}: the '
        'rollout fleet runs another model.'
      )
  rows = assign_rows([len(t) for t in trajectories], shape.seq_len)
  packed = []
  for start in range(0, len(rows), shape.rows):
    arrays = _padding(shape)
    for row, members in enumerate(rows[start : start + shape.rows]):
      offset = 0
      for segment, i in enumerate(members, start=1):
        span = slice(offset, offset + len(trajectories[i]))
        _write(arrays, row, span, segment, trajectories[i], advantages[i])
        offset = span.stop
    packed.append(batches.RLBatch(**arrays))
  return packed
