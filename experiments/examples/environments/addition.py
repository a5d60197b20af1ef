"""Sums of two numbers, as a taskset of verifiers.

It runs where verifiers is, and imports nothing of this project.
"""

import random

from verifiers import v1


class AdditionData(v1.TaskData):
  """A sum, of which the policy sees the numbers."""

  total: int


class AdditionTask(v1.Task[AdditionData]):
  """Pays for the right sum, and a little for an answer made of digits."""

  @v1.reward(weight=1.0)
  async def is_right(self, trace: v1.Trace) -> float:
    return float(trace.last_reply == str(self.data.total))

  @v1.reward(weight=0.2)
  async def digits(self, trace: v1.Trace) -> float:
    reply = trace.last_reply
    return sum(c in '0123456789' for c in reply) / max(len(reply), 1)


class AdditionConfig(v1.TasksetConfig):
  num_tasks: int = 200
  below: int = 50


class AdditionTaskset(v1.Taskset[AdditionTask, AdditionConfig]):
  def load(self):
    draw = random.Random(0)
    for _ in range(self.config.num_tasks):
      a, b = (draw.randrange(self.config.below) for _ in range(2))
      data = AdditionData(prompt=f'{a} + {b} =', total=a + b)
      yield AdditionTask(data, self.config.task)


__all__ = ['AdditionTaskset']
