"""Plays a recorded episode again: the same calls to a new environment.

No policy is needed: sampled tokens are taken from the record, and the tokens
that the host adds are made anew and compared with it. A difference, of answers
or of limits, is an error.
"""

from typing import Any

import numpy as np

from composer_jax.agent import environment as environment_lib
from composer_jax.agent import episode, rewards, summarize
from composer_jax.core import records


class Differs(ValueError):
  """The replay differs from the record."""


class TapePolicy:
  """A policy whose samples are the recorded turns of a rollout."""

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
        f'The record of task {task!r} ends after {len(turns)} turns, but the '
        'episode goes on.'
      )
    turn = turns[self._next]
    if turn.trajectory != self._window:
      self._window, self._stop = turn.trajectory, 0
    trajectory = self._rollout.trajectories[turn.trajectory]
    recorded_T = trajectory.tokens_T[self._stop : turn.start]
    if not np.array_equal(request.context_T, recorded_T):
      raise Differs(
        f'The context before turn {self._next} of task {task!r} differs from '
        f'the record: its tokens are {request.context_T.tolist()}, recorded '
        f'are {recorded_T.tolist()}.'
      )
    # The last token of the turn before is consumed together with the context.
    first = max(self._stop - 1, 0)
    sampled = slice(turn.start, turn.stop)
    self._next, self._stop = self._next + 1, turn.stop
    return records.Completion(
      session=request.session,
      tokens_T=trajectory.tokens_T[sampled],
      logprobs_T=trajectory.logprobs_T[sampled],
      policy_version_T=trajectory.policy_version_T[sampled],
      context_version_T=trajectory.context_version_T[sampled],
      consumed_expert_ids_TMA=trajectory.expert_ids_TMA[first : turn.stop - 1],
      consumed_version_T=trajectory.consumed_version_T[first : turn.stop - 1],
      stopped=int(trajectory.tokens_T[turn.stop - 1]) == self._end,
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

  Arguments are those of the run, but prices and hints may differ. Raises
  `Differs` where a context, a turn or the verdict differs from the record.
  """
  again = episode.run(
    environment,
    TapePolicy(rollout, tokenizer),
    tokenizer,
    options,
    group=rollout.group,
    member=rollout.member,
    seed=0,  # Nothing is drawn.
    reward=reward,
    hints=hints,
    summary=summary,
  )
  episode_fields = ('task_id', 'turns', 'tools', 'flags')
  verdict_fields = ('status', 'passed', 'num_passed', 'num_tests')
  pairs = [(name, again, rollout) for name in episode_fields]
  pairs += [(name, again.verdict, rollout.verdict) for name in verdict_fields]
  for name, replayed, recorded in pairs:
    value, expected = getattr(replayed, name), getattr(recorded, name)
    if value != expected:
      raise Differs(f'{name} is {value!r}; the record has {expected!r}.')
  return again
