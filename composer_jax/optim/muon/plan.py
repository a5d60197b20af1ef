"""Who orthogonalises which matrix: a static plan of one Muon step.

Matrices of equal shape that lie alike on the mesh form a group, over layers,
names and transposes. Each matrix of a group gets one owner among the devices
that hold it (or a few that share it, for the rare matrix too large for one);
the owner receives the whole matrix in one all-to-all and returns it in another.
A plan is made before anything exists, by `optim.muon.planner`, and says what
every device computes, sends and holds; `optim.muon.exchange` runs it.

p <= q are the sides of a matrix; a member whose input side is the longer one is
transposed.
"""

import dataclasses
import math

import jax.numpy as jnp

from composer_jax.optim.muon import newton_schulz as iteration

LOCAL = 'local'
OWNER = 'owner'
REDUNDANT = 'redundant'
GRAM_SHARDED = 'gram_sharded'

Strides = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
  """How one side of a matrix is cut into shards.

  Attributes:
    axes: mesh axes of all its dimensions in order, major to minor.
    dims: (shards, local size) of each dimension in order. An index into the
      side is, major to minor, shard and local of the first dimension, then of
      the second. Dimensions that cannot be told from one are merged.
  """

  axes: tuple[str, ...]
  dims: tuple[tuple[int, int], ...]

  @property
  def shards(self) -> int:
    return math.prod(shards for shards, _ in self.dims)

  @property
  def local(self) -> int:
    return math.prod(local for _, local in self.dims)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
  """A parameter in a group.

  Attributes:
    name: '/'-joined.
    shape: of all shards together.
    batch: dimensions of independent matrices, locally of sizes `local_batch`.
    rows: dimensions of the p side.
    columns: dimensions of the q side.
    is_transposed: the parameter's input side is the q side.
  """

  name: str
  shape: tuple[int, ...]
  batch: tuple[int, ...]
  rows: tuple[int, ...]
  columns: tuple[int, ...]
  is_transposed: bool
  local_batch: tuple[int, ...]

  @property
  def count(self) -> int:
    """Matrices of which a device holds a shard."""
    return math.prod(self.local_batch)

  @property
  def inner(self) -> int:
    """Those of them at one index of the leading batch dimension."""
    return math.prod(self.local_batch[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """What is exchanged and orthogonalised at once.

  The group's local list is the members' local batches, flattened, one after
  another. Owner o of the chunk has the slots [o * owned, (o + 1) * owned) of
  the range, which zeros fill up; owners count replicas first, then shards
  (subgroups of `split` neighbouring shards where matrices are shared).

  Attributes:
    start: of its range of the local list, of `count` matrices.
    owned: slots of each owner.
  """

  start: int
  count: int
  owned: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonGroup:
  """Matrices of one shape and one placement.

  Attributes:
    p: short side, cut as `p_side` says.
    q: long side, cut as `q_side` says.
    replica_axes: mesh axes that touch no dimension of the members.
    num_replicas: devices that hold the same shard.
    split: neighbouring shards that own a matrix together.
    sharers: neighbouring replicas that matrices are dealt out to; a divisor of
      all, as each set of so many does the same work.
    members: in the order of the tree.
    chunks: cover the local list, in order.
    newton_schulz: without an 'auto' dtype.
    shard_strides: (size, devices from one index to the next) of each of `axes`;
      replica_strides likewise of `replica_axes`.
  """

  p: int
  q: int
  p_side: Side
  q_side: Side
  replica_axes: tuple[str, ...]
  num_replicas: int
  split: int
  sharers: int
  members: tuple[Member, ...]
  chunks: tuple[Chunk, ...]
  newton_schulz: iteration.NewtonSchulz
  shard_strides: Strides
  replica_strides: Strides

  @property
  def mode(self) -> str:
    """Who owns a matrix; each replica has an owner where they are redundant."""
    if self.num_shards * self.num_replicas == 1:
      return LOCAL
    if self.split > 1:
      return GRAM_SHARDED
    return REDUNDANT if self.sharers == 1 < self.num_replicas else OWNER

  @property
  def num_shards(self) -> int:
    return self.p_side.shards * self.q_side.shards

  @property
  def axes(self) -> tuple[str, ...]:
    """Mesh axes of the shards: of the p side, then of the q side."""
    return self.p_side.axes + self.q_side.axes

  @property
  def count(self) -> int:
    return sum(member.count for member in self.members)

  @property
  def owned(self) -> int:
    return sum(chunk.owned for chunk in self.chunks)

  @property
  def owners(self) -> int:
    """Owners among the devices that hold shards of the same matrices."""
    return self.num_shards * self.sharers // self.split

  @property
  def shard_bytes(self) -> int:
    """Bytes of one matrix's shard where it is exchanged."""
    size = jnp.dtype(self.newton_schulz.dtype).itemsize
    return self.p_side.local * self.q_side.local * size

  @property
  def piece_columns(self) -> int:
    """Columns of a shard's part for one device, padded."""
    return -(-self.q_side.local // self.split)

  @property
  def piece_bytes(self) -> int:
    """Bytes of a shard's part for one device, padded columns included."""
    return self.shard_bytes // self.q_side.local * self.piece_columns

  @property
  def split_columns(self) -> int:
    """Columns of a matrix on each device that shares it, with padding."""
    return self.q_side.shards * self.piece_columns

  @property
  def matrix_flops(self) -> int:
    """Of one matrix, on each device that shares it."""
    if self.split == 1:
      return iteration.flops(self.p, self.q, self.newton_schulz)
    q = self.split * self.split_columns
    return iteration.split_flops(self.p, q, self.split, self.newton_schulz)

  @property
  def flops(self) -> int:
    """Of a device, padded slots included."""
    return self.owned * self.matrix_flops

  @property
  def even_flops(self) -> float:
    """The same if matrices could be dealt out evenly."""
    one = iteration.flops(self.p, self.q, self.newton_schulz)
    return self.count * one / (self.num_shards * self.num_replicas)

  @property
  def ideal_flops(self) -> float:
    """The same by the standard method."""
    standard = dataclasses.replace(self.newton_schulz, method='standard')
    return dataclasses.replace(self, newton_schulz=standard).even_flops

  def exchange_bytes(self, owned: int) -> int:
    """Into a device, of one all-to-all of a chunk."""
    return (self.num_shards - 1) * owned * self.piece_bytes

  def gather_bytes(self, owned: int) -> int:
    """Into a device, of the all-gather over replicas of a chunk."""
    slots = owned * self.num_shards
    return (self.sharers - 1) * slots * self.piece_bytes

  def split_collectives(self, chunk: Chunk) -> tuple[tuple[str, int], ...]:
    """(kind, bytes into a device) of those while matrices are shared."""
    if self.split == 1:
      return ()
    return iteration.split_collectives(
      self.p, self.split, self.newton_schulz, num=chunk.owned
    )

  @property
  def split_bytes(self) -> int:
    return sum(n for c in self.chunks for _, n in self.split_collectives(c))

  @property
  def wire_bytes(self) -> int:
    """Into a device, of all collectives."""
    exchanged = 2 * self.exchange_bytes(self.owned)
    return exchanged + self.gather_bytes(self.owned) + self.split_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonPlan:
  """One step of Muon on a mesh.

  Attributes:
    groups: in the order of their first member.
    sequence: (group, chunk) in the order of execution.
  """

  groups: tuple[MuonGroup, ...]
  sequence: tuple[tuple[int, int], ...]
  devices: int

  @property
  def flops(self) -> int:
    return sum(group.flops for group in self.groups)

  @property
  def ideal_flops(self) -> float:
    """By the standard method, dealt out evenly."""
    return sum(group.ideal_flops for group in self.groups)

  @property
  def wire_bytes(self) -> int:
    return sum(group.wire_bytes for group in self.groups)
