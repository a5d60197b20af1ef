"""Calls that go by a hint, to learn from: a teacher must know what a hint is.

A policy that has hardly seen a hint is a poor teacher, however it is held still
(`experiments/studies/hint`). In a transcript the call after a mistake is often
the one that was meant: put behind the hint, in the place of the mistake, it
shows what hints are for. The mistake itself is not in the example.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.text import chat

_MENDED = (turns_lib.OK, turns_lib.FAILED)


def examples(
  rollout: records.Rollout, tokenizer: Any
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (tokens_T, loss mask) for each hint whose mistake was mended.

  The call right after the mistake is taken, if it was carried out in the same
  window. One that ends the episode mends nothing, unless the mistake was meant
  to.
  """
  turn_after = {
    (before.trajectory, before.start): after
    for before, after in zip(rollout.turns, rollout.turns[1:], strict=False)
    if before.trajectory == after.trajectory and after.outcome in _MENDED
  }
  for hint in rollout.hints:
    after = turn_after.get((hint.trajectory, hint.start))
    if after is None:
      continue
    tokens_T = rollout.trajectories[hint.trajectory].tokens_T
    ids = tokens_T[hint.start : hint.stop - 1]
    mistake = tokenizer.decode(ids) if chat.is_text(tokenizer, ids) else ''
    if after is rollout.turns[-1] and after.tool not in mistake:
      continue
    context_T = np.concatenate(
      [tokens_T[: hint.at], hint.tokens_T, tokens_T[hint.at : hint.start]]
    )
    call_T = tokens_T[after.start : after.stop]
    yield (
      np.concatenate([context_T, call_T]),
      np.arange(len(context_T) + len(call_T)) >= len(context_T),
    )
