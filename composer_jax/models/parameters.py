"""Table of a decoder's variables: logical axes, shapes and initializers.

Linen initialises them (`models.decoder.init`); layers are functions of their
tree. `parallel.layouts` maps the axes to a mesh. A variable's random numbers
depend on its name and on those before it in its table.
"""

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn

from composer_jax.models import config as model_config

# VariableSpecs, Stacks and further tables by name.
Table = dict[str, Any]


class VariableSpec(NamedTuple):
  """One array with logical axes."""

  axes: tuple[str, ...]
  shape: tuple[int, ...]
  initializer: nn.initializers.Initializer
  collection: str = 'params'


class Stack(NamedTuple):
  """Layers of one table, whose arrays get a leading axis 'layer'."""

  num_layers: int
  layer: Table


def module_of(table: Table, **options: Any) -> nn.Module:
  """Returns the module that creates a table's variables."""
  # Linen would sort a dict, and random numbers depend on the order.
  return TableModule(types.MappingProxyType(table), **options)


class TableModule(nn.Module):
  table: Mapping[str, Any]

  @nn.compact
  def __call__(self, carry=None, _=None):
    for name, entry in self.table.items():
      if isinstance(entry, VariableSpec):
        boxed = nn.with_logical_partitioning(entry.initializer, entry.axes)
        if entry.collection == 'params':
          self.param(name, boxed, entry.shape)
        else:
          self.variable(entry.collection, name, boxed, None, entry.shape)
      elif isinstance(entry, Stack):
        scanned = nn.scan(
          TableModule,
          variable_axes={'params': 0, 'selection_bias': 0},
          split_rngs={'params': True},
          length=entry.num_layers,
          metadata_params={nn.PARTITION_NAME: 'layer'},
        )
        scanned(types.MappingProxyType(entry.layer), name=name)(None)
      else:
        module_of(entry, name=name)()
    return carry, None


def decoder_table(config: model_config.ModelConfig) -> Table:
  c, normal = config, nn.initializers.normal(0.02)
  rows, columns = (c.vocab_size, c.embed_dim), (c.embed_dim, c.vocab_size)
  table: Table = {'embedding': VariableSpec(('vocab', 'embed'), rows, normal)}
  if not c.tie_embeddings:
    table['unembedding'] = VariableSpec(('embed', 'vocab'), columns, normal)
  for name, num_layers in c.stacks.items():
    table[name] = Stack(num_layers, _layer(c, name == 'dense_layers'))
  return table | {'final_norm': _norm(c.embed_dim)}


def mtp_table(config: model_config.ModelConfig) -> Table:
  """Returns the table of the heads of `models.mtp`, which the config must have.

  The projection takes the embedding before the hidden state.
  """
  c, mtp = config, config.mtp
  assert mtp is not None
  head = {
    'embedding_norm': _norm(c.embed_dim),
    'hidden_norm': _norm(c.embed_dim),
    'projection': VariableSpec(
      ('joined', 'embed'), (2 * c.embed_dim, c.embed_dim), _truncated(0)
    ),
    **_layer(c, mtp.layer == 'dense'),
    'final_norm': _norm(c.embed_dim),
  }
  return {'layers': Stack(mtp.depth, head)}


def _layer(c: model_config.ModelConfig, is_dense: bool) -> Table:
  if isinstance(c.attention, model_config.MLAConfig):
    attention = _latent(c, c.attention)
  else:
    attention = _grouped(c, c.attention)
  layer = {
    'attention_norm': _norm(c.embed_dim),
    'attention': attention,
    'ffw_norm': _norm(c.embed_dim),
  }
  if is_dense:
    return layer | {'ffw': _dense(c, c.dense_ffw_dim)}
  return layer | {'moe': _mixture(c)}


def _truncated(
  in_axis: Any, out_axis: Any = -1, *, batch_axis: Any = (), scale: float = 1.0
) -> nn.initializers.Initializer:
  """Returns a truncated normal of variance scale / fan-in."""
  how = ('fan_in', 'truncated_normal', in_axis, out_axis, batch_axis)
  return nn.initializers.variance_scaling(scale, *how)


def _norm(dim: int) -> Table:
  return {'scale': VariableSpec(('norm',), (dim,), nn.initializers.ones)}


def _out(c: model_config.ModelConfig, num_heads: int, dim: int) -> VariableSpec:
  return VariableSpec(
    ('heads', 'head_dim', 'embed'),
    (num_heads, dim, c.embed_dim),
    _truncated((0, 1), 2, scale=0.5 / c.num_layers),
  )


def _grouped(c: model_config.ModelConfig, a: model_config.GQAConfig) -> Table:
  zeros, ones = nn.initializers.zeros, nn.initializers.ones
  heads = {'heads': a.num_heads, 'kv_heads': a.num_kv_heads}
  table: Table = {}
  projections = {'query': 'heads', 'key': 'kv_heads', 'value': 'kv_heads'}
  for name, axis in projections.items():
    axes, shape = (axis, 'head_dim'), (heads[axis], a.head_dim)
    table[name] = VariableSpec(
      ('embed', *axes), (c.embed_dim, *shape), _truncated(0, (1, 2))
    )
    if a.qkv_bias:
      table[f'{name}_bias'] = VariableSpec(axes, shape, zeros)
  for name, axis in (('query_norm', 'heads'), ('key_norm', 'kv_heads')):
    if a.qk_norm == 'head':
      table[name] = _norm(a.head_dim)
    elif a.qk_norm == 'projection':
      shape = (heads[axis], a.head_dim)
      table[name] = VariableSpec((axis, 'norm'), shape, ones)
  table['out'] = _out(c, a.num_heads, a.head_dim)
  if a.out_bias:
    table['out_bias'] = VariableSpec(('embed',), (c.embed_dim,), zeros)
  return table


def _latent(c: model_config.ModelConfig, a: model_config.MLAConfig) -> Table:
  def matrix(axis, *shape):
    return VariableSpec(('embed', axis), shape, _truncated(0, 1))

  def per_head(axis, width, head_dim):
    axes, shape = (axis, 'heads', 'head_dim'), (width, a.num_heads, head_dim)
    return VariableSpec(axes, shape, _truncated(0, (1, 2)))

  if a.q_lora_dim is None:
    table: Table = {'query': per_head('embed', c.embed_dim, a.head_dim)}
  else:
    table = {
      'query_down': matrix('q_lora', c.embed_dim, a.q_lora_dim),
      'query_norm': _norm(a.q_lora_dim),
      'query_up': per_head('q_lora', a.q_lora_dim, a.head_dim),
    }
  return table | {
    'kv_down': matrix('kv_lora', c.embed_dim, a.kv_lora_dim),
    'key_rope': matrix('head_dim', c.embed_dim, a.rope_dim),
    'kv_norm': _norm(a.kv_lora_dim),
    'key_up': per_head('kv_lora', a.kv_lora_dim, a.nope_dim),
    'value_up': per_head('kv_lora', a.kv_lora_dim, a.value_dim),
    'out': _out(c, a.num_heads, a.value_dim),
  }


def _dense(c: model_config.ModelConfig, width: int) -> Table:
  # Gate and up are one product, but two matrices to the optimizer.
  return {
    'gate_up': VariableSpec(
      ('embed', 'gate_up', 'ffw'),
      (c.embed_dim, 2, width),
      _truncated(0, batch_axis=(1,)),
    ),
    'down': VariableSpec(
      ('ffw', 'embed'),
      (width, c.embed_dim),
      _truncated(0, scale=0.5 / c.num_layers),
    ),
  }


def _mixture(c: model_config.ModelConfig) -> Table:
  moe, num_experts = c.moe, c.moe.num_experts
  # 'route', not 'expert': the router is not sharded as the experts are.
  table: Table = {
    'router': VariableSpec(
      ('embed', 'route'), (c.embed_dim, num_experts), _truncated(0)
    )
  }
  if moe.router == 'sigmoid':
    zeros = nn.initializers.zeros
    table['bias'] = VariableSpec(
      ('route',), (num_experts,), zeros, 'selection_bias'
    )
  table['gate_up'] = VariableSpec(
    ('expert', 'embed', 'gate_up', 'ffw'),
    (num_experts, c.embed_dim, 2, moe.ffw_dim),
    _truncated(1, batch_axis=(0, 2)),
  )
  table['down'] = VariableSpec(
    ('expert', 'ffw', 'embed'),
    (num_experts, moe.ffw_dim, c.embed_dim),
    _truncated(1, batch_axis=(0,), scale=0.5 / c.num_layers),
  )
  if moe.num_shared:
    table['shared'] = _dense(c, moe.num_shared * moe.ffw_dim)
  return table
