"""Packs trajectories of finished groups into fixed microbatches.

Guided path, 6 of 10: with the advantages of `rl.advantage`, for
`rl.policy_loss`.
Groups come sorted by id and the packing depends on their lengths only, so the
same groups give the same bits, in whatever order they finished. Arrays keep the
alignment of `core.records`: entry t is about token t. Routes turn from
token-major to layer-major here, and are checked here for the last time.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from composer_jax.core import batches, checks, records
from composer_jax.core.routes import codec
from composer_jax.kernels.attention import grouped_query
from composer_jax.models import config as model_config
from composer_jax.rl import balance


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
  """Static shape of one microbatch.

  Attributes:
    rows, seq_len: B and T, the latter also the longest trajectory that fits.
    num_moe_layers, num_active: M and A of the recorded routes.
    num_experts: E, the bound on recorded ids.
    align: number of tokens that divides every trajectory's start in its row, so
      that its tokens fall into the same tiles of a kernel in any row.
    shards: groups of devices over which the rows are sharded.
  """

  rows: int
  seq_len: int
  num_moe_layers: int
  num_active: int
  num_experts: int
  align: int = 1
  shards: int = 1

  def __post_init__(self):
    rule = f'divide the rows ({self.rows})'
    checks.require(self, 'shards', self.rows % self.shards == 0, rule)
    divides = self.align >= 1 and self.seq_len % self.align == 0
    checks.require(self, 'align', divides, f'divide seq_len ({self.seq_len})')


def shape_of(
  model: model_config.ModelConfig, *, rows: int, seq_len: int, shards: int = 1
) -> BatchShape:
  """The shape of the microbatches that a model trains on."""
  is_invariant = model.numerics == 'batch_invariant'
  return BatchShape(
    rows=rows,
    seq_len=seq_len,
    num_moe_layers=model.num_moe_layers,
    num_active=model.moe.num_active,
    num_experts=model.moe.num_experts,
    # Keys are summed by blocks, which trajectories must not share.
    align=grouped_query.KEY_BLOCK if is_invariant else 1,
    shards=shards,
  )


class RowSpan(NamedTuple):
  """Place of a trajectory: microbatch, row, segment number and columns."""

  batch: int
  row: int
  segment: int
  span: slice


def places(lengths: list[int], shape: BatchShape) -> list[RowSpan]:
  """Places trajectories of these lengths, first-fit decreasing.

  Several shards then get rows of about as many tokens (`rl.balance`). Ties and
  the trajectories of a row keep the given order.
  """
  aligned = [-(-n // shape.align) * shape.align for n in lengths]
  rows: list[list[int]] = []
  room: list[int] = []
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    if lengths[i] > shape.seq_len:
      raise ValueError(
        f'A trajectory of {lengths[i]} tokens does not fit a row of '
        f'{shape.seq_len}; raise --config.rl.seq_len or lower '
        '--config.episode.max_tokens.'
      )
    fitting = (r for r, free in enumerate(room) if free >= lengths[i])
    row = next(fitting, len(rows))
    if row == len(rows):
      rows.append([])
      room.append(shape.seq_len)
    rows[row].append(i)
    room[row] -= aligned[i]
  if shape.shards > 1:
    rows = balance.balanced(
      rows,
      lengths,
      aligned,
      seq_len=shape.seq_len,
      rows_per_batch=shape.rows,
      shards=shape.shards,
    )
  spans: dict[int, RowSpan] = {}
  for row, members in enumerate(rows):
    offset = 0
    for segment, i in enumerate(sorted(members), start=1):
      span = slice(offset, offset + lengths[i])
      spans[i] = RowSpan(row // shape.rows, row % shape.rows, segment, span)
      offset += aligned[i]
  return [spans[i] for i in range(len(lengths))]


def padding(shape: BatchShape) -> dict[str, Any]:
  """Numpy arrays of a microbatch that is all padding, for `write` to fill."""
  B, T = shape.rows, shape.seq_len
  routes = (shape.num_moe_layers, B, T, shape.num_active)
  ints = ('tokens_BT', 'segment_ids_BT', 'positions_BT')
  floats = ('loss_weights_BT', 'rollout_logprobs_BT', 'advantages_BT')
  return {
    **{name: np.zeros((B, T), np.int32) for name in ints},
    **{name: np.zeros((B, T), np.float32) for name in floats},
    'temperatures_BT': np.ones((B, T), np.float32),
    'expert_ids_MBTA': np.full(routes, records.NO_ROUTE, np.uint16),
  }


def write(
  arrays: dict[str, Any],
  place: RowSpan,
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
  ids_MTA = trajectory.expert_ids_TMA.transpose(1, 0, 2)
  arrays['expert_ids_MBTA'][:, row, span] = ids_MTA


def check_routes(i: int, ids_TMA: np.ndarray, shape: BatchShape) -> None:
  """Refuses routes that cannot be those of this model's experts."""
  scheme = codec.RouteScheme(
    num_experts=shape.num_experts,
    num_active=shape.num_active,
    layers=tuple(range(shape.num_moe_layers)),
  )
  try:
    codec.check(ids_TMA, scheme)
  except ValueError as error:
    raise ValueError(
      f'The record of trajectory {i} of the step cannot be replayed; did '
      f'another model sample it? Its MoE layers count from 0. {error}'
    ) from error


class PackedTrajectories(NamedTuple):
  """Trajectories, the microbatches that hold them, and each one's place."""

  trajectories: list[records.Trajectory]
  microbatches: list[batches.RLBatch]
  places: list[RowSpan]


def pack(
  trajectories: list[records.Trajectory],
  advantages: list[float],
  shape: BatchShape,
) -> PackedTrajectories:
  """Packs trajectories into as many microbatches of `shape` as they need.

  Trajectories come in order of (group, member, window). A ValueError names one
  that is too long, or whose routes cannot be replayed.
  """
  for i, trajectory in enumerate(trajectories):
    check_routes(i, trajectory.expert_ids_TMA, shape)
  spans = places([len(t) for t in trajectories], shape)
  num_batches = max((p.batch for p in spans), default=-1) + 1
  packed = [padding(shape) for _ in range(num_batches)]
  for place, trajectory, advantage in zip(
    spans, trajectories, advantages, strict=True
  ):
    write(packed[place.batch], place, trajectory, advantage)
  microbatches = [batches.RLBatch(**arrays) for arrays in packed]
  return PackedTrajectories(trajectories, microbatches, spans)
