"""The shift by one token, and logits in chunks of the vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import platforms
from composer_jax.models import head
from tests import compiling
from tests.models import decoder_test

_OPTIONS = compiling.ORDERLY


def _inputs():
  keys = jax.random.split(jax.random.key(0), 2)
  weight = jax.random.normal(keys[0], (16, 32))
  hidden = jax.random.normal(keys[1], (1, 6, 16))
  tokens = jnp.array([[3, 1, 4, 1, 5, 9]])
  segments = jnp.array([[1, 1, 1, 2, 2, 0]])
  temperatures = jnp.array([[1.0, 2.0, 1.0, 1.0, 0.5, 1.0]])
  return weight, hidden, (tokens, segments, temperatures)


def test_logprobs_are_indexed_by_the_token_they_are_about():
  config = decoder_test.CONFIG
  weight, hidden, (tokens, segments, temperatures) = _inputs()
  logprobs, entropy = jax.jit(head.target_logprobs, static_argnums=5)(
    {'params': {'unembedding': weight}},
    hidden,
    tokens,
    segments,
    temperatures,
    config,
  )
  expected = np.zeros(6)
  entropies = np.zeros(6)
  for t in (1, 2, 4):  # not the first of a segment, not padding
    all_V = jax.nn.log_softmax(hidden[0, t - 1] @ weight / temperatures[0, t])
    expected[t] = all_V[tokens[0, t]]
    entropies[t] = -(jnp.exp(all_V) * all_V).sum()
  np.testing.assert_allclose(logprobs[0], expected, atol=1e-5)
  np.testing.assert_allclose(entropy[0], entropies, atol=1e-5)


def test_the_end_of_a_full_row_predicts_nothing():
  weight, hidden, (tokens, _, _) = _inputs()
  out = jax.jit(head.target_logprobs, static_argnums=5)(
    {'params': {'unembedding': weight}},
    hidden,
    tokens,
    jnp.ones_like(tokens),
    None,
    decoder_test.CONFIG,
  )
  for about in out:
    # The first token of the row has the same segment id, but does not follow.
    assert about[0, 0] == 0 and (about[0, 1:] != 0).all()


def _gradients(name, chunk, platform='cpu'):
  """Returns outputs and gradients, with so many words in each chunk."""
  config = dataclasses.replace(
    decoder_test.CONFIG, tie_embeddings=name == 'embedding'
  )
  weight, hidden, batch = _inputs()
  weight = weight.T if config.tie_embeddings else weight

  def loss(weight, hidden):
    out = head.target_logprobs(
      {'params': {name: weight}}, hidden, *batch, config, chunk=chunk
    )
    return 2 * out[0].sum() - 3 * (out[1] ** 2).sum(), out

  gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
  with platforms.targeting(platform):
    return jax.jit(gradient, compiler_options=_OPTIONS)(weight, hidden)


# A loop over chunks, or chunks one after another.
@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
@pytest.mark.parametrize('name', ['embedding', 'unembedding'])
def test_chunks_equal_logits_at_once(name, platform):
  weight, hidden, (_, _, temperatures) = _inputs()
  largest = np.abs(hidden @ weight).max() / temperatures.min()
  # A logit is off by a unit in the last place of the largest for each of its
  # roundings, which are independent, and a probability by as much of itself.
  off = np.finfo(np.float32).eps * largest * len(weight) ** 0.5
  # The last chunk has two of 32 words.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=off * np.abs(y).max()),
    _gradients(name, 10, platform),
    _gradients(name, 32),
  )


def test_logits_of_all_words_exist_only_where_they_are_small():
  weight, hidden, batch = _inputs()

  def text(chunk):
    def loss(weight):
      variables = {'params': {'unembedding': weight}}
      out = head.target_logprobs(
        variables, hidden, *batch, decoder_test.CONFIG, chunk=chunk
      )
      return out[0].sum()

    return str(jax.make_jaxpr(jax.grad(loss))(weight))

  # Six tokens times 32 words.
  whole = 'f32[1,6,32]', 'f32[6,32]'
  assert whole[0] in text(None)
  assert not any(shape in text(8) for shape in whole)
  assert 'f32[6,8]' in text(8)


@pytest.mark.parametrize('tied', [False, True])
def test_logits_of_one_chunk_exist_at_a_time_on_a_cpu(tied):
  config = dataclasses.replace(decoder_test.CONFIG, tie_embeddings=tied)
  num_tokens, num_words = 6144, 151_936  # Qwen3's
  shape = (num_words, 16) if tied else (16, num_words)
  name = 'embedding' if tied else 'unembedding'

  def loss(weight, hidden, tokens):
    variables, ones = {'params': {name: weight}}, jnp.ones_like(tokens)
    out = head.target_logprobs(variables, hidden, tokens, ones, None, config)
    return out[0].sum()

  arrays = (
    jax.ShapeDtypeStruct(shape, jnp.float32),
    jax.ShapeDtypeStruct((1, num_tokens, 16), jnp.float32),
    jax.ShapeDtypeStruct((1, num_tokens), jnp.int32),
  )
  compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile()
  chunk = 4 * num_tokens * head.words_at_once(num_tokens, num_words)
  # The chunk's gradient stands beside it, and the weight's beside both.
  most = 3 * chunk + 4 * 16 * num_words
  assert compiled.memory_analysis().temp_size_in_bytes < most


@pytest.mark.parametrize('name', ['embedding', 'unembedding'])
def test_chunks_of_bfloat16_are_summed_in_float32(name):
  config = dataclasses.replace(
    decoder_test.CONFIG, tie_embeddings=name == 'embedding'
  )
  weight, hidden, batch = _inputs()
  weight = weight.T if config.tie_embeddings else weight

  def loss(weight, hidden):
    out = head.target_logprobs(
      {'params': {name: weight}}, hidden, *batch, config, chunk=10
    )
    return out[0].sum()

  gradient = jax.grad(loss, (0, 1))
  arrays = weight, hidden.astype(jnp.bfloat16)
  # Logits twice, and two gradients: of each of four chunks, or of a loop's and
  # of the last, which is smaller.
  for platform, products in (('tpu', 16), ('cpu', 8)):
    with platforms.targeting(platform):
      text = str(jax.make_jaxpr(gradient)(*arrays))
    assert text.count('dot_general[') == products
    assert text.count('preferred_element_type=float32') == products
  dtypes = [x.dtype for x in jax.eval_shape(gradient, *arrays)]
  assert dtypes == [jnp.float32, jnp.bfloat16]


@pytest.mark.parametrize('used', [(0, 1), (0,), (1,)])
def test_gradients_are_those_of_log_softmax(used):
  _, _, (tokens, _, temperatures) = _inputs()
  logits = 3 * jax.random.normal(jax.random.key(1), (1, 6, 32))

  def ours(logits):
    return head.token_logprobs(logits, tokens, temperatures, numerics='fast')

  def plain(logits):
    all_BTV = jax.nn.log_softmax(logits / temperatures[..., None])
    picked = jnp.take_along_axis(all_BTV, tokens[..., None], -1)[..., 0]
    return picked, -(jnp.exp(all_BTV) * all_BTV).sum(-1)

  def gradient(function):
    def loss(logits):
      # An output without a gradient has its own path backward.
      out = function(logits)
      return sum((jnp.sin(out[i]) + jnp.cos(2 * out[i])).sum() for i in used)

    return jax.grad(loss)(logits)

  np.testing.assert_allclose(
    gradient(ours), gradient(plain), rtol=1e-5, atol=2e-6
  )
