"""The head on rows shared by devices equals that on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.models import head
from composer_jax.parallel import exchange, sequence, topology
from tests import compiling
from tests.models import decoder_test

# D divides over every narrow group, V over no number of chunks.
B, T, D, V = 8, 16, 16, 31


def _batch():
  """Returns documents that cross shards, whole rows and padding."""
  random = np.random.default_rng(0)
  lengths = [[5, 7, 4], [16, 0, 0], [1, 14, 1], [3, 3, 0], [15, 1, 0]]
  ids = np.zeros((B, T), np.int32)
  for row, parts in zip(ids, lengths, strict=False):
    row[: sum(parts)] = np.repeat([1, 2, 3], parts)
  tokens = random.integers(0, V, (B, T)).astype(np.int32)
  temperatures = random.uniform(0.5, 2, (B, T)).astype(np.float32)
  hidden = random.normal(size=(B, T, D)).astype(np.float32)
  return hidden, tokens, ids, temperatures


def _run(name, plan, chunk, weight, move):
  """Returns ((logprobs, entropy), (d_weight, d_hidden)), in device order."""
  config = dataclasses.replace(
    decoder_test.CONFIG, tie_embeddings=name == 'embedding'
  )
  hidden, *batch = map(move, _batch())
  # Weights differ by token, and for logprobs and entropy.
  weights = move(np.sin(np.arange(B * T, dtype=np.float32)).reshape(B, T))

  def loss(weight, hidden):
    logprobs, entropy = head.target_logprobs(
      {'params': {name: weight}}, hidden, *batch, config, plan, chunk=chunk
    )
    value = (weights * logprobs + jnp.cos(2 * weights) * entropy**2).sum()
    return value, (logprobs, entropy)

  gradient = jax.grad(loss, (0, 1), has_aux=True)
  gradient = jax.jit(gradient, compiler_options=compiling.QUICKLY)
  gradients, out = gradient(weight, hidden)
  return out, gradients


@pytest.mark.parametrize(
  'name,shape,sequence_order,chunk',
  [
    ('unembedding', (2, 2, 2), 'zigzag', None),
    ('embedding', (1, 1, 8), 'zigzag', 9),
    ('unembedding', (1, 2, 4), 'contiguous', 9),
    ('embedding', (8, 1, 1), 'contiguous', None),
  ],
)
def test_outputs_and_gradients_equal_one_device(
  name, shape, sequence_order, chunk
):
  weight = np.random.default_rng(1).normal(size=(D, V)).astype(np.float32)
  hidden, *_, temperatures = _batch()
  largest = np.abs(hidden @ weight).max() / temperatures.min()
  # A logit is off by a unit in the last place of the largest for each of its
  # roundings, which are independent, and a probability by as much of itself.
  off = np.finfo(np.float32).eps * largest * D**0.5
  narrow = P(('fsdp', 'context'), None)
  if name == 'embedding':
    weight, narrow = weight.T, P(None, ('fsdp', 'context'))
  plan = exchange.ExchangePlan(
    mesh=topology.make_mesh(*shape),
    batch_axes=('replica', 'fsdp'),
    sequence_axes=('context',),
    weight_specs=(),
    specs=((f'params/{name}', narrow),),
    sequence_order=sequence_order,
  )

  def move(x):
    is_moved = sequence_order == 'zigzag'
    return sequence.to_device(np.asarray(x), shape[2]) if is_moved else x

  out, (d_weight, d_hidden) = _run(name, None, V, weight, lambda x: x)
  want = jax.tree.map(move, (out, d_hidden)), d_weight
  out, (d_weight, d_hidden) = _run(name, plan, chunk, weight, move)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=off * np.abs(b).max()),
    ((out, d_hidden), d_weight),
    want,
  )
