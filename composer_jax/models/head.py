"""Logits and log-probabilities of tokens.

The only module with the shift by one: the hidden state at t - 1 predicts token
t, and log-probabilities are indexed by the token they are about.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from composer_jax.core import platforms
from composer_jax.kernels import linear, rows
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.parallel import exchange, sequence, shards

# Bytes of a device's logits that exist at once, unless that takes more chunks
# than an unrolled program should have.
_CHUNK_BYTES = 1 << 25
_MOST_CHUNKS = 16
_LEAST_WORDS = 256  # of a product that is worth its overhead


def logits(
  variables: decoder.Variables,
  hidden_BTD: jax.Array,
  config: model_config.ModelConfig,
) -> jax.Array:
  """Returns float32 logits_BTV of the next token."""
  name = 'embedding' if config.tie_embeddings else 'unembedding'
  weight = variables['params'][name].astype(hidden_BTD.dtype)
  return logits_of(weight, hidden_BTD, config)


def logits_of(weight, hidden_BTD, config):
  def stage(weight, hidden_BTD):
    if not config.tie_embeddings:
      is_wide = hidden_BTD.dtype == jnp.float32
      return linear.linear(
        hidden_BTD, weight, dtype=None if is_wide else jnp.float32
      )
    return jnp.einsum(
      '...D,VD->...V', hidden_BTD, weight, preferred_element_type=jnp.float32
    )

  return rows.map_rows(stage, weight, hidden_BTD, numerics=config.numerics)


def token_logprobs(
  logits_BTV: jax.Array,
  tokens_BT: jax.Array,
  temperatures_BT: jax.Array | None,
  *,
  numerics: str,
) -> tuple[jax.Array, jax.Array]:
  """Returns float32 logprobs_BT of tokens and their distributions' entropy_BT.

  Logits are divided by temperatures_BT; None means 1. Engine and trainer both
  call it, so that in batch-invariant numerics they agree bitwise.
  """
  if temperatures_BT is None and numerics == 'batch_invariant':
    # One program in both cases; division by 1 is exact.
    temperatures_BT = jnp.ones(tokens_BT.shape, jnp.float32)

  def stage(_, rows_BT):
    logits_BTV, tokens_BT, temperatures_BT = rows_BT
    if temperatures_BT is not None:
      logits_BTV /= temperatures_BT[..., None].astype(jnp.float32)
    return _logprobs_of(logits_BTV, tokens_BT)

  return rows.map_rows(
    stage, (), (logits_BTV, tokens_BT, temperatures_BT), numerics=numerics
  )


@jax.custom_vjp
def _logprobs_of(
  logits_BTV: jax.Array, tokens_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns logprobs_BT of tokens and entropy_BT, with a gradient in one pass.

  JAX's derived gradient reads all logits four times.
  """
  logprobs_BT, entropy_BT, _ = _logprobs_and_sum(logits_BTV, tokens_BT)
  return logprobs_BT, entropy_BT


def _logprobs_and_sum(logits_BTV, tokens_BT):
  largest_BT1 = logits_BTV.max(-1, keepdims=True)
  exponentials_BTV = jnp.exp(logits_BTV - largest_BT1)
  sum_BT = exponentials_BTV.sum(-1)
  log_z_BT = largest_BT1[..., 0] + jnp.log(sum_BT)
  # A masked sum, since a gather would need all shards of V.
  picked_BT = jnp.where(_picked(logits_BTV, tokens_BT), logits_BTV, 0).sum(-1)
  if platforms.current() == 'cpu':  # XLA writes all masked logits there.
    index_BT1 = tokens_BT[..., None]
    picked_BT = jnp.take_along_axis(logits_BTV, index_BT1, -1).squeeze(-1)
  mean_BT = (exponentials_BTV * logits_BTV).sum(-1) / sum_BT
  return picked_BT - log_z_BT, log_z_BT - mean_BT, log_z_BT


def _picked(logits_BTV, tokens_BT):
  return jnp.arange(logits_BTV.shape[-1]) == tokens_BT[..., None]


def _logprobs_forward(logits_BTV, tokens_BT):
  logits_BTV, tokens_BT = logits_BTV.value, tokens_BT.value
  logprobs_BT, entropy_BT, log_z_BT = _logprobs_and_sum(logits_BTV, tokens_BT)
  residuals = (logits_BTV, tokens_BT, entropy_BT, log_z_BT)
  return (logprobs_BT, entropy_BT), residuals


def _logprobs_backward(residuals, d_out):
  logits_BTV, tokens_BT, entropy_BT, log_z_BT = residuals
  # A loss that leaves the entropy out then computes none.
  zero = jax.custom_derivatives.SymbolicZero
  d_out = [0.0 if isinstance(d, zero) else d[..., None] for d in d_out]
  is_picked_BTV = _picked(logits_BTV, tokens_BT)
  return _d_logits(logits_BTV, is_picked_BTV, entropy_BT, log_z_BT, d_out), None


def _d_logits(logits_BTV, is_picked_BTV, entropy_BT, log_z_BT, d_out):
  d_logprobs_BT1, d_entropy_BT1 = d_out
  logprobs_BTV = logits_BTV - log_z_BT[..., None]
  slope_BTV = d_logprobs_BT1
  if not isinstance(d_entropy_BT1, float):
    # The derivative of the entropy H by a logit is -p (log p + H).
    slope_BTV += d_entropy_BT1 * (logprobs_BTV + entropy_BT[..., None])
  d_picked_BTV = jnp.where(is_picked_BTV, d_logprobs_BT1, 0)
  return d_picked_BTV - jnp.exp(logprobs_BTV) * slope_BTV


_logprobs_of.defvjp(_logprobs_forward, _logprobs_backward, symbolic_zeros=True)


def target_logprobs(
  variables: decoder.Variables,
  hidden_BTD: jax.Array,
  tokens_BT: jax.Array,
  segment_ids_BT: jax.Array,
  temperatures_BT: jax.Array | None,
  config: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None = None,
  *,
  chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probability and entropy of each token's distribution.

  Args:
    temperatures_BT: sampling temperatures, without a gradient; None means 1.
    chunk: number of tokens of the vocabulary whose logits exist at once; None
      chooses it by their bytes.

  Returns:
    logprobs_BT, entropy_BT in float32 nats, indexed by the token they are
    about; 0 at the first token of each segment and on padding.
  """
  name = 'embedding' if config.tie_embeddings else 'unembedding'
  weight = variables['params'][name]
  spec = shards.specs_of(plan, f'params/{name}', weight)

  def stage(weight, hidden_BTD, tokens_BT, segment_ids_BT, temperatures_BT):
    rows_BT, segments_BT = _rows((tokens_BT, segment_ids_BT), plan)
    is_last_T = jnp.arange(rows_BT.shape[1]) == rows_BT.shape[1] - 1
    follows_BT = (_next(segments_BT) == segments_BT) & (segments_BT != 0)
    targets_BT, follows_BT = _own(
      (_next(rows_BT), follows_BT & ~is_last_T), plan
    )
    if temperatures_BT is not None:
      temperatures_BT = of_next(temperatures_BT, plan)
    arrays = (hidden_BTD, targets_BT, temperatures_BT)
    out = _logprobs(weight, arrays, spec, config, plan, chunk)
    whole = _rows(tuple(jnp.where(follows_BT, x_BT, 0) for x_BT in out), plan)
    return _own(tuple(jnp.roll(x, 1, axis=1) for x in whole), plan)

  where = shards.tokens_spec(plan)
  stage = shards.per_shard(
    stage, plan, in_specs=(spec, *[where] * 4), out_specs=where
  )
  with jax.named_scope('head'):
    return stage(weight, hidden_BTD, tokens_BT, segment_ids_BT, temperatures_BT)


def words_at_once(num_tokens: int, num_words: int) -> int:
  """Returns the words whose logits exist at once, for a device's tokens."""
  fitting = _CHUNK_BYTES // (4 * num_tokens)
  if platforms.current() == 'cpu':
    return max(fitting, _LEAST_WORDS)
  return max(fitting, -(-num_words // _MOST_CHUNKS))


def of_next(
  array_BT: jax.Array, plan: exchange.ExchangePlan | None
) -> jax.Array:
  """Returns a shard's array with the value of the next token at each token."""
  (whole_BT,) = _rows((array_BT,), plan)
  return sequence.own_part(_next(whole_BT), plan)


def _next(array_BT: jax.Array) -> jax.Array:
  return jnp.roll(array_BT, -1, axis=1)


def _rows(arrays, plan):
  """Gathers whole rows of a shard's arrays [B, T] of one dtype together."""
  if plan is None:
    return arrays
  whole = sequence.gather_row(jnp.stack(arrays, axis=-1), plan)
  return tuple(jnp.moveaxis(whole, -1, 0))


def _own(arrays, plan):
  return jax.tree.map(lambda x: sequence.own_part(x, plan), arrays)


def _logprobs(weight, arrays, spec, config, plan, chunk):
  """Returns `token_logprobs` of a shard's tokens, in chunks if V is large."""
  hidden_BTD, targets_BT, temperatures_BT = arrays
  num_words = weight.shape[0 if config.tie_embeddings else 1]
  if chunk is None:
    chunk = words_at_once(targets_BT.size, num_words)
  if config.numerics != 'fast' or num_words <= chunk:
    # Logits are kept for the backward pass, to save a fourth product.
    weight = shards.gather(weight, spec, dtype=hidden_BTD.dtype)
    return token_logprobs(
      logits_of(weight, hidden_BTD, config),
      targets_BT,
      temperatures_BT,
      numerics=config.numerics,
    )
  how = Chunked(chunk, spec, weight.dtype.name, config)
  hidden_ZD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
  if temperatures_BT is None:
    temperatures_BT = jnp.ones(targets_BT.shape, jnp.float32)
  out_Z = _in_chunks(
    how, weight, hidden_ZD, targets_BT.reshape(-1), temperatures_BT.reshape(-1)
  )
  return jax.tree.map(lambda x_Z: x_Z.reshape(targets_BT.shape), out_Z)


class Chunked(NamedTuple):
  """Static arguments of `_in_chunks`."""

  chunk: int
  spec: P
  stored_dtype: str
  config: model_config.ModelConfig

  @property
  def words(self) -> int:
    """Dimension of the weight along the vocabulary."""
    return 0 if self.config.tie_embeddings else 1

  def part(self, weight, start, words: int, dtype) -> jax.Array:
    """Returns the gathered weight of some words."""
    part = jax.lax.dynamic_slice_in_dim(weight, start, words, self.words)
    return shards.gathered(part.astype(dtype), self.spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(how, weight, hidden_ZD, targets_Z, temperatures_Z):
  """Returns `token_logprobs` from one chunk of the vocabulary at a time.

  The backward pass computes logits again and scatters each chunk of the
  weight's gradient at once.
  """
  arrays = (weight, hidden_ZD, targets_Z, temperatures_Z)
  return _in_chunks_forward(how, *arrays)[0]


def _in_chunks_forward(how, weight, hidden_ZD, targets_Z, temperatures_Z):
  def step(carry, start, part):
    hidden_ZD, before_Z, total_Z, moment_Z, picked_Z = carry
    logits_ZV = _scaled(part, hidden_ZD, temperatures_Z, how)
    top_Z = jnp.maximum(before_Z, logits_ZV.max(-1))
    powers_ZV = jnp.exp(logits_ZV - top_Z[:, None])
    shrink_Z = jnp.exp(before_Z - top_Z)
    total_Z = total_Z * shrink_Z + powers_ZV.sum(-1)
    moment_Z = moment_Z * shrink_Z + (powers_ZV * logits_ZV).sum(-1)
    is_picked_ZV = _picked(logits_ZV, targets_Z - start)
    picked_Z += jnp.where(is_picked_ZV, logits_ZV, 0).sum(-1)
    return (hidden_ZD, top_Z, total_Z, moment_Z, picked_Z), None

  zeros_Z = jnp.zeros(targets_Z.shape, jnp.float32)
  carry = (hidden_ZD, zeros_Z - jnp.inf, *[zeros_Z] * 3)
  parts = parts_of(how, weight, hidden_ZD.dtype)
  carry, _ = fold(step, carry, how, weight, parts)
  _, top_Z, total_Z, moment_Z, picked_Z = carry
  log_z_Z = top_Z + jnp.log(total_Z)
  entropy_Z = log_z_Z - moment_Z / total_Z
  arrays = (hidden_ZD, targets_Z, temperatures_Z, log_z_Z, entropy_Z)
  return (picked_Z - log_z_Z, entropy_Z), (weight, parts, arrays)


def _in_chunks_backward(how, residuals, d_out):
  weight, parts, arrays = residuals
  hidden_ZD, targets_Z, temperatures_Z, log_z_Z, entropy_Z = arrays

  def step(carry, start, part):
    hidden_ZD, d_hidden_ZD, d_out = carry
    logits_ZV = _scaled(part, hidden_ZD, temperatures_Z, how)
    is_picked_ZV = _picked(logits_ZV, targets_Z - start)
    d_logits_ZV = _d_logits(logits_ZV, is_picked_ZV, entropy_Z, log_z_Z, d_out)
    d_logits_ZV = (d_logits_ZV / temperatures_Z[:, None]).astype(part.dtype)
    d_hidden_ZD += jnp.einsum(
      'ZV,VD->ZD' if how.config.tie_embeddings else 'ZV,DV->ZD',
      d_logits_ZV,
      part,
      preferred_element_type=jnp.float32,
    )
    d_part = linear.weight_gradient(hidden_ZD, d_logits_ZV)
    d_part = d_part.T if how.config.tie_embeddings else d_part
    d_part = shards.scattered(d_part.astype(jnp.float32), how.spec)
    return (hidden_ZD, d_hidden_ZD, d_out), d_part

  zeros_ZD = jnp.zeros(hidden_ZD.shape, jnp.float32)
  carry = (hidden_ZD, zeros_ZD, [d_Z[:, None] for d_Z in d_out])
  d_weight = jnp.zeros(weight.shape, jnp.float32)
  (_, d_hidden_ZD, _), d_weight = fold(
    step, carry, how, weight, parts, d_weight
  )
  d_weight = d_weight.astype(how.stored_dtype)
  return d_weight, d_hidden_ZD.astype(hidden_ZD.dtype), None, None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)


def parts_of(how, weight, dtype) -> list[jax.Array] | None:
  """Returns the gathered weight of each chunk; None for a loop over them."""
  if platforms.current() == 'cpu':
    return None
  # Kept gathered for the backward pass, which comes next.
  size = weight.shape[how.words]
  return [
    how.part(weight, start, min(how.chunk, size - start), dtype)
    for start in range(0, size, how.chunk)
  ]


def fold(step, carry, how, weight, parts, whole=None) -> tuple[Any, Any]:
  """Returns `step(carry, start, part)` folded over chunks, and what it made.

  Chunks are unrolled, so that collectives of one overlap with products of
  others, but on a CPU: its compiler computes the logits of all chunks first if
  that seems faster.

  Args:
    step: returns the next carry, and the chunk's part of `whole` or None.
    parts: weights of `parts_of`.
    whole: zeros to be filled, in the weight's shape; None for nothing.
  """

  def body(start, words, state):
    carry, whole = state
    part = how.part(weight, start, words, carry[0].dtype)
    carry, made = step(carry, start, part)
    if whole is not None:
      whole = jax.lax.dynamic_update_slice_in_dim(whole, made, start, how.words)
    return carry, whole

  if parts is None:
    loops, rest = divmod(weight.shape[how.words], how.chunk)
    looped = lambda i, state: body(i * how.chunk, how.chunk, state)
    state = jax.lax.fori_loop(0, loops, looped, (carry, whole))
    return body(loops * how.chunk, rest, state) if rest else state
  made = []
  for i, part in enumerate(parts):
    # Keeps the compiler from reusing logits of the forward pass, and from
    # computing those of all chunks at once.
    carry = jax.lax.optimization_barrier(carry)
    carry, out = step(carry, i * how.chunk, part)
    made.append(out)
  if whole is not None:
    whole = jnp.concatenate(made, axis=how.words)
  return carry, whole


def _scaled(part, hidden_ZD, temperatures_Z, how):
  temperatures_Z1 = temperatures_Z[:, None].astype(jnp.float32)
  return logits_of(part, hidden_ZD, how.config) / temperatures_Z1
