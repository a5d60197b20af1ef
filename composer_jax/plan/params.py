"""`--what=params`: the sharding of every parameter and its bytes on a device.

Shapes come from tracing the initialiser, shardings from the layout's tables;
nothing is allocated.
"""

import dataclasses
import math
import re

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import decoder
from composer_jax.parallel import shardings
from composer_jax.plan import case as cases
from composer_jax.plan import report

# The first pattern that matches a name gives its part. The parts are those of
# `models.flops.params_by_part`, and the selection biases.
_PARTS = (
  ('mtp_bias', r'^mtp/selection_bias/'),
  ('mtp', r'^mtp/'),
  ('selection_bias', r'^selection_bias/'),
  ('norms', r'_norm(/|$)'),
  ('embedding', r'^params/(un)?embedding$'),
  ('attention', r'/attention/'),
  ('dense_ffw', r'/ffw/'),
  ('router', r'/moe/router$'),
  ('shared_experts', r'/moe/shared/'),
  ('routed_experts', r'/moe/'),
)


_BIASES = ('mtp_bias', 'selection_bias')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedParameter:
  """One array of the model, by its '/'-joined name."""

  name: str
  part: str
  shape: tuple[int, ...]
  axes: tuple[str, ...]
  spec: P
  bytes_per_device: int


def parameters(case: cases.Case) -> list[PlacedParameter]:
  """Returns all arrays in the tree's order; refuses axes that do not fit."""
  shapes, logical = (
    trees.flatten_names(tree) for tree in decoder.abstract(case.model)
  )
  placed = []
  for name, leaf in shapes.items():
    shape, axes = leaf.shape, tuple(logical[name])
    spec = shardings.spec(name, shape, axes, layout=case.layout, mesh=case.mesh)
    part = part_of(name)
    dtype = 'float32' if part in _BIASES else case.dtype
    shard = NamedSharding(case.mesh, spec).shard_shape(shape)
    placed.append(
      PlacedParameter(
        name=name,
        part=part,
        shape=shape,
        axes=axes,
        spec=spec,
        bytes_per_device=math.prod(shard) * jnp.dtype(dtype).itemsize,
      )
    )
  return placed


def part_of(name: str) -> str:
  for part, pattern in _PARTS:
    if re.search(pattern, name):
      return part
  raise ValueError(
    f'Parameter {name} belongs to no part; add a pattern for it to _PARTS in '
    'composer_jax/plan/params.py.'
  )


def tables(case: cases.Case) -> list[report.Table]:
  placed = parameters(case)
  by_name = report.Table(
    title=f'Parameters on one device of {case.where}, {case.dtype}',
    columns=('name', 'shape', 'axes', 'spec', 'bytes_per_device'),
    rows=[
      (
        p.name,
        p.shape,
        p.axes,
        # A PartitionSpec unwraps tuples of one name.
        tuple('+'.join(a) if isinstance(a, tuple) else a for a in p.spec),
        p.bytes_per_device,
      )
      for p in placed
    ],
  )
  parts = {p.part: [q for q in placed if q.part == p.part] for p in placed}
  trained = [p for p in placed if p.part not in _BIASES]
  rows = [
    (
      part,
      sum(math.prod(p.shape) for p in members),
      sum(p.bytes_per_device for p in members),
    )
    for part, members in [*sorted(parts.items()), ('total', trained)]
  ]
  by_part = report.Table(
    title='By part; the total excludes the untrained selection bias',
    columns=('part', 'parameters', 'bytes_per_device'),
    rows=rows,
  )
  return [by_name, by_part]
