"""Carries tokens to the devices that hold their experts, and back.

Tokens that are sharded travel by one of `carriers`, and every shard computes
the copies that chose its own experts. Tokens that every device has, those of a
decode step, need only a sum. All is exact for any routing and drops nothing;
what a bucket has no room for is counted, and the step repeated. Routing itself
happens outside.

Tensors are named for remat: 'dispatched' is what arrived at the experts,
'routes' says what lies where (small), 'combined' is what came back. Where they
are kept, the backward pass repeats neither a collective nor a sort.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from composer_jax.core import platforms
from composer_jax.parallel import carriers, dispatch, transports


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangePlan:
  """How variables, tokens and experts lie on the mesh.

  Attributes:
    batch_axes: mesh axes that shard B.
    sequence_axes: mesh axes that shard T.
    weight_specs: storage spec of each expert array, by name; axis 0 is the
      expert axis and its mesh axes, the same of all, form the expert shards.
      Other sharded dimensions are gathered before use, layer by layer.
    transport: of `carriers.CARRIERS`, or 'auto' for `transports.choose`.
    bucket: room for copies in means; None for the worst case.
    specs: storage spec of each variable of the model, by '/'-joined name.
    sequence_order: of the tokens of a row on the devices: see `sequence`.
  """

  mesh: Mesh
  batch_axes: tuple[str, ...]
  sequence_axes: tuple[str, ...]
  weight_specs: tuple[tuple[str, P], ...]
  transport: str = 'auto'
  bucket: float | None = None
  specs: tuple[tuple[str, P], ...] = ()
  sequence_order: str = 'contiguous'

  @property
  def token_axes(self) -> tuple[str, ...]:
    return self.batch_axes + self.sequence_axes

  @property
  def expert_axes(self) -> tuple[str, ...]:
    return axis_names(self.weight_specs[0][1][0])

  @property
  def expert_shards(self) -> int:
    return math.prod(self.mesh.shape[axis] for axis in self.expert_axes)


class ExchangeStats(flax.struct.PyTreeNode, kw_only=True):
  """Whether one exchange had room, in int32 copies of tokens.

  Where some shard needed more than the capacity, the step has a wrong result
  and must be repeated with more.

  Attributes:
    needed_rows: of the busiest shard that this one knows of; or the tokens to
      receive, if those are more for their room (`transports.rows_for_tokens`).
    capacity: that there was room for.
  """

  needed_rows: jax.Array
  capacity: jax.Array


def axis_names(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes of one entry of a PartitionSpec as a tuple."""
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def exchange(
  expert_fn: dispatch.ExpertFunction,
  weights: dict[str, jax.Array],
  x_BTD: jax.Array,
  ids_BTA: jax.Array,
  gates_BTA: jax.Array,
  valid_BT: jax.Array,
  *,
  plan: ExchangePlan | None,
) -> tuple[jax.Array, ExchangeStats | None]:
  """Returns y_BTD, each token's gated sum over its experts; zero on padding.

  Without a plan it computes on the device at hand. With one that shards tokens
  it runs inside of a shard_map over the whole mesh, on this shard's tokens and
  experts. With one that does not, outside of any, on whole arrays, which always
  have room: the second result is None.

  Args:
    expert_fn: (weights, rows_YD, group_sizes_E) -> rows_YD of sorted rows.
    weights: arrays with a leading expert axis, sharded over nothing else.
    x_BTD: tokens.
    ids_BTA: int32 experts of each token, counted over all shards.
    gates_BTA: float32 weight of each.
    valid_BT: false on padding, which reaches no expert.
    plan: where experts and tokens lie.
  """
  arrays = (weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
  if plan is not None and not plan.token_axes:
    summed = jax.shard_map(
      functools.partial(_whole, expert_fn, plan),
      mesh=plan.mesh,
      in_specs=(dict(plan.weight_specs), P(), P(), P(), P()),
      out_specs=P(),
      check_vma=False,
    )
    return summed(*arrays), None
  tokens = dispatch.prepare(x_BTD, ids_BTA, gates_BTA, valid_BT)
  shards = plan.expert_shards if plan else 1
  load = transports.Load(
    num_tokens=tokens.x_ZD.shape[0],
    num_active=tokens.ids_ZA.shape[1],
    num_experts=shards * jax.tree.leaves(weights)[0].shape[0],
    num_shards=shards,
    embed_dim=x_BTD.shape[-1],
    item_bytes=x_BTD.dtype.itemsize,
  )
  if plan is None or not plan.expert_axes:
    y_ZD, needed = dispatch.expert_sum(expert_fn, weights, tokens, 0)
    capacity = load.worst_rows
  else:
    y_ZD, needed = _carried(expert_fn, weights, tokens, load, plan)
    capacity = transports.capacity_rows(load, plan.bucket)
  return y_ZD.reshape(x_BTD.shape), ExchangeStats(
    needed_rows=needed.astype(jnp.int32), capacity=jnp.int32(capacity)
  )


def _carried(expert_fn, weights, tokens, load, plan):
  """Returns y_ZD and the rows needed."""
  missing = [axis for axis in plan.expert_axes if axis not in plan.token_axes]
  if missing:
    raise ValueError(
      f'The experts are sharded over {plan.expert_axes}, but tokens over '
      f'{plan.token_axes}: {missing} would compute every token again. Let them '
      'shard the batch or the sequence.'
    )
  name, axes = transport_of(plan, load), plan.expert_axes
  shards = transports.sized(load, name, bucket=plan.bucket, axes=axes)
  compute = functools.partial(
    dispatch.expert_sum,
    expert_fn,
    weights,
    first=jax.lax.axis_index(axes) * load.num_local,
    rows=shards.rows,
  )
  y_ZD, needs = carriers.carry(name, compute, tokens, shards)
  if needs.tokens is None:
    return y_ZD, needs.copies
  rows = transports.rows_for_tokens(load, name, needs.tokens)
  return y_ZD, jnp.maximum(needs.copies, rows)


def transport_of(plan: ExchangePlan, load: transports.Load) -> str:
  """Returns the transport of a plan on the platform that is traced for."""
  if plan.transport != 'auto':
    return plan.transport
  platform = platforms.current()
  return transports.choose(load, platform=platform, bucket=plan.bucket)[0]


def load_of(
  plan: ExchangePlan,
  *,
  batch_size: int,
  length: int,
  num_experts: int,
  num_active: int,
  embed_dim: int,
  item_bytes: int = 2,
) -> transports.Load:
  """Returns the size of the exchange of one batch, for `transports`."""
  tokens = math.prod(plan.mesh.shape[axis] for axis in plan.token_axes)
  shards = plan.expert_shards
  if num_experts % shards:
    raise ValueError(
      f'num_experts ({num_experts}) must divide by the mesh axes '
      f'{plan.expert_axes} ({shards}); the nearest that does is '
      f'{max(1, round(num_experts / shards)) * shards}.'
    )
  return transports.Load(
    num_tokens=batch_size * length // tokens,
    num_active=num_active,
    num_experts=num_experts,
    num_shards=shards,
    embed_dim=embed_dim,
    item_bytes=item_bytes,
  )


def needed_rows(
  plan: ExchangePlan,
  ids_MBTA: np.ndarray,
  valid_BT: np.ndarray,
  *,
  num_experts: int,
) -> np.ndarray:
  """Counts on the host what the device will report for recorded routes.

  Args:
    plan: whose transport is no longer 'auto'.
    ids_MBTA: experts of each token as the device will have them; tokens of
      `NO_ROUTE` are routed afresh and are not counted here.

  Returns:
    int64 rows_M, of the shard that needs most in each layer.
  """
  # As `dispatch.prepare`.
  ids_MBTA = ids_MBTA.astype(np.int64)
  same = ids_MBTA[..., :, None] == ids_MBTA[..., None, :]
  is_used = ~np.tril(same, -1).any(-1) & valid_BT[..., None]
  ids_MBTA = np.where(is_used, ids_MBTA, -1)
  num_layers, batch, length, num_active = ids_MBTA.shape
  load = load_of(
    plan,
    batch_size=batch,
    length=length,
    num_experts=num_experts,
    num_active=num_active,
    embed_dim=0,
  )
  # A dimension for each mesh axis; B and T become those of a shard.
  rows, columns = (
    [plan.mesh.shape[axis] for axis in axes]
    for axes in (plan.batch_axes, plan.sequence_axes)
  )
  b, t = batch // math.prod(rows), length // math.prod(columns)
  split = ids_MBTA.reshape(num_layers, *rows, b, *columns, t, num_active)
  dims = ['M', *plan.batch_axes, 'B', *plan.sequence_axes, 'T', 'A']
  # Groups of shards that exchange with each other, in the order of the mesh.
  outer = [axis for axis in plan.token_axes if axis not in plan.expert_axes]
  order = ['M', *outer, *plan.expert_axes, 'B', 'T', 'A']
  split = split.transpose([dims.index(name) for name in order])
  split = split.reshape(num_layers, -1, load.num_shards, b * t, num_active)
  is_any = (split >= 0) & (split < num_experts)
  shard = np.where(is_any, split // load.num_local, load.num_shards)
  # [M, group, sender, token, A, receiver]
  visits = shard[..., None] == np.arange(load.num_shards)
  copies = visits.sum((2, 3, 4)).max((1, 2))
  if plan.transport == 'ring':
    return copies
  tokens = visits.any(4).sum(3)
  if plan.transport == 'ragged_a2a':
    tokens = tokens.sum(2, keepdims=True)
  rows_M = transports.rows_for_tokens(
    load, plan.transport, tokens.max((1, 2, 3))
  )
  return np.maximum(copies, rows_M)


def _whole(expert_fn, plan, weights, x_BTD, ids_BTA, gates_BTA, valid_BT):
  """Sums what each device's share of the experts makes of all tokens.

  A share is whole experts, or the same slice of hidden units of each: SwiGLU
  works on units alone, so their sums add up too and no weight is gathered.
  """
  axes = plan.expert_axes
  first = 0
  if axes:
    first = jax.lax.axis_index(axes) * jax.tree.leaves(weights)[0].shape[0]
  # Of the first array; `models.placement` slices hidden units of all alike.
  spec = plan.weight_specs[0][1]
  axes += tuple(axis for dim in spec[1:] for axis in axis_names(dim))
  tokens = dispatch.prepare(x_BTD, ids_BTA, gates_BTA, valid_BT)
  partial_ZD, _ = dispatch.expert_sum(expert_fn, weights, tokens, first)
  partial_BTD = partial_ZD.reshape(x_BTD.shape)
  with jax.named_scope('combine'):
    return jax.lax.psum(partial_BTD, axes) if axes else partial_BTD
