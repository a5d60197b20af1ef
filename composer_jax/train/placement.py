"""Placement of a training stage's arrays on the mesh."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import checks
from composer_jax.models import config as model_config
from composer_jax.models import placement as model_placement
from composer_jax.parallel import (
  carriers,
  exchange,
  layouts,
  sequence,
  shardings,
  transports,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelOptions:
  """Options of the exchange between devices; results differ by rounding only.

  Attributes:
    transport: name in `carriers.CARRIERS` of the exchange of tokens; 'auto'
      chooses by the bytes that each would move.
    buckets: rising sizes of receive buffers over the mean; a step takes the
      worst case if none is enough (`train.buckets`). () always takes it.
    sequence_order: 'contiguous', or 'zigzag', which gives each context shard an
      early and a late piece of a row, for an even number of keys; 'auto' is
      zigzag with several context shards.
  """

  transport: str = 'auto'
  buckets: tuple[float, ...] = (1.0, 1.25, 2.0)
  sequence_order: str = 'auto'

  def __post_init__(self):
    object.__setattr__(self, 'buckets', tuple(self.buckets))
    checks.one_of(self, 'transport', ('auto', *carriers.CARRIERS))
    checks.one_of(self, 'sequence_order', ('auto', 'contiguous', 'zigzag'))
    is_sorted = list(self.buckets) == sorted({*self.buckets})
    rises = is_sorted and min(self.buckets, default=1) >= 1
    rule = 'rise from 1 (the mean); the worst case is always included'
    checks.require(self, 'buckets', rises, rule)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
  """Placement of a model on a mesh; compared by identity.

  Attributes:
    variables: tree of NamedShardings of the model's variables.
    plan: exchange of tokens with experts; None on one device.
    buckets: sizes of receive buffers; () if none can overflow.
    lines: text that explains the choices.
  """

  model: model_config.ModelConfig
  mesh: Mesh
  layout: layouts.Layout
  variables: dict[str, Any]
  plan: exchange.ExchangePlan | None
  buckets: tuple[float, ...]
  lines: tuple[str, ...]

  @property
  def replicated(self) -> NamedSharding:
    return NamedSharding(self.mesh, P())

  @property
  def batch(self) -> NamedSharding:
    """Sharding of every [B, T] array."""
    return shardings.tokens(self.layout, self.mesh)

  @property
  def expert_shards(self) -> int:
    """Number of devices among which experts are divided."""
    return self.plan.expert_shards if self.plan else 1

  def rows_of(self, bucket: float | None, rows: int, seq_len: int) -> int:
    """Returns the rows of a receive buffer for a microbatch of all devices."""
    assert self.plan is not None
    load = _load(self.model, self.plan, rows, seq_len)
    return transports.capacity_rows(load, bucket)

  def needed_rows(self, ids_MBTA: np.ndarray, valid_BT: np.ndarray) -> int:
    """Returns the rows that recorded routes need, without unrecorded tokens."""
    assert self.plan is not None
    rows_P = exchange.needed_rows(
      self.plan,
      self._ordered(ids_MBTA, 2),
      self._ordered(valid_BT, 1),
      num_experts=self.model.moe.num_experts,
    )
    return int(rows_P.max())

  def plan_of(self, bucket: float | None) -> exchange.ExchangePlan | None:
    """Returns the plan with receive buffers of a bucket."""
    return self.plan and dataclasses.replace(self.plan, bucket=bucket)

  def rows_here(self, batch_size: int) -> list[int]:
    """Returns the rows of a batch that meet devices of this process."""
    # Any number of tokens that divides over the mesh.
    shape = batch_size, self.mesh.size
    indices: Any = self.batch.addressable_devices_indices_map(shape)
    return sorted(
      {row for rows, _ in indices.values() for row in range(batch_size)[rows]}
    )

  def put(self, batch: Any, batch_size: int | None = None) -> Any:
    """Places a batch; refuses an uneven division.

    Args:
      batch_size: rows of the whole batch, if `batch` has those of `rows_here`
        alone; None if it is the whole batch, in every process the same.
    """
    routes = shardings.routes(self.layout, self.mesh)

    def place(path, array):
      # Routes are layer-major: M stands before B.
      is_routes = path[-1].name == 'expert_ids_MBTA'
      axis, sharding = (1, routes) if is_routes else (0, self.batch)
      shape = list(array.shape)
      shape[axis] = batch_size or shape[axis]
      return jax.make_array_from_process_local_data(
        sharding, self._ordered(array, axis + 1), tuple(shape)
      )

    return jax.tree_util.tree_map_with_path(place, batch)

  def _ordered(self, array: np.ndarray, axis: int) -> np.ndarray:
    """Returns an array with the tokens of rows in the order of devices."""
    if self.plan is None or self.plan.sequence_order == 'contiguous':
      return array
    context = shardings.product(self.plan.sequence_axes, self.mesh)
    return sequence.to_device(array, context, axis)


@functools.lru_cache(maxsize=8)
def build(
  model: model_config.ModelConfig,
  *,
  mesh: Mesh,
  layout: layouts.Layout = layouts.TRAIN,
  options: ParallelOptions = ParallelOptions(),
  num_tokens: int = 2**20,
) -> Placement:
  """Places a model by a layout table; cached, as programs are by placement.

  `num_tokens` of a microbatch determine the printed bytes of the transport.

  Raises:
    ValueError: a parameter's axis is missing from the table, or its size does
      not divide; names the parameter.
  """
  is_cut = shardings.product(layout.sequence, mesh) > 1
  order = options.sequence_order
  if order == 'auto':
    order = 'zigzag' if is_cut else 'contiguous'
  plan = model_placement.exchange_plan(
    model,
    layout=layout,
    mesh=mesh,
    transport=options.transport,
    sequence_order=order,
  )
  axes = ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  lines = [f'mesh: {axes}; layout {layout.name}']
  buckets = ()
  if plan is not None:
    if is_cut:
      lines.append(f'tokens of a row: {order} over the context shards')
    if plan.expert_shards > 1:
      buckets = options.buckets
      plan, line = _carried(plan, model, num_tokens, buckets)
      lines.append(line)
  return Placement(
    model=model,
    mesh=mesh,
    layout=layout,
    variables=model_placement.variable_shardings(
      model, layout=layout, mesh=mesh
    ),
    plan=plan,
    buckets=buckets,
    lines=tuple(lines),
  )


def _load(model, plan, rows, seq_len):
  return exchange.load_of(
    plan,
    batch_size=rows,
    length=seq_len,
    num_experts=model.moe.num_experts,
    num_active=model.moe.num_active,
    embed_dim=model.embed_dim,
    item_bytes=4 if model.compute_dtype == 'float32' else 2,
  )


def _carried(plan, model, num_tokens, buckets):
  """Returns the plan with a transport, and a line that explains the choice."""
  name, reason = transports.choose(
    _load(model, plan, 1, num_tokens),
    platform=plan.mesh.devices.flat[0].platform,
    # The middle, as the bucket of a step is not known yet.
    bucket=buckets[len(buckets) // 2] if buckets else None,
  )
  if plan.transport == 'auto':
    return dataclasses.replace(plan, transport=name), reason
  line = f'transport {plan.transport}, as configured; auto: {reason}'
  return plan, line
