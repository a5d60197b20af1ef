"""Carries tokens to the devices that hold their experts, and back.

Inside one `jax.shard_map` over the whole mesh, every expert shard computes the
copies that chose its own experts. Tokens that are sharded are gathered by each
group of devices before and partial sums scattered after (`_ring`: all_gather,
psum_scatter); tokens that every device has, those of a decode step, need
only the sum (`_whole`: psum). Both are exact for any routing, drop nothing, and
copies of other shards cost nothing because they sort behind the groups. Routing
itself happens outside.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import rounding

ExpertFunction = Callable[[Any, jax.Array, jax.Array], jax.Array]


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
    attention_specs: storage spec of each array that attention multiplies with
      inside of shards, gathered likewise.
  """

  mesh: Mesh
  batch_axes: tuple[str, ...]
  sequence_axes: tuple[str, ...]
  weight_specs: tuple[tuple[str, P], ...]
  attention_specs: tuple[tuple[str, P], ...] = ()

  @property
  def expert_axes(self) -> tuple[str, ...]:
    axes = {axis_names(spec[0]) for _, spec in self.weight_specs}
    if len(axes) != 1:
      raise ValueError(
        'All expert arrays must shard their expert axis alike; the plan has '
        f'{dict(self.weight_specs)}.'
      )
    return axes.pop()


def axis_names(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes of one entry of a PartitionSpec as a tuple."""
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def constrain(x_BT: jax.Array, plan: ExchangePlan | None) -> jax.Array:
  """Keeps an array that starts with [B, T] where the tokens are.

  Without it the partitioner may trade a gather of a weight for one of the
  activations.

  Raises:
    ValueError: the batch or the sequence does not divide over its devices.
  """
  if plan is None:
    return x_BT
  _check_divides(plan, x_BT)
  spec = P(plan.batch_axes or None, plan.sequence_axes or None)
  return jax.lax.with_sharding_constraint(x_BT, NamedSharding(plan.mesh, spec))


def gather_weight(weight: jax.Array, plan: ExchangePlan | None) -> jax.Array:
  """Makes a weight whole on every device, for look-ups that index it."""
  if plan is None:
    return weight
  return jax.lax.with_sharding_constraint(weight, NamedSharding(plan.mesh, P()))


def attend_per_shard(
  attend: Callable[..., Any],
  query_BT: Any,
  keys_BS: Any,
  weights: dict[str, jax.Array],
  mask_BTS: jax.Array,
  *,
  plan: ExchangePlan | None,
) -> Any:
  """Runs an attention kernel on each device's queries and its rows' keys.

  A kernel is opaque to the partitioner, or loops over B: it must see only the
  rows of its device.

  Args:
    attend: (query_BT, keys_BS, weights, mask_BTS) -> tree of arrays of shape
      [B, T, ...], such as outputs and largest logits.
    query_BT: tree of arrays [B, T, ...].
    keys_BS: tree of arrays [B, S, ...], gathered along S: all that a query may
      meet, such as keys and values.
    weights: arrays that every device gathers whole.
    mask_BTS: true where a query may look.
    plan: where tokens lie; None means on this device.
  """
  if plan is None:
    return attend(query_BT, keys_BS, weights, mask_BTS)
  batch, sequence = plan.batch_axes or None, plan.sequence_axes or None
  specs = {name: dict(plan.attention_specs)[name] for name in weights}

  def attend_locally(query_BT, keys_BS, weights, mask_BTS):
    # Gathered in here, so that the gradient is reduced to shards, not whole.
    whole = {name: _gather_dims(weights[name], specs[name]) for name in weights}
    return attend(query_BT, keys_BS, whole, mask_BTS)

  local = jax.shard_map(
    attend_locally,
    mesh=plan.mesh,
    in_specs=(P(batch, sequence), P(batch), specs, P(batch, sequence)),
    out_specs=P(batch, sequence),
    check_vma=False,
  )
  return local(query_BT, keys_BS, weights, mask_BTS)


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
    plan: where things lie; None computes on the devices at hand.
  """
  if plan is None:
    return _local(expert_fn, weights, x_BTD, ids_BTA, gates_BTA, valid_BT, 0)
  token_P = P(plan.batch_axes or None, plan.sequence_axes or None)
  specs = dict(plan.weight_specs)
  if set(specs) != set(weights):
    raise ValueError(
      f'The plan knows the expert arrays {sorted(specs)}, not '
      f'{sorted(weights)}.'
    )
  tokens_are_sharded = plan.batch_axes or plan.sequence_axes
  exchange_fn = _ring if tokens_are_sharded else _whole
  transport = jax.shard_map(
    functools.partial(exchange_fn, expert_fn, plan),
    mesh=plan.mesh,
    in_specs=(specs, token_P, token_P, token_P, token_P),
    out_specs=token_P,
    check_vma=False,
  )
  return transport(weights, x_BTD, ids_BTA, gates_BTA, valid_BT)


def _check_divides(plan: ExchangePlan, x_BT: jax.Array) -> None:
  for dim, axes in enumerate((plan.batch_axes, plan.sequence_axes)):
    shards = 1
    for axis in axes:
      shards *= plan.mesh.shape[axis]
    if x_BT.shape[dim] % shards:
      raise ValueError(
        f'{("batch", "sequence")[dim]} size ({x_BT.shape[dim]}) must divide '
        f'by the mesh axes {axes} ({shards}); pad it to a multiple.'
      )


def _ring(expert_fn, plan, weights, x_BTD, ids_BTA, gates_BTA, valid_BT):
  with jax.named_scope('gather_weights'):
    weights = {
      # Experts stay where they are.
      name: _gather_dims(weights[name], P(None, *spec[1:]))
      for name, spec in plan.weight_specs
    }
  axes = plan.expert_axes
  if not axes:
    return _local(expert_fn, weights, x_BTD, ids_BTA, gates_BTA, valid_BT, 0)
  num_local = jax.tree.leaves(weights)[0].shape[0]
  with jax.named_scope('dispatch'):
    x_BTD, ids_BTA, gates_BTA, valid_BT = (
      jax.lax.all_gather(a, axes, axis=0, tiled=True)
      for a in (x_BTD, ids_BTA, gates_BTA, valid_BT)
    )
  first = jax.lax.axis_index(axes) * num_local
  partial_BTD = _local(
    expert_fn, weights, x_BTD, ids_BTA, gates_BTA, valid_BT, first
  )
  with jax.named_scope('combine'):
    return jax.lax.psum_scatter(
      partial_BTD, axes, scatter_dimension=0, tiled=True
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
  partial_BTD = _local(
    expert_fn, weights, x_BTD, ids_BTA, gates_BTA, valid_BT, first
  )
  with jax.named_scope('combine'):
    return jax.lax.psum(partial_BTD, axes) if axes else partial_BTD


def _gather_dims(weight, spec):
  for dim, entry in enumerate(spec):
    if axis_names(entry):
      weight = jax.lax.all_gather(
        weight, axis_names(entry), axis=dim, tiled=True
      )
  return weight


def _local(expert_fn, weights, x_BTD, ids_BTA, gates_BTA, valid_BT, first):
  """Sums the copies that chose experts first .. first + E_local - 1."""
  copies_BTAD, mine_BTA = copies(
    expert_fn, weights, x_BTD, ids_BTA, valid_BT, first
  )
  return gated_sum(copies_BTAD, gates_BTA, mine_BTA)


def copies(
  expert_fn: ExpertFunction,
  weights: dict[str, jax.Array],
  x_BTD: jax.Array,
  ids_BTA: jax.Array,
  valid_BT: jax.Array,
  first: Any,
) -> tuple[jax.Array, jax.Array]:
  """Computes the copies that chose experts first .. first + E_local - 1.

  Returns:
    copies_BTAD and the bool mine_BTA, false where a copy is of another expert
    or of padding and holds nothing of use.
  """
  num_active = ids_BTA.shape[-1]
  num_local = jax.tree.leaves(weights)[0].shape[0]
  local_BTA = ids_BTA - first
  mine_BTA = (local_BTA >= 0) & (local_BTA < num_local) & valid_BT[..., None]
  # Copies that are not ours get the last key: they sort behind all groups.
  key_Y = jnp.where(mine_BTA, local_BTA, num_local).reshape(-1)
  order_Y, place_Y, group_sizes_E = sort_by_group(key_Y, num_local)
  x_ZD = x_BTD.reshape(-1, x_BTD.shape[-1])
  rows_YD = take_rows(x_ZD, order_Y, place_Y, num_active)
  rows_YD = expert_fn(weights, rows_YD, group_sizes_E)
  copies_YD = permute_rows(rows_YD, place_Y, order_Y)
  return copies_YD.reshape(*ids_BTA.shape, -1), mine_BTA


def gated_sum(
  copies_BTAD: jax.Array, gates_BTA: jax.Array, mine_BTA: jax.Array
) -> jax.Array:
  """Returns each token's gated sum over the copies that count."""
  # Summed in float32 in the order of A, so replay repeats it bit for bit.
  gates_BTA = jnp.where(mine_BTA, gates_BTA.astype(jnp.float32), 0)
  y_BTD = jnp.einsum(
    'BTAD,BTA->BTD',
    copies_BTAD.astype(jnp.float32),
    gates_BTA,
    precision=jax.lax.Precision.HIGHEST,
  )
  return rounding.rounded(y_BTD, copies_BTAD.dtype)


def sort_by_group(
  key_Y: jax.Array, num_groups: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Sorts copies by key, stably.

  Returns:
    order_Y (copy at each sorted place), place_Y (its inverse) and
    group_sizes_E; keys of num_groups sort last and count in no group.
  """
  order_Y = jnp.argsort(key_Y, stable=True)
  place_Y = jnp.argsort(order_Y)
  group_sizes_E = (key_Y[:, None] == jnp.arange(num_groups)).sum(0)
  return order_Y, place_Y, group_sizes_E.astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(
  x_ZD: jax.Array, order_Y: jax.Array, place_Y: jax.Array, num_active: int
) -> jax.Array:
  """Returns x[order // A]; its gradient gathers too, and sums over A."""
  del place_Y
  return jnp.take(x_ZD, order_Y // num_active, axis=0, mode='clip')


def _take_rows_forward(x_ZD, order_Y, place_Y, num_active):
  return take_rows(x_ZD, order_Y, place_Y, num_active), place_Y


def _take_rows_backward(num_active, place_Y, d_rows_YD):
  d_copies_YD = jnp.take(d_rows_YD, place_Y, axis=0, mode='clip')
  d_copies_ZAD = d_copies_YD.reshape(-1, num_active, d_rows_YD.shape[-1])
  return d_copies_ZAD.sum(1), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


@jax.custom_vjp
def permute_rows(
  x_YD: jax.Array, source_Y: jax.Array, inverse_Y: jax.Array
) -> jax.Array:
  """Returns x[source]; its gradient is a gather by the inverse permutation."""
  del inverse_Y
  return jnp.take(x_YD, source_Y, axis=0, mode='clip')


def _permute_forward(x_YD, source_Y, inverse_Y):
  return permute_rows(x_YD, source_Y, inverse_Y), inverse_Y


def _permute_backward(inverse_Y, d_out_YD):
  return jnp.take(d_out_YD, inverse_Y, axis=0, mode='clip'), None, None


permute_rows.defvjp(_permute_forward, _permute_backward)
