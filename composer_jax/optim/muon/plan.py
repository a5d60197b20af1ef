"""Static plan of one Muon step: which device orthogonalises which matrix.

Matrices of equal shape and sharding form a group, over layers, names and
transposes. Each matrix has one owner among its devices (or a few that share it,
if it is too large for one), which receives it in one all-to-all and returns it
in another. `optim.muon.planner` makes the plan, `optim.muon.exchange` runs it.

p <= q are the sides of a matrix; a member with a longer input side is
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
  """Sharding of one side of a matrix.

  Attributes:
    axes: mesh axes of its dimensions in order, major to minor.
    dims: (shards, local size) of each dimension in order; dimensions are merged
      where possible. An index into the side is, major to minor, the shard and
      local index of the first dimension, then of the second.
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
    batch: dimensions of independent matrices.
    rows: dimensions of the p side.
    columns: dimensions of the q side.
    is_transposed: true if the parameter's input side is the q side.
    local_batch: sizes of the batch dimensions on one device.
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
    """Number of matrices of which a device has a shard."""
    return math.prod(self.local_batch)

  @property
  def inner(self) -> int:
    """Number of these at one index of the leading batch dimension."""
    return math.prod(self.local_batch[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """Matrices that are exchanged and orthogonalised at once.

  A group's local list is its members' local batches, flattened and one after
  another. Owner o has the slots [o * owned, (o + 1) * owned) of the chunk's
  range, which is padded by zeros; owners count replicas first, then shards (or
  subgroups of `split` neighbouring shards that share matrices).

  Attributes:
    start: first matrix in the local list.
    count: number of matrices of the local list.
    owned: number of slots of each owner.
  """

  start: int
  count: int
  owned: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonGroup:
  """Matrices of one shape and one placement.

  Attributes:
    replica_axes: mesh axes that shard no dimension of the members.
    num_replicas: number of devices with the same shard.
    split: number of neighbouring shards that own a matrix together.
    sharers: number of neighbouring replicas among which matrices are divided, a
      divisor of num_replicas; each set of sharers does the same work.
    newton_schulz: options with a resolved dtype.
    shard_strides: (size, devices from one index to the next) of each of `axes`.
    replica_strides: the same of each of `replica_axes`.
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
    """Kind of ownership; REDUNDANT has an owner in each replica."""
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
    """Mesh axes of the p side, then of the q side."""
    return self.p_side.axes + self.q_side.axes

  @property
  def count(self) -> int:
    return sum(member.count for member in self.members)

  @property
  def owned(self) -> int:
    return sum(chunk.owned for chunk in self.chunks)

  @property
  def owners(self) -> int:
    """Number of owners among the devices with shards of the same matrices."""
    return self.num_shards * self.sharers // self.split

  @property
  def shard_bytes(self) -> int:
    """Bytes of one matrix's shard in an exchange."""
    size = jnp.dtype(self.newton_schulz.dtype).itemsize
    return self.p_side.local * self.q_side.local * size

  @property
  def piece_columns(self) -> int:
    """Columns of a shard's part for one of the sharing devices, padded."""
    return -(-self.q_side.local // self.split)

  @property
  def piece_bytes(self) -> int:
    """Bytes of a shard's part for one of the sharing devices, padded."""
    return self.shard_bytes // self.q_side.local * self.piece_columns

  @property
  def split_columns(self) -> int:
    """Columns of a matrix on each of the sharing devices, padded."""
    return self.q_side.shards * self.piece_columns

  @property
  def matrix_flops(self) -> int:
    """Operations of one matrix on each of the sharing devices."""
    if self.split == 1:
      return iteration.flops(self.p, self.q, self.newton_schulz)
    q = self.split * self.split_columns
    return iteration.split_flops(self.p, q, self.split, self.newton_schulz)

  @property
  def flops(self) -> int:
    """Operations of a device, padded slots included."""
    return self.owned * self.matrix_flops

  @property
  def even_flops(self) -> float:
    """Operations of a device if matrices could be divided evenly."""
    flops = iteration.flops(self.p, self.q, self.newton_schulz)
    return self.count * flops / (self.num_shards * self.num_replicas)

  @property
  def ideal_flops(self) -> float:
    """`even_flops` of the standard method."""
    standard = dataclasses.replace(self.newton_schulz, method='standard')
    return dataclasses.replace(self, newton_schulz=standard).even_flops

  def exchange_bytes(self, owned: int) -> int:
    """Returns bytes into a device of one all-to-all of a chunk."""
    return (self.num_shards - 1) * owned * self.piece_bytes

  def gather_bytes(self, owned: int) -> int:
    """Returns bytes into a device of a chunk's all-gather over replicas."""
    slots = owned * self.num_shards
    return (self.sharers - 1) * slots * self.piece_bytes

  def split_collectives(self, chunk: Chunk) -> tuple[tuple[str, int], ...]:
    """Returns (kind, bytes into a device) of collectives of a shared matrix."""
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
    """Bytes into a device of all collectives."""
    exchanged = 2 * self.exchange_bytes(self.owned)
    return exchanged + self.gather_bytes(self.owned) + self.split_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonPlan:
  """One step of Muon; `sequence` has (group, chunk) in order of execution."""

  groups: tuple[MuonGroup, ...]
  sequence: tuple[tuple[int, int], ...]
  devices: int

  @property
  def flops(self) -> int:
    return sum(group.flops for group in self.groups)

  @property
  def ideal_flops(self) -> float:
    """Operations of a device by the standard method, divided evenly."""
    return sum(group.ideal_flops for group in self.groups)

  @property
  def wire_bytes(self) -> int:
    return sum(group.wire_bytes for group in self.groups)
