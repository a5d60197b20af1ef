"""Makes plans of Muon's step from shapes, roles and shardings.

Which matrices share a group follows from where they lie; `optim.muon.choices`
says who owns them and in how many pieces.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from composer_jax.core import trees
from composer_jax.optim import roles
from composer_jax.optim.muon import choices, cost, plan
from composer_jax.optim.muon import newton_schulz as iteration

_Dims = tuple[int, ...]


def make(
  params: Any,
  matrices: Any,
  *,
  shardings: Any = None,
  newton_schulz: iteration.NewtonSchulz,
  told: choices.PlanOptions = choices.NOTHING_TOLD,
) -> plan.MuonPlan:
  """Plans one step.

  Args:
    params: tree of arrays or shapes.
    matrices: tree of `roles.Matrix`, of those parameters that are Muon's.
    shardings: tree of NamedShardings, all on one mesh, which may be abstract;
      None on one device.
    newton_schulz: its options; the method decides what a matrix costs.
    told: instead of choices by modelled time.

  Raises:
    ValueError: a dimension does not divide over its mesh axes.
  """
  shapes, placed = trees.flatten_names(params), trees.flatten_names(shardings)
  named = trees.flatten_names(matrices)
  mesh = placed[next(iter(named))].mesh if placed and named else None
  sizes = dict(mesh.shape) if mesh else {}
  if mesh is None:
    platform = jax.default_backend()
  else:  # An abstract one has no platform.
    platform = (
      mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else 'tpu'
    )
  rates = told.rates or cost.of_platform(platform)
  members: dict[tuple, list[plan.Member]] = {}
  for name, matrix in named.items():
    shape = shapes[name].shape
    cuts = _cuts(name, shape, placed.get(name))
    used = {axis for axes, _ in cuts for axis in axes}
    replica_axes = tuple(
      axis for axis, size in sizes.items() if size > 1 and axis not in used
    )
    sides, member = _member(name, shape, matrix, cuts)
    members.setdefault((*sides, replica_axes), []).append(member)
  # Bytes go by the dtype that operands have on the mesh's platform.
  resolved = newton_schulz.resolved(platform)
  groups = [
    _group(key, tuple(alike), sizes, resolved) for key, alike in members.items()
  ]
  groups = choices.share_giants(groups, told, rates)
  groups = choices.place_replicas(groups, told, rates)
  groups = choices.cut(groups, told, rates)
  return plan.MuonPlan(
    groups=tuple(groups),
    sequence=choices.sequence(groups, rates),
    devices=math.prod(sizes.values()),
  )


def _cuts(
  name: str, shape: _Dims, sharding: NamedSharding | None
) -> list[tuple[tuple[str, ...], int]]:
  """Returns the mesh axes and the local size of each dimension."""
  if sharding is None:
    return [((), size) for size in shape]
  cuts = []
  spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
  for dim, (size, entry) in enumerate(zip(shape, spec, strict=True)):
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    axes = tuple(a for a in axes if sharding.mesh.shape[a] > 1)
    shards = math.prod(sharding.mesh.shape[a] for a in axes)
    if size % shards:
      raise ValueError(
        f'Parameter {name} of shape {shape}: dimension {dim} ({size}) '
        f'must divide by its mesh axes {axes} ({shards}).'
      )
    cuts.append((axes, size // shards))
  return cuts


def _side(dims: _Dims, shape: _Dims, cuts: list) -> plan.Side:
  """Merges dimensions into a side."""
  merged: list[list[int]] = [[1, 1]]
  for dim in dims:
    _, local = cuts[dim]
    shards = shape[dim] // local
    if shards == 1:  # Follows what its predecessor holds.
      merged[-1][1] *= local
    elif merged[-1][1] == 1:  # Shards of shards.
      merged[-1] = [merged[-1][0] * shards, local]
    else:
      merged.append([shards, local])
  return plan.Side(
    axes=tuple(axis for dim in dims for axis in cuts[dim][0]),
    dims=tuple((shards, local) for shards, local in merged),
  )


def _member(
  name: str, shape: _Dims, matrix: roles.Matrix, cuts: list
) -> tuple[tuple[Any, ...], plan.Member]:
  """Returns p, q and their sides, which its group shares, and the member."""
  size = lambda dims: math.prod(shape[d] for d in dims)
  rows, columns = matrix.rows, matrix.columns
  is_transposed = size(rows) > size(columns) or (
    size(rows) == size(columns) and matrix.swapped
  )
  if is_transposed:
    rows, columns = columns, rows
  batch = tuple(d for d in range(len(shape)) if d not in rows + columns)
  member = plan.Member(
    name=name,
    shape=tuple(shape),
    batch=batch,
    rows=rows,
    columns=columns,
    is_transposed=is_transposed,
    local_batch=tuple(cuts[d][1] for d in batch),
  )
  sides = (_side(s, shape, cuts) for s in (rows, columns))
  return (size(rows), size(columns), *sides), member


def _group(
  key: tuple[Any, ...],
  members: tuple[plan.Member, ...],
  mesh: dict[str, int],
  options: iteration.NewtonSchulz,
) -> plan.MuonGroup:
  """Returns a group whose matrices have one owner each, in one chunk."""
  p, q, p_side, q_side, replica_axes = key
  replicas = math.prod(mesh[axis] for axis in replica_axes)
  group = plan.MuonGroup(
    p=p,
    q=q,
    p_side=p_side,
    q_side=q_side,
    replica_axes=replica_axes,
    num_replicas=replicas,
    split=1,
    sharers=replicas,
    members=members,
    chunks=(),
    newton_schulz=options,
    shard_strides=_strides(p_side.axes + q_side.axes, mesh),
    replica_strides=_strides(replica_axes, mesh),
  )
  return choices.in_chunks(group, 1)


def _strides(axes: tuple[str, ...], mesh: dict[str, int]) -> plan.Strides:
  """Returns the size of each axis, and the devices between its indices."""
  names, sizes = list(mesh), list(mesh.values())
  return tuple((mesh[a], math.prod(sizes[names.index(a) + 1 :])) for a in axes)
