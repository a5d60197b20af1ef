"""The subject of a plan: a model on a mesh in a layout, without arrays."""

import dataclasses
import math
import re
from typing import Any

from jax.sharding import AbstractMesh

from composer_jax.models import config as model_config
from composer_jax.optim import groups
from composer_jax.parallel import layouts, topology
from composer_jax.plan import topologies

DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """The model, machines and layout that a plan is about.

  Attributes:
    topology: machines, one of `topologies.FORMS`.
    mesh: mesh axes and their sizes, without devices.
    dtype: dtype of the parameters; the selection bias is always float32.
    muon: Muon's options in pretraining; None if pretraining does not use it.
  """

  model: model_config.ModelConfig
  topology: str
  mesh: AbstractMesh
  layout: layouts.Layout
  dtype: str
  muon: groups.MuonChoices | None

  @property
  def machine(self) -> str:
    """Kind of the devices, a key of `topologies.MACHINES`."""
    return topologies.machine(self.topology)

  @property
  def where(self) -> str:
    sizes = ', '.join(f'{a} {n}' for a, n in self.mesh.shape.items())
    machines = f'{self.mesh.size} {self.machine} ({sizes})'
    return f'{machines}, layout {self.layout.name}'


def make(
  fields: dict[str, Any],
  *,
  topology_name: str,
  mesh: str,
  layout: str,
  dtype: str,
) -> Case:
  """Builds a Case from a command line; `fields` are those of a model or a run.

  `topology_name` is one of `topologies.FORMS`; `mesh` has the sizes
  'replica,fsdp,context', or is '' for the default mesh.
  """
  for name, value, known in (
    ('layout', layout, tuple(layouts.BY_NAME)),
    ('dtype', dtype, DTYPES),
  ):
    if value not in known:
      raise ValueError(f'{name} {value!r} is not one of {known}.')
  cpt = fields.get('cpt', {})
  is_muon = cpt.get('optimizer', 'muon') == 'muon'
  return Case(
    model=model_config.ModelConfig.from_dict(fields.get('model', fields)),
    topology=topology_name,
    mesh=_mesh(topology_name, mesh),
    layout=layouts.BY_NAME[layout],
    dtype=dtype,
    muon=groups.MuonChoices(**cpt.get('muon', {})) if is_muon else None,
  )


def _mesh(topology_name: str, mesh: str) -> AbstractMesh:
  count = topologies.num_devices(topology_name)
  sizes: tuple[int, ...] = topologies.default_mesh(count)
  if mesh:
    size = '([1-9][0-9]*)'
    match = re.fullmatch(','.join([size] * len(topology.AXES)), mesh)
    if match is None:
      raise ValueError(
        f'mesh {mesh!r} must be {len(topology.AXES)} numbers of at least 1, '
        f'{",".join(topology.AXES)}, e.g. 2,2,2.'
      )
    sizes = tuple(map(int, match.groups()))
  if math.prod(sizes) != count:
    raise ValueError(
      f'mesh {mesh!r} needs {math.prod(sizes)} devices and topology '
      f'{topology_name!r} has {count}; they must be equal.'
    )
  return AbstractMesh(sizes, topology.AXES)
