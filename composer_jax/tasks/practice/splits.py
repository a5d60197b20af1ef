"""Splits of tasks that are read from files, and the order of their tasks."""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.tasks import curriculum


def is_held_out(name: str) -> bool:
  """True for the tenth of all names that training never sees."""
  return hashlib.sha256(name.encode()).digest()[0] % 10 == 0


def source_of(
  tasks: Sequence[Any],
  *,
  split: str,
  seed: int,
  labels_of: Callable[[Any], tuple[str, ...]] = lambda task: (),
) -> environments.TaskSource:
  """Returns tasks in the order of a seed; more groups play them again.

  Args:
    tasks: tasks of the split, each with a `task_id`.
    labels_of: task -> labels by which a curriculum tells tasks apart.
  """
  chosen = [*tasks]
  random.Random(f'{seed}/{split}').shuffle(chosen)
  candidates = [
    curriculum.Candidate(task_id=t.task_id, labels=labels_of(t)) for t in chosen
  ]
  return environments.TaskSource(
    of_group=lambda group: chosen[group % len(chosen)],
    of_id={t.task_id: t for t in chosen}.__getitem__,
    pool=lambda step: candidates,
  )


def listed(
  tasks: Sequence[Any], count: int, *, split: str, seed: int, place: str
) -> list[Any]:
  """Returns the first `count` tasks in the order of a seed; 0 for all.

  Raises:
    ValueError: there are fewer in the file or folder `place`.
  """
  chosen = [*tasks]
  random.Random(f'{seed}/{split}').shuffle(chosen)
  if len(chosen) < max(count, 1):
    raise ValueError(
      f'{place} has {len(chosen)} {split} tasks; --tasks asks for '
      f'{count or "all"}.'
    )
  return chosen[: count or None]
