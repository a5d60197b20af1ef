"""The limit of `train_step` on a CPU: its matrix products and nothing else.

Every product of the step, forward and both gradients, is timed by itself at its
shape, operands in place, in the fastest form here (`kernels.linear`). Only
necessary work counts: experts take equal shares of the rows, and attention half
of its scores.
"""

import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from composer_jax.kernels import linear
from composer_jax.models import config as model_config

_AT_ONCE = 4  # products of a call, so that the cost of calling does not count


class _Product(NamedTuple):
  """[rows, inner] times [inner, columns], `times` times a step."""

  rows: int
  inner: int
  columns: int
  times: float


def limit(config: model_config.ModelConfig, rows: int, length: int) -> float:
  """Returns tokens per CPU second of the products alone."""
  tokens = rows * length
  seconds = sum(p.times * _seconds(p) for p in _products(config, rows, length))
  return tokens / seconds


def _products(config, rows, length):
  a: Any = config.attention
  moe, dim, layers = config.moe, config.embed_dim, config.num_moe_layers
  tokens, width = rows * length, a.num_heads * a.head_dim
  share = tokens * moe.num_active // moe.num_experts
  heads = layers * rows * a.num_heads
  return [
    _Product(tokens, dim, config.vocab_size, 1),
    _Product(tokens, dim, width, layers),
    _Product(tokens, dim, a.num_kv_heads * a.head_dim, 2 * layers),
    _Product(tokens, width, dim, layers),
    _Product(tokens, dim, moe.num_experts, layers),
    _Product(share, dim, 2 * moe.ffw_dim, layers * moe.num_experts),
    _Product(share, moe.ffw_dim, dim, layers * moe.num_experts),
    # Half of the scores and of their products with values is masked.
    _Product(length, a.head_dim, length, heads / 2),
    _Product(length, length, a.head_dim, heads / 2),
  ]


def _seconds(product: _Product) -> float:
  """Returns CPU seconds of a product and both its gradients."""
  generator = np.random.default_rng(0)

  def arrays(*shape):
    draw = generator.standard_normal((_AT_ONCE, *shape), np.float32)
    return [jax.device_put(x) for x in draw]

  rows, inner, columns, _ = product
  x, w = arrays(rows, inner), arrays(inner, columns)
  d = arrays(rows, columns)
  dimensions = (((1,), (1,)), ((), ()))
  kinds = (
    (lambda x, w: x @ w, x, w),
    (lambda d, w: jax.lax.dot_general(d, w, dimensions), d, w),
    (linear.weight_gradient, x, d),
  )
  return sum(_each(*kind) for kind in kinds)


def _each(multiply, left, right):
  def all_of_them(left, right):
    return [multiply(*pair) for pair in zip(left, right, strict=True)]

  run = jax.jit(all_of_them)
  jax.block_until_ready(run(left, right))
  spent = []
  for _ in range(9):
    start = time.process_time()
    jax.block_until_ready(run(left, right))
    spent.append(time.process_time() - start)
  return statistics.median(spent) / _AT_ONCE
