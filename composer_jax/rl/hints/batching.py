"""Packs hinted turns for student and teacher, with maps between their tokens.

The teacher reads what the student read, the hint, and then the student's own
turn: nothing is sampled. Its tokens are shifted by the hint, and by whatever
shares its row; a shape would fit just as well one token off. So each token of a
turn gets a number, its slot, on both sides, from the record alone.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from composer_jax.core import batches, records
from composer_jax.core import turns as turns_lib
from composer_jax.rl import batching


class _Part:
  """The rows of a microbatch that one group of devices holds.

  Only these devices exchange what the teacher says, so a turn's two sides are
  in one part.
  """

  def __init__(self, shape: batching.BatchShape):
    self.windows: list[tuple[records.Trajectory, list[turns_lib.Hint]]] = []
    self._shape = shape

  @property
  def hints(self) -> list[turns_lib.Hint]:
    return [hint for _, hints in self.windows for hint in hints]

  def add(self, window: records.Trajectory, hint: turns_lib.Hint) -> bool:
    """Takes a hint in, unless there is no room for it."""
    before = [(t, list(hints)) for t, hints in self.windows]
    # A token of a student has one slot: of two hints on a turn, the second
    # gets a copy of the window.
    last = self.windows[-1] if self.windows else None
    if last and last[0] is window and last[1][-1].stop <= hint.start:
      last[1].append(hint)
    else:
      self.windows.append((window, [hint]))
    rows = [p.batch for side in self.places() for p in side]
    num_tokens = sum(h.stop - h.start for h in self.hints)
    num_most = num_slots(self._shape.rows, self._shape.seq_len)
    fits = not any(rows) and num_tokens <= num_most
    if not fits:
      self.windows = before
    return fits

  def places(self) -> tuple[list[batching.RowSpan], list[batching.RowSpan]]:
    """Where the student's windows lie, and what the teacher reads of each hint.

    Windows end with their last hinted turn.
    """
    written = [hints[-1].stop for _, hints in self.windows]
    read = [hint.stop + len(hint.tokens_T) for hint in self.hints]
    return (
      batching.places(written, self._shape),
      batching.places(read, self._shape),
    )


def num_slots(rows: int, seq_len: int) -> int:
  """Slots of a part of so many rows: any turn, or a quarter of the tokens."""
  return max(seq_len, rows * seq_len // 4)


def pack(
  groups: Sequence[records.Group],
  shape: batching.BatchShape,
  *,
  num_parts: int = 1,
) -> tuple[list[batches.HintBatch], dict[str, int]]:
  """Packs the hints of all rollouts; empty ones are left out.

  Devices share the rows of a batch out in `num_parts`, which divides them.
  Groups are sorted by id.

  Returns:
    Microbatches, and metrics: how many hints are in them, how many tokens their
    turns have, and how many hints are too long to share a row with their turn.

  Raises:
    ValueError: a hint is on tokens that the policy did not sample, or routes
      cannot be replayed.
  """
  if shape.rows % num_parts:
    raise ValueError(
      f'rows ({shape.rows}) must divide by the devices that share the rows of '
      f'a batch ({num_parts}).'
    )
  part_shape = dataclasses.replace(shape, rows=shape.rows // num_parts)
  parts: list[_Part] = []
  dropped, checked = 0, None
  for i, window, hint in _hints(groups):
    is_turn = window.loss_mask_T[hint.start : hint.stop].all()
    if hint.start < 1 or not is_turn:
      # It would train other tokens.
      raise ValueError(
        f'A hint ({hint.kind}) is on tokens {hint.start} to {hint.stop} of a '
        f'window of {len(window)}; all must have been sampled, after at least '
        'one token of context.'
      )
    if window is not checked:
      batching.check_routes(i, window.expert_ids_TMA, shape)
      checked = window
    if not len(hint.tokens_T):
      # It says nothing: all its teacher could do is to hold the student back.
      continue
    if hint.stop + len(hint.tokens_T) > shape.seq_len:
      dropped += 1
    elif not parts or not parts[-1].add(window, hint):
      parts.append(_Part(part_shape))
      fits = parts[-1].add(window, hint)
      assert fits, (hint, part_shape)
  packed = [
    _microbatch(parts[i : i + num_parts], shape, part_shape.rows)
    for i in range(0, len(parts), num_parts)
  ]
  taken = [hint for part in parts for hint in part.hints]
  return packed, {
    'hints': len(taken),
    'hint_tokens': sum(h.stop - h.start for h in taken),
    'hints_dropped': dropped,
  }


def _hints(
  groups: Sequence[records.Group],
) -> Iterator[tuple[int, records.Trajectory, turns_lib.Hint]]:
  """Numbered windows and their hints, in the order of their turns."""
  number = 0
  for rollout in (r for g in groups for r in g.rollouts):
    for hint in sorted(rollout.hints, key=lambda h: (h.trajectory, h.start)):
      window = rollout.trajectories[hint.trajectory]
      yield number + hint.trajectory, window, hint
    number += len(rollout.trajectories)


def _microbatch(
  parts: list[_Part], shape: batching.BatchShape, part_rows: int
) -> batches.HintBatch:
  student, teacher = batching.padding(shape), batching.padding(shape)
  slots: Any = np.zeros((2, shape.rows, shape.seq_len), np.int32)
  student_slots_BT, teacher_slots_BT = slots
  for i, part in enumerate(parts):
    slot = 1
    written, read = (
      [p._replace(row=i * part_rows + p.row) for p in side]
      for side in part.places()
    )
    unread = iter(read)
    for place, (window, hints) in zip(written, part.windows, strict=True):
      batching.write(student, place, _until(window, hints[-1].stop), 0.0)
      for hint in hints:
        _, row, segment, span = next(unread)
        tokens_T = np.insert(
          window.tokens_T[: hint.stop], hint.at, hint.tokens_T
        )
        teacher['tokens_BT'][row, span] = tokens_T
        teacher['segment_ids_BT'][row, span] = segment
        teacher['positions_BT'][row, span] = np.arange(len(tokens_T))
        length = hint.stop - hint.start
        start = place.span.start + hint.start
        own = place.row, slice(start, start + length)
        numbers = np.arange(slot, slot + length)
        slot += length
        student_slots_BT[own] = numbers
        student['loss_weights_BT'][own] = 1.0 / length
        # The turn comes last of what the teacher reads.
        teacher_slots_BT[row, span.stop - length : span.stop] = numbers
  fields = [field.name for field in dataclasses.fields(batches.LMBatch)]
  return batches.HintBatch(
    student=batches.RLBatch(**student),
    teacher=batches.LMBatch(**{name: teacher[name] for name in fields}),
    student_slots_BT=student_slots_BT,
    teacher_slots_BT=teacher_slots_BT,
  )


def _until(window: records.Trajectory, stop: int) -> records.Trajectory:
  """The window's first tokens as context; no pass consumes the last of them."""
  ids_TMA = window.expert_ids_TMA[:stop].copy()
  ids_TMA[-1] = records.NO_ROUTE
  names = ('tokens_T', 'logprobs_T', 'policy_version_T')
  return dataclasses.replace(
    window,
    **{name: getattr(window, name)[:stop] for name in names},
    loss_mask_T=np.zeros(stop, bool),
    expert_ids_TMA=ids_TMA,
  )
