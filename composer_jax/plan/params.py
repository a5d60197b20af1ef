"""`--what=params`: every parameter, where it lies and what a device holds.

Nothing is allocated: shapes come from tracing the initialiser, places from the
layout's tables. Fails by name for an axis that no table maps or a dimension
that does not divide.
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

# The first pattern found in a name says its part; parts and what they hold are
# those of `models.flops.params_by_part`, and the selection bias.
_PARTS = (
  ('selection_bias', r'^selection_bias/'),
  ('norms', r'_norm(/|$)'),
  ('embedding', r'^params/(un)?embedding$'),
  ('attention', r'/attention/'),
  ('dense_ffw', r'/ffw/'),
  ('router', r'/moe/router$'),
  ('shared_experts', r'/moe/shared/'),
  ('routed_experts', r'/moe/'),
)

# As a token meets them; trees are sorted by letters.
_ORDER = (
  *('params', 'selection_bias', 'embedding', 'dense_layers', 'moe_layers'),
  *('final_norm', 'unembedding', 'attention_norm', 'attention', 'ffw_norm'),
  *('query_down', 'query', 'query_bias', 'query_norm', 'query_up'),
  *('kv_down', 'key_rope', 'kv_norm', 'key', 'key_bias', 'key_norm', 'key_up'),
  *('value', 'value_bias', 'value_up', 'out', 'out_bias'),
  *('ffw', 'moe', 'router', 'bias', 'gate_up', 'down', 'shared', 'scale'),
)


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
  """Returns all arrays of the model, as a token meets them."""
  shapes, logical = (
    trees.flatten_names(tree) for tree in decoder.abstract(case.model)
  )
  found = []
  for name in sorted(shapes, key=_position):
    shape, axes = shapes[name].shape, tuple(logical[name])
    spec = shardings.spec(name, shape, axes, layout=case.layout, mesh=case.mesh)
    part = part_of(name)
    dtype = 'float32' if part == 'selection_bias' else case.dtype
    shard = NamedSharding(case.mesh, spec).shard_shape(shape)
    found.append(
      PlacedParameter(
        name=name,
        part=part,
        shape=shape,
        axes=axes,
        spec=spec,
        bytes_per_device=math.prod(shard) * jnp.dtype(dtype).itemsize,
      )
    )
  return found


def part_of(name: str) -> str:
  """Returns the part of the model that a parameter belongs to."""
  for part, pattern in _PARTS:
    if re.search(pattern, name):
      return part
  raise ValueError(
    f'Parameter {name} belongs to no part; add it to _PARTS of '
    'composer_jax/plan/params.py.'
  )


def _position(name: str) -> list[int]:
  return [
    _ORDER.index(word) if word in _ORDER else len(_ORDER)
    for word in name.split('/')
  ]


def tables(case: cases.Case) -> list[report.Table]:
  """Answers `--what=params`."""
  found = parameters(case)
  each = report.Table(
    title=f'Parameters on a device of {case.where}, {case.dtype}',
    columns=('name', 'shape', 'axes', 'spec', 'bytes_per_device'),
    rows=[
      (p.name, p.shape, p.axes, _spec_cells(p.spec), p.bytes_per_device)
      for p in found
    ],
  )
  parts = {p.part: [q for q in found if q.part == p.part] for p in found}
  trained = [p for p in found if p.part != 'selection_bias']
  rows = [
    (
      part,
      sum(math.prod(p.shape) for p in members),
      sum(p.bytes_per_device for p in members),
    )
    for part, members in [*sorted(parts.items()), ('total', trained)]
  ]
  totals = report.Table(
    title='By part; the selection bias is not trained and not in the total',
    columns=('part', 'parameters', 'bytes_per_device'),
    rows=rows,
  )
  return [each, totals]


def _spec_cells(spec: P) -> tuple[str | None, ...]:
  # A PartitionSpec unwraps tuples of one.
  return tuple(
    '+'.join(axes) if isinstance(axes, tuple) else axes for axes in spec
  )
