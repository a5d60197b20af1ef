"""Which groups each step trains on, and how many are under way.

Every step takes `prompts` whole groups: those of the lowest numbers that are
ready. One that is not ready is overtaken, until `overtake` groups of higher
numbers are trained before it; then the step waits for it. So no group is thrown
away for being late, whatever its length, and with `overtake` 0 groups are
trained in the order of their numbers.

Group g is taken by step (g + overtake) // prompts at the latest. Its sampling
begins no more than `max_staleness` versions before that, which bounds staleness
by numbers alone: the capacity rule of Fireworks' recipe for asynchronous RL.
What may be overtaken is taken from what is under way.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupWindow:
  """The numbers of a run that decide which groups are under way.

  Attributes:
    prompts: groups of a step.
    max_staleness: most steps by which a sampling policy may lag.
    overtake: most groups that are trained before one of a lower number.
    steps: steps of the run.
  """

  prompts: int
  max_staleness: int
  overtake: int
  steps: int

  @property
  def open_groups(self) -> int:
    """Most groups that are admitted and not trained."""
    return (self.max_staleness + 1) * self.prompts - self.overtake

  @property
  def lag(self) -> int:
    """Steps by which groups may begin before their number's own step."""
    return (self.open_groups - 1) // self.prompts

  def admitted(self, version: int) -> int:
    """Returns how many groups may be begun in all once a version is there."""
    limit = version * self.prompts + self.open_groups
    return min(limit, self.steps * self.prompts)

  def min_version(self, group: int) -> int:
    """Returns the version that admits a group, the oldest to sample it."""
    return max(0, (group - self.open_groups) // self.prompts + 1)

  def due(self, version: int) -> int:
    """Returns the number below which a version has trained on every group."""
    return max(0, version * self.prompts - self.overtake)


class GroupQueue:
  """The groups that are still to be trained.

  Attributes:
    first: number below which every group is taken.
    ahead: taken groups of higher numbers.
  """

  def __init__(self, window: GroupWindow, taken: Iterable[int] = ()):
    """Goes on after steps that took these groups, all of them."""
    self.window = window
    self.first, self.ahead = 0, set[int]()
    self.take(taken)

  def open(self, version: int) -> list[int]:
    """Returns groups that may be under way at a version, in order."""
    limit = self.window.admitted(version)
    return [g for g in range(self.first, limit) if g not in self.ahead]

  def pick(
    self, step: int, finished: Callable[[Sequence[int]], Collection[int]]
  ) -> list[int]:
    """Returns groups that a step trains on, in order; too few if it must wait.

    Args:
      finished: returns those of some groups that are ready.
    """
    known = self.open(step)
    ready, due = set(finished(known)), self.window.due(step + 1)
    late = [g for g in known if g < due]
    others = [g for g in known if g >= due and g in ready]
    room = self.window.prompts - len(late)
    return [g for g in late if g in ready] + others[:room]

  def take(self, groups: Iterable[int]) -> None:
    """Notes that a step trains on groups."""
    self.ahead |= {*groups}
    while self.first in self.ahead:
      self.ahead.remove(self.first)
      self.first += 1
