"""Bytes that devices exchange in one train step, and the least they could.

Bytes are those that one execution brings into one device from others of its
group, as `plan.hlo.overlap` counts them in compiled programs; an all-reduce
counts as a reduce-scatter and an all-gather. A device in a group of n that hold
one shard each of W bytes lacks W (n - 1) / n. Lines of a layer:

- 'dense weights', 'expert weights': weights are gathered in the compute dtype
  (the router's in float32), forward and again in recomputation unless 'weights'
  are saved; float32 gradients are reduce-scattered. Experts are gathered only
  along dimensions that are sharded because the number of experts does not
  divide by all devices.
- 'copies': gradients are all-reduced over the mesh axes that do not shard an
  array: over 'replica' for a matrix (HSDP), over none for experts.
- 'vectors': small replicated arrays (scales of norms, biases) are summed over
  all devices, for all layers at once.
- 'keys': context shards gather what attention keeps of a token (keys and
  values, or the latent and the rotated key), and reduce-scatter its gradient.
- 'dispatch', 'combine': copies of tokens go to the devices of their experts and
  outputs come back; backward the copies go again with the gradients of the
  outputs and a gate, and gradients of both come back. 'a2a' sends the slots of
  one round to each device, 'ragged_a2a' the copies of even load. At least each
  token goes once to each device that has an expert of it, at even load.
- 'routes': counts of copies, and the number of rounds where other devices have
  copies of the experts; their least is 0.

Lines of the step: 'ids' and 'embedding' (token ids go to the devices of the
table's columns, rows come back; the least is the smaller of rows and table),
'head' (gathered, its gradient reduce-scattered), 'rows' (ids and segments of
neighbours in context) and 'statistics' of routers. Scalars are left out, and so
is Muon, whose plan has figures of its own.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from composer_jax.models import config as model_config
from composer_jax.parallel import exchange, rounds, shardings, shards
from composer_jax.plan import case as cases
from composer_jax.plan import params

_KINDS = {'a2a': 'all-to-all', 'ragged_a2a': 'ragged-all-to-all'}
# Bytes of numbers whose dtype does not follow the model's compute dtype.
_FLOAT32 = _INT32 = 4
_WHERE = {'dense_layers': 'dense layer', 'moe_layers': 'mixture layer'}


class Traffic(NamedTuple):
  """Collectives of one kind for one purpose.

  Attributes:
    where: 'dense layer' or 'mixture layer' for one such layer, or 'step'.
    what: name of the line; see the module's docstring.
    phase: 'forward', 'recompute' (in the backward pass) or 'backward'.
    kind: kind of the collectives, one of `plan.hlo.events.KINDS`.
    axes: mesh axes whose devices form a group.
    count: collectives before a compiler merges any.
    bytes: bytes of all collectives into one device.
    least: fewest bytes of any program with this layout.
  """

  where: str
  what: str
  phase: str
  kind: str
  axes: tuple[str, ...]
  count: int
  bytes: int
  least: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """Sizes and transport of one forward and backward pass.

  Attributes:
    batch_size: rows on all devices.
    seq_len: tokens of a row.
    transport: one of `rounds.TRANSPORTS`.
    room: copies that a buffer holds as a multiple of the mean.
  """

  batch_size: int
  seq_len: int
  transport: str
  room: float = rounds.ROOM


def lines(case: cases.Case, step: Step) -> list[Traffic]:
  """Returns the traffic of one layer of each kind, and of the step.

  Raises:
    ValueError: the batch or the sequence does not divide over its devices.
  """
  for name, size, mesh_axes in (
    ('batch', step.batch_size, case.layout.batch),
    ('sequence', step.seq_len, case.layout.sequence),
  ):
    shardings.check_divides(f'{name} size', size, mesh_axes, case.mesh)
  merged: dict[tuple, Traffic] = {}
  for line in _Counter(case, step).lines():
    # A device sends nothing to itself.
    axes = tuple(axis for axis in line.axes if case.mesh.shape[axis] > 1)
    if axes:
      line = line._replace(axes=axes)
      before = merged.get(line[:5], line._replace(count=0, bytes=0, least=0))
      merged[line[:5]] = Traffic(
        *line[:5], *(a + b for a, b in zip(before[5:], line[5:], strict=True))
      )
  return list(merged.values())


def shards_of(case: cases.Case, step: Step) -> rounds.Shards:
  """Returns the devices that share experts, and the room of their buffers."""
  return _Counter(case, step).shards()


@dataclasses.dataclass(frozen=True)
class _Counter:
  case: cases.Case
  step: Step

  def lines(self) -> Iterator[Traffic]:
    for name, array in _arrays(self.case).items():
      yield from self.weight(name, array)
    if self.case.model.num_dense_layers:
      yield from self.keys('dense layer')
    yield from self.keys('mixture layer')
    yield from self.exchange()
    yield from self.sums()

  def width(self, axes: tuple[str, ...]) -> int:
    return shardings.product(axes, self.case.mesh)

  @property
  def tokens(self) -> int:
    """Tokens of one device."""
    layout = self.case.layout
    devices = self.width(layout.batch + layout.sequence)
    return self.step.batch_size * self.step.seq_len // devices

  @property
  def size(self) -> int:
    """Bytes of one number in the compute dtype."""
    return jnp.dtype(self.case.model.compute_dtype).itemsize

  def phases(self, name: str) -> tuple[str, ...]:
    """Returns the phases that compute an array that remat has a name for."""
    model = self.case.model
    is_kept = not model.remat or name in model.remat_saves
    return ('forward',) if is_kept else ('forward', 'recompute')

  def weight(self, name: str, array: '_Array') -> Iterator[Traffic]:
    where = _WHERE.get(name.split('/')[0], 'step')
    size, dims = array.size, array.dims
    held = sum(dims.values(), ())
    # Experts are not gathered along the expert axis.
    gathered = tuple(
      axis for axis in held if axis not in dims.get('expert', ())
    )
    shard = size // self.width(held)
    others = self.width(gathered) - 1
    what = 'expert weights' if 'expert' in dims else 'dense weights'
    is_table = where == 'step'
    if name == 'embedding':
      yield from self.look_up(gathered)
    if name != 'embedding' or self.case.model.tie_embeddings:
      number = _FLOAT32 if name.endswith('/router') else self.size
      line = functools.partial(_line, where, 'head' if is_table else what)
      # The head's backward pass follows at once and reuses its weight.
      phases = ('forward',) if is_table else self.phases('weights')
      for phase in phases:
        yield line(phase, 'all-gather', gathered, shard * others * number)
      sent = shard * others * _FLOAT32
      yield line('backward', 'reduce-scatter', gathered, sent)
    copies = tuple(axis for axis in self.case.mesh.shape if axis not in held)
    line = functools.partial(_line, phase='backward', kind='all-reduce')
    sent = _all_reduce(
      shard * jnp.dtype(self.case.dtype).itemsize, self.width(copies)
    )
    if not held and not is_table and size <= shards.MOST_LENT:
      yield line('step', 'vectors', axes=copies, sent=array.layers * sent)
    else:
      yield line(where, 'copies', axes=copies, sent=sent)
    if name == 'embedding' and self.case.model.tie_embeddings:
      # The tied table is summed once for each of its two uses.
      yield line(where, 'copies', axes=copies, sent=sent, least=0)

  def look_up(self, axes: tuple[str, ...]) -> Iterator[Traffic]:
    """Yields ids on their way to the table, and rows on their way back."""
    model, width = self.case.model, self.width(axes)
    sent = self.tokens * _INT32 * (width - 1)
    yield _line('step', 'ids', 'forward', 'all-gather', axes, sent, 0)
    row = model.embed_dim * self.size * (width - 1) // width
    rows = (self.tokens, min(self.tokens, model.vocab_size))
    for phase in ('forward', 'backward'):
      sent, least = (row * number for number in rows)
      yield _line('step', 'embedding', phase, 'all-to-all', axes, sent, least)

  def keys(self, where: str) -> Iterator[Traffic]:
    a, axes = self.case.model.attention, self.case.layout.sequence
    if isinstance(a, model_config.MLAConfig):
      kept = (a.kv_lora_dim, a.rope_dim)
    else:
      kept = (a.num_kv_heads * a.head_dim,) * 2
    for width in kept:
      sent = self.tokens * width * self.size * (self.width(axes) - 1)
      for phase in self.phases('keys'):
        yield _line(where, 'keys', phase, 'all-gather', axes, sent)
      yield _line(where, 'keys', 'backward', 'reduce-scatter', axes, sent)

  def exchange(self) -> Iterator[Traffic]:
    """Yields copies on their way to experts, and outputs on their way back."""
    axes, shards, moe = self.expert_axes, self.shards(), self.case.model.moe
    others = shards.num_shards - 1
    rows = self.tokens * moe.num_active / shards.num_shards
    if shards.transport == 'a2a':
      rows = shards.rows
    elsewhere = moe.num_experts - shards.num_local
    missed = math.comb(elsewhere, moe.num_active)
    visits = 1 - missed / math.comb(moe.num_experts, moe.num_active)
    width = self.case.model.embed_dim * self.size
    least = round(others * self.tokens * visits * width)
    for what, phase, row in (
      ('dispatch', 'forward', width),
      ('combine', 'forward', width),
      # Gradients of outputs with the gates, and copies unless they are kept.
      ('combine', 'backward', (1 + self.case.model.remat) * width + _FLOAT32),
      ('dispatch', 'backward', width + _FLOAT32),
    ):
      sent = round(others * rows * row)
      yield _line(
        'mixture layer',
        what,
        phase,
        _KINDS[shards.transport],
        axes,
        sent,
        least,
      )
    routes = functools.partial(_line, 'mixture layer', 'routes', 'forward')
    sent = others * moe.num_experts * _INT32
    yield routes('all-gather', axes, sent, 0)
    if others:
      sent = _all_reduce(_INT32, self.width(shards.others))
      yield routes('all-reduce', shards.others, sent, 0)

  @property
  def expert_axes(self) -> tuple[str, ...]:
    return _arrays(self.case)['moe_layers/moe/gate_up'].dims['expert']

  def shards(self) -> rounds.Shards:
    model, layout = self.case.model, self.case.layout
    plan = exchange.ExchangePlan(
      mesh=self.case.mesh,
      batch_axes=layout.batch,
      sequence_axes=layout.sequence,
      weight_specs=(('gate_up', P(self.expert_axes)),),
      transport=self.step.transport,
      room=self.step.room,
    )
    return exchange.shards_of(
      plan,
      num_tokens=self.tokens,
      num_active=model.moe.num_active,
      num_local=model.moe.num_experts // plan.expert_shards,
    )

  def sums(self) -> Iterator[Traffic]:
    model, along = self.case.model, self.case.layout.sequence
    line = functools.partial(_line, 'step')
    sent = self.tokens * _INT32 * (self.width(along) - 1)
    # Segments for attention, ids and segments of next tokens, and two results
    # of the head by token, whose gradients come back.
    yield line('rows', 'forward', 'all-gather', along, 5 * sent, 0)
    yield line('rows', 'backward', 'reduce-scatter', along, 2 * sent, 0)
    # Counts and scores of the experts, and six sums, for each layer.
    numbers = model.num_moe_layers * (2 * model.moe.num_experts + 6)
    everyone = tuple(self.case.mesh.shape)
    sent = _all_reduce(numbers * _FLOAT32, self.case.mesh.size)
    yield line('statistics', 'forward', 'all-reduce', everyone, sent, sent)


def _all_reduce(sent: int, width: int) -> int:
  """Returns the bytes of a reduce-scatter and an all-gather of `sent`."""
  return 2 * sent * (width - 1) // width


def _line(where, what, phase, kind, axes, sent, least=None) -> Traffic:
  least = sent if least is None else least
  return Traffic(where, what, phase, kind, axes, 1, sent, least)


class _Array(NamedTuple):
  """A parameter: size of one layer, mesh axes (`dims`) by logical axis."""

  size: int
  layers: int
  dims: dict[str, tuple[str, ...]]


def _arrays(case: cases.Case) -> dict[str, _Array]:
  arrays = {}
  for p in params.parameters(case):
    if p.part != 'selection_bias':
      layers = p.shape[0] if 'layer' in p.axes else 1
      dims = dict(zip(p.axes, map(exchange.axis_names, p.spec), strict=True))
      size = math.prod(p.shape) // layers
      arrays[p.name.removeprefix('params/')] = _Array(size, layers, dims)
  return arrays
