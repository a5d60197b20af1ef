"""Collectives of training inside `jax.shard_map`.

Each stage of the forward pass (embedding, a layer, the head) is one
`jax.shard_map` over the whole mesh. Weights enter as stored; `gather` returns a
whole weight and reduces its gradient to shards. Mesh axes with copies of a
weight are not in its spec, so `shard_map` sums gradients of shards over them.

The map does not check which values vary over which axis (`check_vma=False`).
Instead, no differentiable path through a shard may sum over the mesh, and sums
over all tokens leave the shard unsummed, on an axis of their own (`stacked`),
and are added outside.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import ad_checkpoint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.parallel import dispatch, exchange, shardings

# Most elements of one layer's array that `lend` copies.
MOST_LENT = 1 << 16


def per_shard(
  fn: Callable[..., Any],
  plan: exchange.ExchangePlan | None,
  *,
  in_specs: Any,
  out_specs: Any,
) -> Callable[..., Any]:
  """Returns fn mapped over each device's shards; fn itself without a plan."""
  if plan is None:
    return fn
  specs = dict(in_specs=in_specs, out_specs=out_specs)
  return jax.shard_map(fn, mesh=plan.mesh, **specs, check_vma=False)


def tokens_spec(plan: exchange.ExchangePlan | None) -> P:
  """Returns the spec of arrays that start with [B, T]."""
  if plan is None:
    return P()
  return P(plan.batch_axes or None, plan.sequence_axes or None)


def stacked_spec(plan: exchange.ExchangePlan | None) -> P:
  """Returns the spec of the results of `stacked`, one entry per device."""
  return P() if plan is None else P(tuple(plan.mesh.shape))


def stacked(tree: Any) -> Any:
  """Gives each array an axis for the devices, to be reduced outside."""
  return jax.tree.map(lambda x: x[None], tree)


def specs_of(plan: exchange.ExchangePlan | None, name: str, tree: Any) -> Any:
  """Returns the storage specs of the variables of a subtree or leaf.

  `name` is the '/'-joined name of the subtree, such as 'params/moe_layers'.
  """
  if plan is None:
    return jax.tree.map(lambda _: P(), tree)
  known = dict(plan.specs)

  def spec(inner, _):
    return known[f'{name}/{inner}' if inner else name]

  return trees.map_names(spec, tree)


def check_tokens(
  plan: exchange.ExchangePlan | None, shape_BT: tuple[int, ...]
) -> None:
  """Raises a ValueError for a batch that does not divide over the mesh."""
  if plan is None:
    return
  if set(plan.token_axes) != set(plan.mesh.shape):
    raise ValueError(
      f'Tokens are sharded over {plan.token_axes} and the mesh has the axes '
      f'{tuple(plan.mesh.shape)}. Train in a layout whose tokens use all axes, '
      'such as layouts.TRAIN or layouts.REPLICATED.'
    )
  named = (('batch', plan.batch_axes), ('sequence', plan.sequence_axes))
  for size, (name, axes) in zip(shape_BT, named, strict=True):
    shardings.check_divides(f'{name} size', size, axes, plan.mesh)
  width = shape_BT[1] // shardings.product(plan.sequence_axes, plan.mesh)
  if width % plan.chunks:
    raise ValueError(
      f'parallel.chunks ({plan.chunks}) must divide the tokens of a row on a '
      f'device, and there are {width}.'
    )


def gather(
  shard: jax.Array,
  spec: P,
  *,
  dtype: jax.typing.DTypeLike,
  coding: dispatch.Coding | None = None,
) -> jax.Array:
  """Returns the whole weight of a shard in the compute dtype.

  The weight travels in that dtype or as a coding says, its gradient in float32,
  both among the devices of the spec. The result has the checkpoint name
  'weights'.
  """
  if not any(_axes(entry) for entry in spec):
    return shard.astype(dtype)
  whole = _gather(shard, spec, jnp.dtype(dtype), shard.dtype, coding)
  return ad_checkpoint.checkpoint_name(whole, 'weights')


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(shard, spec, dtype, stored_dtype, coding):
  del stored_dtype
  if coding is None:
    return gathered(shard.astype(dtype), spec)
  arrays = [gathered(x, spec) for x in coding.encode(shard)]
  return coding.decode(arrays, dtype)


def _gather_backward(spec, dtype, stored_dtype, coding, _, d_whole):
  del dtype, coding
  d_shard = scattered(d_whole.astype(jnp.float32), spec)
  return (d_shard.astype(stored_dtype),)


_gather.defvjp(lambda *args: (_gather(*args), None), _gather_backward)


def lend(
  stacked: Any, specs: Any, plan: exchange.ExchangePlan | None
) -> tuple[Any, Any, Callable[[Any], Any]]:
  """Gives each device its own copy of small replicated arrays.

  The gradients of the copies leave the shards unsummed, and one sum after the
  scan serves all layers. `shard_map` would sum those of the arrays themselves
  layer by layer, with a round trip for few bytes.

  `stacked` has a leading layer axis, over which a scan runs; `specs` are those
  of one layer.

  Returns:
    The variables to scan over, the specs of one layer of them, and a function
    that returns a layer's variables inside a shard.
  """
  if plan is None:
    return stacked, specs, lambda variables: variables
  size, by_device = plan.mesh.size, stacked_spec(plan)
  lent = jax.tree.map(
    lambda x_M, spec: not any(spec) and math.prod(x_M.shape[1:]) <= MOST_LENT,
    stacked,
    specs,
  )

  def lend_one(x_M, is_lent):
    if not is_lent:
      return x_M
    copies_M = jnp.broadcast_to(x_M[:, None], (len(x_M), size, *x_M.shape[1:]))
    sharding = NamedSharding(plan.mesh, P(None, *by_device))
    return jax.lax.with_sharding_constraint(copies_M, sharding)

  return (
    jax.tree.map(lend_one, stacked, lent),
    jax.tree.map(
      lambda is_lent, spec: by_device if is_lent else spec, lent, specs
    ),
    lambda variables: jax.tree.map(
      lambda is_lent, x: x[0] if is_lent else x, lent, variables
    ),
  )


def _axes(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes of a dimension that have more than one device."""
  names = exchange.axis_names(entry)
  return tuple(name for name in names if jax.lax.axis_size(name) > 1)


def gathered(shard: jax.Array, spec: P) -> jax.Array:
  """Returns the whole array, gathered from the devices of its spec."""
  with jax.named_scope('gather_weights'):
    for dim, entry in enumerate(spec):
      if axes := _axes(entry):
        shape = (*shard.shape[:dim], -1, *shard.shape[dim + 1 :])
        shards_X = jax.lax.all_gather(shard, axes, axis=0)
        shard = jnp.moveaxis(shards_X, 0, dim).reshape(shape)
    return shard


def scattered(whole: jax.Array, spec: P) -> jax.Array:
  """Returns this device's shard of the sum over the devices of the spec.

  Shards are a leading axis of their own, since the TPU compiler may turn a
  reduce-scatter along an axis of the array into an all-reduce of all of it.
  """
  with jax.named_scope('scatter_gradients'):
    for dim, entry in reversed(list(enumerate(spec))):
      if axes := _axes(entry):
        parts = (jax.lax.axis_size(axes), -1)
        shape = (*whole.shape[:dim], *parts, *whole.shape[dim + 1 :])
        shards_X = jnp.moveaxis(whole.reshape(shape), dim, 0)
        whole = jax.lax.psum_scatter(shards_X, axes)
    return whole


def look_up(
  table_VD: jax.Array,
  ids_BT: jax.Array,
  spec: P,
  *,
  dtype: jax.typing.DTypeLike,
) -> jax.Array:
  """Returns x_BTD, the rows of a table whose D may be sharded.

  The table is not gathered: each device looks up its columns for the tokens of
  all devices that share the table, and an all_to_all brings every token its
  columns. That moves tokens x D numbers forward and backward; gathering would
  move V x D, and a device usually has fewer tokens than V. The gradient is
  scattered into the columns in float32.
  """
  rows_axes, axes = (_axes(entry) for entry in (*spec, None, None)[:2])
  assert not rows_axes, 'V is whole in every layout that trains.'
  if not axes:
    return table_VD[ids_BT].astype(dtype)
  with jax.named_scope('embedding'):
    ids_BT = jax.lax.all_gather(ids_BT, axes, axis=0, tiled=True)
    x_BTD = table_VD[ids_BT].astype(dtype)
    return jax.lax.all_to_all(x_BTD, axes, 0, 2, tiled=True)
