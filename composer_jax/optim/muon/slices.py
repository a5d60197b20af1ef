"""Cuts chunks out of parameters as they lie, and puts results back.

A chunk is a range of a group's local list: the members' batches, flattened, one
after another. Of each member it is a few boxes, slices that nobody has to
transpose or gather first.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout

from composer_jax.optim.muon import plan

Arrays = dict[str, jax.Array]


class ShardBox(NamedTuple):
  """A box of a member's local shard, with `count` matrices in it.

  `order` transposes the member to batch, p side, q side.
  """

  name: str
  starts: tuple[int, ...]
  sizes: tuple[int, ...]
  order: tuple[int, ...]
  count: int


def _boxes(
  start: int, stop: int, sizes: tuple[int, ...]
) -> list[tuple[tuple[int, int], ...]]:
  """Covers [start, stop) of a row-major index space by boxes, in order."""
  if start >= stop:
    return []
  if not sizes:
    return [()]
  inner = math.prod(sizes[1:])
  first, skipped = divmod(start, inner)
  last, left = divmod(stop, inner)
  if first == last:
    return [
      ((first, first + 1), *box) for box in _boxes(skipped, left, sizes[1:])
    ]
  boxes: list[tuple[tuple[int, int], ...]] = []
  if skipped:
    head = _boxes(skipped, inner, sizes[1:])
    boxes += [((first, first + 1), *box) for box in head]
    first += 1
  if last > first:
    boxes.append(((first, last), *((0, size) for size in sizes[1:])))
  tail = _boxes(0, left, sizes[1:])
  return boxes + [((last, last + 1), *box) for box in tail]


def boxes_of(
  group: plan.MuonGroup, chunk: plan.Chunk, arrays: Arrays
) -> list[ShardBox]:
  """Returns the boxes a chunk covers, in the order of the local list.

  Of `arrays`, local shards by name, only shapes are used.
  """
  boxes = []
  begin = 0
  for member in group.members:
    shape = arrays[member.name].shape
    start = max(chunk.start - begin, 0)
    stop = min(chunk.start + chunk.count - begin, member.count)
    for box in _boxes(start, stop, member.local_batch):
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
  """Fixes the order in memory to that of parameters.

  Else XLA, for the sake of slices, copies whole parameters to another order.
  """
  order = layout.Layout(major_to_minor=tuple(range(x.ndim)))
  return layout.with_layout_constraint(x, order)


def read(
  boxes: list[ShardBox],
  combine: Callable[..., jax.Array],
  trees: tuple[Arrays, ...],
  group: plan.MuonGroup,
) -> jax.Array:
  """Returns a chunk's local shards [n, p / m_p, q / m_q] as they travel.

  They are `combine`, elementwise, of a slice of each of `trees`.
  """
  parts = []
  for box in boxes:
    ends = [s + n for s, n in zip(box.starts, box.sizes, strict=True)]
    slices = [lax.slice(t[box.name], box.starts, ends) for t in trees]
    x = _as_stored(combine(*slices).astype(group.newton_schulz.dtype))
    x = x.transpose(box.order)
    parts.append(x.reshape(box.count, group.p_side.local, group.q_side.local))
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def write(boxes: list[ShardBox], y: jax.Array, results: Arrays) -> None:
  """Puts a chunk's local shards into `results`."""
  begin = 0
  for box in boxes:
    part = y[begin : begin + box.count]
    begin += box.count
    part = part.reshape([box.sizes[d] for d in box.order])
    inverse = tuple(box.order.index(d) for d in range(len(box.order)))
    results[box.name] = lax.dynamic_update_slice(
      results[box.name], _as_stored(part.transpose(inverse)), box.starts
    )
