"""Goes on with an episode that another process began, from its last turn.

The episode is played again from its start, in a new box: what the policy said
is answered from the record, and its calls are carried out. A request must be
what it was then, to the token, which means that every tool gave the answer that
the policy had read. The first request behind the record brings the whole window
to an engine that never saw it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from composer_jax.agent import environment
from composer_jax.core import played, records


class Diverged(Exception):
  """An episode did not go as recorded: it has to begin anew."""


class ResumedPolicy:
  """Implements the Policy protocol for one episode, and records its turns."""

  def __init__(
    self,
    policy: environment.Policy,
    saved: Sequence[played.FinishedTurn] = (),
  ):
    """Answers from `saved` first, then asks `policy`."""
    self._turns: list[played.FinishedTurn] = []
    self._policy, self._saved = policy, tuple(saved)
    # Tokens of windows that the policy never saw.
    self._unseen: dict[str, list[np.ndarray]] = {}

  @property
  def is_replaying(self) -> bool:
    """True while the record has turns that were not asked for."""
    return len(self._turns) < len(self._saved)

  def record(self) -> tuple[played.FinishedTurn, ...]:
    """Returns all finished turns, those not replayed yet included."""
    turns = tuple(self._turns)
    return turns + self._saved[len(turns) :]

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Extends a session; raises Diverged if the record has another request."""
    context_T, name = request.context_T, request.session
    if self.is_replaying:
      turn = self._saved[len(self._turns)]
      completion = dataclasses.replace(turn.completion, session=name)
      is_longer = len(completion.tokens_T) > request.max_new_tokens
      if is_longer or not np.array_equal(turn.context_T, context_T):
        raise Diverged
      seen = self._unseen.setdefault(name, [])
      seen += [context_T, completion.tokens_T]
    else:
      unseen = self._unseen.pop(name, [])
      if unseen:
        whole_T = np.concatenate([*unseen, context_T])
        request = dataclasses.replace(request, context_T=whole_T)
      completion = self._policy.complete(request)
      if unseen and completion.routes_start is None:
        completion = dataclasses.replace(completion, routes_start=0)
    self._turns.append(played.turn_of(context_T, completion))
    return completion

  def close(self, session: str) -> None:
    self._unseen.pop(session, None)
    self._policy.close(session)
