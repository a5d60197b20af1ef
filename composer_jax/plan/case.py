"""What a plan is made of: a model on a mesh in a layout; no array of it."""

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
  """One question's subject.

  Attributes:
    machine: what the devices are, see `topologies`.
    mesh: of the topology, without devices.
    dtype: of the parameters; the selection bias is float32 always.
    muon: of the run's pretraining, or what it is without a run; None where
      pretraining does not use it.
  """

  model: model_config.ModelConfig
  machine: str
  mesh: AbstractMesh
  layout: layouts.Layout
  dtype: str
  muon: groups.MuonChoices | None

  @property
  def where(self) -> str:
    """Returns the devices and their layout, for titles."""
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
  """Builds a Case from what a command line says.

  Args:
    fields: of a ModelConfig, or of a whole run, whose model is taken, and what
      its pretraining chooses of Muon.
    topology_name: one of `topologies.FORMS`.
    mesh: 'replica,fsdp,context', or '' for the default.
    layout: of `layouts.BY_NAME`.
    dtype: of DTYPES.
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
    machine=topologies.machine(topology_name),
    mesh=_mesh(topology_name, mesh),
    layout=layouts.BY_NAME[layout],
    dtype=dtype,
    muon=groups.MuonChoices(**cpt.get('muon', {})) if is_muon else None,
  )


def _mesh(topology_name: str, mesh: str) -> AbstractMesh:
  count = topologies.num_devices(topology_name)
  sizes = _sizes(mesh) if mesh else topologies.default_mesh(count)
  if math.prod(sizes) != count:
    raise ValueError(
      f'mesh {mesh!r} needs {math.prod(sizes)} devices and topology '
      f'{topology_name!r} has {count}; they must be equal.'
    )
  return AbstractMesh(sizes, topology.AXES)


def _sizes(mesh: str) -> tuple[int, ...]:
  size = '([1-9][0-9]*)'
  match = re.fullmatch(','.join([size] * len(topology.AXES)), mesh)
  if match is None:
    raise ValueError(
      f'mesh {mesh!r} must be {len(topology.AXES)} numbers of at least 1, '
      f'{",".join(topology.AXES)}, e.g. 2,2,2.'
    )
  return tuple(int(size) for size in match.groups())
