"""Drafts are what followed before, or what heads that know the tokens say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import batches
from composer_jax.models import config as config_lib
from composer_jax.models import decoder, head, mtp
from composer_jax.rollout import drafts, forward, sampling, sessions

NONE = sessions.NOT_SAMPLED
DEPTH = 4


@functools.partial(jax.jit, static_argnames='depth')
def _by_ngrams(table, history_BS, positions_B, depth=DEPTH):
  return drafts.by_ngrams(table, history_BS, positions_B, depth)


def _drafts(grams, *histories, depth=DEPTH):
  """Drafts for histories, behind which the rows hold other tokens."""
  history_BS = np.full((len(histories), 32), 7, np.int32)
  for row_S, history in zip(history_BS, histories, strict=True):
    row_S[: len(history)] = history
  positions_B = np.array([len(h) - 1 for h in histories], np.int32)
  drafted_BK = _by_ngrams(grams.arrays(), history_BS, positions_B, depth)
  return np.asarray(drafted_BK).tolist()


def test_drafts_follow_the_longest_and_latest_match_of_the_session():
  nothing = drafts.NGrams(size=64)
  none = [NONE] * DEPTH
  assert _drafts(
    nothing,
    # Two matches of three tokens: the latest counts.
    [1, 2, 3, 9, 8, 7, 6, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3],
    # A longer match counts more than a later one.
    [5, 1, 2, 3, 9, 8, 7, 6, 1, 2, 3, 4, 5, 1, 2, 3],
    # The match borders on its own end, so that it goes on in circles.
    [4, 1, 2, 1, 2],
    [3, 3],
    # Tokens behind the last known one are no match: nor is there any.
    [1, 2, 3, 7],
    [5],
  ) == [
    [4, 5, 6, 0],
    [9, 8, 7, 6],
    [1, 2, 1, 2],
    [3, 3, 3, 3],
    none,
    none,
  ]


def test_grams_of_earlier_sessions_stand_between_long_and_short_matches():
  grams = drafts.NGrams(size=1024)
  earlier = np.arange(10, 30, dtype=np.int32)
  grams.add(earlier, start=15)
  assert _drafts(
    grams,
    [*range(0, 16)],  # What follows 15 was not learnt as a place of its own.
    [*range(12, 26)],
    [3, 24, 25, 26, 27],  # A gram of four.
    [3, 25, 26, 27],
    [26, 27, 28, 29],  # Behind the end of the session nothing followed.
    [27, 1, 2, 24, 25, 26, 27],  # Before a match of one token.
    [24, 25, 26, 27, 1, 24, 25, 26, 27],  # Behind one of four.
  ) == [
    [NONE] * DEPTH,
    [26, 27, 28, 29],
    [28, 29, NONE, NONE],
    [NONE] * DEPTH,
    [NONE] * DEPTH,
    [28, 29, NONE, NONE],
    [1, 24, 25, 26],
  ]
  assert _drafts(grams, [*range(17, 25)], depth=2) == [[25, 26]]


def test_a_gram_of_eight_goes_before_one_of_four_and_newer_before_older():
  grams = drafts.NGrams(size=4096)
  eight = [*range(10, 18)]
  grams.add(np.array([*eight, 1, 1, 1, 1], np.int32))
  grams.add(np.array([3, *eight[4:], 2, 2, 2, 2], np.int32))
  of_eight, of_four = _drafts(grams, eight, [4, *eight[3:]])
  assert (of_eight, of_four) == ([1] * 4, [2] * 4)
  grams.add(np.array([*eight, 5, 5, 5, 5], np.int32))
  assert _drafts(grams, eight) == [[5] * 4]


def test_what_the_host_learns_the_device_finds():
  """Every gram of random sessions, in a table with few collisions."""
  random, grams = np.random.default_rng(0), drafts.NGrams(size=2**16)
  session_T = random.integers(0, 2**30, 400).astype(np.int32)
  grams.add(session_T)
  ends = range(8, 390)
  # Of the session itself each row knows eight tokens.
  histories = [session_T[end - 8 : end] for end in ends]
  found = np.array(_drafts(grams, *histories))
  wanted = np.array([session_T[end : end + DEPTH] for end in ends])
  assert (found == wanted).all(1).mean() > 0.97


@pytest.fixture(scope='module')
def config(make_config):
  heads = config_lib.MTPConfig(depth=2, layer='moe')
  return dataclasses.replace(make_config(), mtp=heads)


@functools.partial(jax.jit, static_argnames=('config', 'depth'))
def _consume(
  weights, cache, tokens_BT, valid_BT, positions_BT, settings, config, depth
):
  where = (valid_BT, positions_BT, jnp.zeros((1, 1), jnp.int32))
  hidden_BTD, _, cache = forward.forward(
    weights, cache, tokens_BT[:, :-1], *where, config=config
  )
  arrays = (hidden_BTD, tokens_BT[:, 1:], *where, settings, depth)
  pools = cache[config.num_layers :]
  drafts_BK, pools = drafts.by_heads(
    weights, pools, *arrays, config=config, plan=None
  )
  return drafts_BK, (*cache[: config.num_layers], *pools)


@functools.partial(jax.jit, static_argnames='config')
def _states(variables, tokens_BT, config, stand_in=None):
  """Returns hidden_BTD of the decoder and of the trainer's heads.

  With `stand_in` it takes the place of the last but one state of the decoder.
  """
  positions_BT = jnp.arange(tokens_BT.shape[1])[None]
  ones_BT = jnp.ones_like(tokens_BT)
  hidden_BTD = (
    decoder.Decoder(config)
    .apply(variables, tokens_BT, ones_BT, positions_BT)
    .hidden_BTD
  )
  if stand_in is not None:
    hidden_BTD = hidden_BTD.at[:, -2].set(stand_in)
  batch = batches.LMBatch(
    tokens_BT=tokens_BT,
    segment_ids_BT=ones_BT,
    positions_BT=positions_BT,
    loss_weights_BT=jnp.ones(tokens_BT.shape),
  )
  made = mtp.states(
    variables['mtp'], variables, hidden_BTD, batch, config=config, plan=None
  )
  return [state_BTD for state_BTD, _ in made]


@pytest.mark.slow
@pytest.mark.parametrize('num_heads', [1, 2])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_heads_draft_what_the_trained_heads_say(
  config, make_variables, num_heads, temperature
):
  """In chunks of any border, as the trainer's heads over the whole session."""
  variables = decoder.policy(make_variables(config, 0))
  variables['mtp'] = jax.tree.map(lambda x: x[:num_heads], variables['mtp'])
  config = dataclasses.replace(
    config, mtp=config_lib.MTPConfig(depth=num_heads, layer='moe')
  )
  weights = forward.unstack(variables, config)
  length, chunk = 13, 8
  random = np.random.default_rng(1)
  tokens_T = random.integers(0, config.vocab_size, length + 1).astype(np.int32)
  settings = sampling.Settings(
    keys_B2=sampling.key_of((5,))[None],
    temperatures_B=np.array([temperature], np.float32),
    top_ps_B=np.ones(1, np.float32),
    top_ks_B=np.zeros(1, np.int32),
    min_ps_B=np.zeros(1, np.float32),
  )
  cache = forward.empty_cache(config, 1, 40, num_heads=num_heads)
  for start, end in ((0, 6), (6, length)):
    padded_T = np.zeros(chunk + 1, np.int32)
    padded_T[: end - start + 1] = tokens_T[start : end + 1]
    valid_BT = (np.arange(chunk) < end - start)[None]
    positions_BT = (start + np.arange(chunk, dtype=np.int32))[None]
    inputs = (padded_T[None], valid_BT, positions_BT, settings)
    drafts_BK, cache = _consume(weights, cache, *inputs, config=config, depth=2)
  drafted_K = np.asarray(drafts_BK)[0]
  whole_BT = np.array([[*tokens_T, *drafted_K]], np.int32)
  variables = jax.tree.map(lambda x: x.astype(jnp.float32), variables)
  states = _states(variables, whole_BT, config)
  wanted = [state_BTD[0, length - 1] for state_BTD in states]
  if num_heads == 1:
    # The head's state there stands for the decoder's at the next token.
    whole_BT = whole_BT[:, : length + 2]
    (state_BTD,) = _states(variables, whole_BT, config, wanted[0])
    wanted.append(state_BTD[0, length])
  for depth, state_D in enumerate(wanted, start=1):
    logits_BV = head.logits(variables, state_D[None, None], config)[:, 0]
    position_B = np.array([length + depth], np.int32)
    drawn = sampling.draw(
      settings, position_B, logits_BV, truncate=False, numerics='fast'
    )
    assert drawn.tokens_B[0] == drafted_K[depth - 1]
