"""Carries tokens to the devices that hold their experts, and back.

`in_shard` runs inside of a shard_map over the whole mesh: tokens that are
sharded travel by one of `transports`, and every shard computes the copies that
chose its own experts. `exchange` runs outside of one and is for tokens that
every device has, those of a decode step, which need only a sum. All are exact
for any routing and drop nothing; what a bucket has no room for is counted, and
the step repeated. Routing itself happens outside.

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
from composer_jax.parallel import dispatch, transports

ExpertFunction = dispatch.ExpertFunction


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangePlan:
  """How experts and tokens lie on the mesh.

  Attributes:
    mesh: the one mesh.
    batch_axes: mesh axes that shard B.
    sequence_axes: mesh axes that shard T.
    weight_specs: storage spec of each expert array, by name; axis 0 is the
      expert axis and its mesh axes form the expert shards. Other sharded
      dimensions are gathered before use, layer by layer.
    transport: of `transports.CARRIERS`, or 'auto' for `transports.choose`.
    bucket: room for copies in means; None for the worst case.
    chunks: in how many steps a shard goes through its experts; one step's rows
      exist at a time, and are computed anew for the gradient.
    specs: storage spec of each variable of the model, by '/'-joined name.
    reduce_dtype: of gradients of dense weights on their way to their shards.
    sequence_order: of `sequence.ORDERS`; the tokens of a row on the devices.
  """

  mesh: Mesh
  batch_axes: tuple[str, ...]
  sequence_axes: tuple[str, ...]
  weight_specs: tuple[tuple[str, P], ...]
  transport: str = 'auto'
  bucket: float | None = None
  chunks: int = 1
  specs: tuple[tuple[str, P], ...] = ()
  reduce_dtype: str = 'float32'
  sequence_order: str = 'contiguous'

  @property
  def expert_axes(self) -> tuple[str, ...]:
    axes = {axis_names(spec[0]) for _, spec in self.weight_specs}
    if len(axes) != 1:
      raise ValueError(
        'All expert arrays must shard their expert axis alike; the plan has '
        f'{dict(self.weight_specs)}.'
      )
    return axes.pop()

  @property
  def expert_shards(self) -> int:
    return math.prod(self.mesh.shape[axis] for axis in self.expert_axes)


class ExchangeStats(flax.struct.PyTreeNode, kw_only=True):
  """Whether one exchange had room; no leaf is differentiable.

  Attributes:
    needed_rows: int32, copies that the busiest shard that this one knows of had
      to have room for, or the tokens to receive, if those are more for their
      room (`transports.rows_for_tokens`).
    capacity: int32, copies that there was room for. Where some shard needed
      more, the step has a wrong result and must be repeated with more.
  """

  needed_rows: jax.Array
  capacity: jax.Array


def axis_names(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes of one entry of a PartitionSpec as a tuple."""
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def exchange(
  expert_fn: ExpertFunction,
  weights: dict[str, jax.Array],
  x_BTD: jax.Array,
  ids_BTA: jax.Array,
  gates_BTA: jax.Array,
  valid_BT: jax.Array,
  *,
  plan: ExchangePlan | None,
) -> jax.Array:
  """Returns y_BTD, each token's gated sum over its experts; zero on padding.

  Args:
    expert_fn: (weights, rows_YD, group_sizes_E) -> rows_YD of sorted rows.
    weights: arrays with a leading expert axis.
    x_BTD: tokens.
    ids_BTA: int32 experts of each token.
    gates_BTA: float32 weight of each.
    valid_BT: false on padding, which reaches no expert.
    plan: where experts lie, every device having all tokens; None computes on
      the devices at hand.
  """
  if plan is None:
    arrays = (weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
    return in_shard(expert_fn, *arrays, plan=None)[0]
  assert not plan.batch_axes and not plan.sequence_axes, plan
  specs = dict(plan.weight_specs)
  if set(specs) != set(weights):
    raise ValueError(
      f'The plan knows the expert arrays {sorted(specs)}, not '
      f'{sorted(weights)}.'
    )
  transport = jax.shard_map(
    functools.partial(_whole, expert_fn, plan),
    mesh=plan.mesh,
    in_specs=(specs, P(), P(), P(), P()),
    out_specs=P(),
    check_vma=False,
  )
  return transport(weights, x_BTD, ids_BTA, gates_BTA, valid_BT)


def in_shard(
  expert_fn: ExpertFunction,
  weights: dict[str, jax.Array],
  x_BTD: jax.Array,
  ids_BTA: jax.Array,
  gates_BTA: jax.Array,
  valid_BT: jax.Array,
  *,
  plan: ExchangePlan | None,
) -> tuple[jax.Array, ExchangeStats]:
  """Returns y_BTD of this shard's tokens, inside of a shard_map.

  Args:
    expert_fn: (weights, rows_YD, group_sizes_E) -> rows_YD of sorted rows.
    weights: this shard's experts, every other dimension whole.
    x_BTD: this shard's tokens.
    ids_BTA: int32 experts of each token, counted over all shards.
    gates_BTA: float32 weight of each.
    valid_BT: false on padding, which reaches no expert.
    plan: where things lie; None computes on the device at hand.
  """
  tokens = dispatch.prepare(x_BTD, ids_BTA, gates_BTA, valid_BT)
  num_local = jax.tree.leaves(weights)[0].shape[0]
  shards = plan.expert_shards if plan else 1
  load = transports.Load(
    num_tokens=tokens.x_ZD.shape[0],
    num_active=tokens.ids_ZA.shape[1],
    num_experts=shards * num_local,
    num_shards=shards,
    embed_dim=x_BTD.shape[-1],
    item_bytes=x_BTD.dtype.itemsize,
  )
  if plan is None or not plan.expert_axes:
    chunks = plan.chunks if plan else 1
    y_ZD, needed = dispatch.expert_sum(
      expert_fn, weights, tokens, 0, chunks=chunks
    )
    capacity = load.worst_rows
  else:
    y_ZD, needed, capacity = _carried(expert_fn, weights, tokens, load, plan)
  return y_ZD.reshape(x_BTD.shape), ExchangeStats(
    needed_rows=needed.astype(jnp.int32), capacity=jnp.int32(capacity)
  )


def _carried(expert_fn, weights, tokens, load, plan):
  """Returns y_ZD, the rows needed and those that there were."""
  _check_axes(plan)
  name, axes = transport_of(plan, load), plan.expert_axes
  group = transports.sized(
    load, name, bucket=plan.bucket, axes=axes, chunks=plan.chunks
  )
  compute = functools.partial(
    dispatch.expert_sum,
    expert_fn,
    weights,
    first=jax.lax.axis_index(axes) * load.num_local,
    rows=group.rows,
    chunks=group.chunks,
  )
  y_ZD, needs = transports.CARRIERS[name](compute, tokens, group)
  needed = needs.copies
  if needs.tokens is not None:
    rows = transports.rows_for_tokens(load, name, needs.tokens)
    needed = jnp.maximum(needed, rows)
  return y_ZD, needed, transports.capacity_rows(load, plan.bucket)


def transport_of(plan: ExchangePlan, load: transports.Load) -> str:
  """Returns the transport of a plan on the platform that is traced for.

  Raises:
    ValueError: there is none of that name.
  """
  if plan.transport == 'auto':
    platform = platforms.current()
    return transports.choose(load, platform=platform, bucket=plan.bucket).name
  if plan.transport not in transports.CARRIERS:
    raise ValueError(
      f'transport {plan.transport!r} is not one of '
      f'{("auto", *transports.CARRIERS)}.'
    )
  return plan.transport


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
  """Returns the size of the exchange of one batch, for `transports`.

  Raises:
    ValueError: the experts do not divide over their shards.
  """
  sizes = plan.mesh.shape
  tokens = math.prod(sizes[a] for a in plan.batch_axes + plan.sequence_axes)
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
  name: str,
  num_experts: int,
) -> np.ndarray:
  """Returns rows_M that recorded routes need: see `transports.needed_rows`."""
  return transports.needed_rows(
    ids_MBTA,
    valid_BT,
    name,
    num_experts=num_experts,
    mesh_shape=dict(plan.mesh.shape),
    batch_axes=plan.batch_axes,
    sequence_axes=plan.sequence_axes,
    expert_axes=plan.expert_axes,
  )


def _check_axes(plan):
  token_axes = plan.batch_axes + plan.sequence_axes
  missing = [axis for axis in plan.expert_axes if axis not in token_axes]
  if missing:
    raise ValueError(
      f'The experts are sharded over {plan.expert_axes}, but tokens over '
      f'{token_axes}: {missing} would compute every token again. Let them '
      'shard the batch or the sequence.'
    )


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
