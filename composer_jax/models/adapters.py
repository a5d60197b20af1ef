"""Low-rank adapters (LoRA, Hu et al. 2021) of frozen weights.

A collection of variables of their own, whose tree is that of the parameters
with {'a', 'b'} in place of each adapted weight. What a layer computes is said
once, by `kernels.linear` and `kernels.grouped.matmul`. Engine and trainer both
add the adapter's product to that of the frozen weight: a sum of the two weights
would round elsewhere, and need a second copy of the frozen ones.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from composer_jax.core import rounding
from composer_jax.kernels import linear
from composer_jax.models import config as model_config
from composer_jax.models import parameters

# Adapted arrays and the number of their contracted axes.
_WEIGHTS = {
  **dict.fromkeys(('query', 'key', 'value', 'kv_down', 'key_rope'), 1),
  **dict.fromkeys(('query_down', 'query_up', 'gate_up', 'down', 'router'), 1),
  'out': 2,
}
_MIXTURE = {'router': 'router', 'gate_up': 'routed', 'down': 'routed'}
_PARTS = {'attention': 'attention', 'ffw': 'dense', 'shared': 'shared'}


def table(config: model_config.ModelConfig) -> parameters.Table:
  """Returns the table of the adapters; {} for a model without any."""
  tables = {
    name: parameters.Stack(entry.num_layers, _of(entry.layer, '', config))
    for name, entry in parameters.decoder_table(config).items()
    if isinstance(entry, parameters.Stack)
  }
  return {name: stack for name, stack in tables.items() if stack.layer}


def _of(entries, role, config) -> parameters.Table:
  pairs = {}
  for name, entry in entries.items():
    if not isinstance(entry, parameters.VariableSpec):
      pairs[name] = _of(entry, _PARTS.get(name, ''), config)
    elif name in _WEIGHTS:
      rank = getattr(config.adapters, role or _MIXTURE[name])
      pairs[name] = _pair(entry, _WEIGHTS[name], rank) if rank else {}
  return {name: pair for name, pair in pairs.items() if pair}


def _pair(weight, num_contracted, rank) -> parameters.Table:
  batch = int(weight.axes[0] == 'expert')
  end = batch + num_contracted
  spread = nn.initializers.variance_scaling(
    1.0,
    'fan_in',
    'normal',
    in_axis=tuple(range(batch, end)),
    out_axis=-1,
    batch_axis=tuple(range(batch)),
  )
  axes, shape = weight.axes, weight.shape
  return {
    'a': parameters.VariableSpec(
      (*axes[:end], 'rank'), (*shape[:end], rank), spread
    ),
    'b': parameters.VariableSpec(
      (*axes[:batch], 'rank', *axes[end:]),
      (*shape[:batch], rank, *shape[end:]),
      nn.initializers.zeros,
    ),
  }


def join(params: Any, adapters: Any, config: model_config.ModelConfig) -> Any:
  """Returns a layer's parameters with the adapters beside their weights.

  Every B is multiplied by alpha / rank. Weights in a tuple, one for each
  expert, have adapters in a tuple.
  """
  if isinstance(adapters, tuple):
    each = zip(params, adapters, strict=True)
    return tuple(join(weight, pair, config) for weight, pair in each)
  if adapters.keys() == {'a', 'b'}:
    a, b = adapters['a'], adapters['b']
    scaled = b.astype(jnp.float32) * (config.adapters.alpha / a.shape[-1])
    return linear.Adapted(params, a, rounding.rounded(scaled, b.dtype))
  joined = {
    name: join(params[name], adapters[name], config) for name in adapters
  }
  return {**params, **joined}
