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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
  """Hinted turns in microbatches.

  Attributes:
    microbatches: numpy HintBatches.
    num_hints: that are in them.
    num_tokens: of their turns.
    num_dropped: hints too long to stand in a row with their turn.
  """

  microbatches: list[batches.HintBatch]
  num_hints: int
  num_tokens: int
  num_dropped: int


class _Part:
  """The rows of a microbatch that one group of devices holds.

  Only these devices exchange what the teacher says, so a turn's two sides are
  in one part.
  """

  def __init__(self, shape: batching.BatchShape):
    self.windows: list[tuple[records.Trajectory, list[turns_lib.Hint]]] = []
    self._shape = shape
    self._num_slots = num_slots(shape.rows, shape.seq_len)

  @property
  def hints(self) -> list[tuple[records.Trajectory, turns_lib.Hint]]:
    return [(t, hint) for t, hints in self.windows for hint in hints]

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
    fits = (
      self._fit(self.student_lengths())
      and self._fit(self.teacher_lengths())
      and sum(h.stop - h.start for _, h in self.hints) <= self._num_slots
    )
    if not fits:
      self.windows = before
    return fits

  def student_lengths(self) -> list[int]:
    return [hints[-1].stop for _, hints in self.windows]

  def teacher_lengths(self) -> list[int]:
    return [hint.stop + len(hint.tokens_T) for _, hint in self.hints]

  def _fit(self, lengths: list[int]) -> bool:
    shape = self._shape
    rows = batching.assign_rows(lengths, shape.seq_len, shape.align)
    return len(rows) <= shape.rows


def num_slots(rows: int, seq_len: int) -> int:
  """Slots of a part of so many rows: any one turn, or a quarter of the tokens.

  What the teacher says of them is at hand at once.
  """
  return max(seq_len, rows * seq_len // 4)


def pack(
  groups: Sequence[records.Group],
  shape: batching.BatchShape,
  *,
  num_parts: int = 1,
) -> Packed:
  """Packs the hints of all rollouts; empty ones are left out.

  Args:
    groups: of a step, sorted by id.
    shape: of the microbatches of RL, whose rows hold trajectories.
    num_parts: in which devices share the rows of a batch out; divides them.

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
    _check(hint, window)
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
    _microbatch(parts[i : i + num_parts], shape, part_shape)
    for i in range(0, len(parts), num_parts)
  ]
  taken = [hint for part in parts for _, hint in part.hints]
  return Packed(
    microbatches=packed,
    num_hints=len(taken),
    num_tokens=sum(h.stop - h.start for h in taken),
    num_dropped=dropped,
  )


def _hints(
  groups: Sequence[records.Group],
) -> Iterator[tuple[int, records.Trajectory, turns_lib.Hint]]:
  """Numbered windows and their hints, in the order of their turns."""
  number = 0
  for group in groups:
    for rollout in group.rollouts:
      hints = sorted(rollout.hints, key=lambda h: (h.trajectory, h.start))
      for hint in hints:
        window = rollout.trajectories[hint.trajectory]
        yield number + hint.trajectory, window, hint
      number += len(rollout.trajectories)


def _check(hint: turns_lib.Hint, window: records.Trajectory) -> None:
  """Refuses a hint that is not on a turn: it would train other tokens."""
  is_turn = window.loss_mask_T[hint.start : hint.stop].all()
  if hint.start < 1 or not is_turn:
    raise ValueError(
      f'A hint ({hint.kind}) is on tokens {hint.start} to {hint.stop} of a '
      f'window of {len(window)}; all must have been sampled, after at least '
      'one token of context.'
    )


def _microbatch(
  parts: list[_Part],
  shape: batching.BatchShape,
  part_shape: batching.BatchShape,
) -> batches.HintBatch:
  B, T = shape.rows, shape.seq_len
  student = batching.padding(shape)
  teacher: dict[str, Any] = {
    'tokens_BT': np.zeros((B, T), np.int32),
    'segment_ids_BT': np.zeros((B, T), np.int32),
    'positions_BT': np.zeros((B, T), np.int32),
    'loss_weights_BT': np.zeros((B, T), np.float32),
  }
  slots: dict[str, Any] = {
    'student_slots_BT': np.zeros((B, T), np.int32),
    'teacher_slots_BT': np.zeros((B, T), np.int32),
  }
  for i, part in enumerate(parts):
    first_row, slot = i * part_shape.rows, 1
    read = iter(_places(part.teacher_lengths(), part_shape, first_row))
    written = _places(part.student_lengths(), part_shape, first_row)
    for place, (window, hints) in zip(written, part.windows, strict=True):
      batching.write(student, place, _until(window, hints[-1].stop), 0.0)
      student['loss_weights_BT'][place.row, place.span] = 0.0
      for hint in hints:
        theirs = next(read)
        _write_teacher(teacher, theirs, window, hint)
        length = hint.stop - hint.start
        numbers = np.arange(slot, slot + length)
        slot += length
        start = place.span.start + hint.start
        own = slice(start, start + length)
        slots['student_slots_BT'][place.row, own] = numbers
        student['loss_weights_BT'][place.row, own] = 1.0 / length
        # The turn comes last of what the teacher reads.
        stop = theirs.span.stop
        slots['teacher_slots_BT'][theirs.row, stop - length : stop] = numbers
  return batches.HintBatch(
    student=batches.RLBatch(**student),
    teacher=batches.LMBatch(**teacher),
    **slots,
  )


def _places(
  lengths: list[int], shape: batching.BatchShape, first_row: int
) -> list[batching.Place]:
  places = batching.places(lengths, shape)
  return [p._replace(row=first_row + p.row) for p in places]


def _until(window: records.Trajectory, stop: int) -> records.Trajectory:
  """The window's first tokens; no pass consumes the last of them."""
  ids_TMA = window.expert_ids_TMA[:stop].copy()
  ids_TMA[-1] = records.NO_ROUTE
  return dataclasses.replace(
    window,
    tokens_T=window.tokens_T[:stop],
    loss_mask_T=window.loss_mask_T[:stop],
    logprobs_T=window.logprobs_T[:stop],
    expert_ids_TMA=ids_TMA,
    policy_version_T=window.policy_version_T[:stop],
  )


def _write_teacher(
  arrays: dict[str, Any],
  place: batching.Place,
  window: records.Trajectory,
  hint: turns_lib.Hint,
) -> None:
  before_T, after_T = np.split(window.tokens_T[: hint.stop], [hint.at])
  _, row, segment, span = place
  arrays['tokens_BT'][row, span] = np.concatenate(
    [before_T, hint.tokens_T, after_T]
  )
  arrays['segment_ids_BT'][row, span] = segment
  arrays['positions_BT'][row, span] = np.arange(span.stop - span.start)
