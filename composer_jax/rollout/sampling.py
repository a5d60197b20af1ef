"""Draws tokens with random numbers that do not depend on the batch.

A token's random numbers are a function of its session's seed tuple and its
absolute position, never of the slot, the batch or the number of steps taken.
Two numbers per token suffice; Gumbel noise needs one for each entry of the
vocabulary and costs as much as a small model's experts.

If a request truncates its distribution (`records.SampleRequest`), or a guide
(`sessions.Guide`) adds to its logits, token and log-probability are those of
the distribution that results. Raw log-probabilities are those of the model, at
temperature 1.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.kernels import rows
from composer_jax.models import head

# Named, so that a change of JAX's default generator does not change rollouts.
_GENERATOR = 'threefry2x32'


class Settings(flax.struct.PyTreeNode, kw_only=True):
  """Sampling options of each row, as in `records.SampleRequest`."""

  keys_B2: Any  # uint32 key data from `key_of`
  temperatures_B: Any
  top_ps_B: Any
  top_ks_B: Any  # int32; the others are float32
  min_ps_B: Any


class Drawn(flax.struct.PyTreeNode, kw_only=True):
  """A token per row; raw_logprobs_B is finite if logits give a distribution."""

  tokens_B: Any
  logprobs_B: Any
  raw_logprobs_B: Any


def key_of(seed: tuple[int, ...]) -> np.ndarray:
  """Folds a seed tuple into key data, on the host.

  A hash rather than a chain of `fold_in`s: it needs no device call, and takes
  tuples of any length with members of any size. Two of n different tuples share
  a key with a probability of about n^2 / 2^65.
  """
  text = ','.join(str(int(part)) for part in seed)
  digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return np.frombuffer(digest, '<u4').astype(np.uint32)


def draw(
  settings: Settings,
  positions_B: jax.Array,
  logits_BV: jax.Array,
  bias_BV: jax.Array | None = None,
  *,
  truncate: bool,
  numerics: str,
) -> Drawn:
  """Draws one token per row by the inverse of its distribution function.

  The vocabulary is split into about sqrt(V) classes: one uniform number chooses
  a class by its share, another one a token of the class.

  Both numbers are multiples of 2^-24, and a running sum of n float32 terms is
  off by at most n 2^-24 of the whole, so a token's probability is off by about
  as much of the whole and of its class. Gumbel noise from float32 uniforms is
  no finer: it never exceeds 17, so it never draws tokens further behind. A
  token of weight zero is never drawn.

  `positions_B` are those of the drawn tokens. `bias_BV` is added to the logits;
  -inf excludes a token. `truncate` says that some rows truncate; rows that do
  not, and rows whose bias is zero, get the same bits either way.
  """
  greedy_B = settings.temperatures_B == 0
  temperatures_B = jnp.where(greedy_B, 1, settings.temperatures_B)
  altered_B = _truncates(settings)
  scaled_BV = logits_BV / temperatures_B[:, None]
  if bias_BV is not None:
    altered_B |= (bias_BV != 0).any(-1)
    scaled_BV = (logits_BV + bias_BV) / temperatures_B[:, None]
  if truncate:
    kept_BV = _each_row(_kept, (settings, scaled_BV), numerics)
    scaled_BV = jnp.where(kept_BV, scaled_BV, -jnp.inf)
  uniforms_B2 = jax.vmap(_uniforms)(settings.keys_B2, positions_B)
  tokens_B = _each_row(_choose, (uniforms_B2, scaled_BV), numerics)
  tokens_B = jax.lax.cond(
    greedy_B.any(),
    lambda: jnp.where(greedy_B, jnp.argmax(scaled_BV, axis=-1), tokens_B),
    lambda: tokens_B,
  ).astype(jnp.int32)

  def logprobs_at(temperatures_B):
    """Computes log-probabilities with the trainer's function."""
    arrays = [x[:, None] for x in (logits_BV, tokens_B, temperatures_B)]
    return head.token_logprobs(*arrays, numerics=numerics)[0][:, 0]

  logprobs_B = logprobs_at(temperatures_B)
  raw_logprobs_B = jax.lax.cond(
    (temperatures_B == 1).all(),
    lambda: logprobs_B,
    lambda: logprobs_at(jnp.ones_like(temperatures_B)),
  )
  if truncate or bias_BV is not None:
    drawn_B = _each_row(_logprob, (scaled_BV, tokens_B), numerics)
    logprobs_B = jnp.where(altered_B, drawn_B, logprobs_B)
  return Drawn(
    tokens_B=tokens_B,
    # A greedy choice has probability 1.
    logprobs_B=jnp.where(greedy_B, 0, logprobs_B),
    raw_logprobs_B=raw_logprobs_B,
  )


def _each_row(fn: Callable[..., Any], rows_B: Any, numerics: str) -> Any:
  """Returns fn(*rows_B), with bits of each row that ignore the others."""

  def stage(_, rows_BT):
    lead = jax.tree.leaves(rows_BT)[0].shape[:2]
    rows_Z = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows_BT)
    result_Z = fn(*rows_Z)
    return result_Z.reshape(*lead, *result_Z.shape[1:])

  rows_BT = jax.tree.map(lambda x: x[:, None], rows_B)
  return rows.map_rows(stage, (), rows_BT, numerics=numerics)[:, 0]


def _uniforms(key_2: jax.Array, position: jax.Array) -> jax.Array:
  """Returns two float32 numbers in [0, 1)."""
  key = jax.random.wrap_key_data(key_2, impl=_GENERATOR)
  bits_2 = jax.random.bits(jax.random.fold_in(key, position), (2,), jnp.uint32)
  return (bits_2 >> 8).astype(jnp.float32) * 2.0**-24


def _choose(uniforms_B2: jax.Array, scaled_BV: jax.Array) -> jax.Array:
  """Returns a token drawn from each row's softmax."""
  batch, vocab_size = scaled_BV.shape
  num_classes = 2 ** math.ceil(math.log2(vocab_size) / 2)
  size = -(-vocab_size // num_classes)
  missing = size * num_classes - vocab_size
  padding = ((0, 0), (0, missing))
  padded_BV = jnp.pad(scaled_BV, padding, constant_values=-jnp.inf)
  # Classes are columns, so that their sums vectorise.
  scaled_BXC = padded_BV.reshape(batch, size, num_classes)
  top_B11 = scaled_BXC.max(axis=(1, 2), keepdims=True)
  sums_BC = jnp.exp(scaled_BXC - top_B11).sum(1)
  class_B = _invert(sums_BC, uniforms_B2[:, 0])
  column_BX = jnp.take_along_axis(scaled_BXC, class_B[:, None, None], axis=2)
  weights_BX = jnp.exp(column_BX - top_B11)[:, :, 0]
  return _invert(weights_BX, uniforms_B2[:, 1]) * num_classes + class_B


def _invert(weights_BX: jax.Array, uniforms_B: jax.Array) -> jax.Array:
  """Returns the index at which the running sum exceeds u times the total."""
  sums_BX = jnp.cumsum(weights_BX, axis=-1)
  wanted_B1 = (uniforms_B * sums_BX[:, -1])[:, None]
  is_likely_BX = weights_BX > 0
  exceeds_BX = is_likely_BX & (sums_BX > wanted_B1)
  # Rounding may leave none, as sums need not ascend: then the last likely one.
  last_B = weights_BX.shape[-1] - 1 - jnp.argmax(is_likely_BX[:, ::-1], axis=-1)
  first_B = jnp.argmax(exceeds_BX, axis=-1)
  return jnp.where(exceeds_BX.any(-1), first_B, last_B)


def _logprob(scaled_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
  chosen_B = jnp.take_along_axis(scaled_BV, tokens_B[:, None], axis=-1)[:, 0]
  return chosen_B - jax.nn.logsumexp(scaled_BV, axis=-1)


def _truncates(settings: Settings) -> jax.Array:
  return (
    (settings.top_ps_B < 1) | (settings.top_ks_B > 0) | (settings.min_ps_B > 0)
  )


def _kept(settings: Settings, scaled_BV: jax.Array) -> jax.Array:
  """Returns a mask of the tokens that each row may draw.

  Each rule keeps the likeliest tokens, of equal ones those with the smaller
  index, so the last token that all rules keep defines the mask.
  """
  order_BV = jnp.argsort(-scaled_BV, axis=-1, stable=True)
  sorted_BV = jnp.take_along_axis(scaled_BV, order_BV, axis=-1)
  vocab_size = scaled_BV.shape[-1]
  top_k_B1 = jnp.where(settings.top_ks_B > 0, settings.top_ks_B, vocab_size)
  kept_BV = jnp.arange(vocab_size) < top_k_B1[:, None]
  left_BV = jnp.where(kept_BV, sorted_BV, -jnp.inf)
  probabilities_BV = jax.nn.softmax(left_BV, axis=-1)
  # The smallest set that reaches top_p: a token stays if those before do not.
  before_BV = jnp.cumsum(probabilities_BV[:, :-1], axis=-1)
  before_BV = jnp.pad(before_BV, ((0, 0), (1, 0)))
  top_p_B1 = settings.top_ps_B[:, None]
  kept_BV &= (before_BV < top_p_B1) | (top_p_B1 >= 1)
  least_B1 = settings.min_ps_B[:, None] * probabilities_BV[:, :1]
  kept_BV &= probabilities_BV >= least_B1
  # The likeliest token always stays, whatever rounding does.
  last_B1 = jnp.maximum(kept_BV.sum(-1, keepdims=True) - 1, 0)
  value_B1 = jnp.take_along_axis(sorted_BV, last_B1, axis=-1)
  index_B1 = jnp.take_along_axis(order_BV, last_B1, axis=-1)
  kept_BV = (scaled_BV > value_B1) | (
    (scaled_BV == value_B1) & (jnp.arange(vocab_size) <= index_B1)
  )
  return kept_BV | ~_truncates(settings)[:, None]
