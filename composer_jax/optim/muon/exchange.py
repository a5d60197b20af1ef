"""Runs a Muon plan: slices out, whole matrices through Newton-Schulz, back.

One `shard_map` over every group of the plan. A chunk is cut out of the
parameters' own layout, brought to whole matrices on their owners by one
all-to-all, orthogonalised there without communication, and returned by a
second one (and an all-gather where replicas shared the work). While a chunk is
multiplied the next one arrives and the last one returns; nothing else is in
flight, for the sake of memory.

Letters of local arrays: n matrices, p and q the short and the long side.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from composer_jax.optim.muon import (
  newton_schulz,
  newton_schulz_split,
  slices,
)
from composer_jax.optim.muon import (
  plan as muon_plan,
)

Arrays = slices.Arrays

# Entries from which a matrix keeps a device busy by itself. A chunk of such
# matrices is two loops over them: loops need the memory of one matrix, and
# XLA's scheduler for TPUs, which lets one all-to-all fly at a time and lands it
# as soon as it can, gives one loop to the next chunk's and one to the last's.
_LARGE = 1 << 20


class Rule(NamedTuple):
  """How gradients move the momentum, elementwise.

  Attributes:
    accumulate: (momentum, gradient) -> momentum.
    direction: (momentum before, gradient, weight) -> what is orthogonalised.
    weight: a number that depends on the step. Not of the closure: shard_map
      takes no array along that lies on Explicit axes.
  """

  accumulate: Callable[[jax.Array, jax.Array], jax.Array]
  direction: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
  weight: jax.Array


def _exchange(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """All-to-all of equal blocks of the leading dimension."""
  if not axes:
    return x

  def exchange(x):
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

  # XLA on the CPU looks through what blocks were made of, and refuses blocks
  # that it has laid out differently.
  return _as_bits(exchange, lax.optimization_barrier(x))


def _as_bits(
  collective: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
  """Applies a collective that only moves: XLA:CPU widens those of bfloat16."""
  if x.dtype != jnp.bfloat16:
    return collective(x)

  def move_bits(x):
    moved = collective(lax.bitcast_convert_type(x, jnp.uint16))
    return lax.bitcast_convert_type(moved, jnp.bfloat16)

  return lax.platform_dependent(x, cpu=move_bits, default=collective)


class _Route(NamedTuple):
  """How one chunk travels between local shards and whole matrices.

  Attributes:
    axes: mesh axes of the shards, p's before q's, major to minor.
    replica_axes: whose devices share the chunk's matrices; () if they do not.
    num_replicas: their number.
    sharers: how many neighbours of them share; each such set does the same.
    shards: devices of `axes`.
    split: devices that own a matrix together.
    owned: matrices of an owner.
    width: local q.
    sides: local (p, q) as sent; q padded to a multiple of `split`.
    dims: (shards, local size) of each dimension of both sides as received.
    whole: [n, p, q] an owner works on.
  """

  axes: tuple[str, ...]
  replica_axes: tuple[str, ...]
  num_replicas: int
  sharers: int
  shards: int
  split: int
  owned: int
  width: int
  sides: tuple[int, int]
  dims: tuple[tuple[int, int], ...]
  whole: tuple[int, int, int]

  @property
  def slots(self) -> int:
    """Matrices that the owners within one replica take together."""
    return self.shards // self.split * self.owned

  def interleaved(self) -> tuple[list[int], list[int]]:
    """Returns the shape of what arrives and the order that makes it whole.

    Each dimension of a side has its own place among the shard indices and
    among the local sizes; in the whole matrix they belong side by side.
    """
    rank = len(self.dims)
    shape = [s for s, _ in self.dims] + [self.owned] + [n for _, n in self.dims]
    order = [rank]
    for i in range(rank):
      order += [i, rank + 1 + i]
    return shape, order


def _route(group: muon_plan.MuonGroup, chunk: muon_plan.Chunk) -> _Route:
  p_side, q_side = group.p_side, group.q_side
  padded, q_dims = q_side.local, q_side.dims
  if group.split > 1:
    # Columns may stay in the order of arrival: Newton-Schulz commutes with
    # any permutation of them.
    padded = -(-q_side.local // group.split) * group.split
    q_dims = ((q_side.shards, padded // group.split),)
  return _Route(
    axes=group.axes,
    replica_axes=group.replica_axes if group.sharers > 1 else (),
    num_replicas=group.num_replicas,
    sharers=group.sharers,
    shards=group.num_shards,
    split=group.split,
    owned=chunk.owned,
    width=q_side.local,
    sides=(p_side.local, padded),
    dims=(*p_side.dims, *q_dims),
    whole=(chunk.owned, group.p, math.prod(s * n for s, n in q_dims)),
  )


def _gather(x: jax.Array, route: _Route) -> jax.Array:
  """Takes local shards [count, p / m_p, q / m_q] to owners' matrices."""
  extra = route.slots * route.sharers - len(x)
  x = jnp.pad(x, ((0, extra), (0, 0), (0, route.sides[1] - route.width)))
  if route.replica_axes:
    mine = lax.axis_index(route.replica_axes) % route.sharers
    x = lax.dynamic_slice_in_dim(x, mine * route.slots, route.slots)
  if route.split > 1:
    width = route.sides[1] // route.split
    x = x.reshape(-1, route.owned, route.sides[0], route.split, width)
    x = x.transpose(0, 3, 1, 2, 4).reshape(-1, route.sides[0], width)
  x = _exchange(x, route.axes)
  shape, order = route.interleaved()
  return x.reshape(shape).transpose(order).reshape(route.whole)


def _scatter(y: jax.Array, route: _Route) -> jax.Array:
  """Takes owners' matrices to local shards, as within one replica."""
  shape, order = route.interleaved()
  inverse = [order.index(d) for d in range(len(order))]
  y = y.reshape([shape[d] for d in order]).transpose(inverse)
  width = route.sides[1] // route.split
  y = _exchange(y.reshape(-1, route.sides[0], width), route.axes)
  if route.split > 1:
    y = y.reshape(-1, route.split, route.owned, route.sides[0], width)
    y = y.transpose(0, 2, 3, 1, 4).reshape(-1, *route.sides)
  return y


def _share(y: jax.Array, route: _Route, count: int) -> jax.Array:
  """Collects what the replicas did, and drops what filled up."""
  if route.replica_axes:
    sets = newton_schulz_split.index_groups(route.num_replicas, route.sharers)
    if len(sets) == 1:
      sets = None
    y = _as_bits(
      lambda y: lax.all_gather(
        y, route.replica_axes, axis_index_groups=sets, tiled=True
      ),
      y,
    )
  return y[:count, :, : route.width]


def _after(earlier: list[jax.Array], x: jax.Array) -> jax.Array:
  """Returns x, but not before `earlier` exist.

  A barrier would say as much, but XLA drops barriers before it schedules. So x
  is selected by a condition that always holds, which no compiler knows.
  """
  for before in earlier:
    first = before[(0,) * before.ndim].astype(jnp.float32)
    bits = lax.bitcast_convert_type(first, jnp.uint32) >> 1
    x = jnp.where(bits.astype(jnp.int32) >= 0, x, jnp.zeros_like(x))
  return x


def _products(
  x: jax.Array, route: _Route, options: newton_schulz.NewtonSchulz
) -> jax.Array:
  """Orthogonalises an owner's matrices."""
  if route.split > 1:
    subgroups = newton_schulz_split.index_groups(route.shards, route.split)
    y = newton_schulz_split.orthogonalize(
      x, options, axes=route.axes, index_groups=subgroups
    )
    return y.astype(x.dtype)
  if len(x) == 1 or math.prod(x.shape[1:]) < _LARGE:
    return newton_schulz.orthogonalize(x, options).astype(x.dtype)

  def loop(stack):
    return lax.map(
      lambda x: newton_schulz.orthogonalize(x, options).astype(x.dtype), stack
    )

  return jnp.concatenate([loop(h) for h in jnp.split(x, [len(x) // 2])])


def _run(
  plan: muon_plan.MuonPlan,
  rule: Rule,
  options: newton_schulz.NewtonSchulz,
  is_whole: bool,
  momentum: Arrays,
  gradients: Arrays,
  weight: jax.Array,
) -> tuple[Arrays, Arrays]:
  """Executes the plan on one device's shards; `is_whole` false: no exchange."""
  results = {
    member.name: lax.empty(momentum[member.name].shape, group.wire_dtype)
    for group in plan.groups
    for member in group.members
  }
  mean_flops = plan.flops / len(plan.sequence)
  received, done, returned, along = [], [], [], []
  for group_index, chunk_index in plan.sequence:
    group = plan.groups[group_index]
    chunk = group.chunks[chunk_index]
    route = _route(group, chunk)
    is_local = not is_whole or group.mode == muon_plan.LOCAL
    pieces = slices.pieces_of(group, chunk, momentum)
    # While a chunk is multiplied, the next one arrives and the last one
    # returns; no more, for the sake of memory.
    earlier = received[-1:] + done[-2:-1] + sum(returned[-3:-2], [])
    x = slices.read(
      pieces,
      lambda m, g, earlier=earlier: _after(
        earlier, rule.direction(m, g, weight)
      ),
      (momentum, gradients),
      group,
    )
    if is_local:  # A block has one owner, whoever shares the whole matrix.
      route = route._replace(split=1)
    else:
      x = _gather(x, route)
    y = _products(lax.optimization_barrier(x), route, options)
    back = y if is_local else _share(_scatter(y, route), route, chunk.count)
    slices.write(pieces, back, results)
    along.append(back)
    # What takes no time hides nothing: it comes along with its neighbours.
    if 2 * chunk.owned * group.matrix_flops >= mean_flops:
      received.append(x)
      done.append(y)
      returned.append(along)
      along = []
  # The rest of the step comes last: XLA's scheduler would spend it, instead of
  # products, on hiding transfers. So may the momentum lie where the last did.
  momentum = {
    name: _after(done[-1:], rule.accumulate(m, gradients[name]))
    for name, m in momentum.items()
  }
  return results, momentum


def orthogonalize(
  plan: muon_plan.MuonPlan,
  momentum: Arrays,
  gradients: Arrays,
  *,
  rule: Rule,
  options: newton_schulz.NewtonSchulz,
  shardings: Mapping[str, NamedSharding] | None = None,
  is_whole: bool = True,
) -> tuple[Arrays, Arrays]:
  """Takes a step of the momentum and orthogonalises where it points.

  Args:
    plan: made from the same shapes and shardings.
    momentum: arrays by name, in the parameters' layout.
    gradients: likewise.
    rule: of the momentum. It sees slices, so that whole directions never exist.
    options: of Newton-Schulz.
    shardings: of the parameters by name; None on one device.
    is_whole: False orthogonalises each device's block of a matrix alone,
      without communication.

  Returns:
    The directions, in their group's wire dtype, and the momentum.
  """
  if not momentum:
    return {}, {}
  run = functools.partial(_run, plan, rule, options, is_whole)
  if not shardings:
    return run(momentum, gradients, rule.weight)
  specs = {name: shardings[name].spec for name in momentum}
  mesh = next(iter(shardings.values())).mesh
  is_typed = all(
    group.split == group.num_replicas == 1 for group in plan.groups
  )
  return jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(specs, specs, PartitionSpec()),
    out_specs=(specs, specs),
    # That replicas hold the same, and collectives among parts of an axis, have
    # no type that says so.
    check_vma=is_whole and is_typed and min(mesh.shape.values()) > 1,
  )(momentum, gradients, rule.weight)
