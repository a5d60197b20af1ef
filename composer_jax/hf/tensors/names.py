"""Which tensor of a Hugging Face checkpoint is which block of our arrays.

One table per model serves import and export, so a round trip is exact by
construction. It holds names, shapes and index arithmetic only: it reads no
file and makes no array.

A linear layer is stored there as [out, in] and here as [in, out] with heads
and gate/up as axes of their own; a layer is a tensor of its own there and an
entry of a stacked array here. Rotated dimensions keep the order they have
there (`RopeConfig.interleaved` says how they pair up).
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from composer_jax.models import config as model_config

FAMILIES = ('qwen3_moe', 'deepseek_v3', 'kimi_k2', 'mixtral', 'olmoe')
# 'per_expert': three matrices for each expert, as on the hub. 'stacked': two
# arrays for all experts of a layer, as transformers v5 holds them in memory.
EXPERT_LAYOUTS = ('per_expert', 'stacked')

# On the hub Mixtral has names of its own; transformers v5 has one for all.
_MOE_NAMES = ('mlp', 'gate_proj', 'up_proj', 'down_proj')
_MIXTRAL_MOE_NAMES = ('block_sparse_moe', 'w1', 'w3', 'w2')
_ALL = slice(None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
  """A view of one tensor of theirs, and the block of an array of ours it is.

  `array[index] = tensor.reshape(view)[select].transpose(order)`, and all parts
  of one array have blocks of one shape: a regular grid of chunks.

  Attributes:
    array: '/'-joined name: 'params/moe_layers/moe/gate_up'.
    index: an int for layer, expert and gate/up, `slice(None)` for any other.
    view: shape that splits heads, or that joins experts with their rows.
    select: a slice with both bounds for each axis of the view.
    order: of the axes of the view in the block.
  """

  array: str
  index: tuple[int | slice, ...]
  view: tuple[int, ...]
  select: tuple[slice, ...]
  order: tuple[int, ...]

  @property
  def block_shape(self) -> tuple[int, ...]:
    sizes = [s.stop - s.start for s in self.select]
    return tuple(sizes[axis] for axis in self.order)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedTensor:
  """A tensor of a Hugging Face checkpoint; its parts cover it exactly once."""

  name: str
  shape: tuple[int, ...]
  parts: tuple[TensorPart, ...]


Table = dict[str, NamedTensor]


def tensors(
  config: model_config.ModelConfig,
  family: str,
  *,
  expert_layout: str,
  prefix: str = '',
) -> Table:
  """Returns {name: Tensor} of every tensor that the model consists of.

  Args:
    config: of the model; `hf.architecture.config.check_family` says whether
      it has the tensors of the family.
    family: one of FAMILIES.
    expert_layout: one of EXPERT_LAYOUTS.
    prefix: of a language model inside a larger one: 'language_model.'.
  """
  for value, known in ((family, FAMILIES), (expert_layout, EXPERT_LAYOUTS)):
    if value not in known:
      raise ValueError(f'{value!r} is not one of {known}.')
  c, V, D = config, config.vocab_size, config.embed_dim
  rows = [
    _row('model.embed_tokens.weight', 'params/embedding', (V, D), (0, 1)),
    _row('model.norm.weight', 'params/final_norm/scale', (D,), (0,)),
  ]
  if not c.tie_embeddings:
    rows.append(_row('lm_head.weight', 'params/unembedding', (V, D), (1, 0)))
  table = {}
  _add(table, rows, prefix, '', ())
  attention = _attention_rows(c)
  dense = attention + _mlp_rows('mlp', 'ffw', c.dense_ffw_dim, D)
  for layer in range(c.num_layers):
    start, index = f'{prefix}model.layers.{layer}.', layer - c.num_dense_layers
    if index < 0:
      _add(table, dense, start, 'params/dense_layers/', (layer,))
    else:
      _add(table, attention, start, 'params/moe_layers/', (index,))
      _add_moe(table, c, family, expert_layout, start, (index,))
  return table


def expert_layout_of(
  names: Iterable[str],
  config: model_config.ModelConfig,
  family: str,
  *,
  prefix: str = '',
) -> str:
  """Recognises which of EXPERT_LAYOUTS a list of tensor names has.

  The first mixture layer decides. The names of quantised tensors will do.
  """
  layer = f'{prefix}model.layers.{config.num_dense_layers}.'
  ends = {'per_expert': 'experts.0.', 'stacked': 'experts.gate_up_proj'}
  starts = {
    layout: f'{layer}{_moe_names(family, layout)[0]}.{end}'
    for layout, end in ends.items()
  }
  names = list(names)
  found = [k for k, s in starts.items() if any(n.startswith(s) for n in names)]
  if len(found) != 1:
    raise ValueError(
      f'The experts of the first mixture layer are named in {len(found)} '
      f'layouts among {len(names)} tensors; exactly one of '
      f'{list(starts.values())} must begin a name (family {family!r}).'
    )
  return found[0]


def contradicting(
  names: Iterable[str],
  table: Table,
  config: model_config.ModelConfig,
  *,
  prefix: str = '',
) -> list[str]:
  """Returns the unmodelled tensors that say the config is not the model's.

  Names are those of whole tensors: of a quantised one `weight`, not its parts.
  To be carried along unchanged are towers beside the language model, layers
  for multi-token prediction (those past the last, with an `eh_proj`) and
  rotary tables. A bias the config denies, an expert or a layer too many, or a
  head beside tied embeddings changes what the model computes.
  """
  names = list(names)
  layer = re.compile(re.escape(prefix) + r'model\.layers\.(\d+)\.')
  starts = {m[0]: int(m[1]) for name in names if (m := layer.match(name))}
  joins = {name.partition('eh_proj.')[0] for name in names}
  predictors = {s for s in joins if starts.get(s, 0) >= config.num_layers}
  harmless = (*predictors, *(f'{s}self_attn.rotary_emb.' for s in starts))
  return [
    name
    for name in names
    if name not in table
    and name.startswith((f'{prefix}model.', f'{prefix}lm_head.'))
    and not name.startswith(harmless)
  ]


def block(part: TensorPart, tensor: np.ndarray) -> np.ndarray:
  """Returns the block of our array that `part` of their tensor is, a view."""
  return tensor.reshape(part.view)[part.select].transpose(part.order)


def put(part: TensorPart, values: np.ndarray, tensor: np.ndarray) -> None:
  """Writes a block of our array into their (contiguous) tensor."""
  view = tensor.reshape(part.view, copy=False)
  view[part.select] = values.transpose(np.argsort(part.order))


# An entry of the table before it is placed: (name, shape, parts) without what
# all entries of a layer share.
_Row = tuple[str, tuple[int, ...], tuple[TensorPart, ...]]


def _row(
  name: str,
  arrays: str | dict[str, int],
  view: tuple[int, ...],
  order: tuple[int, ...],
  *,
  shape: tuple[int, ...] | None = None,
  axis: int = 0,
  index: tuple[int | slice, ...] | None = None,
) -> _Row:
  """A tensor that is one block, or one for each {array: size along `axis`}.

  `shape` defaults to the view, `index` to the whole arrays.
  """
  sizes = {arrays: view[axis]} if isinstance(arrays, str) else arrays
  index = index or (_ALL,) * len(view)
  parts, start = [], 0
  for array, size in sizes.items():
    slices = [slice(0, n) for n in view]
    slices[axis] = slice(start, start + size)
    start += size
    select = tuple(slices)
    parts.append(
      TensorPart(
        array=array, index=index, view=view, select=select, order=order
      )
    )
  return name, view if shape is None else shape, tuple(parts)


def _add(
  table: Table,
  rows: Iterable[_Row],
  start: str,
  array_start: str,
  index: tuple[int, ...],
) -> None:
  for name, shape, parts in rows:
    table[start + name] = NamedTensor(
      name=start + name,
      shape=shape,
      parts=tuple(
        dataclasses.replace(
          part, array=array_start + part.array, index=index + part.index
        )
        for part in parts
      ),
    )


def _attention_rows(c: model_config.ModelConfig) -> list[_Row]:
  D = c.embed_dim
  if isinstance(c.attention, model_config.MLAConfig):
    rows = _mla_rows(c.attention, D)
  else:
    rows = _gqa_rows(c.attention, D)
  return [
    _row('input_layernorm.weight', 'attention_norm/scale', (D,), (0,)),
    _row('post_attention_layernorm.weight', 'ffw_norm/scale', (D,), (0,)),
    *rows,
  ]


def _gqa_rows(a: model_config.GQAConfig, D: int) -> Iterator[_Row]:
  H = a.head_dim
  sides = (
    ('q', 'query', a.num_heads),
    ('k', 'key', a.num_kv_heads),
    ('v', 'value', a.num_kv_heads),
  )
  for letter, side, heads in sides:
    name, array = f'self_attn.{letter}_proj', f'attention/{side}'
    view, shape = (heads, H, D), (heads * H, D)
    yield _row(f'{name}.weight', array, view, (2, 0, 1), shape=shape)
    if a.qkv_bias:
      view, shape = (heads, H), (heads * H,)
      yield _row(f'{name}.bias', f'{array}_bias', view, (0, 1), shape=shape)
    norm, array = f'self_attn.{letter}_norm.weight', f'{array}_norm'
    if letter != 'v' and a.qk_norm == 'head':
      yield _row(norm, f'{array}/scale', (H,), (0,))
    elif letter != 'v' and a.qk_norm == 'projection':
      yield _row(norm, array, (heads, H), (0, 1), shape=(heads * H,))
  yield _out_row(a.num_heads, H, D)
  if a.out_bias:
    yield _row('self_attn.o_proj.bias', 'attention/out_bias', (D,), (0,))


def _mla_rows(a: model_config.MLAConfig, D: int) -> Iterator[_Row]:
  N, C, H, J = a.num_heads, a.kv_lora_dim, a.nope_dim, a.rope_dim
  if a.q_lora_dim is None:
    Q, name, array = D, 'q_proj', 'query'
  else:
    Q, name, array = a.q_lora_dim, 'q_b_proj', 'query_up'
    norm, down = 'attention/query_norm/scale', 'attention/query_down'
    yield _row('self_attn.q_a_layernorm.weight', norm, (Q,), (0,))
    yield _row('self_attn.q_a_proj.weight', down, (Q, D), (1, 0))
  yield _row(
    f'self_attn.{name}.weight',
    f'attention/{array}',
    (N, H + J, Q),
    (2, 0, 1),
    shape=(N * (H + J), Q),
  )
  norm = 'attention/kv_norm/scale'
  yield _row('self_attn.kv_a_layernorm.weight', norm, (C,), (0,))
  yield _row(
    'self_attn.kv_a_proj_with_mqa.weight',
    {'attention/kv_down': C, 'attention/key_rope': J},
    (C + J, D),
    (1, 0),
  )
  yield _row(
    'self_attn.kv_b_proj.weight',
    {'attention/key_up': H, 'attention/value_up': a.value_dim},
    (N, H + a.value_dim, C),
    (2, 0, 1),
    shape=(N * (H + a.value_dim), C),
    axis=1,
  )
  yield _out_row(N, a.value_dim, D)


def _out_row(N: int, H: int, D: int) -> _Row:
  name, array = 'self_attn.o_proj.weight', 'attention/out'
  return _row(name, array, (D, N, H), (1, 2, 0), shape=(D, N * H))


def _mlp_rows(
  name: str,
  array: str,
  F: int,
  D: int,
  matrices: Sequence[str] = _MOE_NAMES[1:],
) -> list[_Row]:
  """A gated feed-forward: gate, up and down."""
  gate, up, down = (f'{name}.{matrix}.weight' for matrix in matrices)
  pair = f'{array}/gate_up'
  return [
    _row(gate, pair, (F, D), (1, 0), index=(_ALL, 0, _ALL)),
    _row(up, pair, (F, D), (1, 0), index=(_ALL, 1, _ALL)),
    _row(down, f'{array}/down', (D, F), (1, 0)),
  ]


def _moe_names(family: str, expert_layout: str) -> tuple[str, str, str, str]:
  if family == 'mixtral' and expert_layout == 'per_expert':
    return _MIXTRAL_MOE_NAMES
  return _MOE_NAMES


def _add_moe(
  table: Table,
  c: model_config.ModelConfig,
  family: str,
  expert_layout: str,
  start: str,
  index: tuple[int],
) -> None:
  D, E, F = c.embed_dim, c.moe.num_experts, c.moe.ffw_dim
  module, *matrices = _moe_names(family, expert_layout)
  stack = 'params/moe_layers/'
  rows = [_row(f'{module}.gate.weight', 'moe/router', (E, D), (1, 0))]
  if c.moe.num_shared:
    name = f'{module}.shared_experts'
    rows += _mlp_rows(name, 'moe/shared', F * c.moe.num_shared, D)
  _add(table, rows, start, stack, index)
  if c.moe.router == 'sigmoid':
    name = f'{module}.gate.e_score_correction_bias'
    bias = _row(name, 'moe/bias', (E,), (0,))
    _add(table, [bias], start, 'selection_bias/moe_layers/', index)
  if expert_layout == 'stacked':
    rows = _stacked_rows(f'{module}.experts', E, D, F)
    _add(table, rows, start, stack, index)
    return
  rows = _mlp_rows('', 'moe', F, D, matrices)
  for expert in range(E):
    name = f'{start}{module}.experts.{expert}'
    _add(table, rows, name, stack, (*index, expert))


def _stacked_rows(name: str, E: int, D: int, F: int) -> list[_Row]:
  """[E, 2F, D] and [E, D, F], a part for each matrix of each expert.

  Experts and rows are one axis of the view, so that a part is a range of
  bytes, and blocks are those of the layout per expert.
  """

  def part(array, index, view, row, size):
    select = (slice(row, row + size), slice(0, view[1]))
    return TensorPart(
      array=array, index=index, view=view, select=select, order=(1, 0)
    )

  gate_up, down = [], []
  for e in range(E):
    for half in range(2):
      index, row = (e, _ALL, half, _ALL), (2 * e + half) * F
      gate_up.append(part('moe/gate_up', index, (2 * E * F, D), row, F))
    down.append(part('moe/down', (e, _ALL, _ALL), (E * D, F), e * D, D))
  return [
    (f'{name}.gate_up_proj', (E, 2 * F, D), tuple(gate_up)),
    (f'{name}.down_proj', (E, D, F), tuple(down)),
  ]
