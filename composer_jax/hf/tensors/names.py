"""Maps the tensors of a Hugging Face checkpoint to blocks of a model's arrays.

One table per model serves import and export, so a round trip is exact by
construction. The table holds names, shapes and index arithmetic only: it reads
no file and makes no array.

A linear layer is [out, in] in a checkpoint and [in, out] here, with heads and
gate/up as axes of their own. A tensor of one layer or expert there is an entry
of a stacked array here. Rotated dimensions keep the checkpoint's order
(`RopeConfig.interleaved` says how they pair up).
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

from composer_jax.models import config as model_config

FAMILIES = ('qwen3_moe', 'deepseek_v3', 'kimi_k2', 'olmoe')

_ALL = slice(None)
# Tensors that a layer for multi-token prediction repeats.
_COPIES = {
  'embed_tokens.weight': 'model.embed_tokens.weight',
  'shared_head.head.weight': 'lm_head.weight',
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
  """A view of one tensor of a checkpoint, and the block of an array it fills.

  `array[index] = tensor.reshape(view)[select].transpose(order)`. The blocks of
  all parts of an array have one shape and form a regular grid.

  Attributes:
    array: '/'-joined name, such as 'params/moe_layers/moe/gate_up'.
    index: place of the block; an int for layer, expert and gate/up, else
      `slice(None)`.
    view: shape in which heads are an axis.
    select: slice with both bounds for each axis of the view.
    order: axes of the view in the order that the block has them.
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
  """A tensor of a checkpoint; its parts cover it exactly once."""

  name: str
  shape: tuple[int, ...]
  parts: tuple[TensorPart, ...]


Table = dict[str, NamedTensor]


def tensors(
  config: model_config.ModelConfig, family: str, *, prefix: str = ''
) -> Table:
  """Returns {name: tensor} of all tensors of a model; names have the prefix."""
  if family not in FAMILIES:
    raise ValueError(f'family {family!r} is not one of {FAMILIES}.')
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
      _add_moe(table, c, start, ('', 'moe_layers/'), (index,))
  if c.mtp is None:
    return table
  for head in range(c.mtp.depth):
    start = f'{prefix}model.layers.{c.num_layers + head}.'
    rows = _head_rows(D) + (dense if c.mtp.layer == 'dense' else attention)
    _add(table, rows, start, 'mtp/params/layers/', (head,))
    if c.mtp.layer == 'moe':
      _add_moe(table, c, start, ('mtp/', 'layers/'), (head,))
    for end, original in _COPIES.items():
      tied = prefix + 'model.embed_tokens.weight'
      tensor = table.get(prefix + original, table[tied])
      table[start + end] = dataclasses.replace(tensor, name=start + end)
  return table


def original(name: str, table: Table) -> str | None:
  """Returns the tensor of which another is a copy beside a head, or None.

  DeepSeek's checkpoints repeat embedding and unembedding, which heads share.
  """
  for end, of in _COPIES.items():
    if re.search(rf'model\.layers\.\d+\.{re.escape(end)}$', name):
      prefix = name[: name.index('model.layers.')]
      is_there = prefix + of in table
      return prefix + (of if is_there else 'model.embed_tokens.weight')
  return None


def contradicting(
  names: Iterable[str],
  table: Table,
  config: model_config.ModelConfig,
  *,
  prefix: str = '',
) -> list[str]:
  """Returns the unmodelled tensors that show the config to be another model's.

  A bias that the config denies, an expert or a layer too many, and a head
  beside tied embeddings change what the model computes. Towers beside the
  language model, layers for multi-token prediction of a config without heads
  (those past the last, with an `eh_proj`) and rotary tables do not, and are
  carried along unchanged.

  Args:
    names: names of all tensors, a quantised one once, without its scales.
    prefix: start of the names of the language model.
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


# (name, shape, parts) of a tensor, relative to its layer.
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
  """Describes a tensor that fills a block of an array, or of several.

  `arrays` is then {array: size along `axis` of the view}. The shape defaults to
  that of the view, the index to the layer's whole array.
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


def _head_rows(D: int) -> list[_Row]:
  norms = {
    'enorm': 'embedding_norm',
    'hnorm': 'hidden_norm',
    'shared_head.norm': 'final_norm',
  }
  return [
    _row('eh_proj.weight', 'projection', (D, 2 * D), (1, 0)),
    *(
      _row(f'{theirs}.weight', f'{ours}/scale', (D,), (0,))
      for theirs, ours in norms.items()
    ),
  ]


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
) -> list[_Row]:
  gate, up, down = (f'{name}.{m}_proj.weight' for m in ('gate', 'up', 'down'))
  pair = f'{array}/gate_up'
  return [
    _row(gate, pair, (F, D), (1, 0), index=(_ALL, 0, _ALL)),
    _row(up, pair, (F, D), (1, 0), index=(_ALL, 1, _ALL)),
    _row(down, f'{array}/down', (D, F), (1, 0)),
  ]


def _add_moe(
  table: Table,
  c: model_config.ModelConfig,
  start: str,
  within: tuple[str, str],
  index: tuple[int],
) -> None:
  D, E, F = c.embed_dim, c.moe.num_experts, c.moe.ffw_dim
  tree, layers = within
  stack = f'{tree}params/{layers}'
  rows = [_row('mlp.gate.weight', 'moe/router', (E, D), (1, 0))]
  if c.moe.num_shared:
    width = F * c.moe.num_shared
    rows += _mlp_rows('mlp.shared_experts', 'moe/shared', width, D)
  _add(table, rows, start, stack, index)
  if c.moe.router == 'sigmoid':
    name = 'mlp.gate.e_score_correction_bias'
    bias = _row(name, 'moe/bias', (E,), (0,))
    _add(table, [bias], start, f'{tree}selection_bias/{layers}', index)
  rows = _mlp_rows('', 'moe', F, D)
  for expert in range(E):
    name = f'{start}mlp.experts.{expert}'
    _add(table, rows, name, stack, (*index, expert))
