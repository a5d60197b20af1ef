"""The wires of a machine, and how long a collective occupies them.

A model, not a measurement. A TPU slice is a torus of links, which all groups of
a collective share. Exchanges take the shortest path, one dimension after the
other, so the busiest link of each dimension counts; between two halves of a
ring this is the bound of their bisection. Gathers and reductions run along
every dimension of a group at once, as rings, or as lines where a side does not
close; groups that interleave divide the links. GPUs have a switch in each node
and a network between nodes.

Links carry 0.9 of the published speed: of 100 GB/s a link of v5p 'How to Scale
Your Model' (jax-ml.github.io/scaling-book) states 90. For GPUs the same share
is an assumption, as are shortest paths and rings.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import numpy as np

from composer_jax.optim.muon import cost
from composer_jax.parallel import topology
from composer_jax.plan import topologies

EFFICIENCY = 0.9
# Google Cloud's page on TPU7x: the speed between the two devices of a chip,
# over that of one link.
_DIE = 6.0
# Collectives whose bytes differ by the device that they are for.
_EXCHANGES = ('all-to-all', 'ragged-all-to-all', 'collective-permute')

Groups = frozenset[frozenset[int]]
Seconds = dict[str, float]  # by wire


@dataclasses.dataclass(frozen=True)
class Nodes:
  """Devices i, i + 1, ... of a node on a switch, and a network between nodes.

  `within` and `across` are bytes per second into a device.
  """

  node: int
  within: float
  across: float

  @property
  def words(self) -> str:
    return (
      f'{self.within / 1e9:g} GB/s within {self.node} devices, '
      f'{self.across / 1e9:g} beyond'
    )

  def seconds(self, kind: str, num_bytes: float, groups: Groups) -> Seconds:
    """Returns the time for which each wire is occupied.

    `num_bytes` come into each device; groups are sets of places on the mesh.
    """
    width = max(map(len, groups))
    here = max(_most_in_a_node(group, self.node) for group in groups)
    if here == width:
      return {'node': num_bytes / self.within}
    outside = num_bytes * (width - here) / (width - 1)
    inside = num_bytes - outside
    if kind not in _EXCHANGES:
      # The devices of a node divide what comes in, and pass it on.
      inside, outside = num_bytes, outside / here
    return {'node': inside / self.within, 'network': outside / self.across}


def _most_in_a_node(group: frozenset[int], node: int) -> int:
  places = [place // node for place in group]
  return max(map(places.count, set(places)))


@dataclasses.dataclass(frozen=True, eq=False)
class Torus:
  """Chips with two links in each dimension, and devices on one die or two.

  Attributes:
    sizes: chips of each dimension.
    is_ring: true for dimensions whose last chip is linked with the first.
    places: chip coordinates, then number on the chip, of each place on the
      mesh.
    link: bytes per second of one link in one direction.
    die: the same between two devices of a chip.
  """

  sizes: tuple[int, ...]
  is_ring: tuple[bool, ...]
  places: np.ndarray
  link: float
  die: float

  @property
  def words(self) -> str:
    sides = 'x'.join(map(str, self.sizes))
    return f'links of {self.link / 1e9:g} GB/s in {sides} chips'

  def seconds(self, kind: str, num_bytes: float, groups: Groups) -> Seconds:
    """Returns the time for which each wire is occupied; see `Nodes`.

    All links of a dimension count as one wire.
    """
    loads = _exchanged if kind in _EXCHANGES else _gathered
    speeds = [self.link] * len(self.sizes) + [self.die]
    return {
      f'dimension {i}' if i < len(self.sizes) else 'die': n * num_bytes / speed
      for i, (n, speed) in enumerate(
        zip(loads(self, groups), speeds, strict=True)
      )
      if n
    }


@functools.lru_cache(maxsize=64)
def _exchanged(torus: Torus, groups: Groups) -> list[float]:
  """Returns the load of each dimension's busiest link, of 1 into a device."""
  sizes = *torus.sizes, int(torus.places[:, -1].max()) + 1
  closed = *torus.is_ring, False
  traffic = [
    np.zeros([*sizes[:i], *sizes[i + 1 :], n, n]) for i, n in enumerate(sizes)
  ]
  for group in groups:
    members = torus.places[sorted(group)]
    start, end = (
      x.reshape(-1, len(sizes))
      for x in np.broadcast_arrays(members[:, None], members[None])
    )
    for i, traffic_XAB in enumerate(traffic):
      # On a dimension's links, those before it have been travelled.
      line = np.concatenate([end[:, :i], start[:, i + 1 :]], axis=1)
      if i < len(torus.sizes):
        line[:, -1] = 0  # The devices of a chip share its links.
      at = *line.T, start[:, i], end[:, i]
      np.add.at(traffic_XAB, at, 1 / max(len(group) - 1, 1))
  return [
    float((traffic_XAB[..., None, None] * paths).sum((-4, -3)).max())
    for traffic_XAB, paths in zip(
      traffic, map(_paths, sizes, closed), strict=True
    )
  ]


@functools.lru_cache(maxsize=64)
def _gathered(torus: Torus, groups: Groups) -> list[float]:
  """The same for gathers, which use a group's links evenly."""
  group = torus.places[sorted(max(groups, key=len))]
  chips = np.unique(group[:, :-1], axis=0)
  width, here = len(group), len(group) // len(chips)
  each = int(torus.places[:, -1].max()) + 1
  links = []
  for i, (size, is_ring) in enumerate(
    zip(torus.sizes, torus.is_ring, strict=True)
  ):
    at = np.unique(chips[:, i])
    step = int(np.diff(at).min()) if len(at) > 1 else 1
    is_closed = is_ring and len(at) * step == size
    links.append((len(at) > 1) * (1 + is_closed) / step)
  # What comes into a chip, of which the groups of its devices have their own.
  whole = width / (width - 1)
  into = whole * (1 - 1 / len(chips)) * each / here
  load = into / sum(links) if len(chips) > 1 else 0.0
  return [load * (n > 0) for n in links] + [whole * (1 - 1 / here)]


@functools.cache
def _paths(size: int, is_ring: bool) -> np.ndarray:
  """Returns the share of [from, to] on link [at, direction] of one side."""
  paths = np.zeros((size, size, size, 2))
  for start in range(size):
    for end in range(size):
      up = (end - start) % size if is_ring else end - start
      ways = {1: 1.0} if up > 0 else {-1: 1.0}
      if is_ring and 2 * up > size:
        ways = {-1: 1.0}
      elif is_ring and 2 * up == size:
        ways = {1: 0.5, -1: 0.5}
      for step, share in ways.items():
        at = start
        while at != end:
          paths[start, end, at, (1 - step) // 2] += share
          at = (at + step) % size
  return paths


@dataclasses.dataclass(frozen=True)
class _Device:
  """A device that need not exist, as far as a mesh looks at it."""

  id: int
  coords: tuple[int, ...]
  core_on_chip: int
  device_kind: str
  platform: str = 'tpu'


def of(topology_name: str, mesh: tuple[int, ...]) -> Nodes | Torus:
  """Returns the wires of machines on which a mesh of these sizes lies."""
  name = topologies.machine(topology_name)
  machine, rates = topologies.MACHINES[name], cost.BY_NAME[name]
  if machine.platform != 'tpu':
    speeds = EFFICIENCY * rates.within, EFFICIENCY * rates.across
    return Nodes(rates.node, *speeds)
  sizes = topologies.sizes(topology_name)
  boundaries = *sizes, *(1,) * (3 - len(sizes)), machine.devices
  devices = [
    _Device(i, at[:-1], at[-1], machine.kind)
    for i, at in enumerate(np.ndindex(*boundaries))
  ]
  placed = topology.place(mesh, devices)
  places = [
    (*d.coords[: len(sizes)], d.core_on_chip) for d in placed.reshape(-1)
  ]
  # A device's share of the links into its chip.
  link = EFFICIENCY * rates.within * machine.devices / (2 * len(sizes))
  return Torus(
    sizes, topologies.rings(sizes), np.array(places), link, _DIE * link
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRates(cost.Rates):
  """Rates of a device whose transfers occupy the wires of a mesh."""

  wires: Nodes | Torus
  mesh: tuple[int, ...]

  def strides(self, axes: tuple[str, ...]) -> Any:
    """Returns (size, places from one index to the next) of mesh axes."""
    return tuple(
      (self.mesh[i], math.prod(self.mesh[i + 1 :]))
      for i in map(topology.AXES.index, axes)
    )

  def transfer_seconds(
    self, kind: str, num_bytes: float, strides: Any, count: int
  ) -> float:
    groups = neighbours(math.prod(self.mesh), strides, count)
    return max(self.wires.seconds(kind, num_bytes, groups).values())


def rates(topology_name: str, mesh: tuple[int, ...]) -> MeshRates:
  """Returns the rates of machines on which a mesh of these sizes lies."""
  alone = cost.BY_NAME[topologies.machine(topology_name)]
  return MeshRates(**vars(alone), wires=of(topology_name, mesh), mesh=mesh)


@functools.lru_cache(maxsize=64)
def neighbours(devices: int, strides: Any, count: int) -> Groups:
  """Returns all sets of `count` neighbours along axes (size, stride)."""
  sets = collections.defaultdict(set)
  for place in range(devices):
    base, index = place, 0
    for size, stride in strides:
      at = place // stride % size
      base, index = base - at * stride, index * size + at
    sets[base, index // count].add(place)
  return frozenset(map(frozenset, sets.values()))
