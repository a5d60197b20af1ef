"""Chooses how many tokens a pass of decode drafts, by measured tokens a second.

Drafts pay while steps are bound by memory and drafts come true; with many rows,
a distribution of high entropy or a large mixture of experts they cost more than
they give. So each depth is tried for a few dispatches, then the fastest one
runs. From time to time another one is tried again, more rarely while the
fastest stays the same, so that trials of slow ones cost less than a hundredth.
Plain decoding runs unless drafts are faster by more than measurements vary.

Nothing here changes a token: those of all depths are equal.
"""

import dataclasses

import numpy as np

# Dispatches of a trial, whose first follows another depth and is not measured.
_TRIAL = 4
# Dispatches between two trials, at first and at most.
_GAPS = (32, 1024)
# Weight of what was measured before: about ten dispatches count.
_DECAY = 0.9
# How many times the rate of plain decoding a depth must reach.
_MARGIN = 1.02


@dataclasses.dataclass
class _Load:
  """What is known of one number of rows.

  Attributes:
    due: depths, the one that has waited longest for a trial first.
    sums: tokens and seconds of each depth, of which older ones weigh less.
    best: the fastest depth at the last choice.
    current: depth that runs, for `left` further dispatches.
    untried: number of depths whose first trial is still to come.
  """

  due: list[int]
  untried: int
  sums: dict[int, np.ndarray]
  best: int
  current: int = 0
  left: int = 0
  gap: int = _GAPS[0]
  is_trial: bool = True


class Controller:
  """Chooses among depths, for each number of rows up to a factor of two.

  Attributes:
    kept_X: number of passes over a session, of those with drafts, that kept 1,
      2, ... tokens.
  """

  def __init__(self, depths: tuple[int, ...]):
    """Takes ascending depths; of a single one there is nothing to choose."""
    self._depths = depths
    self._loads: dict[int, _Load] = {}
    self.kept_X = np.zeros(max(depths) + 1, np.int64)

  def choose(self, num_rows: int) -> int:
    """Returns the depth of the next dispatch."""
    if len(self._depths) == 1:
      return self._depths[0]
    load = self._load(num_rows)
    if not load.left:
      self._turn(load)
    load.left -= 1
    return load.current

  def measure(
    self, depth: int, num_rows: int, tokens: int, seconds: float
  ) -> None:
    """Takes what a dispatch gave, and the time since the one before it."""
    sums = self._load(num_rows).sums
    sums[depth] = _DECAY * sums[depth] + (tokens, seconds)

  def _load(self, num_rows: int) -> _Load:
    depths = self._depths
    sums = {depth: np.zeros(2) for depth in depths}
    load = _Load(list(depths), len(depths), sums, depths[0])
    return self._loads.setdefault(num_rows.bit_length(), load)

  def _turn(self, load: _Load) -> None:
    """Begins a trial, or runs the fastest depth until the next."""
    best = self._best(load)
    if load.untried or not load.is_trial:
      load.untried = max(load.untried - 1, 0)
      is_other = lambda depth: load.untried or depth != best
      load.current = next(filter(is_other, load.due))
      load.due.remove(load.current)
      load.due.append(load.current)
      load.is_trial, load.left = True, _TRIAL
      return
    longer = min(2 * load.gap, _GAPS[1])
    load.gap = longer if best == load.best else _GAPS[0]
    load.best = load.current = best
    load.is_trial, load.left = False, load.gap

  def _best(self, load: _Load) -> int:
    def rate(depth):
      tokens, seconds = load.sums[depth]
      return tokens / seconds if seconds else 0.0

    plain, best = self._depths[0], max(self._depths, key=rate)
    return best if rate(best) > _MARGIN * rate(plain) else plain
