"""Placement of a training stage's arrays on the mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import checks
from composer_jax.models import config as model_config
from composer_jax.models import placement as model_placement
from composer_jax.numerics import formats
from composer_jax.parallel import (
  exchange,
  layouts,
  rounds,
  sequence,
  shardings,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelOptions:
  """Options of the exchange between devices; results differ by rounding only.

  Attributes:
    transport: one of `rounds.TRANSPORTS`; 'auto' takes the platform's.
    room: copies of tokens that a buffer holds over their mean. More than fit
      are exchanged in several rounds.
    sequence_order: 'contiguous', or 'zigzag', which gives each context shard an
      early and a late piece of a row, for an even number of keys; 'auto' is
      zigzag with several context shards.
    wire: 'values' sends tokens to experts in the model's dtype; 'codes' in the
      eight bits that experts in 'mxfp8' or 'fp8' use of them, which changes no
      result.
    chunks: parts of a device's tokens that attend and travel one after another,
      so that attention of one stands beside the exchange of another.
  """

  transport: str = 'auto'
  room: float = rounds.ROOM
  sequence_order: str = 'auto'
  wire: str = 'values'
  chunks: int = 1

  def __post_init__(self):
    checks.one_of(self, 'transport', ('auto', *rounds.TRANSPORTS))
    checks.one_of(self, 'sequence_order', ('auto', 'contiguous', 'zigzag'))
    checks.one_of(self, 'wire', rounds.WIRES)
    checks.positive(self, 'room')
    checks.at_least(self, 1, 'chunks')


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
  """Placement of a model on a mesh; compared by identity.

  Attributes:
    variables: tree of NamedShardings of the model's variables.
    plan: exchange of tokens with experts; None on one device.
    lines: text that explains the choices.
  """

  model: model_config.ModelConfig
  mesh: Mesh
  layout: layouts.Layout
  variables: dict[str, Any]
  plan: exchange.ExchangePlan | None
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

  def shards_of(self, num_tokens: int) -> rounds.Shards | None:
    """Returns the shards of an exchange of so many tokens of all devices."""
    if self.plan is None or not self.plan.travels:
      return None
    width = shardings.product(self.plan.token_axes, self.mesh)
    return exchange.shards_of(
      self.plan,
      num_tokens=num_tokens // width // self.plan.chunks,
      num_active=self.model.moe.num_active,
      num_local=self.model.moe.num_experts // self.expert_shards,
    )

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
  transport = options.transport
  if transport == 'auto':
    transport = rounds.transport_of(mesh.devices.flat[0].platform)
  plan = model_placement.exchange_plan(
    model,
    layout=layout,
    mesh=mesh,
    transport=transport,
    room=options.room,
    sequence_order=order,
    wire=options.wire,
  )
  if plan is not None:
    plan = dataclasses.replace(plan, chunks=options.chunks)
  axes = ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  lines = [f'mesh: {axes}; layout {layout.name}']
  if plan is not None and is_cut:
    lines.append(f'tokens of a row: {order} over the context shards')
  placed = Placement(
    model=model,
    mesh=mesh,
    layout=layout,
    variables=model_placement.variable_shardings(
      model, layout=layout, mesh=mesh
    ),
    plan=plan,
    lines=tuple(lines),
  )
  if shards := placed.shards_of(num_tokens):
    line = _line(shards, model, num_tokens // mesh.size)
    placed = dataclasses.replace(placed, lines=(*lines, line))
  return placed


def _line(shards, model, num_tokens):
  """Returns a line about the exchange, for tokens of one device."""
  copies = num_tokens * model.moe.num_active
  width = model.embed_dim * jnp.dtype(model.compute_dtype).itemsize
  coded = 0
  if shards.wire == 'codes':
    block = formats.BLOCKS[model.precision.experts]
    coded = model.embed_dim + -(-model.embed_dim // block)
  received = rounds.bytes_received(
    shards, copies, width, keeps=not model.remat, coded=coded
  )
  return (
    f'transport {shards.transport}: {shards.num_shards} expert shards, buffers '
    f'of {shards.buffer} rows for {copies} copies of the tokens of a device; '
    f'at even load a shard receives {received / 1e6:.3g} MB per layer forward '
    'and backward'
  )
