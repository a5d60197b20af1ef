"""Sends tokens to the devices of their experts, and the outputs back.

Sharded tokens travel by one of `carriers`, and each shard computes the copies
for its own experts. Tokens that every device has, as in a decode step, need
only a sum. Results are exact for any routes: a step whose tokens exceed a
bucket is detected and repeated. Routing itself happens elsewhere.

Checkpoint names for policies of recomputation: 'dispatched' for the tokens that
arrive at experts, 'routes' for the small arrays of their order, 'combined' for
the sums that come back. If they are kept, the backward pass repeats neither a
collective nor a sort.
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

from composer_jax.core import checks, platforms
from composer_jax.parallel import carriers, dispatch, transports


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangePlan:
  """The sharding of variables, tokens and experts.

  Attributes:
    batch_axes: mesh axes that shard B.
    sequence_axes: mesh axes that shard T.
    weight_specs: storage spec of each expert array by name; of an adapted one a
      tree that begins with the array's. Dimension 0 is the expert axis, whose
      mesh axes, equal for all arrays, form the expert shards; other sharded
      dimensions are gathered before use in each layer.
    transport: key of `carriers.CARRIERS`; 'auto' uses `transports.choose`.
    bucket: capacity for copies as a multiple of the mean; None for the worst
      case.
    specs: storage spec of each variable of the model by '/'-joined name.
    sequence_order: order of a row's tokens on the devices; see `sequence`.
  """

  mesh: Mesh
  batch_axes: tuple[str, ...]
  sequence_axes: tuple[str, ...]
  weight_specs: tuple[tuple[str, Any], ...]
  transport: str = 'auto'
  bucket: float | None = None
  specs: tuple[tuple[str, P], ...] = ()
  sequence_order: str = 'contiguous'

  @property
  def token_axes(self) -> tuple[str, ...]:
    return self.batch_axes + self.sequence_axes

  @property
  def expert_axes(self) -> tuple[str, ...]:
    return axis_names(self.expert_spec[0])

  @property
  def expert_spec(self) -> P:
    """Storage spec of the first expert array."""
    return jax.tree.leaves(self.weight_specs[0][1], is_leaf=_is_spec)[0]

  @property
  def expert_shards(self) -> int:
    return math.prod(self.mesh.shape[axis] for axis in self.expert_axes)


class ExchangeStats(flax.struct.PyTreeNode, kw_only=True):
  """Needed and available capacity of one exchange, in int32 copies of tokens.

  If a shard needed more than the capacity, the step has a wrong result and must
  be repeated with more.

  Attributes:
    needed_rows: copies of the busiest shard known here, or its received tokens
      converted by `transports.rows_for_tokens` if those are more.
    capacity: copies that had room.
  """

  needed_rows: jax.Array
  capacity: jax.Array


def fits(stats: ExchangeStats | None) -> jax.Array | bool:
  """Returns true if every exchange had the rows that it needed."""
  return stats is None or (stats.needed_rows <= stats.capacity).all()


def _is_spec(tree: Any) -> bool:
  return isinstance(tree, P)


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
  """Computes each token's gated sum over its experts, zero for padding.

  With a plan that shards tokens, call it inside a shard_map over the whole mesh
  with this shard's tokens and experts. With a plan that does not, call it
  outside of any with whole arrays. Without a plan it computes on one device.

  Args:
    expert_fn: function (weights, rows_YD, group_sizes_E) -> rows_YD.
    weights: arrays with a leading expert axis, the only sharded one.
    ids_BTA: int32 experts of each token, counted over all shards.
    gates_BTA: float32 gate of each expert.
    valid_BT: false for padding, which reaches no expert.
    plan: sharding of experts and tokens; None for one device.

  Returns:
    y_BTD, and the capacity of the exchange; None for a plan that does not shard
    tokens, which always has room.
  """
  if plan is not None and not plan.token_axes:
    summed = jax.shard_map(
      functools.partial(_whole, expert_fn, plan),
      mesh=plan.mesh,
      in_specs=(dict(plan.weight_specs), P(), P(), P(), P()),
      out_specs=P(),
      check_vma=False,
    )
    return summed(weights, x_BTD, ids_BTA, gates_BTA, valid_BT), None
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
  name, axes = plan.transport, plan.expert_axes
  # Another axis would compute every token again.
  assert set(axes) <= set(plan.token_axes), (axes, plan.token_axes)
  if name == 'auto':
    name, _ = transports.choose(
      load, platform=platforms.current(), bucket=plan.bucket
    )
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
  tokens = math.prod(plan.mesh.shape[axis] for axis in plan.token_axes)
  shards = plan.expert_shards
  parts = f'the mesh axes {plan.expert_axes}'
  checks.divides(shards, parts, num_experts, 'num_experts')
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
  """Counts on the host the `needed_rows` of a device for recorded routes.

  Args:
    plan: plan with a transport other than 'auto'.
    ids_MBTA: experts of each token in the order of the devices; tokens with
      `NO_ROUTE` will be routed afresh and are not counted.

  Returns:
    int64 rows_M, the rows of the shard that needs most in each layer.
  """
  # Merges repeated experts of a token, as `dispatch.prepare` does.
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
  # One dimension for each mesh axis; B and T become the sizes of a shard.
  rows, columns = (
    [plan.mesh.shape[axis] for axis in axes]
    for axes in (plan.batch_axes, plan.sequence_axes)
  )
  b, t = batch // math.prod(rows), length // math.prod(columns)
  split = ids_MBTA.reshape(num_layers, *rows, b, *columns, t, num_active)
  dims = ['M', *plan.batch_axes, 'B', *plan.sequence_axes, 'T', 'A']
  # Groups of shards that exchange tokens, in the order of the mesh.
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
  """Sums the outputs of each device's experts for all tokens.

  A device has whole experts, or the same slice of hidden units of every expert,
  whose outputs add up too, since SwiGLU is element-wise in hidden units.
  """
  axes = plan.expert_axes
  first = 0
  if axes:
    first = jax.lax.axis_index(axes) * jax.tree.leaves(weights)[0].shape[0]
  # `models.placement` slices the hidden units of all arrays alike.
  spec = plan.expert_spec
  axes += tuple(axis for dim in spec[1:] for axis in axis_names(dim))
  tokens = dispatch.prepare(x_BTD, ids_BTA, gates_BTA, valid_BT)
  partial_ZD, _ = dispatch.expert_sum(expert_fn, weights, tokens, first)
  partial_BTD = partial_ZD.reshape(x_BTD.shape)
  with jax.named_scope('combine'):
    return jax.lax.psum(partial_BTD, axes) if axes else partial_BTD
