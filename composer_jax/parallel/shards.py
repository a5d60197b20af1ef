"""What training computes inside of `jax.shard_map`, with its own collectives.

Each stage of the forward pass (embedding, a layer, the head) is one
`jax.shard_map` over the whole mesh. Weights enter as they are stored; `gather`
makes one whole and its gradient goes back by the same way, reduced to shards.
An input that lies on several replicas is in the specs of neither, so that
`shard_map` sums its gradient over them: shards, not whole weights.

The map does not check what varies over which axis (`check_vma=False`). Two
rules take its place: no differentiable path through a shard may sum over the
mesh by itself, and what is a sum over all tokens leaves the shard unsummed, on
an axis of its own (`stacked`), and is added outside.
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
from composer_jax.parallel import exchange, shardings

# Elements of an array of one layer that `lend` copies.
MOST_LENT = 1 << 16


def per_shard(
  fn: Callable[..., Any],
  plan: exchange.ExchangePlan | None,
  *,
  in_specs: Any,
  out_specs: Any,
) -> Callable[..., Any]:
  """Returns fn, called by each device with its shards; fn itself on one."""
  if plan is None:
    return fn
  where = dict(mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs)
  return jax.shard_map(fn, **where, check_vma=False)


def tokens_spec(plan: exchange.ExchangePlan | None) -> P:
  """Returns the spec of arrays that start with [B, T]."""
  if plan is None:
    return P()
  return P(plan.batch_axes or None, plan.sequence_axes or None)


def stacked_spec(plan: exchange.ExchangePlan | None) -> P:
  """Returns the spec of what `stacked` makes: one entry per device."""
  return P() if plan is None else P(tuple(plan.mesh.shape))


def stacked(tree: Any) -> Any:
  """Gives each array an axis for the devices, to be reduced outside."""
  return jax.tree.map(lambda x: x[None], tree)


def specs_of(plan: exchange.ExchangePlan | None, name: str, tree: Any) -> Any:
  """Returns where the variables of a subtree lie, or a leaf.

  `name` is that of the subtree, such as 'params/moe_layers'.
  """
  if plan is None:
    return jax.tree.map(lambda _: P(), tree)
  known = dict(plan.specs)

  def spec(inner, _):
    full = f'{name}/{inner}' if inner else name
    if full not in known:
      raise ValueError(
        f'The plan does not say where {full} lies; it knows {sorted(known)}. '
        "Build it with models.placement.exchange_plan, of the model's config."
      )
    return known[full]

  return trees.map_names(spec, tree)


def check_tokens(
  plan: exchange.ExchangePlan | None, shape_BT: tuple[int, ...]
) -> None:
  """Refuses a batch that the mesh cannot divide."""
  if plan is None:
    return
  if set(plan.token_axes) != set(plan.mesh.shape):
    raise ValueError(
      f'Tokens lie over the mesh axes {plan.batch_axes} and '
      f'{plan.sequence_axes} and the mesh has {tuple(plan.mesh.shape)}: a '
      'decoder trains in a layout whose tokens use them all, such as '
      'layouts.TRAIN or layouts.REPLICATED.'
    )
  named = (('batch', plan.batch_axes), ('sequence', plan.sequence_axes))
  for size, (name, axes) in zip(shape_BT, named, strict=True):
    shardings.check_divides(f'{name} size', size, axes, plan.mesh)


def gather(
  shard: jax.Array, spec: P, *, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Returns a weight whole, in the dtype that it is computed with.

  It travels in that dtype, its gradient in float32, and both among the devices
  of the spec alone. What was gathered is named 'weights', so that a policy of
  recomputation can keep it.
  """
  if not any(_axes(entry) for entry in spec):
    return shard.astype(dtype)
  whole = _gather(shard, spec, jnp.dtype(dtype), shard.dtype)
  return ad_checkpoint.checkpoint_name(whole, 'weights')


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(shard, spec, dtype, stored_dtype):
  del stored_dtype
  return gathered(shard.astype(dtype), spec)


def _gather_forward(shard, spec, dtype, stored_dtype):
  return _gather(shard, spec, dtype, stored_dtype), None


def _gather_backward(spec, dtype, stored_dtype, _, d_whole):
  del dtype
  d_shard = scattered(d_whole.astype(jnp.float32), spec)
  return (d_shard.astype(stored_dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def lend(
  stacked: Any, specs: Any, plan: exchange.ExchangePlan | None
) -> tuple[Any, Any, Callable[[Any], Any]]:
  """Gives each device copies of its own of small arrays that all hold alike.

  The gradient of such a copy leaves the shard unsummed, and one sum after the
  scan serves all layers. Of the arrays themselves, `shard_map` would sum it
  layer by layer over the whole mesh: few bytes at the price of a round trip.

  `stacked` has a leading layer axis, that a scan consumes; `specs` are of one
  layer.

  Returns:
    The variables and specs to scan with, and what gives a layer's variables
    back, inside of the shard.
  """
  if plan is None:
    return stacked, specs, lambda variables: variables
  size, apart = plan.mesh.size, stacked_spec(plan)

  lent = jax.tree.map(
    lambda x_M, spec: not any(spec) and math.prod(x_M.shape[1:]) <= MOST_LENT,
    stacked,
    specs,
  )

  def lend_one(x_M, is_lent):
    if not is_lent:
      return x_M
    copies_M = jnp.broadcast_to(x_M[:, None], (len(x_M), size, *x_M.shape[1:]))
    where = NamedSharding(plan.mesh, P(None, *apart))
    return jax.lax.with_sharding_constraint(copies_M, where)

  return (
    jax.tree.map(lend_one, stacked, lent),
    jax.tree.map(lambda one, spec: apart if one else spec, lent, specs),
    lambda variables: jax.tree.map(
      lambda one, x: x[0] if one else x, lent, variables
    ),
  )


def _axes(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes of a dimension that have more than one device."""
  names = exchange.axis_names(entry)
  return tuple(name for name in names if jax.lax.axis_size(name) > 1)


def gathered(shard: jax.Array, spec: P) -> jax.Array:
  """Returns the whole of an array from every device of its spec."""
  with jax.named_scope('gather_weights'):
    for dim, entry in enumerate(spec):
      if axes := _axes(entry):
        shape = (*shard.shape[:dim], -1, *shard.shape[dim + 1 :])
        shards_X = jax.lax.all_gather(shard, axes, axis=0)
        shard = jnp.moveaxis(shards_X, 0, dim).reshape(shape)
    return shard


def scattered(whole: jax.Array, spec: P) -> jax.Array:
  """Returns this device's shard of the sum over the devices of the spec.

  Shards travel on a leading axis of their own, both ways. Of a reduce-scatter
  along an axis of the array the TPU compiler may make an all-reduce of it all.
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

  The table stays where it is: each device looks up its columns for the tokens
  of all devices that share the table, and an all_to_all brings every token its
  columns. That moves tokens x D numbers there and as many back, where a
  gathered table moves V x D and then its gradient; a device has fewer tokens
  than a vocabulary has words. The gradient is added to the columns in float32,
  by a scatter.
  """
  rows_axes, axes = (_axes(entry) for entry in (*spec, None, None)[:2])
  assert not rows_axes, 'V is whole in every layout that trains.'
  if not axes:
    return table_VD[ids_BT].astype(dtype)
  with jax.named_scope('embedding'):
    ids_BT = jax.lax.all_gather(ids_BT, axes, axis=0, tiled=True)
    x_BTD = table_VD[ids_BT].astype(dtype)
    return jax.lax.all_to_all(x_BTD, axes, 0, 2, tiled=True)
