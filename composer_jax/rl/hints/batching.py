"""Packs hinted turns for student and teacher, with maps between their tokens.

The teacher reads the student's context, the hint, and then the student's turn;
nothing is sampled. The hint and other windows in the row shift its tokens, and
no shape would show a shift that is wrong by one. So each token of a turn gets
the same number on both sides, its slot, from the record.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from composer_jax.core import batches, checks, records
from composer_jax.core import turns as turns_lib
from composer_jax.rl import batching


class Student(NamedTuple):
  """A window with hints, and its place in the student's rows."""

  window: records.Trajectory
  hints: list[turns_lib.Hint]
  place: batching.RowSpan


class _Part:
  """The rows of a microbatch that one group of devices holds.

  Only these devices exchange the teacher's states, so a turn's two sides must
  be in one part.
  """

  def __init__(self, shape: batching.BatchShape):
    self.windows: list[tuple[records.Trajectory, list[turns_lib.Hint]]] = []
    self._shape = shape

  @property
  def hints(self) -> list[turns_lib.Hint]:
    return [hint for _, hints in self.windows for hint in hints]

  def add(self, window: records.Trajectory, hint: turns_lib.Hint) -> bool:
    """Adds a hint if there is room for it; returns whether there was."""
    before = [(t, list(hints)) for t, hints in self.windows]
    # A student's token has a single slot, so a second hint on the same turn
    # needs another copy of the window.
    last = self.windows[-1] if self.windows else None
    if last and last[0] is window and last[1][-1].stop <= hint.start:
      last[1].append(hint)
    else:
      self.windows.append((window, [hint]))
    rows = [p.batch for side in self.places() for p in side]
    num_tokens = sum(h.stop - h.start for h in self.hints)
    max_tokens = num_slots(self._shape.rows, self._shape.seq_len)
    fits = not any(rows) and num_tokens <= max_tokens
    if not fits:
      self.windows = before
    return fits

  def places(self) -> tuple[list[batching.RowSpan], list[batching.RowSpan]]:
    """Places of the student's windows, and of the teacher's text of each hint.

    Windows end with their last hinted turn.
    """
    student_lengths = [hints[-1].stop for _, hints in self.windows]
    teacher_lengths = [hint.stop + len(hint.tokens_T) for hint in self.hints]
    return (
      batching.places(student_lengths, self._shape),
      batching.places(teacher_lengths, self._shape),
    )


def num_slots(rows: int, seq_len: int) -> int:
  """Slots of a part: a quarter of its tokens, but at least a whole row."""
  return max(seq_len, rows * seq_len // 4)


def pack(
  groups: Sequence[records.Group],
  shape: batching.BatchShape,
  *,
  num_parts: int = 1,
) -> tuple[list[batches.HintBatch], dict[str, int], list[Student]]:
  """Packs the hints of all rollouts; empty ones are left out.

  Groups are sorted by id. `num_parts` groups of devices each hold an equal
  number of the rows.

  Returns:
    Microbatches, metrics (the number of hints in them, of tokens in their
    turns, and of hints too long to share a row with their turn), and students.

  Raises:
    ValueError: a hint is on tokens that the policy did not sample, or routes
      cannot be replayed.
  """
  checks.divides(num_parts, 'the groups of devices', shape.rows, 'rows')
  rows = shape.rows // num_parts
  part_shape = dataclasses.replace(shape, rows=rows, shards=1)
  parts: list[_Part] = []
  dropped, checked = 0, None
  for i, window, hint in _hints(groups):
    is_turn = window.loss_mask_T[hint.start : hint.stop].all()
    if hint.start < 1 or not is_turn:
      raise ValueError(
        f'A hint ({hint.kind}) is on tokens {hint.start} to {hint.stop} of a '
        f'window of {len(window)}; all must have been sampled, after at least '
        'one token of context.'
      )
    if window is not checked:
      batching.check_routes(i, window.expert_ids_TMA, shape)
      checked = window
    if not len(hint.tokens_T):
      # A teacher without a hint could only hold the student back.
      continue
    if hint.stop + len(hint.tokens_T) > shape.seq_len:
      dropped += 1
    elif not parts or not parts[-1].add(window, hint):
      parts.append(_Part(part_shape))
      fits = parts[-1].add(window, hint)
      assert fits, (hint, part_shape)
  packed = [
    microbatch(parts[i : i + num_parts], shape, part_shape.rows)
    for i in range(0, len(parts), num_parts)
  ]
  packed_hints = [hint for part in parts for hint in part.hints]
  counts = {
    'hints': len(packed_hints),
    'hint_tokens': sum(h.stop - h.start for h in packed_hints),
    'hints_dropped': dropped,
  }
  students = []
  for i, part in enumerate(parts):
    batch, offset = i // num_parts, i % num_parts * part_shape.rows
    for place, window in zip(part.places()[0], part.windows, strict=True):
      place = place._replace(batch=batch, row=offset + place.row)
      students.append(Student(*window, place))
  return packed, counts, students


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


def microbatch(
  parts: list[_Part], shape: batching.BatchShape, part_rows: int
) -> batches.HintBatch:
  """Returns the rows of all parts; of no part, a microbatch of padding."""
  student, teacher = batching.padding(shape), batching.padding(shape)
  slots: Any = np.zeros((2, shape.rows, shape.seq_len), np.int32)
  student_slots_BT, teacher_slots_BT = slots
  for i, part in enumerate(parts):
    slot = 1
    student_places, teacher_places = (
      [p._replace(row=i * part_rows + p.row) for p in side]
      for side in part.places()
    )
    unused_places = iter(teacher_places)
    placed_windows = zip(student_places, part.windows, strict=True)
    for place, (window, hints) in placed_windows:
      batching.write(student, place, until(window, hints[-1].stop), 0.0)
      student['loss_weights_BT'][place.row, place.span] = 0.0
      for hint in hints:
        _, row, segment, span = next(unused_places)
        tokens_T = np.insert(
          window.tokens_T[: hint.stop], hint.at, hint.tokens_T
        )
        teacher['tokens_BT'][row, span] = tokens_T
        teacher['segment_ids_BT'][row, span] = segment
        teacher['positions_BT'][row, span] = np.arange(len(tokens_T))
        length = hint.stop - hint.start
        start = place.span.start + hint.start
        turn = place.row, slice(start, start + length)
        slots_T = np.arange(slot, slot + length)
        slot += length
        student_slots_BT[turn] = slots_T
        student['loss_weights_BT'][turn] = 1.0 / length
        # The teacher's text ends with the turn.
        teacher_slots_BT[row, span.stop - length : span.stop] = slots_T
  fields = [field.name for field in dataclasses.fields(batches.LMBatch)]
  return batches.HintBatch(
    student=batches.RLBatch(**student),
    teacher=batches.LMBatch(**{name: teacher[name] for name in fields}),
    student_slots_BT=student_slots_BT,
    teacher_slots_BT=teacher_slots_BT,
  )


def until(window: records.Trajectory, stop: int) -> records.Trajectory:
  """The window's first tokens; the last one has no route."""
  ids_TMA = window.expert_ids_TMA[:stop].copy()
  ids_TMA[-1] = records.NO_ROUTE
  names = ('tokens_T', 'loss_mask_T', 'logprobs_T', *records.VERSIONS)
  return dataclasses.replace(
    window,
    **{name: getattr(window, name)[:stop] for name in names},
    expert_ids_TMA=ids_TMA,
  )
