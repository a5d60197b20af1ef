"""Finished turns of episodes that have not ended, so that others go on.

A worker saves them as bytes in the form of `core.group_bytes`; they are kept as
the policy was asked and answered, so that `agent.resuming` can answer again.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from composer_jax.core import checks, group_bytes, records
from composer_jax.core.routes import codec

# Of all turns of a member, one after another.
_SAMPLED = ('tokens_T', 'logprobs_T', 'policy_version_T', 'context_version_T')
_ROUTES, _CONSUMED = 'consumed_expert_ids_TMA', 'consumed_version_T'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlayedTurn:
  """What an episode asked of its policy, and the answer.

  Attributes:
    context_T: int32 context of the request, which holds what tools said.
    completion: answer of the policy, with all its versions.
  """

  context_T: np.ndarray
  completion: records.Completion

  def __post_init__(self):
    checks.array(self, 'context_T', np.int32, None)
    for name in ('context_version_T', _CONSUMED):
      is_there = getattr(self.completion, name) is not None
      checks.require(self, 'completion', is_there, f'have a {name}')


def turn_of(
  context_T: np.ndarray, completion: records.Completion
) -> PlayedTurn:
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
  return PlayedTurn(context_T=context_T, completion=kept)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedTurns:
  """Finished turns of some members of a group.

  Attributes:
    turns: finished turns by member, in order; members without any are absent.
    policies: identity of the weights of each version, as in `records.Group`.
  """

  group: int
  task_id: str
  turns: Mapping[int, tuple[PlayedTurn, ...]]
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


def versions_of(turns: Mapping[int, tuple[PlayedTurn, ...]]) -> set[int]:
  """Returns the policy versions that sampled or consumed any token."""
  names = ('policy_version_T', 'context_version_T', _CONSUMED)
  return {
    int(version)
    for played in turns.values()
    for turn in played
    for name in names
    for version in np.unique(getattr(turn.completion, name))
  }


def to_bytes(saved: SavedTurns) -> bytes:
  """Serialises turns; equal turns give equal bytes."""
  arrays: dict[str, np.ndarray] = {}
  lengths = []
  for member, played in sorted(saved.turns.items()):
    answers = [turn.completion for turn in played]
    sizes = [
      (len(t.context_T), len(a.tokens_T), len(a.consumed_expert_ids_TMA))
      for t, a in zip(played, answers, strict=True)
    ]
    ends = [(a.routes_start, a.stopped) for a in answers]
    lengths.append([member, [(*s, *e) for s, e in zip(sizes, ends)]])
    contexts = [turn.context_T for turn in played]
    arrays[f'{member}/context_T'] = np.concatenate(contexts)
    for name in (*_SAMPLED, _CONSUMED):
      parts = [getattr(answer, name) for answer in answers]
      arrays[f'{member}/{name}'] = np.concatenate(parts)
    ids_TMA = np.concatenate([getattr(a, _ROUTES) for a in answers])
    routes = group_bytes.routes_to_bytes(ids_TMA)
    arrays[f'{member}/{group_bytes.ROUTES}'] = np.frombuffer(routes, np.uint8)
  return group_bytes.pack(
    dict(
      group=saved.group,
      task_id=saved.task_id,
      turns=lengths,
      policies=sorted(saved.policies.items()),
    ),
    arrays,
  )


def from_bytes(data: bytes, max_bytes: int) -> SavedTurns:
  """Rebuilds what `to_bytes` wrote; see `group_bytes.from_bytes`."""
  return group_bytes.guarded(_saved, data, max_bytes)


def _saved(
  header: dict, arrays: dict[str, np.ndarray], max_bytes: int
) -> SavedTurns:
  turns, left = {}, max_bytes
  members = [member for member, _ in header['turns']]
  is_right = all(type(m) is int for m in members)
  # Before any tape is unpacked, of which one could serve many.
  if not is_right or members != sorted(set(members)):
    raise ValueError(f'its members are {members!r:.99}, not ascending numbers.')
  for member, lengths in header['turns']:
    tape = codec.decode(
      arrays[f'{member}/{group_bytes.ROUTES}'].tobytes(), left
    )
    left -= tape.ids_TMA.nbytes
    names = ('context_T', *_SAMPLED, _CONSUMED)
    parts = {name: arrays[f'{member}/{name}'] for name in names}
    turns[member] = _turns(lengths, parts | {_ROUTES: tape.ids_TMA})
  return SavedTurns(
    group=header['group'],
    task_id=header['task_id'],
    turns=turns,
    policies=dict(header['policies']),
  )


def _turns(
  lengths: list[list[int]], parts: dict[str, np.ndarray]
) -> tuple[PlayedTurn, ...]:
  """Divides arrays of an episode into its turns."""
  if not lengths or not all(
    len(row) == 5
    and type(row[4]) is bool
    and all(type(n) is int and n >= 0 for n in row[:3])
    for row in lengths
  ):
    raise ValueError(f'its turns have no lengths: {lengths!r:.99}.')
  column = {'context_T': 0, _ROUTES: 2, _CONSUMED: 2}
  split = {}
  for name, array in parts.items():
    ends = np.cumsum([row[column.get(name, 1)] for row in lengths])
    if ends[-1] != len(array):
      raise ValueError(f'its turns do not have the lengths of {name}.')
    split[name] = np.split(array, ends[:-1])
  turns = []
  for i, (*_, start, stopped) in enumerate(lengths):
    answer = {name: values[i] for name, values in split.items()}
    context_T = answer.pop('context_T')
    completion = records.Completion(
      session='', stopped=stopped, routes_start=start, **answer
    )
    turns.append(PlayedTurn(context_T=context_T, completion=completion))
  return tuple(turns)
