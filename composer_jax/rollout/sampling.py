"""Draws tokens with random numbers that do not depend on the batch.

A token's random numbers are a function of its session's seed tuple and its
absolute position, never of the slot, the batch or the number of steps taken.
So a draft that is drawn at the same seed and position from a similar
distribution is often the same token (`choose`).

If a request truncates its distribution (`records.SampleRequest`), or a guide
(`sessions.Guide`) adds to its logits, token and log-probability are those of
the distribution that results. Raw log-probabilities are those of the model, at
temperature 1.
"""

import functools
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
  """Draws one token per row, and returns it with its log-probabilities.

  `positions_B` are those of the drawn tokens. `bias_BV` is added to the logits;
  -inf excludes a token. `truncate` says that some rows truncate; rows that do
  not, and rows whose bias is zero, get the same bits either way.
  """
  greedy_B = settings.temperatures_B == 0
  temperatures_B = jnp.where(greedy_B, 1, settings.temperatures_B)
  altered_B = _truncates(settings)
  if bias_BV is not None:
    altered_B |= (bias_BV != 0).any(-1)
  tokens_B, scaled_BV = choose(
    settings,
    positions_B,
    logits_BV,
    bias_BV,
    truncate=truncate,
    numerics=numerics,
  )

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


def choose(
  settings: Settings,
  positions_B: jax.Array,
  logits_BV: jax.Array,
  bias_BV: jax.Array | None = None,
  *,
  truncate: bool,
  numerics: str,
) -> tuple[jax.Array, jax.Array]:
  """Draws one token per row by two races; arguments as of `draw`.

  The vocabulary is split into about sqrt(V) classes. A class of weight w
  arrives at a time -log(1 - u) / w, with a uniform u of its own, and the first
  one wins; then its tokens race likewise. (Races are the Gumbel trick without
  logarithms of weights; one race over all tokens would cost as much as a small
  model's experts.)

  Two distributions with a total variation of t win the same class, and the same
  token of it, with a probability of at least (1 - t) / (1 + t), of the classes
  and of the class: for rows at the same seed and position.

  Uniforms are midpoints of 2^32 intervals, of which float32 keeps 24 bits. So
  class and token in the class have their probabilities up to 2^-32 of the
  whole, and to a few parts in 10^6; shares below 2^-37 are never drawn. Nor is
  a token of weight zero.

  Returns:
    int32 tokens_B, and the logits of the distribution that they are drawn from.
  """
  greedy_B = settings.temperatures_B == 0
  temperatures_B = jnp.where(greedy_B, 1, settings.temperatures_B)
  if bias_BV is not None:
    logits_BV += bias_BV
  scaled_BV = logits_BV / temperatures_B[:, None]
  if truncate:
    kept_BV = _each_row(_kept, (settings, scaled_BV), numerics)
    scaled_BV = jnp.where(kept_BV, scaled_BV, -jnp.inf)
  numbers = functools.partial(_uniforms, count=sum(_split(logits_BV.shape[1])))
  uniforms_BU = jax.vmap(numbers)(settings.keys_B2, positions_B)
  tokens_B = _each_row(_winner, (uniforms_BU, scaled_BV), numerics)
  tokens_B = jax.lax.cond(
    greedy_B.any(),
    lambda: jnp.where(greedy_B, jnp.argmax(scaled_BV, axis=-1), tokens_B),
    lambda: tokens_B,
  )
  return tokens_B.astype(jnp.int32), scaled_BV


def _each_row(fn: Callable[..., Any], rows_B: Any, numerics: str) -> Any:
  """Returns fn(*rows_B), with bits of each row that ignore the others."""

  def stage(_, rows_BT):
    lead = jax.tree.leaves(rows_BT)[0].shape[:2]
    rows_Z = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows_BT)
    result_Z = fn(*rows_Z)
    return result_Z.reshape(*lead, *result_Z.shape[1:])

  rows_BT = jax.tree.map(lambda x: x[:, None], rows_B)
  return rows.map_rows(stage, (), rows_BT, numerics=numerics)[:, 0]


def _uniforms(key_2: jax.Array, position: jax.Array, count: int) -> jax.Array:
  """Returns float32 numbers in (0, 1), finest next to 0."""
  key = jax.random.wrap_key_data(key_2, impl=_GENERATOR)
  key = jax.random.fold_in(key, position)
  bits_U = jax.random.bits(key, (count,), jnp.uint32)
  uniforms_U = (bits_U.astype(jnp.float32) + 0.5) * 2.0**-32
  return jnp.minimum(uniforms_U, 1 - 2.0**-24)


def _split(vocab_size: int) -> tuple[int, int]:
  """Returns the number of classes and of tokens in each."""
  num_classes = 2 ** math.ceil(math.log2(vocab_size) / 2)
  return num_classes, -(-vocab_size // num_classes)


def _winner(uniforms_BU: jax.Array, scaled_BV: jax.Array) -> jax.Array:
  """Returns a token drawn from each row's softmax."""
  batch, vocab_size = scaled_BV.shape
  num_classes, size = _split(vocab_size)
  padding = ((0, 0), (0, size * num_classes - vocab_size))
  padded_BV = jnp.pad(scaled_BV, padding, constant_values=-jnp.inf)
  # Classes are columns, so that their sums vectorise.
  scaled_BXC = padded_BV.reshape(batch, size, num_classes)
  top_B11 = scaled_BXC.max(axis=(1, 2), keepdims=True)
  sums_BC = jnp.exp(scaled_BXC - top_B11).sum(1)
  class_B = _first(sums_BC, uniforms_BU[:, :num_classes])
  column_BX = jnp.take_along_axis(scaled_BXC, class_B[:, None, None], axis=2)
  weights_BX = jnp.exp(column_BX - top_B11)[:, :, 0]
  place_B = _first(weights_BX, uniforms_BU[:, num_classes:])
  return place_B * num_classes + class_B


def _first(weights_BX: jax.Array, uniforms_BX: jax.Array) -> jax.Array:
  """Returns who arrives first, as index of the largest inverse time."""
  return jnp.argmax(weights_BX / -jnp.log1p(-uniforms_BX), axis=-1)


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
