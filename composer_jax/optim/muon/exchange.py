"""Runs a Muon plan, in one `shard_map` over all groups.

Slices of the local shards of a chunk are exchanged by one all-to-all, after
which owners have whole matrices; these are orthogonalised without
communication and returned by a second all-to-all (and an all-gather if replicas
shared the work).

Letters of local arrays: n matrices, p and q the short and the long side.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout
from jax.sharding import NamedSharding, PartitionSpec

from composer_jax.core import platforms
from composer_jax.optim.muon import newton_schulz
from composer_jax.optim.muon import plan as muon_plan

# Entries of a matrix that keeps a device busy by itself. A chunk of such
# matrices is two loops, which need the memory of one matrix. XLA's scheduler
# for TPUs runs one all-to-all at a time: it hides the next chunk's beside one
# loop and the last chunk's beside the other.
_LARGE = 1 << 20

_Arrays = dict[str, jax.Array]
_Box = tuple[tuple[int, int], ...]  # first and end of each dimension


class ShardBox(NamedTuple):
  """`count` matrices of a shard; `order` makes them batch, p side, q side."""

  name: str
  starts: tuple[int, ...]
  sizes: tuple[int, ...]
  order: tuple[int, ...]
  count: int


def _cover(start: int, stop: int, sizes: tuple[int, ...]) -> list[_Box]:
  """Covers [start, stop) of a row-major index space by boxes, in order."""
  if start >= stop:
    return []
  if not sizes:
    return [()]
  inner = math.prod(sizes[1:])
  first, skipped = divmod(start, inner)
  last, end = divmod(stop, inner)

  def within(index: int, start: int, stop: int) -> list[_Box]:
    inside = _cover(start, stop, sizes[1:])
    return [((index, index + 1), *box) for box in inside]

  if first == last:
    return within(first, skipped, end)
  boxes: list[_Box] = []
  if skipped:
    boxes += within(first, skipped, inner)
    first += 1
  if last > first:
    boxes.append(((first, last), *((0, size) for size in sizes[1:])))
  return boxes + within(last, 0, end)


def _boxes_of(
  group: muon_plan.MuonGroup, chunk: muon_plan.Chunk, arrays: _Arrays
) -> list[ShardBox]:
  """Returns a chunk's boxes in local order, by the shapes of local shards."""
  boxes = []
  begin = 0
  for member in group.members:
    shape = arrays[member.name].shape
    start = max(chunk.start - begin, 0)
    stop = min(chunk.start + chunk.count - begin, member.count)
    for box in _cover(start, stop, member.local_batch):
      starts, sizes = [0] * len(shape), list(shape)
      for dim, (low, high) in zip(member.batch, box, strict=True):
        starts[dim], sizes[dim] = low, high - low
      boxes.append(
        ShardBox(
          name=member.name,
          starts=tuple(starts),
          sizes=tuple(sizes),
          order=member.batch + member.rows + member.columns,
          count=math.prod(high - low for low, high in box),
        )
      )
    begin += member.count
  return boxes


def _as_stored(x: jax.Array) -> jax.Array:
  # Keeps XLA from copying whole parameters to another layout before slicing.
  order = layout.Layout(major_to_minor=tuple(range(x.ndim)))
  return layout.with_layout_constraint(x, order)


def _read(
  boxes: list[ShardBox],
  combine: Callable[..., jax.Array],
  trees: tuple[_Arrays, ...],
  group: muon_plan.MuonGroup,
) -> jax.Array:
  """Returns a chunk's local shards [n, p / m_p, q / m_q] in the wire dtype.

  Values are `combine`, elementwise, of slices of `trees`.
  """
  parts = []
  for box in boxes:
    ends = [s + n for s, n in zip(box.starts, box.sizes, strict=True)]
    slices = [lax.slice(t[box.name], box.starts, ends) for t in trees]
    x = _as_stored(combine(*slices).astype(group.newton_schulz.dtype))
    x = x.transpose(box.order)
    parts.append(x.reshape(box.count, group.p_side.local, group.q_side.local))
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _write(boxes: list[ShardBox], y: jax.Array, results: _Arrays) -> None:
  begin = 0
  for box in boxes:
    part = y[begin : begin + box.count]
    begin += box.count
    part = part.reshape([box.sizes[d] for d in box.order])
    inverse = tuple(box.order.index(d) for d in range(len(box.order)))
    results[box.name] = lax.dynamic_update_slice(
      results[box.name], _as_stored(part.transpose(inverse)), box.starts
    )


def _accumulate(m: jax.Array, g: jax.Array, beta: float) -> jax.Array:
  """Returns the momentum after a gradient, in float32 rounded once."""
  # With one product in each sum, fused multiply-adds give the same bits on
  # every mesh.
  wide = m.astype(jnp.float32)
  wide += (1 - beta) * (g.astype(jnp.float32) - wide)
  return wide.astype(m.dtype)


def _direction(
  m: jax.Array, g: jax.Array, beta: float, weight: jax.Array
) -> jax.Array:
  """Returns the look-ahead to orthogonalise, from the previous momentum."""
  wide = _accumulate(m, g, beta).astype(jnp.float32)
  return wide + weight * g.astype(jnp.float32)


def _exchange(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """All-to-all of equal blocks of the leading dimension."""
  if not axes:
    return x

  exchange = functools.partial(
    lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
  )
  # Without the barrier XLA on the CPU gives blocks different layouts, and then
  # refuses them.
  return newton_schulz.as_bits(exchange, lax.optimization_barrier(x))


def _interleaved(
  group: muon_plan.MuonGroup, owned: int
) -> tuple[list[int], list[int]]:
  """Returns the shape of exchanged blocks, and the order of whole matrices.

  In blocks the shard index and the local index of a dimension are apart.
  """
  q_dims = group.q_side.dims
  if group.split > 1:
    # Newton-Schulz commutes with any permutation of columns.
    q_dims = ((group.q_side.shards, group.piece_columns),)
  dims = (*group.p_side.dims, *q_dims)
  rank = len(dims)
  shape = [s for s, _ in dims] + [owned] + [n for _, n in dims]
  return shape, [rank] + [d for i in range(rank) for d in (i, rank + 1 + i)]


def _gather(x: jax.Array, group: muon_plan.MuonGroup, owned: int) -> jax.Array:
  """Takes local shards [count, p / m_p, q / m_q] to owners' matrices."""
  rows, columns = group.p_side.local, group.piece_columns
  # Slots of all owners of one replica.
  slots = group.num_shards // group.split * owned
  extra = slots * group.sharers - len(x)
  padding = group.split * columns - group.q_side.local
  x = jnp.pad(x, ((0, extra), (0, 0), (0, padding)))
  if group.sharers > 1:
    sharer = lax.axis_index(group.replica_axes) % group.sharers
    x = lax.dynamic_slice_in_dim(x, sharer * slots, slots)
  if group.split > 1:
    x = x.reshape(-1, owned, rows, group.split, columns)
    x = x.transpose(0, 3, 1, 2, 4).reshape(-1, rows, columns)
  x = _exchange(x, group.axes)
  shape, order = _interleaved(group, owned)
  return x.reshape(shape).transpose(order).reshape(owned, group.p, -1)


def _scatter(y: jax.Array, group: muon_plan.MuonGroup, owned: int) -> jax.Array:
  """Takes owners' matrices to local shards, within one replica."""
  rows, columns = group.p_side.local, group.piece_columns
  shape, order = _interleaved(group, owned)
  inverse = [order.index(d) for d in range(len(order))]
  y = y.reshape([shape[d] for d in order]).transpose(inverse)
  y = _exchange(y.reshape(-1, rows, columns), group.axes)
  if group.split > 1:
    y = y.reshape(-1, group.split, owned, rows, columns)
    y = y.transpose(0, 2, 3, 1, 4).reshape(-1, rows, group.split * columns)
  return y


def _share(y: jax.Array, group: muon_plan.MuonGroup, count: int) -> jax.Array:
  """Gathers the replicas' results, and drops padding."""
  if group.sharers > 1:
    sets = newton_schulz.index_groups(group.num_replicas, group.sharers)
    y = newton_schulz.as_bits(
      lambda y: lax.all_gather(
        y,
        group.replica_axes,
        axis_index_groups=sets if len(sets) > 1 else None,
        tiled=True,
      ),
      y,
    )
  return y[:count, :, : group.q_side.local]


def _products(x: jax.Array, group: muon_plan.MuonGroup) -> jax.Array:
  options = group.newton_schulz
  if group.split > 1:
    return newton_schulz.orthogonalize_split(
      x,
      options,
      axes=group.axes,
      index_groups=newton_schulz.index_groups(group.num_shards, group.split),
    )
  if len(x) == 1 or math.prod(x.shape[1:]) < _LARGE:
    return newton_schulz.orthogonalize(x, options)

  function = functools.partial(newton_schulz.orthogonalize, options=options)
  halves = jnp.split(x, [len(x) // 2])
  return jnp.concatenate([lax.map(function, half) for half in halves])


def _run(
  plan: muon_plan.MuonPlan,
  beta: float,
  momentum: _Arrays,
  gradients: _Arrays,
  weight: jax.Array,
) -> tuple[_Arrays, _Arrays]:
  """Executes the plan on one device's shards."""
  results = {
    member.name: lax.empty(
      momentum[member.name].shape, group.newton_schulz.dtype
    )
    for group in plan.groups
    for member in group.members
  }
  mean_flops = plan.flops / len(plan.sequence)
  received, done, returned, along = [], [], [], []
  for group_index, chunk_index in plan.sequence:
    group = plan.groups[group_index]
    chunk = group.chunks[chunk_index]
    is_local = group.mode == muon_plan.LOCAL
    boxes = _boxes_of(group, chunk, momentum)
    # To save memory, at most the next chunk arrives and the last one returns
    # while a chunk is multiplied.
    earlier = received[-1:] + done[-2:-1] + sum(returned[-3:-2], [])
    x = _read(
      boxes,
      lambda m, g, earlier=earlier: platforms.after(
        earlier, _direction(m, g, beta, weight)
      ),
      (momentum, gradients),
      group,
    )
    if not is_local:
      x = _gather(x, group, chunk.owned)
    y = back = _products(lax.optimization_barrier(x), group)
    if not is_local:
      back = _share(_scatter(y, group, chunk.owned), group, chunk.count)
    _write(boxes, back, results)
    along.append(back)
    # Chunks of little work hide no transfer; they join their neighbours.
    if 2 * chunk.owned * group.matrix_flops >= mean_flops:
      received.append(x)
      done.append(y)
      returned.append(along)
      along = []
  # Last, so that XLA's scheduler hides transfers beside products instead, and
  # the momentum can reuse the buffer of the previous one.
  momentum = {
    name: platforms.after(done[-1:], _accumulate(m, gradients[name], beta))
    for name, m in momentum.items()
  }
  return results, momentum


def orthogonalize(
  plan: muon_plan.MuonPlan,
  momentum: _Arrays,
  gradients: _Arrays,
  weight: jax.Array,
  *,
  beta: float,
  shardings: dict[str, NamedSharding],
) -> tuple[_Arrays, _Arrays]:
  """Returns orthogonalised directions, in the wire dtype, and the new momentum.

  Args:
    plan: plan for the same shapes and shardings.
    momentum, gradients: arrays by name, sharded as the parameters.
    weight: weight of the gradient beside the momentum, in the look-ahead.
    shardings: shardings of the parameters by name; {} on one device.
  """
  if not momentum:
    return {}, {}
  # The order of the plan stands for names, so that no schedule depends on them.
  members = [m for group in plan.groups for m in group.members]
  numbers = {m.name: f'{i:05}' for i, m in enumerate(members)}
  numbered = lambda tree: {numbers[name]: x for name, x in tree.items()}
  run = functools.partial(_run, _renamed(plan, numbers), beta)
  if shardings:
    specs = numbered({name: shardings[name].spec for name in momentum})
    mesh = next(iter(shardings.values())).mesh
    is_typed = all(
      group.split == group.num_replicas == 1 for group in plan.groups
    )
    run = jax.shard_map(
      run,
      mesh=mesh,
      # The weight is an argument, as shard_map's closure may have no arrays on
      # Explicit axes.
      in_specs=(specs, specs, PartitionSpec()),
      out_specs=(specs, specs),
      # Equal replicas, and collectives among parts of an axis, cannot be typed.
      check_vma=is_typed and min(mesh.shape.values()) > 1,
    )
  results = run(numbered(momentum), numbered(gradients), weight)
  directions, momentum = (
    {name: tree[number] for name, number in numbers.items()} for tree in results
  )
  return directions, momentum


def _renamed(
  plan: muon_plan.MuonPlan, names: dict[str, str]
) -> muon_plan.MuonPlan:
  renamed = lambda m: dataclasses.replace(m, name=names[m.name])
  groups = tuple(
    dataclasses.replace(group, members=tuple(map(renamed, group.members)))
    for group in plan.groups
  )
  return dataclasses.replace(plan, groups=groups)
