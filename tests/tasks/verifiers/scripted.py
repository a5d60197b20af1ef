"""A policy that says given tokens, with routes that only its place decides."""

import numpy as np

from composer_jax.core import records

LAYERS, ACTIVE, EXPERTS = 2, 2, 8


class ScriptedTokens:
  """`agent.environment.Policy`; turn i of the episode samples `turns[i]`.

  Attributes:
    version: policy version of the next turn, which the caller may raise.
  """

  def __init__(self, turns):
    self.version = 0
    self._turns, self._held = [list(t) for t in turns], {}

  def complete(self, request):
    said = self._turns.pop(0)
    held = self._held.setdefault(request.session, [])
    first = max(len(held) - 1, 0)  # The last token was not consumed yet.
    held += [*request.context_T.tolist(), *said]
    draw = np.random.default_rng((len(held), sum(held)))
    # No router picks an expert twice.
    ids = [
      [draw.permutation(EXPERTS)[:ACTIVE] for _ in range(LAYERS)]
      for _ in range(len(held) - 1 - first)
    ]
    return records.Completion(
      session=request.session,
      tokens_T=np.array(said, np.int32),
      logprobs_T=-draw.random(len(said)).astype(np.float32),
      policy_version_T=np.full(len(said), self.version, np.int32),
      consumed_expert_ids_TMA=np.array(ids, np.uint16),
      stopped=said[-1] in request.stop_tokens,
    )

  def close(self, session):
    pass
