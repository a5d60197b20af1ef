"""Makes plans of Muon's step from shapes, roles and shardings.

Which matrices share a group follows from where they lie; `optim.muon.choices`
says who owns them and in how many pieces.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from composer_jax.optim import roles
from composer_jax.optim.muon import choices, cost, plan
from composer_jax.optim.muon import newton_schulz as iteration

_Dims = tuple[int, ...]


def make(
  shapes: Mapping[str, jax.ShapeDtypeStruct],
  matrices: Mapping[str, roles.Matrix],
  *,
  shardings: Mapping[str, NamedSharding] | None = None,
  newton_schulz: iteration.NewtonSchulz,
  options: plan.PlanOptions,
) -> plan.MuonPlan:
  """Plans one step.

  Args:
    shapes: of Muon's parameters, by '/'-joined name, in the order of the tree.
    matrices: of the same names.
    shardings: of the same names, all on one mesh, which may be abstract; None
      on one device.
    newton_schulz: its options; the method decides what a matrix costs.
    options: what is asked of the plan.

  Raises:
    ValueError: a dimension does not divide over its mesh axes, or `options`
      cannot be met.
  """
  mesh = _mesh(shardings)
  platform = _platform(shardings)
  rates = options.rates or cost.of_platform(platform)
  wire = options.wire_dtype
  if wire == 'auto':
    wire = 'float32' if platform == 'cpu' else 'bfloat16'
  # Bytes go by the dtype that operands have on the mesh's platform.
  resolved = iteration.resolved(newton_schulz, platform or 'tpu')
  members: dict[tuple, list[plan.Member]] = {}
  for name, shape in shapes.items():
    cuts = _cuts(name, shape, shardings[name] if shardings else None)
    key, member = _member(name, shape, matrices[name], cuts)
    used = {axis for axes, _ in cuts for axis in axes}
    replica_axes = tuple(
      a for a, size in mesh.items() if size > 1 and a not in used
    )
    members.setdefault((*key, replica_axes), []).append(member)
  groups = [
    _group(key, tuple(found), mesh, wire, resolved)
    for key, found in members.items()
  ]
  groups = choices.share_giants(groups, options, rates)
  groups = choices.place_replicas(groups, options, rates)
  groups = choices.cut(groups, options, rates)
  return plan.MuonPlan(
    groups=tuple(groups),
    sequence=choices.sequence(groups, rates),
    devices=math.prod(mesh.values()),
    rates=rates,
  )


def _mesh(shardings: Mapping[str, NamedSharding] | None) -> dict[str, int]:
  """Returns the sizes of the mesh's axes."""
  if not shardings:
    return {}
  meshes = {tuple(s.mesh.shape.items()) for s in shardings.values()}
  if len(meshes) > 1:
    raise ValueError(
      f'Muon needs all its parameters on one mesh; they lie on {meshes}.'
    )
  return dict(meshes.pop())


def _platform(
  shardings: Mapping[str, NamedSharding] | None,
) -> str | None:
  if not shardings:
    return jax.default_backend()
  mesh = next(iter(shardings.values())).mesh
  # An abstract mesh is of no platform.
  return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None


def _cuts(
  name: str, shape: jax.ShapeDtypeStruct, sharding: NamedSharding | None
) -> list[tuple[tuple[str, ...], int]]:
  """Returns the mesh axes and the local size of each dimension."""
  if sharding is None:
    return [((), size) for size in shape.shape]
  cuts = []
  spec = (*sharding.spec, *(None,) * (len(shape.shape) - len(sharding.spec)))
  for dim, (size, entry) in enumerate(zip(shape.shape, spec, strict=True)):
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    axes = tuple(a for a in axes if sharding.mesh.shape[a] > 1)
    shards = math.prod(sharding.mesh.shape[a] for a in axes)
    if size % shards:
      raise ValueError(
        f'Parameter {name} of shape {shape.shape}: dimension {dim} ({size}) '
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
  name: str, shape: jax.ShapeDtypeStruct, matrix: roles.Matrix, cuts: list
) -> tuple[tuple[Any, ...], plan.Member]:
  """Returns what its group has in common, and the member."""
  size = lambda dims: math.prod(shape.shape[d] for d in dims)
  rows, columns = matrix.rows, matrix.columns
  is_transposed = size(rows) > size(columns) or (
    size(rows) == size(columns) and matrix.swapped
  )
  if is_transposed:
    rows, columns = columns, rows
  batch = tuple(d for d in range(len(shape.shape)) if d not in rows + columns)
  member = plan.Member(
    name=name,
    shape=tuple(shape.shape),
    dtype=str(shape.dtype),
    batch=batch,
    rows=rows,
    columns=columns,
    is_transposed=is_transposed,
    local_batch=tuple(cuts[d][1] for d in batch),
  )
  sides = (_side(s, shape.shape, cuts) for s in (rows, columns))
  return (size(rows), size(columns), *sides), member


def _group(
  key: tuple[Any, ...],
  members: tuple[plan.Member, ...],
  mesh: dict[str, int],
  wire: str,
  options: iteration.NewtonSchulz,
) -> plan.MuonGroup:
  """Returns a group whose matrices have one owner each, in one chunk."""
  p, q, p_side, q_side, replica_axes = key
  replicas = math.prod(mesh[axis] for axis in replica_axes)
  shards = p_side.shards * q_side.shards
  group = plan.MuonGroup(
    p=p,
    q=q,
    p_side=p_side,
    q_side=q_side,
    replica_axes=replica_axes,
    num_replicas=replicas,
    mode=plan.OWNER if shards * replicas > 1 else plan.LOCAL,
    split=1,
    sharers=replicas,
    members=members,
    chunks=(),
    wire_dtype=wire,
    newton_schulz=options,
    shard_strides=_strides(p_side.axes + q_side.axes, mesh),
    replica_strides=_strides(replica_axes, mesh),
  )
  return choices.in_chunks(group, 1)


def _strides(axes: tuple[str, ...], mesh: dict[str, int]) -> plan.Strides:
  """Returns the size of each axis, and the devices between its indices."""
  names, sizes = list(mesh), list(mesh.values())
  return tuple((mesh[a], math.prod(sizes[names.index(a) + 1 :])) for a in axes)
