"""Serialises finished turns of unfinished episodes, as groups are.

Equal turns give equal bytes; whoever wrote them, nothing that is read is
executed, and every record is checked again.
"""

from typing import Any

import numpy as np

from composer_jax.core import group_bytes, played, records
from composer_jax.core.routes import codec

# Of all turns of a member, one after another.
_SAMPLED = ('tokens_T', 'logprobs_T', 'policy_version_T', 'context_version_T')
_ROUTES, _CONSUMED = 'consumed_expert_ids_TMA', 'consumed_version_T'


def to_bytes(saved: played.SavedTurns) -> bytes:
  """Serialises turns; equal turns give equal bytes."""
  arrays: dict[str, np.ndarray] = {}
  lengths = []
  for member, turns in sorted(saved.turns.items()):
    answers = [turn.completion for turn in turns]
    contexts = [turn.context_T for turn in turns]
    rows = [
      (len(c), len(a.tokens_T), len(getattr(a, _ROUTES)))
      + (a.routes_start, a.stopped)
      for c, a in zip(contexts, answers, strict=True)
    ]
    lengths.append((member, rows))
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


def from_bytes(data: bytes, max_bytes: int) -> played.SavedTurns:
  """Rebuilds what `to_bytes` wrote; see `group_bytes.from_bytes`."""
  return group_bytes.guarded(_saved, data, max_bytes)


def _saved(
  header: dict, arrays: dict[str, np.ndarray], max_bytes: int
) -> played.SavedTurns:
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
  return played.SavedTurns(
    group=header['group'],
    task_id=header['task_id'],
    turns=turns,
    policies=dict(header['policies']),
  )


def _turns(
  lengths: list[list[int]], parts: dict[str, np.ndarray]
) -> tuple[played.FinishedTurn, ...]:
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
    sizes = [row[column.get(name, 1)] for row in lengths]
    # In whole numbers of any size: an int64 of them could wrap around.
    if sum(sizes) != len(array):
      raise ValueError(f'its turns do not have the lengths of {name}.')
    split[name] = np.split(array, np.cumsum(sizes)[:-1])
  turns = []
  for i, (*_, start, stopped) in enumerate(lengths):
    answer: dict[str, Any] = {name: part[i] for name, part in split.items()}
    answer |= dict(stopped=stopped, routes_start=start)
    context_T = answer.pop('context_T')
    completion = records.Completion(session='', **answer)
    turns.append(
      played.FinishedTurn(context_T=context_T, completion=completion)
    )
  return tuple(turns)
