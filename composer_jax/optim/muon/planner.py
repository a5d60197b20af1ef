"""Makes plans of Muon's step from shapes, matrices and shardings.

Owners and chunks are chosen by times that are modelled from published rates
(`optim.muon.cost`).
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from composer_jax.core import checks, trees
from composer_jax.optim import roles
from composer_jax.optim.muon import cost, plan
from composer_jax.optim.muon import newton_schulz as iteration

_Dims = tuple[int, ...]
_Groups = list[plan.MuonGroup]

# Share of the step below which differences do not count: the smaller split is
# taken, as short messages and narrow products cost more than rates tell.
_INDIFFERENT = 0.01
# Least time of a chunk, in latencies of a collective.
_LATENCIES = 50
# With so many chunks the first and the last are 4 % of the step each.
_MOST_CHUNKS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
  """Choices of a plan; None leaves them to modelled times.

  Attributes:
    rates: speeds of the machine; None takes the platform's, or v5p's.
    chunks: number of chunks of the step, as far as its groups allow.
    split: number of devices that share a matrix if there are fewer matrices
      than owners; 1 shares none.
    repeats: true if each replica does all work and gathers nothing, false if
      each matrix has one owner among all replicas.
  """

  rates: cost.Rates | None = None
  chunks: int | None = None
  split: int | None = None
  repeats: bool | None = None


NOTHING_FIXED = PlanOptions()


def make(
  params: Any,
  matrices: Any,
  *,
  shardings: Any = None,
  newton_schulz: iteration.NewtonSchulz,
  fixed: PlanOptions = NOTHING_FIXED,
) -> plan.MuonPlan:
  """Plans one step.

  Args:
    matrices: tree of `roles.Matrix` of Muon's parameters.
    shardings: tree of NamedShardings on one mesh, which may be abstract; None
      on one device.
    fixed: choices that are not left to modelled times.

  Raises:
    ValueError: a dimension is 0 or does not divide over its mesh axes.
  """
  shapes, placed = trees.flatten_names(params), trees.flatten_names(shardings)
  named = trees.flatten_names(matrices)
  mesh = placed[next(iter(named))].mesh if placed and named else None
  sizes = dict(mesh.shape) if mesh else {}
  platform = jax.default_backend()
  if mesh is not None:
    # An abstract mesh without a device is taken for one of TPUs.
    is_real = isinstance(mesh, Mesh)
    device = mesh.devices.flat[0] if is_real else mesh.abstract_device
    platform = device.platform if device else 'tpu'
  assumed = {'cpu': 'cpu', 'gpu': 'h200', 'cuda': 'h200'}.get(platform, 'v5p')
  rates = fixed.rates or cost.BY_NAME[assumed]
  found = []
  for name, matrix in named.items():
    shape = shapes[name].shape
    cuts = _cuts(name, shape, placed.get(name))
    used = {axis for axes, _ in cuts for axis in axes}
    replica_axes = tuple(
      axis for axis, size in sizes.items() if size > 1 and axis not in used
    )
    sides, member = _member(name, shape, matrix, cuts)
    found.append(((*sides, replica_axes), member))
  members: dict[tuple, list[plan.Member]] = {}
  for key, member in sorted(found, key=_by_form):
    members.setdefault(key, []).append(member)
  resolved = newton_schulz.resolved(platform)
  groups = [
    _group(key, tuple(alike), sizes, resolved) for key, alike in members.items()
  ]
  for choose in (_share_giants, _place_replicas, _cut):
    groups = choose(groups, fixed, rates)
  return plan.MuonPlan(
    groups=tuple(groups),
    sequence=_sequence(groups, rates),
    devices=math.prod(sizes.values()),
  )


def _by_form(found: tuple[tuple[Any, ...], plan.Member]) -> Any:
  """Returns a key of order that looks at the name last.

  Schedulers break ties by the order of operations, so what a step overlaps
  must not depend on what parameters are called.
  """
  (p, q, *sides, _), m = found
  placed = [(side.axes, side.dims) for side in sides]
  dims = m.batch, m.rows, m.columns
  return p, q, placed, m.shape, dims, m.is_transposed, m.name


def _cuts(
  name: str, shape: _Dims, sharding: NamedSharding | None
) -> list[tuple[tuple[str, ...], int]]:
  """Returns the mesh axes and local size of each dimension."""
  check_size(name, shape)
  if sharding is None:
    return [((), size) for size in shape]
  if len(sharding.spec) > len(shape):
    raise ValueError(
      f'Parameter {name} of shape {shape} has {len(shape)} dimensions, but its '
      f'sharding {sharding.spec} has {len(sharding.spec)}. Leave out the last.'
    )
  cuts = []
  axes_of_dims = mesh_axes(sharding, len(shape))
  for dim, (size, axes) in enumerate(zip(shape, axes_of_dims, strict=True)):
    shards = math.prod(sharding.mesh.shape[a] for a in axes)
    what = f'Parameter {name} of shape {shape}: dimension {dim}'
    checks.divides(shards, f'its mesh axes {axes}', size, what)
    cuts.append((axes, size // shards))
  return cuts


def check_size(name: str, shape: _Dims) -> None:
  if 0 in shape:
    raise ValueError(
      f'Parameter {name} of shape {shape} has a dimension of size 0, hence no '
      'matrices. Take it out of the tree, or leave it to Adam.'
    )


def mesh_axes(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
  """Returns the mesh axes, of more than one device, of each dimension."""
  entries = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
  axes = ((e,) if isinstance(e, str) else tuple(e or ()) for e in entries)
  sizes = sharding.mesh.shape
  return [tuple(a for a in dim if sizes[a] > 1) for dim in axes]


def _side(dims: _Dims, shape: _Dims, cuts: list) -> plan.Side:
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
  name: str, shape: _Dims, matrix: roles.Matrix, cuts: list
) -> tuple[tuple[Any, ...], plan.Member]:
  """Returns (p, q, p side, q side), which a group shares, and the member."""
  size = lambda dims: math.prod(shape[d] for d in dims)
  rows, columns = matrix.rows, matrix.columns
  is_transposed = size(rows) > size(columns) or (
    size(rows) == size(columns) and matrix.swapped
  )
  if is_transposed:
    rows, columns = columns, rows
  batch = tuple(d for d in range(len(shape)) if d not in rows + columns)
  member = plan.Member(
    name=name,
    shape=tuple(shape),
    batch=batch,
    rows=rows,
    columns=columns,
    is_transposed=is_transposed,
    local_batch=tuple(cuts[d][1] for d in batch),
  )
  sides = (_side(s, shape, cuts) for s in (rows, columns))
  return (size(rows), size(columns), *sides), member


def _group(
  key: tuple[Any, ...],
  members: tuple[plan.Member, ...],
  mesh: dict[str, int],
  options: iteration.NewtonSchulz,
) -> plan.MuonGroup:
  """Returns a group of one chunk, each of whose matrices has one owner."""
  p, q, p_side, q_side, replica_axes = key
  replicas = math.prod(mesh[axis] for axis in replica_axes)
  group = plan.MuonGroup(
    p=p,
    q=q,
    p_side=p_side,
    q_side=q_side,
    replica_axes=replica_axes,
    num_replicas=replicas,
    split=1,
    sharers=replicas,
    members=members,
    chunks=(),
    newton_schulz=options,
    shard_strides=_strides(p_side.axes + q_side.axes, mesh),
    replica_strides=_strides(replica_axes, mesh),
  )
  return _in_chunks(group, 1)


def _strides(axes: tuple[str, ...], mesh: dict[str, int]) -> plan.Strides:
  """Returns the size of each axis, and the devices between its indices."""
  names, sizes = list(mesh), list(mesh.values())
  return tuple((mesh[a], math.prod(sizes[names.index(a) + 1 :])) for a in axes)


def _in_chunks(group: plan.MuonGroup, wanted: int) -> plan.MuonGroup:
  """Cuts a group's local list; only its last chunk is padded."""
  count, owners = group.count, group.owners
  owned = -(-count // owners)
  each = -(-owned // min(wanted, owned))
  # Chunks of whole layers if possible, whose slices are cheap.
  inner = math.lcm(*(member.inner for member in group.members))
  unit = inner // math.gcd(inner, owners)
  if each < owned and unit <= each:
    each = -(-each // unit) * unit
  chunks = tuple(
    plan.Chunk(
      start=first * owners,
      count=min(each * owners, count - first * owners),
      owned=min(each, owned - first),
    )
    for first in range(0, owned, each)
  )
  return dataclasses.replace(group, chunks=chunks)


def _share_giants(
  groups: _Groups, fixed: PlanOptions, rates: cost.Rates
) -> _Groups:
  """Lets devices share matrices that are few and expensive.

  If a group has fewer matrices than half its owners, every device waits for the
  few that own one.
  """
  even_flops = sum(group.even_flops for group in groups)

  def shared(group: plan.MuonGroup) -> plan.MuonGroup:
    if (k := fixed.split) is not None:
      fits = group.num_shards % k == 0 and group.count * k <= group.owners
      return _dealt(group, split=k) if fits else group
    # Bits of a shared matrix depend on who shares it.
    if group.newton_schulz.deterministic or 2 * group.count > group.owners:
      return group
    candidates = [_dealt(group, split=k) for k in _divisors(group.num_shards)]
    seconds = [sum(_roofs([candidate], rates)) for candidate in candidates]
    enough = min(seconds) + _INDIFFERENT * even_flops / rates.flops
    return candidates[[s <= enough for s in seconds].index(True)]

  return [shared(group) for group in groups]


def _place_replicas(
  groups: _Groups, fixed: PlanOptions, rates: cost.Rates
) -> _Groups:
  """Chooses the groups whose replicas repeat work instead of gathering results.

  With fewer matrices than owners repeating costs nothing: they are divided
  among as few replicas as take no longer. With more, groups repeat if transfers
  would be the longer part of the step.
  """
  repeated = [_dealt(group, sharers=1) for group in groups]
  if fixed.repeats is not None:
    return repeated if fixed.repeats else groups
  chosen = []
  for group in groups:
    dealt = (_dealt(group, sharers=n) for n in _divisors(group.num_replicas))
    chosen.append(next(g for g in dealt if g.flops <= group.flops))
  # First the groups that save most transfers for each operation added.
  order = sorted(
    (i for i, group in enumerate(chosen) if repeated[i] != group),
    key=lambda i: _roofs([chosen[i]], rates)[1] / repeated[i].flops,
    reverse=True,
  )
  for i in order:
    candidate = [*chosen[:i], repeated[i], *chosen[i + 1 :]]
    best = max(_roofs(chosen, rates))
    if max(_roofs(candidate, rates)) < (1 - _INDIFFERENT) * best:
      chosen = candidate
  return chosen


def _dealt(group: plan.MuonGroup, **to: Any) -> plan.MuonGroup:
  return _in_chunks(dataclasses.replace(group, **to), 1)


def _divisors(n: int) -> list[int]:
  return [d for d in range(1, n + 1) if n % d == 0]


def _roofs(groups: _Groups, rates: cost.Rates) -> tuple[float, float]:
  """Returns the modelled seconds of all work and of all transfers."""
  times = [cost.chunk_times(g, c, rates) for g in groups for c in g.chunks]
  return sum(t.work for t in times), sum(t.bring + t.give for t in times)


def _cut(groups: _Groups, fixed: PlanOptions, rates: cost.Rates) -> _Groups:
  """Divides groups into chunks of about equal work, or of equal bytes.

  A group with a larger share of the step's bytes than of its work is divided by
  bytes, since chunks in flight take memory.
  """
  work = [_roofs([group], rates)[0] for group in groups]
  held = [group.count * group.shard_bytes for group in groups]
  longest = sum(work) / (_LATENCIES * rates.latency)
  wanted = fixed.chunks or min(_MOST_CHUNKS, int(longest))
  cut = []
  for group, seconds, size in zip(groups, work, held, strict=True):
    share = max(seconds / sum(work), size / sum(held))
    cut.append(_in_chunks(group, max(1, round(wanted * share))))
  return cut


def _sequence(
  groups: _Groups, rates: cost.Rates
) -> tuple[tuple[int, int], ...]:
  """Orders chunks so that transfers overlap with work.

  Chunks of a group are spread over the step, as groups of small matrices have
  more bytes for their work. The first and the last chunk, whose transfers
  cannot overlap, are those that exchange least.
  """
  singles = [g for g, group in enumerate(groups) if len(group.chunks) == 1]
  places = []
  for g, group in enumerate(groups):
    for c, chunk in enumerate(group.chunks):
      place = (c + 0.5) / len(group.chunks)
      if g in singles:  # All would be in the middle.
        place = (singles.index(g) + 0.5) / len(singles)
      times = cost.chunk_times(group, chunk, rates)
      places.append((place, (g, c), times.bring + times.give))
  places.sort()
  if len(places) > 2:
    exchanged = lambda index: places[index][2]
    first = places.pop(min(range(len(places)), key=exchanged))
    last = places.pop(min(reversed(range(len(places))), key=exchanged))
    places = [first, *places, last]
  return tuple(identity for _, identity, _ in places)
