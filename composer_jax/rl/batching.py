"""Packs trajectories of finished groups into fixed microbatches.

Groups come sorted by id and the packing is a function of their lengths alone,
so the same groups give the same bits, whoever sampled them and in which order
they finished. Arrays keep the alignment of `core.records`: about the token.
Routes turn from token-major to layer-major here, and are checked for the last
time: on the device an id is a number like any other.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from composer_jax.core import batches, records
from composer_jax.core.routes import codec


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
  """Static shape of one microbatch.

  Attributes:
    rows: B.
    seq_len: T; the longest trajectory that fits.
    num_moe_layers: M of the recorded routes.
    num_active: A of the recorded routes.
    num_experts: E, which recorded ids are below.
    align: every trajectory starts at a multiple of it in its row, so that its
      tokens fall into the same tiles of a kernel whatever lies before them.
  """

  rows: int
  seq_len: int
  num_moe_layers: int
  num_active: int
  num_experts: int
  align: int = 1

  def __post_init__(self):
    if self.align < 1 or self.seq_len % self.align:
      raise ValueError(
        f'align ({self.align}) must be at least 1 and divide seq_len '
        f'({self.seq_len}).'
      )


def _aligned(length: int, align: int) -> int:
  return -(-length // align) * align


def assign_rows(
  lengths: list[int], seq_len: int, align: int = 1
) -> list[list[int]]:
  """First-fit decreasing: which trajectories share a row.

  Ties keep the given order. Rows are returned with members in given order.

  Args:
    lengths: of the trajectories.
    seq_len: of a row.
    align: divides `seq_len`; see BatchShape.

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
        '--config.episode.max_tokens.'
      )
    fits = next((r for r, free in enumerate(room) if free >= lengths[i]), None)
    if fits is None:
      rows.append([])
      room.append(seq_len)
      fits = len(rows) - 1
    rows[fits].append(i)
    room[fits] -= _aligned(lengths[i], align)
  return [sorted(row) for row in rows]


class Place(NamedTuple):
  """Where a trajectory lies: microbatch, row, segment number and tokens."""

  batch: int
  row: int
  segment: int
  span: slice


def places(lengths: list[int], shape: BatchShape) -> list[Place]:
  """The place that `pack` gives to each trajectory, in the given order."""
  found: dict[int, Place] = {}
  rows = assign_rows(lengths, shape.seq_len, shape.align)
  for row, members in enumerate(rows):
    offset = 0
    for segment, i in enumerate(members, start=1):
      span = slice(offset, offset + lengths[i])
      found[i] = Place(row // shape.rows, row % shape.rows, segment, span)
      offset = _aligned(span.stop, shape.align)
  return [found[i] for i in range(len(lengths))]


def padding(shape: BatchShape) -> dict[str, Any]:
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


def write(
  arrays: dict[str, Any],
  place: Place,
  trajectory: records.Trajectory,
  advantage: float,
) -> None:
  _, row, segment, span = place
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


def check_routes(i: int, ids_TMA: np.ndarray, shape: BatchShape) -> None:
  """Refuses what would train other experts than those that sampled."""
  want = (shape.num_moe_layers, shape.num_active)
  if ids_TMA.shape[1:] != want:
    raise ValueError(
      'Recorded routes have (MoE layers, active experts) = '
      f'{ids_TMA.shape[1:]}, the trainer has {want}: the rollout fleet runs '
      'another model.'
    )
  scheme = codec.RouteScheme(
    num_experts=shape.num_experts,
    num_active=shape.num_active,
    layers=tuple(range(shape.num_moe_layers)),
  )
  try:
    codec.check(ids_TMA, scheme)
  except ValueError as error:
    raise ValueError(
      f'The record of trajectory {i} of the step cannot be replayed; its MoE '
      f'layers count from 0. {error}'
    ) from error


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
    ValueError: a trajectory too long, routes of other layers or experts, or
      routes that no router makes.
  """
  for i, trajectory in enumerate(trajectories):
    check_routes(i, trajectory.expert_ids_TMA, shape)
  where = places([len(t) for t in trajectories], shape)
  num_batches = max((p.batch for p in where), default=-1) + 1
  packed = [padding(shape) for _ in range(num_batches)]
  for place, trajectory, advantage in zip(
    where, trajectories, advantages, strict=True
  ):
    write(packed[place.batch], place, trajectory, advantage)
  return [batches.RLBatch(**arrays) for arrays in packed]
