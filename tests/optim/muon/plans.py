"""Plans of Muon that several tests look at, and what is read off plans."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import roles
from composer_jax.optim.muon import cost, newton_schulz, planner
from composer_jax.optim.muon import plan as muon_plan
from composer_jax.parallel import layouts, shardings, topology
from configs.models import kimi_k2

STANDARD = newton_schulz.NewtonSchulz(method='standard', dtype='float32')
CPU = cost.BY_NAME['cpu']

# A decoder of 332 matrices, experts 3.5 times as long as wide.
LEAVES = {
  'gate': ('layer', 'expert', 'embed', 'ffw'),
  'up': ('layer', 'expert', 'embed', 'ffw'),
  'down': ('layer', 'expert', 'ffw', 'embed'),
  'shared/gate': ('layer', 'embed', 'shared'),
  'shared/up': ('layer', 'embed', 'shared'),
  'shared/down': ('layer', 'shared', 'embed'),
  'query': ('layer', 'embed', 'heads', 'head_dim'),
  'key': ('layer', 'embed', 'heads', 'head_dim'),
  'value': ('layer', 'embed', 'heads', 'head_dim'),
  'out': ('layer', 'heads', 'head_dim', 'embed'),
}
SIZES = dict(layer=4, expert=16, embed=448, ffw=128)
SIZES |= dict(heads=8, head_dim=64, shared=256)
# The mesh, where experts lie, where the rest does, and the bytes exchanged over
# the least possible: the excess is the padding of 12 shared experts to 16.
MESHES = {
  'EP8': (dict(x=8), dict(expert='x'), dict(embed='x'), 12 / 11),
  'FSDP8': (dict(x=8), dict(embed='x'), dict(embed='x'), 36 / 35),
  'EP2xFSDP4': (
    dict(e=2, f=4),
    dict(expert='e', embed='f'),
    dict(embed=('e', 'f')),
    1.0316742,
  ),
  'HSDP': (dict(r=2, f=4), dict(embed='f'), dict(embed='f'), 36 / 35),
  'EP2xFSDP2xTP2': (
    dict(e=2, f=2, t=2),
    dict(expert='e', embed='f', ffw='t'),
    dict(embed=('e', 'f'), shared='t', heads='t'),
    1.0328639,
  ),
  'DUAL': (
    dict(r=2, f=4),
    dict(expert='r', embed='f'),
    dict(embed='f'),
    1.0393701,
  ),
}


def mesh_of(sizes):
  return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def plan_of(leaves, specs, mesh, sizes=SIZES, ns=STANDARD, **options):
  """Plans parameters whose axes are sides of a matrix or batch axes."""
  options = options or dict(rates=CPU)
  shapes, matrices = {}, {}
  for name, axes in leaves.items():
    shape = tuple(sizes[a] for a in axes)
    sides = [a for a in axes if a not in ('layer', 'expert', 'heads')]
    shapes[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    matrices[name] = roles.parse(name, '->'.join(sides), axes, shape)
  return planner.make(
    shapes,
    matrices,
    shardings={name: NamedSharding(mesh, specs[name]) for name in leaves},
    newton_schulz=ns,
    fixed=planner.PlanOptions(**options),
  )


def decoder_plan(name, **options):
  sizes, experts, rest, _ = MESHES[name]
  specs = {
    leaf: P(*((experts if 'expert' in axes else rest).get(a) for a in axes))
    for leaf, axes in LEAVES.items()
  }
  return plan_of(LEAVES, specs, mesh_of(sizes), **options)


def one_matrix(shape, spec, sizes, **options):
  """Plans one [layer, embed, ffw] parameter; returns its group."""
  sides = dict(zip(('layer', 'embed', 'ffw'), shape, strict=True))
  made = plan_of(
    {'w': tuple(sides)}, {'w': spec}, mesh_of(sizes), sides, **options
  )
  return made.groups[0]


def kimi_plan(mesh, method='standard', **options):
  config = model_config.ModelConfig.from_dict(kimi_k2.get_config().to_dict())
  shapes, axes = (tree['params'] for tree in decoder.abstract(config))
  places = shardings.specs(
    shapes, axes, layout=layouts.TRAIN, mesh=AbstractMesh(mesh, topology.AXES)
  )
  where = AbstractMesh(mesh, topology.AXES)
  return planner.make(
    shapes,
    roles.matrices(shapes, axes, roles.tree(shapes, axes)),
    shardings=jax.tree.map(lambda spec: NamedSharding(where, spec), places),
    newton_schulz=newton_schulz.NewtonSchulz(method=method),
    fixed=planner.PlanOptions(**options),
  )


def critical_path(plan) -> float:
  """Returns a device's operations relative to an even share of all."""
  return plan.flops / max(sum(group.even_flops for group in plan.groups), 1)


def owners(
  made: muon_plan.MuonPlan, shardings: Any
) -> dict[tuple[str, tuple[int, ...]], list[int]]:
  """Returns the devices that orthogonalise each matrix.

  A matrix has several devices if they share it, or if replicas repeat the work.

  Args:
    made: plan of parameters with these shardings.
    shardings: tree of the parameters' NamedShardings on one mesh.

  Returns:
    Positions of devices in the mesh, row by row, for each parameter's name and
    index into its batch dimensions.
  """
  places = trees.flatten_names(shardings)
  devices: dict[tuple[str, tuple[int, ...]], list[int]] = {}
  for group in made.groups:
    for device in range(made.devices):
      local_list = [
        matrix
        for member in group.members
        for matrix in _held(member, places[member.name], device)
      ]
      # As `optim.muon.exchange` deals them: to replicas first, then to shards.
      shard = _index(group.shard_strides, device) // group.split
      sharer = _index(group.replica_strides, device) % group.sharers
      owner = sharer * (group.num_shards // group.split) + shard
      for chunk in group.chunks:
        first = chunk.start + owner * chunk.owned
        end = min(first + chunk.owned, chunk.start + chunk.count)
        for matrix in local_list[first:end]:
          devices.setdefault(matrix, []).append(device)
  return devices


def _held(
  member: muon_plan.Member, place: NamedSharding, device: int
) -> list[tuple[str, tuple[int, ...]]]:
  """Returns the matrices of which a device has a shard, in local order."""
  sizes = dict(place.mesh.shape)
  at = dict(zip(sizes, np.unravel_index(device, tuple(sizes.values()))))
  axes = planner.mesh_axes(place, len(member.shape))
  ranges = []
  for dim, local in zip(member.batch, member.local_batch, strict=True):
    shard = 0
    for axis in axes[dim]:
      shard = shard * sizes[axis] + int(at[axis])
    ranges.append(range(shard * local, (shard + 1) * local))
  return [(member.name, index) for index in itertools.product(*ranges)]


def _index(strides: muon_plan.Strides, device: int) -> int:
  """Returns a device's index along mesh axes, major to minor."""
  index = 0
  for size, stride in strides:
    index = index * size + device // stride % size
  return index
