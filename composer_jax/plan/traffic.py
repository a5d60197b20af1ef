"""What devices send each other in one train step, and the least they could.

Bytes are those that one execution brings into one device from others of its
group, as `plan.hlo.overlap` counts them in compiled programs; an all-reduce
counts as a reduce-scatter and an all-gather. n devices of a group that hold one
shard each of W bytes lack W (n - 1) / n of them. Lines of a layer:

- 'dense weights', 'expert weights': a layer gathers its weights in the compute
  dtype, the router's in float32, once forward and once more in the recomputing
  backward pass unless 'weights' are saved; their gradients are reduce-scattered
  in float32 within the same group. Of experts only the dimensions are
  gathered that stand in for experts that do not divide; where the experts cover
  all devices, nothing is.
- 'copies': mesh axes that do not cut an array hold copies of its shards, so
  the gradient of a shard is all-reduced over them: over 'replica' alone for a
  matrix (that is HSDP), over none for experts, whose shards have no copies.
- 'vectors': small arrays that lie everywhere (the scales of norms, biases) are
  summed over all devices for all layers at once.
- 'keys': context shards gather what attention keeps of a token (keys and values
  of the key heads; the latent and one rotated key), for a shard's queries may
  see every key of their row; backward the gradients are reduce-scattered.
- 'dispatch' and 'combine': tokens go to the devices of their experts and sums
  come back; gradients go the same ways. 'ring' sends each device all tokens of
  the group, and scatters the sums; 'a2a' has each send each as many rows as it
  has tokens, or as a `bucket` holds; 'ragged_a2a' sends the rows that there
  are. That is the least: a token once to each device that has an expert of it,
  in the mean where all experts are alike.
- 'routes': ids, gates and counts that go along; none of it is in the least.

Of the step: 'embedding' is where a device's tokens come as 'ids' and go as rows
of its columns, and their gradients alike, which is less than the table as long
as a device has fewer tokens than the vocabulary; the 'head' is gathered and its
gradient reduce-scattered. 'rows' are ids and segments of neighbours in context,
'statistics' those of routers, for all layers at once. Left out are counts and
norms of a few numbers each, and Muon, which is in `--what=muon`.

Nothing is allocated, and nothing here is measured.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.parallel import exchange, shardings, shards, transports
from composer_jax.plan import case as cases

# Of dispatch and of combine; gradients go by the other.
_KINDS = {
  'ring': ('all-gather', 'reduce-scatter'),
  'a2a': ('all-to-all', 'all-to-all'),
  'ragged_a2a': ('ragged-all-to-all', 'ragged-all-to-all'),
}
TRANSPORTS = tuple(_KINDS)
# Bytes of a number that is what it is, whatever the model computes in.
_FLOAT32 = _INT32 = 4
_WHERE = {'dense_layers': 'dense layer', 'moe_layers': 'mixture layer'}


class Traffic(NamedTuple):
  """One kind of traffic.

  Attributes:
    where: 'dense layer' or 'mixture layer', of one such layer; or 'step'.
    what: see the module.
    phase: 'forward', 'recompute' (in the backward pass) or 'backward'.
    kind: of `hlo.KINDS`.
    axes: of the mesh, whose devices join.
    count: operations as they are written; a compiler may merge some.
    bytes: of all of them, into one device.
    least: of any program with this layout.
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
  """What decides about traffic beside a Case.

  Attributes:
    batch_size: rows of one forward pass, over all devices.
    transport: of TRANSPORTS.
    bucket: room for rows in means; None for the worst case.
  """

  batch_size: int
  seq_len: int
  transport: str
  bucket: float | None = None

  def __post_init__(self):
    if self.transport not in TRANSPORTS:
      raise ValueError(
        f'transport {self.transport!r} is not one of {TRANSPORTS}.'
      )


def lines(case: cases.Case, step: Step) -> list[Traffic]:
  """Returns the traffic of one layer of each kind, and of a step beside them.

  Raises:
    ValueError: a batch or a sequence that does not divide over its devices.
  """
  traffic = _Counter(case, step)
  traffic.check()
  merged: dict[tuple, Traffic] = {}
  for line in traffic.lines():
    # Nobody sends to itself.
    axes = tuple(axis for axis in line.axes if case.mesh.shape[axis] > 1)
    if axes:
      line = line._replace(axes=axes)
      before = merged.get(line[:5], line._replace(count=0, bytes=0, least=0))
      merged[line[:5]] = Traffic(
        *line[:5], *(a + b for a, b in zip(before[5:], line[5:], strict=True))
      )
  return list(merged.values())


def load(case: cases.Case, step: Step) -> transports.Load:
  """Returns the size of one exchange."""
  return _Counter(case, step).load()


@dataclasses.dataclass(frozen=True)
class _Counter:
  """Makes the lines of a case, one for each array."""

  case: cases.Case
  step: Step

  def check(self):
    layout, step = self.case.layout, self.step
    for name, size, axes in (
      ('batch', step.batch_size, layout.batch),
      ('sequence', step.seq_len, layout.sequence),
    ):
      shardings.check_divides(f'{name} size', size, axes, self.case.mesh)

  def lines(self) -> Iterator[Traffic]:
    yield from self.weights()
    if self.case.model.num_dense_layers:
      yield from self.keys('dense layer')
    yield from self.keys('mixture layer')
    yield from self.exchange()
    yield from self.sums()

  def width(self, axes: tuple[str, ...]) -> int:
    return math.prod(self.case.mesh.shape[axis] for axis in axes)

  @property
  def tokens(self) -> int:
    """Of a device."""
    layout = self.case.layout
    devices = self.width(layout.batch + layout.sequence)
    return self.step.batch_size * self.step.seq_len // devices

  @property
  def size(self) -> int:
    """Bytes of a number that the model computes with."""
    return jnp.dtype(self.case.model.compute_dtype).itemsize

  def phases(self, name: str) -> tuple[str, ...]:
    """Returns when a remat policy has what it calls by this name made."""
    model = self.case.model
    is_kept = not model.remat or name in model.remat_saves
    return ('forward',) if is_kept else ('forward', 'recompute')

  def weights(self) -> Iterator[Traffic]:
    for name, array in _arrays(self.case).items():
      yield from self.weight(name, array)

  def weight(self, name: str, array: '_Array') -> Iterator[Traffic]:
    """Yields what a parameter makes devices send."""
    where = _WHERE.get(name.split('/')[0], 'step')
    size, dims = array.size, array.dims
    held = sum(dims.values(), ())
    # Experts stay where they are.
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
      # Backward the head comes right after forward, and keeps its weight.
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
      # Once for each of its two uses.
      yield line(where, 'copies', axes=copies, sent=sent, least=0)

  def look_up(self, axes: tuple[str, ...]) -> Iterator[Traffic]:
    """Yields the way of a token's embedding: its id out, its row back."""
    model, width = self.case.model, self.width(axes)
    sent = self.tokens * _INT32 * (width - 1)
    yield _line('step', 'ids', 'forward', 'all-gather', axes, sent, 0)
    row = model.embed_dim * self.size * (width - 1) // width
    rows = (self.tokens, min(self.tokens, model.vocab_size))
    for phase in ('forward', 'backward'):
      sent, least = (row * number for number in rows)
      yield _line('step', 'embedding', phase, 'all-to-all', axes, sent, least)

  def keys(self, where: str) -> Iterator[Traffic]:
    """Yields what context shards tell each other of their tokens."""
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
    """Yields the way of tokens to their experts and back."""
    axes, load = self.expert_axes, self.load()
    transport, others = self.step.transport, load.num_shards - 1
    group = transports.sized(load, transport, bucket=self.step.bucket)
    # Rows from each of the others: all, as many as fit, or an even load's.
    visits = load.num_tokens * load.visits
    rows = (
      others
      * {
        'ring': load.num_tokens,
        'a2a': group.slots or load.num_tokens,
        'ragged_a2a': visits,
      }[transport]
    )
    there, back = _KINDS[transport]
    line = functools.partial(_line, 'mixture layer')
    width = load.embed_dim * load.item_bytes
    sent, least = round(rows * width), round(others * visits * width)
    for phase in self.phases('dispatched'):
      yield line('dispatch', phase, there, axes, sent, least)
    # Sums of experts enter sums; no gradient needs them again.
    yield line('combine', 'forward', back, axes, sent, least)
    yield line('dispatch', 'backward', back, axes, sent, least)
    yield line('combine', 'backward', there, axes, sent, least)
    # Ids and gates of a row travel as one array, and so does its gradient.
    sent = round(rows * 2 * load.num_active * _FLOAT32)
    # Kept always: small, and recomputed they might choose other experts.
    yield line('routes', 'forward', there, axes, sent, 0)
    yield line('routes', 'backward', back, axes, sent, 0)
    if transport == 'ragged_a2a' or group.slots:
      # Tokens and copies of each shard for each.
      sent = others * 2 * load.num_shards * _INT32
      yield line('routes', 'forward', 'all-gather', axes, sent, 0)

  @property
  def expert_axes(self) -> tuple[str, ...]:
    return _arrays(self.case)['moe_layers/moe/gate_up'].dims['expert']

  def load(self) -> transports.Load:
    model = self.case.model
    return transports.Load(
      num_tokens=self.tokens,
      num_active=model.moe.num_active,
      num_experts=model.moe.num_experts,
      num_shards=self.width(self.expert_axes),
      embed_dim=model.embed_dim,
      item_bytes=self.size,
    )

  def sums(self) -> Iterator[Traffic]:
    """Yields what is said of tokens outside of layers."""
    model, along = self.case.model, self.case.layout.sequence
    line = functools.partial(_line, 'step')
    sent = self.tokens * _INT32 * (self.width(along) - 1)
    # Segments for attention; ids and segments of next tokens, and what the head
    # says of them to their own devices, whose gradient comes back.
    yield line('rows', 'forward', 'all-gather', along, 5 * sent, 0)
    yield line('rows', 'backward', 'reduce-scatter', along, 2 * sent, 0)
    # Counts and scores of experts, and six sums.
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
  """A parameter: numbers of one layer, mesh axes by logical axis."""

  size: int
  layers: int
  dims: dict[str, tuple[str, ...]]


def _arrays(case: cases.Case) -> dict[str, _Array]:
  shapes, logical = (
    trees.flatten_names(tree['params']) for tree in decoder.abstract(case.model)
  )
  found = {}
  for name, leaf in shapes.items():
    axes = tuple(logical[name])
    spec = shardings.spec(
      name, leaf.shape, axes, layout=case.layout, mesh=case.mesh
    )
    layers = leaf.shape[0] if 'layer' in axes else 1
    dims = dict(zip(axes, map(exchange.axis_names, spec), strict=True))
    found[name] = _Array(leaf.size // layers, layers, dims)
  return found
