"""Sorts tokens into rows by expert, and sums the results, by gathers only.

An `Order` describes a buffer of rows: the copy of a token in each row, and the
row of each copy. `take` fills a buffer, `combine` sums it up, and each is the
transpose of the other, so neither direction scatters and results do not depend
on a device's order of work. No place points at unused rows, so they need not be
cleared.

Ids outside of 0 .. E - 1, such as `NO_ROUTE`, and those of padding have no
expert: they sort behind all groups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.core import platforms, records, rounding

ExpertFunction = Callable[[Any, jax.Array, jax.Array], jax.Array]


class Coding(NamedTuple):
  """How the values of an array travel in bytes, without loss.

  Attributes:
    encode: array -> list of uint8 arrays with its axes, of codes and of scales.
    decode: (these arrays, dtype) -> the array.
  """

  encode: Callable[[jax.Array], list[jax.Array]]
  decode: Callable[[list[jax.Array], jax.typing.DTypeLike], jax.Array]


class Experts(NamedTuple):
  """Functions of rows sorted by expert.

  Attributes:
    forward: (weights, rows_YD, group_sizes_E) -> outputs_YD.
    kept: the same -> (outputs_YD, hidden_YX), which `gradient` can use.
    gradient: (weights, (rows_YD, d_outputs_YD, gates_Y), group_sizes_E, sums
      or None, hidden_YX or None) -> (d_rows_YD, d_gates_Y, sums) of outputs
      times gates, where the weights' gradients are added to the sums.
    zeros: weights -> float32 sums of zero, None for frozen ones.
    coding: bytes that hold all of a row that the functions use; None if only
      the row itself does.
  """

  forward: ExpertFunction
  kept: Callable[..., tuple[jax.Array, jax.Array]]
  gradient: Callable[..., tuple[jax.Array, jax.Array, Any]]
  zeros: Callable[[Any], Any]
  coding: Coding | None = None


class Order(NamedTuple):
  """Contents of a buffer of rows, as int32 arrays.

  Attributes:
    source_Y: token z in each row; any token in unused rows.
    copy_Y: copy z * A + a in each row; any copy in unused rows.
    place_ZA: row of each copy; the number of rows if it has none.
  """

  source_Y: jax.Array
  copy_Y: jax.Array
  place_ZA: jax.Array


class RoutedTokens(NamedTuple):
  """Tokens with the ids and gates of their experts on any device.

  `draws_ZA` are uint32 numbers of copies, the same on every mesh, for functions
  that draw; None for others, whose weights then have no entry 'draws'.
  """

  x_ZD: jax.Array
  ids_ZA: jax.Array
  gates_ZA: jax.Array
  draws_ZA: jax.Array | None = None


def sort_copies(key_ZA: jax.Array, num_groups: int) -> tuple[Order, jax.Array]:
  """Sorts copies stably by group, and returns the int32 sizes of the groups.

  A key is the int32 group of a copy, num_groups if it has none.
  """
  key_Y = key_ZA.reshape(-1)
  size = key_Y.size
  # Sorts numbers that hold both key and copy: on CPU an argsort, which compares
  # pairs, takes five times as long.
  sorted_Y, copy_Y = _sort_numbered(key_Y, num_groups + 1)
  _, place_Y = _sort_numbered(copy_Y, size)
  place_Y = jnp.where(key_Y < num_groups, place_Y, size)
  ends_E = jnp.searchsorted(
    sorted_Y, jnp.arange(num_groups), side='right', method='scan'
  ).astype(jnp.int32)
  sizes_E = jnp.diff(ends_E, prepend=0)
  source_Y = copy_Y // key_ZA.shape[1]
  return Order(source_Y, copy_Y, place_Y.reshape(key_ZA.shape)), sizes_E


def _sort_numbered(key_Y, num_keys):
  """Returns the sorted keys, and the index that each had."""
  size = key_Y.size
  index_Y = jnp.arange(size, dtype=jnp.uint32)
  key_Y = key_Y.astype(jnp.uint32)
  if num_keys * size <= 1 << 32:
    key_Y = jnp.sort(key_Y * size + index_Y)
    keys, numbers = key_Y // size, key_Y % size
  else:
    keys, numbers = jax.lax.sort((key_Y, index_Y), num_keys=1, is_stable=True)
  return keys.astype(jnp.int32), numbers.astype(jnp.int32)


@jax.custom_vjp
def take(x_ZD: jax.Array, order: Order) -> jax.Array:
  """Returns rows_YD, the token of each row."""
  return x_ZD.at[order.source_Y].get(mode='promise_in_bounds')


take.defvjp(
  lambda x_ZD, order: (take(x_ZD, order), order),
  lambda order, d_rows_YD: (_sum(d_rows_YD, None, order.place_ZA), None),
)


@jax.custom_vjp
def combine(
  rows_YD: jax.Array, gates_ZA: jax.Array | None, order: Order
) -> jax.Array:
  """Returns y_ZD, each token's sum over its rows, times gates unless None.

  Sums are float32 in the order of A, so that replay repeats them bit for bit.
  """
  return _sum(rows_YD, gates_ZA, order.place_ZA)


def _sum(rows_YD, gates_ZA, place_ZA):
  y_ZD = jnp.zeros((place_ZA.shape[0], rows_YD.shape[1]), jnp.float32)
  # One copy at a time: an array of all copies would be written to memory.
  for a in range(place_ZA.shape[1]):
    place_Z = place_ZA[:, a]
    if platforms.current() != 'cpu':
      # Accelerators gather to memory; the barrier keeps one copy at a time.
      place_Z, y_ZD = jax.lax.optimization_barrier((place_Z, y_ZD))
    copy_ZD = rows_YD.at[place_Z].get(mode='fill', fill_value=0)
    copy_ZD = copy_ZD.astype(jnp.float32)
    y_ZD += copy_ZD if gates_ZA is None else gates_ZA[:, a, None] * copy_ZD
  return rounding.rounded(y_ZD, rows_YD.dtype)


def _combine_forward(rows_YD, gates_ZA, order):
  # Without gates, the backward pass does not need the rows.
  residuals = (None if gates_ZA is None else rows_YD, gates_ZA, order)
  return combine(rows_YD, gates_ZA, order), residuals


def _combine_backward(residuals, d_y_ZD):
  rows_YD, gates_ZA, order = residuals
  d_rows_YD = take(d_y_ZD, order)
  if gates_ZA is None:
    return d_rows_YD, None, None
  d_wide_YD = d_rows_YD.astype(jnp.float32)
  # A gate's gradient needs only its own row.
  d_gate_Y = (rows_YD.astype(jnp.float32) * d_wide_YD).sum(-1)
  d_gates_ZA = d_gate_Y.at[order.place_ZA].get(mode='fill', fill_value=0)
  gate_Y = gates_ZA.reshape(-1)[order.copy_Y]
  d_rows_YD = rounding.rounded(gate_Y[:, None] * d_wide_YD, rows_YD.dtype)
  return d_rows_YD, d_gates_ZA.astype(gates_ZA.dtype), None


combine.defvjp(_combine_forward, _combine_backward)


def prepare(
  x_BTD: jax.Array,
  ids_BTA: jax.Array,
  gates_BTA: jax.Array,
  valid_BT: jax.Array,
  draws_BT: jax.Array | None = None,
) -> RoutedTokens:
  """Returns flat tokens, with `NO_ROUTE` for padding.

  A second copy of a token for the same expert is merged into the first, gates
  included. A shard therefore never needs more rows for a token than it has
  experts, whatever the routes.
  """
  dim, num_active = x_BTD.shape[-1], ids_BTA.shape[-1]
  ids_ZA = ids_BTA.reshape(-1, num_active).astype(jnp.int32)
  gates_ZA = gates_BTA.reshape(-1, num_active).astype(jnp.float32)
  same_ZAA = ids_ZA[:, :, None] == ids_ZA[:, None, :]
  gates_ZA = jnp.where(same_ZAA, gates_ZA[:, None, :], 0).sum(-1)
  is_used_ZA = ~jnp.tril(same_ZAA, -1).any(-1) & valid_BT.reshape(-1, 1)
  ids_ZA = jnp.where(is_used_ZA, ids_ZA, records.NO_ROUTE)
  draws_ZA = _draws_of_copies(draws_BT, num_active)
  return RoutedTokens(x_BTD.reshape(-1, dim), ids_ZA, gates_ZA, draws_ZA)


def _draws_of_copies(draws_BT, num_active):
  if draws_BT is None:
    return None
  # Threefry makes independent numbers of any two that differ.
  step = jnp.uint32(0x9E3779B9)
  return draws_BT.reshape(-1, 1) + step * jnp.arange(num_active, dtype='uint32')


def _with_draws(weights, draws_ZA, order):
  if draws_ZA is None:
    return weights
  return {**weights, 'draws': draws_ZA.reshape(-1)[order.copy_Y]}


def expert_sum(
  expert_fn: ExpertFunction,
  weights: dict[str, jax.Array],
  tokens: RoutedTokens,
  first: jax.Array | int,
) -> jax.Array:
  """Sums the outputs of experts first .. first + E_local - 1 by token.

  Args:
    expert_fn: function (weights, rows_YD, group_sizes_E) -> rows_YD.
    tokens: tokens of `prepare`, from any shards.

  Returns:
    y_ZD, the sum by token, zero for tokens without an expert here.
  """
  x_ZD, ids_ZA, gates_ZA, draws_ZA = tokens
  num_local = jax.tree.leaves(weights)[0].shape[0]
  local_ZA = ids_ZA - first
  is_mine_ZA = (local_ZA >= 0) & (local_ZA < num_local)
  key_ZA = jnp.where(is_mine_ZA, local_ZA, num_local)
  if num_local < key_ZA.shape[1]:
    key_ZA, gates_ZA, draws_ZA = _narrowed(
      key_ZA, (gates_ZA, draws_ZA), num_local
    )
  with jax.named_scope('dispatch'):
    order, sizes_E = named_routes(sort_copies(key_ZA, num_local))
    rows_YD = take(x_ZD, order)
  rows_YD = expert_fn(_with_draws(weights, draws_ZA, order), rows_YD, sizes_E)
  with jax.named_scope('combine'):
    return combine(rows_YD, gates_ZA, order)


def _narrowed(key_ZA, arrays_ZA, num_groups):
  """Keeps one column per group that a token can have, in the order of A."""
  is_some_ZA = key_ZA < num_groups
  column_ZA = jnp.cumsum(is_some_ZA, axis=1) - 1
  # Comparisons, since the gradient of a gather would be a scatter.
  picks_ZAA = column_ZA[:, None, :] == jnp.arange(num_groups)[:, None]
  picks_ZAA &= is_some_ZA[:, None, :]
  key_ZA = jnp.where(picks_ZAA, key_ZA[:, None, :], num_groups).min(-1)
  return key_ZA, *(
    None if x is None else jnp.where(picks_ZAA, x[:, None, :], 0).sum(-1)
    for x in arrays_ZA
  )


def copies(
  expert_fn: ExpertFunction,
  weights: dict[str, jax.Array],
  x_BTD: jax.Array,
  ids_BTA: jax.Array,
  valid_BT: jax.Array,
  draws_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns each copy's output without summing, on one device.

  Returns:
    copies_BTAD: output of each copy.
    mine_BTA: false for copies without an expert or of padding, which are zero.
  """
  num_active = ids_BTA.shape[-1]
  num_local = jax.tree.leaves(weights)[0].shape[0]
  mine_BTA = (ids_BTA >= 0) & (ids_BTA < num_local) & valid_BT[..., None]
  key_BTA = jnp.where(mine_BTA, ids_BTA, num_local)
  order, group_sizes_E = sort_copies(key_BTA.reshape(-1, num_active), num_local)
  rows_YD = take(x_BTD.reshape(-1, x_BTD.shape[-1]), order)
  draws_ZA = _draws_of_copies(draws_BT, num_active)
  weights = _with_draws(weights, draws_ZA, order)
  rows_YD = expert_fn(weights, rows_YD, group_sizes_E)
  # Each copy is a token of its own, whose sum of one row is exact.
  each = Order(order.copy_Y, order.copy_Y, order.place_ZA.reshape(-1, 1))
  copies_YD = combine(rows_YD, None, each)
  return copies_YD.reshape(*ids_BTA.shape, -1), mine_BTA


def gated_sum(
  copies_BTAD: jax.Array, gates_BTA: jax.Array, mine_BTA: jax.Array
) -> jax.Array:
  """Returns each token's gated sum over its copies with mine_BTA."""
  # Float32 sums in the order of A, which replay repeats bit for bit.
  gates_BTA = jnp.where(mine_BTA, gates_BTA.astype(jnp.float32), 0)
  y_BTD = jnp.einsum(
    'BTAD,BTA->BTD',
    copies_BTAD.astype(jnp.float32),
    gates_BTA,
    precision=jax.lax.Precision.HIGHEST,
  )
  return rounding.rounded(y_BTD, copies_BTAD.dtype)


def named_routes(tree: Any) -> Any:
  """Gives small arrays the name 'routes' for policies of recomputation."""
  return jax.tree.map(
    lambda x: ad_checkpoint.checkpoint_name(x, 'routes'), tree
  )
