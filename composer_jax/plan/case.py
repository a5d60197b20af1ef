"""What a plan is made of: a model on a mesh in a layout; no array of it."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from composer_jax.models import config as model_config
from composer_jax.parallel import layouts, topology
from composer_jax.plan import topologies

DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One question's subject.

  Attributes:
    model: what is placed.
    mesh: of the topology's devices.
    layout: the tables.
    dtype: of the parameters; the selection bias is float32 always.
  """

  model: model_config.ModelConfig
  mesh: Mesh
  layout: layouts.Layout
  dtype: str


def make(
  fields: dict[str, Any],
  *,
  topology_name: str,
  mesh: str,
  layout: str,
  dtype: str,
) -> Case:
  """Builds a Case from what a command line says.

  Args:
    fields: of a ModelConfig, or of a whole run, whose model is taken.
    topology_name: prepared by `topologies.prepare`.
    mesh: 'replica,fsdp,context', or '' for `topologies.default_mesh`.
    layout: one of `layouts.BY_NAME`.
    dtype: one of DTYPES.
  """
  for name, value, known in (
    ('layout', layout, tuple(layouts.BY_NAME)),
    ('dtype', dtype, DTYPES),
  ):
    if value not in known:
      raise ValueError(f'{name} {value!r} is not one of {known}.')
  devices = topologies.devices(topology_name)
  return Case(
    model=model_config.ModelConfig.from_dict(fields.get('model', fields)),
    mesh=topology.make_mesh(*_sizes(mesh, len(devices)), devices=devices),
    layout=layouts.BY_NAME[layout],
    dtype=dtype,
  )


def _sizes(mesh: str, num_devices: int) -> tuple[int, ...]:
  if not mesh:
    return topologies.default_mesh(num_devices)
  sizes = mesh.split(',')
  if len(sizes) != len(topology.AXES) or not all(s.isdecimal() for s in sizes):
    raise ValueError(
      f'mesh {mesh!r} must be {len(topology.AXES)} numbers, '
      f'{",".join(topology.AXES)}, e.g. 2,2,2.'
    )
  return tuple(int(size) for size in sizes)
