"""Chooses how many tokens a pass of decode drafts, by measured tokens a second.

Drafts pay while steps are bound by memory and drafts come true; with many rows,
a distribution of high entropy or a large mixture of experts they cost more than
they give. So plain decoding goes first, each other depth is tried for a few
dispatches, then the fastest one runs. Others are tried again from time to time,
as often as the time that their trials lose stays below a hundredth. Plain
decoding runs unless drafts are faster by more than measurements vary. Seconds
are medians, since a host that is busy for a moment makes any depth look slow.

Nothing here changes a token: those of all depths are equal.
"""

import collections
import statistics
from typing import Any

import numpy as np

# Dispatches of a trial.
_TRIAL = 3
# Dispatches between two trials, at least.
_GAP = 32
# Part of the time that trials may lose.
_SHARE = 0.01
# Dispatches that count, of a depth that runs; the latest ones.
_COUNTED = 16
# How many times the rate of plain decoding a depth must reach.
_MARGIN = 1.02
# Most seconds that a dispatch is taken to last, in those of the best depth.
_DEAREST = 4


class _Load:
  """What is known of one number of rows."""

  def __init__(self, depths: tuple[int, ...]):
    # (tokens, seconds) of the latest dispatches of each depth.
    latest = collections.deque[tuple[int, float]]
    self.measured = {depth: latest(maxlen=_COUNTED) for depth in depths}
    self.due = [*depths[1:], depths[0]]  # what waits longest for a trial first
    # Depth of so many further dispatches; and whether they are a trial.
    self.current, self.left, self.is_trial = depths[0], _GAP, False
    self.budget = 0.0  # seconds that trials may lose

  def seconds(self, depth: int) -> float:
    return statistics.median_low([s for _, s in self.measured[depth]] or [0.0])

  def rate(self, depth: int) -> float:
    tokens = [tokens for tokens, _ in self.measured[depth]]
    seconds = self.seconds(depth) * len(tokens)
    return sum(tokens) / seconds if seconds else 0.0

  def loss(self, depth: int, best: int) -> float:
    """Returns the seconds that a trial loses against the best depth.

    What was never measured loses what the next smaller depth does.
    """
    known = [d for d in self.measured if d <= depth and self.measured[d]]
    if not known or not self.rate(best):
      return 0.0
    slower = max(0.0, 1 - self.rate(known[-1]) / self.rate(best))
    most = _DEAREST * self.seconds(best)
    return slower * _TRIAL * min(self.seconds(known[-1]), most)


class Controller:
  """Chooses among depths, for each number of rows up to a factor of two.

  Attributes:
    kept_X: number of passes over a session, of those with drafts, that kept 1,
      2, ... tokens.
  """

  def __init__(self, depths: tuple[int, ...]):
    """Takes ascending depths; of a single one there is nothing to choose."""
    self._depths = depths
    self._loads = collections.defaultdict[Any, _Load](lambda: _Load(depths))
    self.kept_X = np.zeros(max(depths) + 1, np.int64)

  def choose(self, num_rows: int, truncates: bool = False) -> int:
    """Returns the depth of the next dispatch, of a program that truncates."""
    if len(self._depths) == 1:
      return self._depths[0]
    load = self._loads[num_rows.bit_length(), truncates]
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
    truncates: bool = False,
  ) -> None:
    """Takes the counts and tokens of a report; None for unknown seconds."""
    depth = 0
    if counts_X is not None:
      depth = len(counts_X) - 1
      self.kept_X[: depth + 1] += counts_X
    if seconds is not None and depth in self._depths:
      load = self._loads[num_rows.bit_length(), truncates]
      load.measured[depth].append((tokens, seconds))
      load.budget += _SHARE * load.seconds(depth)

  def _turn(self, load: _Load) -> None:
    """Begins a trial if time allows, or goes on with the best depth."""
    plain, best = self._depths[0], max(self._depths, key=load.rate)
    if load.rate(best) <= _MARGIN * load.rate(plain):
      best = plain
    if load.is_trial:
      load.budget -= load.loss(load.current, best)
    due = next(depth for depth in load.due if depth != best)
    if not load.is_trial and load.loss(due, best) <= max(0.0, load.budget):
      load.due.remove(due)
      load.due.append(due)
      # One good trial must tell, whatever was measured before.
      for _ in range(len(load.measured[due]) - _TRIAL):
        load.measured[due].popleft()
      load.is_trial, load.current, load.left = True, due, _TRIAL
    else:
      load.is_trial, load.current, load.left = False, best, _GAP
