"""NamedShardings from shapes, logical axes, a layout and a mesh."""

import itertools
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import checks, trees
from composer_jax.parallel import layouts

# Specs need only the sizes of mesh axes, not devices.
AnyMesh = Mesh | AbstractMesh


def spec(
  name: str,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  *,
  layout: layouts.Layout,
  mesh: AnyMesh,
) -> P:
  """Returns the mesh axes of each dimension; refuses what does not divide."""
  table = layout.expert if 'expert' in axes else layout.dense
  missing = [axis for axis in axes if axis not in table]
  if missing or len(axes) != len(shape):
    raise ValueError(
      f'Parameter {name} of shape {shape} has logical axes {axes}; '
      f'{missing or "their number"} does not fit layout {layout.name}, which '
      f'knows {sorted(table)}. Add the axis to parallel/layouts.py.'
    )
  sizes = dict(zip(axes, shape, strict=True))
  taken: dict[str, tuple[str, ...]] = {}
  for axis in axes:
    if table[axis] != layouts.REST:
      earlier = set().union(*taken.values())
      taken[axis] = tuple(a for a in table[axis] or () if a not in earlier)
      if axis in layout.partial:
        taken[axis] = _largest_divisor(sizes[axis], taken[axis], mesh)
  if 'expert' in axes:
    taken |= _place_experts(name, sizes, table, mesh)
  for axis, mesh_axes in taken.items():
    what = f'Parameter {name}: its {axis} dimension'
    check_divides(what, sizes[axis], mesh_axes, mesh)
  return P(*(taken.get(axis) or None for axis in axes))


def _place_experts(
  name: str, sizes: dict[str, int], table: Any, mesh: AnyMesh
) -> dict[str, tuple[str, ...]]:
  """Gives E the largest product that divides it, and D or F the other axes."""
  wanted = table['expert'] or ()
  expert_axes = _largest_divisor(sizes['expert'], wanted, mesh)
  other_axes = tuple(axis for axis in wanted if axis not in expert_axes)
  others = product(other_axes, mesh)
  if others == 1:
    return {'expert': expert_axes}
  candidates = [a for a in table if table[a] == layouts.REST and a in sizes]
  for axis in candidates:
    if sizes[axis] % others == 0:
      return {'expert': expert_axes, axis: other_axes}
  if 'rank' in sizes:  # Adapters are small, and whole on the other axes.
    return {'expert': expert_axes}
  count = product(wanted, mesh)
  cures = [f'{checks.nearest(sizes["expert"], count)} experts'] + [
    f'{axis} of {checks.nearest(sizes[axis], others)}' for axis in candidates
  ]
  raise ValueError(
    f'Parameter {name}: its {sizes["expert"]} experts do not divide over '
    f'{describe(wanted, mesh)} ({count}), and none of '
    f'{ {a: sizes[a] for a in candidates} } divides over the rest, '
    f'{describe(other_axes, mesh)} ({others}). The nearest that do: '
    f'{", ".join(cures)}; or change the mesh.'
  )


def _largest_divisor(
  size: int, wanted: tuple[str, ...], mesh: AnyMesh
) -> tuple[str, ...]:
  """Returns the subset of mesh axes with the largest product dividing size."""
  subsets = (
    subset
    for count in range(len(wanted), -1, -1)
    for subset in itertools.combinations(wanted, count)
    if size % product(subset, mesh) == 0
  )
  return max(subsets, key=lambda subset: product(subset, mesh))


def product(mesh_axes: tuple[str, ...], mesh: AnyMesh) -> int:
  return math.prod(mesh.shape[axis] for axis in mesh_axes)


def describe(mesh_axes: tuple[str, ...], mesh: AnyMesh) -> str:
  """Returns mesh axes with their sizes, for messages."""
  return ' x '.join(f'{axis}={mesh.shape[axis]}' for axis in mesh_axes)


def check_divides(
  what: str, size: int, mesh_axes: tuple[str, ...], mesh: AnyMesh
) -> None:
  """Raises a ValueError unless a size divides over some mesh axes."""
  parts = f'the mesh axes {describe(mesh_axes, mesh)}'
  checks.divides(product(mesh_axes, mesh), parts, size, what)


def specs(
  abstract: Any, logical: Any, *, layout: layouts.Layout, mesh: AnyMesh
) -> Any:
  """Returns PartitionSpecs for a tree of shapes and one of logical axes."""
  named = trees.flatten_names(logical)
  return trees.map_names(
    lambda name, leaf: spec(
      name, leaf.shape, tuple(named[name]), layout=layout, mesh=mesh
    ),
    abstract,
  )


def shardings(
  abstract: Any, logical: Any, *, layout: layouts.Layout, mesh: Mesh
) -> Any:
  return jax.tree.map(
    lambda s: NamedSharding(mesh, s),
    specs(abstract, logical, layout=layout, mesh=mesh),
    is_leaf=lambda s: isinstance(s, P),
  )


def tokens(layout: layouts.Layout, mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays that start with [B, T]."""
  return NamedSharding(mesh, P(layout.batch or None, layout.sequence or None))


def routes(layout: layouts.Layout, mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, P(None, *tokens(layout, mesh).spec))
