"""Drafts: guesses of the next tokens of a session, which a pass verifies.

N-grams guess that what followed the last tokens before follows them again, in
the session itself or in earlier ones, of which the device has a hash table.
Heads for multi-token prediction (`models.mtp`) guess with the random numbers of
the sampler, so that a head that has the policy's distribution guesses the very
token. No draft changes a token (`rollout.steps`); a wrong one costs time.

Everything here runs inside the device loop but `NGrams`, which learns on the
host from sessions that ended.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models import config as config_lib
from composer_jax.models import layer, mtp
from composer_jax.parallel import exchange
from composer_jax.rollout import forward, sampling, sessions

# Tokens of the grams in the table, those to look up first in front.
_GRAMS = (8, 4)
# Tokens that a match with the session's own must have to go before the table.
_CLOSE = 3
# Tokens that follow a gram in the table, the most that a pass drafts of it.
_FOLLOWING = 4
# An odd number near 2^32 over the golden ratio, as in Fibonacci hashing.
_FACTOR = np.uint32(0x9E3779B1)


class Grams(flax.struct.PyTreeNode, kw_only=True):
  """What followed grams: slot `hash % N` has the newest gram of its hash."""

  hashes_N: Any  # uint32; grams of one hash are taken for each other
  tokens_NK: Any  # int32 tokens; NOT_SAMPLED behind a session's end


class NGrams:
  """Learns, on the host, what followed the grams of earlier sessions.

  Its size is fixed and the newest gram of a slot stays, so that what older
  policies wrote goes as newer ones write other things.
  """

  def __init__(self, size: int = 2**17):
    self._hashes_N = np.zeros(size, np.uint32)
    self._tokens_NK = np.full((size, _FOLLOWING), sessions.NOT_SAMPLED)

  def add(self, tokens_T: np.ndarray, start: int = 0) -> None:
    """Learns the tokens of a session from `start` on, after those before."""
    windows = np.lib.stride_tricks.sliding_window_view
    none = (sessions.NOT_SAMPLED,) * _FOLLOWING
    following_TK = windows(np.append(tokens_T, none), _FOLLOWING)
    for length in _GRAMS:
      first = max(start, length)
      if first < len(tokens_T):
        hashes_X = _hash(windows(tokens_T, length)[first - length : -1], np)
        slots_X = hashes_X % len(self._hashes_N)
        self._hashes_N[slots_X] = hashes_X
        self._tokens_NK[slots_X] = following_TK[first:-1]

  def arrays(self) -> Grams:
    """Returns a copy for the device, whose shapes never change."""
    tokens_NK = self._tokens_NK.astype(np.int32)
    return Grams(hashes_N=self._hashes_N.copy(), tokens_NK=tokens_NK)


def _hash(grams_XN: Any, xp: Any) -> Any:
  """Returns uint32 hashes of grams of N tokens."""
  count, length = grams_XN.shape
  hashes_X = xp.full(count, length, xp.uint32)
  for n in range(length):
    hashes_X = (hashes_X ^ grams_XN[:, n].astype(xp.uint32)) * _FACTOR
    hashes_X ^= hashes_X >> 15
  return hashes_X


def by_ngrams(
  table: Grams, history_BS: jax.Array, positions_B: jax.Array, depth: int
) -> jax.Array:
  """Drafts what followed the longest match of the last tokens.

  That is one of at least three tokens in the session itself, the latest of
  equally long ones; else a gram of the table, the longer first; else a shorter
  match in the session.

  Args:
    history_BS: int32 tokens of each row by position, garbage behind
      `positions_B`.
    positions_B: int32 positions of the tokens sampled last.

  Returns:
    int32 drafts_BK of `depth` tokens; `sessions.NOT_SAMPLED` from the column on
    where there is none.
  """
  lengths_B, drafts_BK = _by_session(history_BS, positions_B, depth)
  drafts_BK = jnp.where(lengths_B[:, None] > 0, drafts_BK, sessions.NOT_SAMPLED)
  is_settled_B = lengths_B >= _CLOSE
  for length in _GRAMS:
    hashes_B = _hash(_last(history_BS, positions_B, length), jnp)
    slots_B = hashes_B % jnp.uint32(len(table.hashes_N))
    is_known_B = (table.hashes_N[slots_B] == hashes_B) & ~is_settled_B
    is_known_B &= positions_B >= length - 1
    known_BK = table.tokens_NK[slots_B, :depth]
    drafts_BK = jnp.where(is_known_B[:, None], known_BK, drafts_BK)
    is_settled_B |= is_known_B
  return drafts_BK


def _last(history_BS, positions_B, count):
  """Returns the last tokens of each row, [B, count]; any before the first."""
  places_BN = positions_B[:, None] + jnp.arange(1 - count, 1)
  return jnp.take_along_axis(history_BS, jnp.maximum(places_BN, 0), axis=1)


def _by_session(history_BS, positions_B, depth):
  """Returns the length of the longest match, up to a gram's, and its drafts."""
  places_S = jnp.arange(history_BS.shape[1])
  # The match ends at place s, behind which a known token follows.
  goes_on_BS = places_S < positions_B[:, None]
  lengths_BS = jnp.zeros(history_BS.shape, jnp.int32)
  last_BN = _last(history_BS, positions_B, _GRAMS[0])
  for n in range(_GRAMS[0]):
    before_BS = jnp.roll(history_BS, n, axis=1)
    goes_on_BS &= (before_BS == last_BN[:, -1 - n, None]) & (places_S >= n)
    lengths_BS += goes_on_BS
  length_B = lengths_BS.max(1)
  # The latest of the longest ones.
  ends_BS = jnp.where(lengths_BS == length_B[:, None], places_S, 0)
  end_B1 = ends_BS.max(1, keepdims=True)
  # What would follow the last known token is again what follows the match.
  period_B1 = jnp.maximum(positions_B[:, None] - end_B1, 1)
  places_BK = end_B1 + 1 + jnp.arange(depth) % period_B1
  return length_B, jnp.take_along_axis(
    history_BS, places_BK, axis=1, mode='clip'
  )


def by_heads(
  weights: forward.Weights,
  pools: forward.Cache,
  hidden_BTD: jax.Array,
  following_BT: jax.Array,
  valid_BT: jax.Array,
  positions_BT: jax.Array,
  tables_BP: jax.Array,
  settings: sampling.Settings | None,
  depth: int,
  *,
  config: config_lib.ModelConfig,
  plan: exchange.ExchangePlan | None,
) -> tuple[jax.Array, forward.Cache]:
  """Drafts by the heads, each of which consumes a pass of the decoder.

  A head's keys and values lie in pages of its own. Those of a token whose
  following tokens were not known yet are made of drafts, and stay: if these
  were wrong, later drafts are somewhat worse. Beyond the number of heads the
  last one goes on by single tokens, its own state in the place of the state
  that it was trained to read.

  Args:
    pools: pools of each head, with the pages of `tables_BP`.
    hidden_BTD: states of the decoder after its final norm, at positions_BT.
    following_BT: int32 tokens at positions_BT + 1.
    valid_BT: mask of the columns to consume, one after another in each row.
    settings: how the rows sample; None drafts the likeliest tokens.

  Returns:
    int32 drafts_BK of the tokens from the last valid position + 2 on, and the
    pools.
  """
  heads, all_pools, drafts = weights.heads, [*pools], []
  columns_T = jnp.arange(valid_BT.shape[1])
  last_B1 = jnp.where(valid_BT, columns_T, 0).max(1, keepdims=True)
  position_B1 = jnp.take_along_axis(positions_BT, last_B1, axis=1)

  def run(i, valid_BT, positions_BT, tokens_BT, x_BTD):
    where = (valid_BT, positions_BT, tables_BP)
    pages = forward.pages_of(*where, pools, config)
    table_VD = weights.outer['params']['embedding']
    embedded_BTD = table_VD[tokens_BT].astype(x_BTD.dtype)
    x_BTD = mtp.join(heads[i]['params'], embedded_BTD, x_BTD, config)
    how: Any = dict(config=config, plan=plan, apart=True)
    x_BTD, _, all_pools[i] = forward.run_layer(
      heads[i], x_BTD, all_pools[i], pages, **how
    )
    return x_BTD

  def draft(i, state_B1D):
    scale_D = heads[i]['params']['final_norm']['scale']
    normed_B1D = layer.final_norm(scale_D, state_B1D, config)
    logits_BV = forward.logits(weights, normed_B1D, config)[:, 0]
    positions_B = position_B1[:, 0] + len(drafts) + 2
    drafts.append(_drawn(settings, positions_B, logits_BV, config))
    return normed_B1D

  x_BTD, tokens_BT, state_B1D, normed_B1D = hidden_BTD, following_BT, None, None
  for i in range(min(depth, len(heads))):
    x_BTD = run(i, valid_BT, positions_BT, tokens_BT, x_BTD)
    state_B1D = jnp.take_along_axis(x_BTD, last_B1[..., None], axis=1)
    normed_B1D = draft(i, state_B1D)
    tokens_BT = jnp.roll(tokens_BT, -1, axis=1)
    tokens_BT = jnp.where(columns_T == last_B1, drafts[-1], tokens_BT)
  last, is_used_B1 = len(heads) - 1, valid_BT.any(1, keepdims=True)
  for i in range(1, depth - last):
    # The decoder's states, which a first head reads, are normed.
    x_B1D = state_B1D if last else normed_B1D
    state_B1D = run(last, is_used_B1, position_B1 + i, drafts[-1], x_B1D)
    normed_B1D = draft(last, state_B1D)
  return jnp.concatenate(drafts, axis=1), tuple(all_pools)


def _drawn(settings, positions_B, logits_BV, config):
  """Returns the token of each row, [B, 1], truncated distributions whole."""
  if settings is None:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)[:, None]
  return sampling.choose(
    settings, positions_B, logits_BV, truncate=False, numerics=config.numerics
  )[0][:, None]
