"""Trees of matrices and meshes that the benchmarks of Muon run on.

A tree is a model's matrices by name; a `Placed` tree also says which mesh axes
shard them, and knows the ideal work and the least traffic that results are
compared with.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

_Axes = tuple[str, ...]


class Leaf(NamedTuple):
  """A parameter; all dimensions but rows and columns are batch dimensions.

  `is_swapped` means the same as in `optim.roles.Matrix`.
  """

  axes: _Axes
  shape: tuple[int, ...]
  rows: tuple[int, ...]
  columns: tuple[int, ...]
  is_swapped: bool = False

  @property
  def sides(self) -> tuple[int, int]:
    """The shorter side of the matrix, then the longer."""
    sides = [
      math.prod(self.shape[d] for d in s) for s in (self.rows, self.columns)
    ]
    return min(sides), max(sides)

  @property
  def num_matrices(self) -> int:
    return math.prod(self.shape) // math.prod(self.sides)


Tree = dict[str, Leaf]


def moe(
  *,
  layers: int,
  experts: int,
  embed: int,
  ffw: int,
  shared_ffw: int,
  heads: int,
  head_dim: int,
) -> Tree:
  """Returns the matrices of a mixture of experts, layers stacked.

  Attention is per head. Embedding, router and norms are Adam's and left out.
  """
  L, E, D, F, S, N, H = layers, experts, embed, ffw, shared_ffw, heads, head_dim
  expert_in = ('layer', 'expert', 'embed', 'ffw')
  shared_in = ('layer', 'embed', 'ffw')
  head_in = ('layer', 'embed', 'heads', 'head_dim')
  tree = {
    'experts/gate': Leaf(expert_in, (L, E, D, F), (2,), (3,)),
    'experts/up': Leaf(expert_in, (L, E, D, F), (2,), (3,)),
    'experts/down': Leaf(
      ('layer', 'expert', 'ffw', 'embed'), (L, E, F, D), (2,), (3,)
    ),
    'shared/gate': Leaf(shared_in, (L, D, S), (1,), (2,)),
    'shared/up': Leaf(shared_in, (L, D, S), (1,), (2,)),
    'shared/down': Leaf(('layer', 'ffw', 'embed'), (L, S, D), (1,), (2,)),
    'attention/out': Leaf(
      ('layer', 'heads', 'head_dim', 'embed'), (L, N, H, D), (2,), (3,)
    ),
  }
  for name in ('query', 'key', 'value'):
    tree[f'attention/{name}'] = Leaf(head_in, (L, D, N, H), (1,), (3,))
  return tree


# Sides in K2's ratio of 3.5; 332 matrices.
SMALL = moe(
  layers=4,
  experts=16,
  embed=448,
  ffw=128,
  shared_ffw=256,
  heads=8,
  head_dim=64,
)
# Kimi K2's 60 layers of experts, attention per head.
K2 = moe(
  layers=60,
  experts=384,
  embed=7168,
  ffw=2048,
  shared_ffw=2048,
  heads=64,
  head_dim=128,
)


@dataclasses.dataclass(frozen=True)
class Placed:
  """A tree on a mesh whose devices need not exist.

  Attributes:
    tree: matrices by name.
    specs: partition spec of each matrix.
    mesh: sizes of the mesh's axes.
  """

  tree: Tree
  specs: Mapping[str, P]
  mesh: Mapping[str, int]

  @property
  def num_devices(self) -> int:
    return math.prod(self.mesh.values())

  def on(self, devices: Sequence[jax.Device]) -> dict[str, jax.NamedSharding]:
    """Returns the shardings on a mesh of these devices."""
    mesh = jax.sharding.Mesh(
      # The order in which `jax.make_mesh` lays axes on a torus.
      mesh_utils.create_device_mesh(
        tuple(self.mesh.values()), devices, allow_split_physical_axes=True
      ),
      tuple(self.mesh),
      axis_types=(jax.sharding.AxisType.Auto,) * len(self.mesh),
    )
    return {n: jax.NamedSharding(mesh, spec) for n, spec in self.specs.items()}

  def even_flops(self, method: str = 'standard') -> float:
    """Operations of a device's even share, without repetition or padding."""
    count = {'standard': standard_flops, 'gram': gram_flops}[method]
    total = sum(x.num_matrices * count(*x.sides) for x in self.tree.values())
    return total / self.num_devices

  @property
  def local_elements(self) -> int:
    """Elements of the update that one device holds."""
    total = 0
    for name, leaf in self.tree.items():
      matrix, batch = self._shards(name)
      total += math.prod(leaf.shape) // (matrix * batch)
    return total

  def least_bytes(self, itemsize: int) -> float:
    """Bytes into a device if each matrix visits one owner and comes back."""
    total = 0.0
    for name, leaf in self.tree.items():
      matrix, batch = self._shards(name)
      copies = self.num_devices // (matrix * batch)
      local = itemsize * math.prod(leaf.shape) / (matrix * batch)
      into = (matrix - 1) / (copies * matrix)
      back = 1 - 1 / (copies * matrix)
      total += local * (into + back)
    return total

  def _shards(self, name: str) -> tuple[int, int]:
    """Returns shards of a matrix, and of the batch."""
    leaf = self.tree[name]
    matrix = batch = 1
    for dim, entry in enumerate(self.specs[name]):
      axes = (entry,) if isinstance(entry, str) else entry or ()
      size = math.prod(self.mesh[axis] for axis in axes)
      if dim in leaf.rows + leaf.columns:
        matrix *= size
      else:
        batch *= size
    return matrix, batch


def standard_flops(p: int, q: int, steps: int = 5) -> int:
  """Operations of standard Newton-Schulz on one matrix, p its shorter side."""
  return steps * (4 * p * p * q + 2 * p**3)


def gram_flops(p: int, q: int) -> int:
  """The same of 5 steps on the Gram matrix, restarted twice, where it pays."""
  return 12 * p * p * q + 22 * p**3 if 2 * q >= 3 * p else standard_flops(p, q)


def _place(
  tree: Tree,
  mesh: Mapping[str, int],
  expert: Mapping[str, _Axes],
  others: Mapping[str, _Axes],
) -> Placed:
  """Shards logical axes by a table, and those of experts by another table."""

  def spec(leaf: Leaf) -> P:
    table = expert if 'expert' in leaf.axes else others
    return P(*(table.get(axis) for axis in leaf.axes))

  return Placed(tree, {name: spec(leaf) for name, leaf in tree.items()}, mesh)


# Layouts of SMALL on 8 devices.
MESHES = {
  'ep8': _place(SMALL, {'x': 8}, {'expert': ('x',)}, {'embed': ('x',)}),
  'fsdp8': _place(SMALL, {'x': 8}, {'embed': ('x',)}, {'embed': ('x',)}),
  'ep2_fsdp4': _place(
    SMALL,
    {'e': 2, 'f': 4},
    {'expert': ('e',), 'embed': ('f',)},
    {'embed': ('e', 'f')},
  ),
  'hsdp2x4': _place(
    SMALL, {'r': 2, 'f': 4}, {'embed': ('f',)}, {'embed': ('f',)}
  ),
  'ep2_fsdp2_tp2': _place(
    SMALL,
    {'e': 2, 'f': 2, 't': 2},
    {'expert': ('e',), 'embed': ('f',), 'ffw': ('t',)},
    {'embed': ('e', 'f'), 'ffw': ('t',), 'heads': ('t',)},
  ),
  # The layouts of this project: experts spread over replicas as well.
  'dual2x4': _place(
    SMALL,
    {'replica': 2, 'fsdp': 4},
    {'expert': ('replica',), 'embed': ('fsdp',)},
    {'embed': ('fsdp',)},
  ),
  'one': _place(SMALL, {'x': 1}, {}, {}),
}


def k2_wide(devices: int) -> Placed:
  """Shards experts over 16 devices and other matrices over all."""
  return _place(
    K2,
    {'e': devices // 16, 'f': 16},
    {'expert': ('e',), 'embed': ('f',)},
    {'embed': ('e', 'f')},
  )


def k2_dual(devices: int) -> Placed:
  """Shards experts over all devices; others over 8 devices, replicated."""
  return _place(
    K2,
    {'replica': devices // 8, 'fsdp': 8},
    {'expert': ('replica',), 'embed': ('fsdp',)},
    {'embed': ('fsdp',)},
  )


def configured(
  fields: dict[str, Any], mesh: tuple[int, int, int], layout_name: str
) -> Placed:
  """Returns the matrices of a model's config, in a layout of this project."""
  from composer_jax.core import trees
  from composer_jax.models import config as model_config
  from composer_jax.models import decoder
  from composer_jax.optim import roles
  from composer_jax.parallel import layouts, shardings, topology

  config = model_config.ModelConfig.from_dict(fields)
  shapes, axes = (
    trees.flatten_names(tree['params']) for tree in decoder.abstract(config)
  )
  tree, specs = {}, {}
  abstract = AbstractMesh(mesh, topology.AXES)
  for name, array in shapes.items():
    names = tuple(axes[name])
    role = roles.of_axes(name, names, len(array.shape))
    matrix = roles.parse(name, role, names, array.shape)
    if matrix is None:
      continue
    tree[name] = Leaf(
      names, array.shape, matrix.rows, matrix.columns, matrix.swapped
    )
    specs[name] = shardings.spec(
      name,
      array.shape,
      names,
      layout=layouts.BY_NAME[layout_name],
      mesh=abstract,
    )
  return Placed(tree, specs, dict(zip(topology.AXES, mesh, strict=True)))
