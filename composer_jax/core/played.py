"""Finished turns of episodes that have not ended, so that others go on.

They are kept as the policy was asked and answered, so that `agent.resuming` can
answer again. A fleet saves them (`fleet.leases.turn_bytes`).
"""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from composer_jax.core import checks, records


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinishedTurn:
  """What an episode asked of its policy, and the answer.

  Attributes:
    context_T: int32 context of the request, which holds what tools said.
    completion: answer of the policy, with all its versions.
  """

  context_T: np.ndarray
  completion: records.Completion

  def __post_init__(self):
    checks.array(self, 'context_T', np.int32, None)
    for name in ('context_version_T', 'consumed_version_T'):
      is_there = getattr(self.completion, name) is not None
      checks.require(self, 'completion', is_there, f'have a {name}')


def turn_of(
  context_T: np.ndarray, completion: records.Completion
) -> FinishedTurn:
  """Keeps of an answer what trajectories are made of."""
  versions_T = completion.policy_version_T
  context_version_T = completion.context_version_T
  consumed_T = completion.consumed_version_T
  if context_version_T is None:
    context_version_T = versions_T
  if consumed_T is None:
    count = len(completion.consumed_expert_ids_TMA)
    consumed_T = np.repeat(versions_T[:1], count)
  kept = dataclasses.replace(
    completion,
    session='',
    raw_logprobs_T=None,
    top_ids_TX=None,
    top_logprobs_TX=None,
    context_version_T=context_version_T,
    consumed_version_T=consumed_T,
  )
  return FinishedTurn(context_T=context_T, completion=kept)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedTurns:
  """Finished turns of some members of a group.

  Attributes:
    group: id of the group.
    task_id: task of the group.
    turns: finished turns by member, in order; members without any are absent.
    policies: identity of the weights of each version, as in `records.Group`.
  """

  group: int
  task_id: str
  turns: Mapping[int, tuple[FinishedTurn, ...]]
  policies: Mapping[int, str]

  def __post_init__(self):
    if set(self.policies) != self.versions:
      raise ValueError(
        f'Turns of versions {sorted(self.versions)} name the weights of '
        f'versions {sorted(self.policies)}.'
      )

  @property
  def versions(self) -> set[int]:
    return versions_of(self.turns)


def versions_of(turns: Mapping[int, tuple[FinishedTurn, ...]]) -> set[int]:
  """Returns the policy versions that sampled or consumed any token."""
  finished = itertools.chain(*turns.values())
  return records.versions_of(turn.completion for turn in finished)
