"""Puzzles of reasoning-gym, as a taskset of verifiers.

It runs where verifiers and reasoning-gym are; an answer earns what the puzzle's
own scorer gives, from 0 to 1.
"""

from typing import Any

import reasoning_gym
from verifiers import v1


class PuzzleData(v1.TaskData):
  """A puzzle with its answer, as reasoning-gym made it."""

  entry: dict[str, Any]


class PuzzleTask(v1.Task[PuzzleData]):
  """Pays what the scorer of the puzzle's kind gives."""

  @v1.reward(weight=1.0)
  async def answered(self, trace: v1.Trace) -> float:
    entry = self.data.entry
    kind = entry['metadata']['source_dataset']
    return float(
      reasoning_gym.get_score_answer_fn(kind)(trace.last_reply, entry)
    )


class PuzzleConfig(v1.TasksetConfig):
  dataset: str = 'spell_backward'
  size: int = 200
  seed: int = 0
  options: dict[str, Any] = {}


class PuzzleTaskset(v1.Taskset[PuzzleTask, PuzzleConfig]):
  def load(self):
    c = self.config
    for entry in reasoning_gym.create_dataset(
      c.dataset, size=c.size, seed=c.seed, **c.options
    ):
      data = PuzzleData(prompt=entry['question'], entry=entry)
      yield PuzzleTask(data, c.task)


__all__ = ['PuzzleTaskset']
