"""Chooses how many tokens a pass of decode drafts, by measured tokens a second.

Drafts pay while steps are bound by memory and drafts come true; with many rows,
a distribution of high entropy or a large mixture of experts they cost more than
they give. So each depth is tried for a few dispatches, then the fastest one
runs. Others are tried again from time to time, as often as the time that their
trials lose stays below a hundredth. Plain decoding runs unless drafts are
faster by more than measurements vary.

Nothing here changes a token: those of all depths are equal.
"""

import numpy as np

# Dispatches of a trial.
_TRIAL = 4
# Dispatches between two trials, at least.
_GAP = 32
# Part of the time that trials may lose.
_SHARE = 0.01
# Weight of what was measured before: about ten dispatches count.
_DECAY = 0.9
# How many times the rate of plain decoding a depth must reach.
_MARGIN = 1.02


class _Load:
  """What is known of one number of rows."""

  def __init__(self, depths: tuple[int, ...]):
    # Tokens, seconds and dispatches of each depth; older ones weigh less.
    self.sums = {depth: np.zeros(3) for depth in depths}
    self.due = list(depths)  # the one that waits longest for a trial first
    self.untried = len(depths)
    self.current = self.left = 0  # depth of so many further dispatches
    self.is_trial, self.budget = False, 0.0  # seconds that trials may lose

  def rate(self, depth: int) -> float:
    tokens, seconds, _ = self.sums[depth]
    return tokens / seconds if seconds else 0.0

  def loss(self, depth: int, best: int) -> float:
    """Returns the seconds that a trial loses against the best depth."""
    _, seconds, count = self.sums[depth]
    if not count or not self.rate(best):
      return 0.0
    slower = 1 - self.rate(depth) / self.rate(best)
    return max(0.0, slower * _TRIAL * seconds / count)


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

  def take(
    self,
    counts_X: np.ndarray | None,
    num_rows: int,
    tokens: int,
    seconds: float | None,
  ) -> None:
    """Takes the counts and tokens of a report; None for unknown seconds."""
    depth = 0
    if counts_X is not None:
      depth = len(counts_X) - 1
      self.kept_X[: depth + 1] += counts_X
    if seconds is not None and depth in self._depths:
      load = self._load(num_rows)
      load.sums[depth] = _DECAY * load.sums[depth] + (tokens, seconds, 1)
      load.budget += _SHARE * seconds

  def _load(self, num_rows: int) -> _Load:
    load = _Load(self._depths)
    return self._loads.setdefault(num_rows.bit_length(), load)

  def _turn(self, load: _Load) -> None:
    """Begins a trial if time allows, or goes on with the best depth."""
    plain, best = self._depths[0], max(self._depths, key=load.rate)
    if load.rate(best) <= _MARGIN * load.rate(plain):
      best = plain
    if load.is_trial:
      load.budget -= load.loss(load.current, best)
    due = load.due[load.due[0] == best and not load.untried]
    is_affordable = load.loss(due, best) <= load.budget
    if load.untried or (is_affordable and not load.is_trial):
      load.untried = max(0, load.untried - 1)
      load.is_trial, load.current, load.left = True, due, _TRIAL
      load.due.remove(due)
      load.due.append(due)
    else:
      load.is_trial, load.current, load.left = False, best, _GAP
