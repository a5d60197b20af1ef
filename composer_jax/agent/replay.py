"""Plays a recorded episode again: the same calls to a new environment.

The record holds every token, so no policy is needed: what was sampled is taken
from it, and what the host adds is made anew and compared. An environment that
answers otherwise, or limits other than those of the run, are named.
"""

import dataclasses
from typing import Any

import numpy as np

from composer_jax.agent import environment as environment_lib
from composer_jax.agent import episode, rewards, summarize
from composer_jax.core import records

# The record has passed every deadline.
_NO_DEADLINE = 1e9


class Differs(ValueError):
  """Something came out otherwise than the record says."""


class TapePolicy:
  """A policy that samples what a rollout recorded."""

  def __init__(self, rollout: records.Rollout, tokenizer: Any):
    self._rollout = rollout
    self._end = tokenizer.END
    self._next = 0
    self._window, self._stop = 0, 0

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Returns the next turn; raises `Differs` for another context."""
    task, turns = self._rollout.task_id, self._rollout.turns
    if self._next >= len(turns):
      raise Differs(
        f'The record of task {task!r} ends after {len(turns)} turns; the '
        'episode does not.'
      )
    turn = turns[self._next]
    if turn.trajectory != self._window:
      self._window, self._stop = turn.trajectory, 0
    trajectory = self._rollout.trajectories[turn.trajectory]
    recorded_T = trajectory.tokens_T[self._stop : turn.start]
    if not np.array_equal(request.context_T, recorded_T):
      raise Differs(
        f'The context before turn {self._next} of task {task!r} is not as '
        f'recorded: the tokens are {request.context_T.tolist()}, the record '
        f'has {recorded_T.tolist()}.'
      )
    # The last token sampled before is consumed together with the context.
    first = max(self._stop - 1, 0)
    sampled = slice(turn.start, turn.stop)
    self._next, self._stop = self._next + 1, turn.stop
    return records.Completion(
      session=request.session,
      tokens_T=trajectory.tokens_T[sampled],
      logprobs_T=trajectory.logprobs_T[sampled],
      policy_version_T=trajectory.policy_version_T[sampled],
      consumed_expert_ids_TMA=trajectory.expert_ids_TMA[first : turn.stop - 1],
      stopped=int(trajectory.tokens_T[turn.stop - 1]) == self._end,
      context_version=int(trajectory.policy_version_T[turn.start - 1]),
    )

  def close(self, session: str) -> None:
    del session


def replay(
  rollout: records.Rollout,
  environment: environment_lib.Environment,
  tokenizer: Any,
  options: episode.EpisodeOptions,
  *,
  reward: rewards.RewardOptions = rewards.UNPRICED,
  hints: environment_lib.HintWriter | None = None,
  summary: summarize.SummaryOptions = summarize.OFF,
) -> records.Rollout:
  """Carries out the calls of a rollout again, in a new environment; blocks.

  Arguments are the run's; prices and hints may be others. Raises `Differs`
  where a context, a window or the verdict is not as recorded.
  """
  again = episode.run(
    environment,
    TapePolicy(rollout, tokenizer),
    tokenizer,
    dataclasses.replace(
      options, max_turns=rollout.num_turns, max_seconds=_NO_DEADLINE
    ),
    group=rollout.group,
    member=rollout.member,
    seed=0,  # Nothing is drawn.
    reward=reward,
    hints=hints,
    summary=summary,
  )
  said = ('task_id', 'turns', 'tools', 'flags')
  found = ('status', 'passed', 'num_passed', 'num_tests')
  pairs = [(name, again, rollout) for name in said]
  pairs += [(name, again.verdict, rollout.verdict) for name in found]
  for name, mine, recorded in pairs:
    value, expected = getattr(mine, name), getattr(recorded, name)
    if value != expected:
      raise Differs(f'{name} is {value!r}; the record has {expected!r}.')
  return again
