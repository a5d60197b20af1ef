"""Sends tokens to the devices of their experts, and the outputs back.

Sharded tokens travel in `rounds`, and each shard computes the copies for its
own experts. Tokens that every device has, as in a decode step, need only a sum.
Routing itself happens elsewhere.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from composer_jax.core import platforms
from composer_jax.parallel import dispatch, rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangePlan:
  """The sharding of variables, tokens and experts.

  Attributes:
    batch_axes: mesh axes that shard B.
    sequence_axes: mesh axes that shard T.
    weight_specs: storage spec of each expert array by name; of an adapted one a
      tree that begins with the array's. Dimension 0 is the expert axis, whose
      mesh axes, equal for all arrays, form the expert shards; other sharded
      dimensions are gathered before use in each layer.
    transport: one of `rounds.TRANSPORTS`; 'auto' takes the platform's.
    room: copies that a buffer holds, as a multiple of the mean.
    specs: storage spec of each variable of the model by '/'-joined name.
    sequence_order: order of a row's tokens on the devices; see `sequence`.
    wire: one of `rounds.WIRES`.
    parts: least number of rounds of an exchange, which can overlap; 0 takes the
      platform's.
    chunks: parts of a device's tokens that attend and travel one after another,
      so that attention of one stands beside the exchange of another.
  """

  mesh: Mesh
  batch_axes: tuple[str, ...]
  sequence_axes: tuple[str, ...]
  weight_specs: tuple[tuple[str, Any], ...]
  transport: str = 'auto'
  room: float = rounds.ROOM
  specs: tuple[tuple[str, P], ...] = ()
  sequence_order: str = 'contiguous'
  wire: str = 'values'
  parts: int = 0
  chunks: int = 1

  @property
  def token_axes(self) -> tuple[str, ...]:
    return self.batch_axes + self.sequence_axes

  @property
  def expert_axes(self) -> tuple[str, ...]:
    return axis_names(self.expert_spec[0])

  @property
  def expert_spec(self) -> P:
    """Storage spec of the first expert array."""
    return jax.tree.leaves(self.weight_specs[0][1], is_leaf=_is_spec)[0]

  @property
  def expert_shards(self) -> int:
    return math.prod(self.mesh.shape[axis] for axis in self.expert_axes)

  @property
  def travels(self) -> bool:
    """True if tokens go to the devices of their experts."""
    return bool(self.token_axes) and self.expert_shards > 1


def _is_spec(tree: Any) -> bool:
  return isinstance(tree, P)


def axis_names(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes of one entry of a PartitionSpec as a tuple."""
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def exchange(
  experts: dispatch.Experts,
  weights: dict[str, jax.Array],
  x_BTD: jax.Array,
  ids_BTA: jax.Array,
  gates_BTA: jax.Array,
  valid_BT: jax.Array,
  *,
  plan: ExchangePlan | None,
  keeps: bool = False,
  draws_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Computes each token's gated sum over its experts, zero for padding.

  With a plan that shards tokens, call it inside a shard_map over the whole mesh
  with this shard's tokens and experts. With a plan that does not, call it
  outside of any with whole arrays. Without a plan it computes on one device.

  Args:
    weights: arrays with a leading expert axis, the only sharded one.
    ids_BTA: int32 experts of each token, counted over all shards.
    gates_BTA: float32 gate of each expert.
    valid_BT: false for padding, which reaches no expert.
    plan: sharding of experts and tokens; None for one device.
    keeps: true to keep what the first round received and its hidden units for
      the backward pass, which else exchanges and computes them again.
    draws_BT: uint32 number of each token, the same on every mesh, for experts
      that draw; None for others.

  Returns:
    y_BTD, and the int32 number of rounds; None if no token travels.
  """
  if plan is not None and not plan.token_axes:
    summed = jax.shard_map(
      functools.partial(_whole, experts.forward, plan),
      mesh=plan.mesh,
      in_specs=(dict(plan.weight_specs), P(), P(), P(), P()),
      out_specs=P(),
      check_vma=False,
    )
    return summed(weights, x_BTD, ids_BTA, gates_BTA, valid_BT), None
  tokens = dispatch.prepare(x_BTD, ids_BTA, gates_BTA, valid_BT, draws_BT)
  if plan is None or not plan.travels:
    y_ZD = dispatch.expert_sum(experts.forward, weights, tokens, 0)
    return y_ZD.reshape(x_BTD.shape), None
  shards = shards_of(
    plan,
    num_tokens=tokens.x_ZD.shape[0],
    num_active=tokens.ids_ZA.shape[1],
    num_local=jax.tree.leaves(weights)[0].shape[0],
    keeps=keeps,
  )
  y_ZD, count = rounds.exchange(experts, weights, tokens, shards, keeps)
  return y_ZD.reshape(x_BTD.shape), count


def shards_of(
  plan: ExchangePlan,
  *,
  num_tokens: int,
  num_active: int,
  num_local: int,
  keeps: bool = False,
) -> rounds.Shards:
  """Returns the shards of a plan, with room for so many tokens of a device.

  `keeps` as in `exchange`, for which a round has to stand before the loop.
  """
  axes, num_shards = plan.expert_axes, plan.expert_shards
  # Another axis would compute every token again.
  assert set(axes) <= set(plan.token_axes), (axes, plan.token_axes)
  name = plan.transport
  if name == 'auto':
    name = rounds.transport_of(platforms.current())
  parts = plan.parts
  if not parts:
    parts = max(1, rounds.PARTS // plan.chunks)
    parts = int(keeps) if platforms.current() == 'cpu' else parts
  return rounds.Shards(
    transport=name,
    axes=axes,
    others=tuple(axis for axis in plan.token_axes if axis not in axes),
    num_shards=num_shards,
    num_local=num_local,
    wire=plan.wire,
    parts=parts,
    copies=num_tokens * num_active,
    rows=rounds.rows_of(
      name,
      copies=num_tokens * num_active,
      most=num_tokens * min(num_active, num_local),
      num_shards=num_shards,
      room=plan.room / max(parts, 1),
    ),
  )


def _whole(expert_fn, plan, weights, x_BTD, ids_BTA, gates_BTA, valid_BT):
  """Sums the outputs of each device's experts for all tokens.

  A device has whole experts, or the same slice of hidden units of every expert,
  whose outputs add up too, since SwiGLU is element-wise in hidden units.
  """
  axes = plan.expert_axes
  first = 0
  if axes:
    first = jax.lax.axis_index(axes) * jax.tree.leaves(weights)[0].shape[0]
  # `models.placement` slices the hidden units of all arrays alike.
  spec = plan.expert_spec
  axes += tuple(axis for dim in spec[1:] for axis in axis_names(dim))
  tokens = dispatch.prepare(x_BTD, ids_BTA, gates_BTA, valid_BT)
  partial_ZD = dispatch.expert_sum(expert_fn, weights, tokens, first)
  partial_BTD = partial_ZD.reshape(x_BTD.shape)
  with jax.named_scope('combine'):
    return jax.lax.psum(partial_BTD, axes) if axes else partial_BTD
