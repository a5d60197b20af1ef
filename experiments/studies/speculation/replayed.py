"""Drafts for recorded episodes, and the passes that they would have taken.

A draft is right or wrong whatever the engine does: it depends on the tokens
before, and on the random numbers of its position. So each drafter drafts at
every place of an episode, and passes are counted afterwards.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head, mtp
from composer_jax.rollout import drafts, sampling

DEPTH = 4
_ROWS = 8  # episodes of a forward pass
_PLACES = 256  # places that n-grams draft for at once


@dataclasses.dataclass(frozen=True)
class Episode:
  """What the policy sampled in one window.

  Attributes:
    seed: seed of its random numbers, as in `records.SampleRequest`.
    version: policy version that sampled its first token.
  """

  tokens_T: np.ndarray
  sampled_T: np.ndarray
  seed: tuple[int, ...]
  version: int
  group: int
  temperature: float

  def turns(self) -> Iterator[tuple[int, int]]:
    """Yields the first place of each turn, and the one behind it."""
    edges_T = np.flatnonzero(np.diff(self.sampled_T, prepend=0, append=0))
    yield from zip(edges_T[::2].tolist(), edges_T[1::2].tolist(), strict=True)


def passes(
  episode: Episode, drafts_TK: np.ndarray, depth: int
) -> Iterator[tuple[int, int, list[int]]]:
  """Counts the passes of each turn.

  Args:
    drafts_TK: drafts behind each place, whose token was sampled last.

  Yields:
    the first place of a turn, its number of tokens, and for each pass how many
    drafts were right.
  """
  tokens_T = episode.tokens_T
  for start, end in episode.turns():
    place, right = start - 1, []
    while place < end - 1:
      ahead = min(depth, end - 1 - place)
      same = drafts_TK[place, :ahead] == tokens_T[place + 1 : place + 1 + ahead]
      count = int(np.cumprod(same).sum())
      right.append(count)
      place += count + 1
    yield start, end - start, right


_by_ngrams = jax.jit(drafts.by_ngrams, static_argnums=3)


def by_ngrams(
  episodes: Sequence[Episode], grams: drafts.NGrams, length: int
) -> list[np.ndarray]:
  """Returns drafts_TK of each episode, of at most `length` tokens."""
  made = [np.full((length, DEPTH), -1, np.int32) for _ in episodes]
  table = jax.device_put(grams.arrays())
  places = [
    (i, place)
    for i, e in enumerate(episodes)
    for start, end in e.turns()
    for place in range(start - 1, end - 1)
  ]
  history_ES = np.zeros((len(episodes), length), np.int32)
  for row_S, episode in zip(history_ES, episodes, strict=True):
    row_S[: len(episode.tokens_T)] = episode.tokens_T
  for first in range(0, len(places), _PLACES):
    some = places[first : first + _PLACES]
    missing = [some[-1]] * (_PLACES - len(some))
    rows, columns = np.array(some + missing).T
    found_BK = _by_ngrams(
      table, history_ES[rows], columns.astype(np.int32), DEPTH
    )
    for (i, place), draft_K in zip(some, np.asarray(found_BK), strict=False):
      made[i][place] = draft_K
  return made


def learnt(
  episodes: Iterable[Episode], before: drafts.NGrams | None = None
) -> drafts.NGrams:
  """Learns what the episodes' policy sampled, on top of a copy of `before`."""
  grams = copy.deepcopy(before) or drafts.NGrams()
  for episode in episodes:
    for start, end in episode.turns():
      grams.add(episode.tokens_T[:end], start)
  return grams


@functools.partial(jax.jit, static_argnames='config')
def _drawn(
  variables, heads, tokens_BT, mask_BT, keys_B2, temperatures_B, config
):
  """Returns int32 drawn_KBT of the model and of each head; see `drawn`."""
  positions_BT = jnp.broadcast_to(
    jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
  )
  segments_BT = mask_BT.astype(jnp.int32)
  given = (tokens_BT, segments_BT, positions_BT)
  hidden_BTD = decoder.Decoder(config).apply(variables, *given).hidden_BTD
  states = [hidden_BTD]
  if heads is not None:
    batch = batches.LMBatch(
      tokens_BT=tokens_BT,
      segment_ids_BT=segments_BT,
      positions_BT=positions_BT,
      loss_weights_BT=mask_BT.astype(jnp.float32),
    )
    made = mtp.states(
      heads, variables, hidden_BTD, batch, config=config, plan=None
    )
    states += [state_BTD for state_BTD, _ in made]

  def rows(x_B):
    return jnp.repeat(x_B, tokens_BT.shape[1], axis=0)

  ones_Z = jnp.ones(tokens_BT.size)
  settings = sampling.Settings(
    keys_B2=rows(keys_B2),
    temperatures_B=rows(temperatures_B),
    top_ps_B=ones_Z,
    top_ks_B=jnp.zeros(tokens_BT.size, jnp.int32),
    min_ps_B=0 * ones_Z,
  )
  drawn = []
  for ahead, state_BTD in enumerate(states, start=1):
    logits_BTV = head.logits(variables, state_BTD, config)
    tokens_Z, _ = sampling.choose(
      settings,
      positions_BT.reshape(-1) + ahead,
      logits_BTV.reshape(tokens_BT.size, -1),
      truncate=False,
      numerics='fast',
    )
    drawn.append(tokens_Z.reshape(tokens_BT.shape))
  return jnp.stack(drawn)


def drawn(
  episodes: Sequence[Episode],
  variables: Any,
  config: model_config.ModelConfig,
  length: int,
  heads: Any = None,
) -> list[np.ndarray]:
  """Returns int32 drawn_KT of each episode, given its tokens.

  drawn[k][t] is the token at t + k + 1 by the model (k = 0), which has seen the
  tokens up to t, or by its k-th head, which has seen those up to t + k.
  """
  variables = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), variables)
  made: list[np.ndarray] = []
  for first in range(0, len(episodes), _ROWS):
    some = episodes[first : first + _ROWS]
    tokens_BT = np.zeros((_ROWS, length), np.int32)
    mask_BT = np.zeros((_ROWS, length), bool)
    keys_B2 = np.zeros((_ROWS, 2), np.uint32)
    temperatures_B = np.ones(_ROWS, np.float32)
    for row, e in enumerate(some):
      tokens_BT[row, : len(e.tokens_T)] = e.tokens_T
      mask_BT[row, : len(e.tokens_T)] = True
      keys_B2[row], temperatures_B[row] = sampling.key_of(e.seed), e.temperature
    given = (tokens_BT, mask_BT, keys_B2, temperatures_B)
    found_KBT = np.asarray(_drawn(variables, heads, *given, config=config))
    made += [found_KBT[:, row] for row in range(len(some))]
  return made


def by_model(drawn_KT: np.ndarray) -> np.ndarray:
  """Returns drafts_TK of the model, given that those before are right."""
  ahead = [np.roll(drawn_KT[0], -k) for k in range(DEPTH)]
  return np.stack(ahead, axis=1)


def by_heads(drawn_KT: np.ndarray) -> np.ndarray:
  """Returns drafts_TK of the heads; -1 beyond their number.

  The pass before the place made the state that they read.
  """
  heads = [np.roll(x_T, 1) for x_T in drawn_KT[1:]]
  none_T = np.full(drawn_KT.shape[1], -1, np.int32)
  return np.stack((heads + [none_T] * DEPTH)[:DEPTH], axis=1)
