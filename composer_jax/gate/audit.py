"""Scores tokens by exactly the weights that sampled them, at any staleness.

The trainer's own pass scores a stale token by newer weights, so that a false
record hides behind the policy's change. Here each token is computed by the
version that consumed it, from cache entries of the versions before: a chain of
passes, one a version, as the engine computed it. What differs then is rounding,
or a lie. The policies kept for this take 2 bytes a parameter and version,
sharded as the trainer's; a step has about 16 bytes a parameter besides.

A step can afford a share of these tokens, and at least one chain. Three lists
take turns: parts whose record, if it were false, would change the gradient most
by what the trainer's own pass saw; parts that are nearer to the trained weights
than the policy's move lets expect; and parts drawn at random, the likelier the
more of the gradient they make. The gradient is that of rewards and of hints.
A lie shows in few tokens, and a pass a version is dear: but for the first of
some chains, parts are scored up to where a second version sampled, so that a
pass holds many.
What the trained version sampled is in the trainer's own pass (of hints, in the
student's) and needs no other one.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from composer_jax.core import records
from composer_jax.gate import parts as parts_lib
from composer_jax.rl import batching, comparison, mismatch
from composer_jax.rl import step as steps
from composer_jax.rl.hints import batching as hint_batching


class Score(NamedTuple):
  """A part, log p of its tokens, and the layers whose routes differ, by token.

  Both are by the weights of the chain, over all tokens of the trajectory.
  """

  part: parts_lib.Part
  logprobs_T: np.ndarray
  differing_T: np.ndarray

  @property
  def log_ratios(self) -> np.ndarray:
    recorded_T = self.part.trajectory.logprobs_T
    ratios_T = self.logprobs_T.astype(np.float64) - recorded_T
    return ratios_T[self.part.compared_T]


# Of the other lists' chains one in so many scores the whole of its first part,
# as each of the first list does.
_WHOLE = 4


class Auditor:
  """Keeps the last policies of a trainer and scores records by them.

  Attributes:
    policies: variables of the last `max_staleness + 1` versions.
  """

  def __init__(
    self,
    functions: steps.Functions,
    shape: batching.BatchShape,
    *,
    max_staleness: int = 0,
    share: float = 0.0,
    seed: int = 0,
  ):
    """Keeps nothing yet; `share` is that of `mismatch.GateOptions`."""
    self.policies: dict[int, Any] = {}
    self._functions, self._max_staleness = functions, max_staleness
    self._shape = dataclasses.replace(shape, rows=functions.parts)
    self._share, self._seed = share, seed
    self._first: int | None = None  # The first version kept.
    self._work = 0.0  # Rows that passes may still compute; below 0 a debt.
    self._chains = 0  # How many `choose` has run, so that its lists take turns.

  def keep(self, version: int, values: Any) -> None:
    """Keeps a copy of a policy's values and forgets those too old."""
    if self._first is None:
      self._first = version
    if self._max_staleness:
      self.policies[version] = self._functions.compact(values)
    for old in [v for v in self.policies if v < version - self._max_staleness]:
      del self.policies[old]

  def knows(self, part: parts_lib.Part) -> bool:
    """True if the policies of a part are kept."""
    return set(part.versions) <= self.policies.keys()

  def is_valid(self, version: int, now: int) -> bool:
    """True if a record may name a version in the step of version `now`."""
    return now - self._max_staleness <= version <= now

  def lacks(self, part: parts_lib.Part) -> bool:
    """True if a part is from before the first policy that was kept."""
    return self._first is None or bool(part.consumed_T.min() < self._first)

  def choose(
    self,
    parts: Sequence[parts_lib.Part],
    suspicion: Sequence[tuple[float, float, float]],
    key: int,
    rows: float,
  ) -> list[Score]:
    """Scores parts of the known versions, chain by chain, up to the share.

    That is a share of their tokens, and passes over that share of the step's
    rows, but for the first chain. A share of 1 is everything.

    Args:
      parts: parts that need passes of their own.
      suspicion: ranks of each part (`Suspicion`); the largest goes first.
      key: number that, with the seed, determines what is drawn at random.
      rows: rows of the step, of which each took a pass and its gradient.
    """
    known = [i for i, part in enumerate(parts) if self.knows(part)]
    # Drawn without replacement, in proportion (Efraimidis and Spirakis 2006).
    draws = np.random.default_rng((self._seed, key)).exponential(
      size=len(parts)
    )
    lists = [
      *(sorted(known, key=lambda i: -suspicion[i][rank]) for rank in range(2)),
      sorted(known, key=lambda i: draws[i] / max(suspicion[i][2], _LEAST)),
    ]
    begun = [p if self._share == 1 else p.beginning() for p in parts]
    scores: list[Score] = []
    seen: set[int] = set()
    left = self._share * sum(int(parts[i].compared_T.sum()) for i in known)
    share = self._share if self._share < 1 else math.inf
    self._work = min(self._work, 0.0) + share * rows
    while len(seen) < len(known) and left > 0 and (self._work > 0 or not seen):
      turn = self._chains % len(lists)
      self._chains += 1
      rotated = zip(*lists[turn:], *lists[:turn], strict=True)
      order = dict.fromkeys(itertools.chain.from_iterable(rotated))
      first, *others = (i for i in order if i not in seen)
      is_whole = turn == 0 or self._chains % _WHOLE == 0
      chosen = [(parts if is_whole else begun)[first]]
      seen.add(first)
      versions = set(chosen[0].versions)
      for i in others:
        # No other part may add a pass to those of the first.
        is_free = versions.issuperset(begun[i].versions)
        if is_free and self._fits([*chosen, begun[i]]):
          chosen.append(begun[i])
          seen.add(i)
      self._work -= self._shape.rows * len(versions)
      scores += self._chain(chosen)
      left -= sum(int(part.compared_T.sum()) for part in chosen)
    return scores

  def score(self, parts: Sequence[parts_lib.Part]) -> list[Score]:
    """Scores all parts, whatever it costs."""
    scores: list[Score] = []
    chosen: list[parts_lib.Part] = []
    for part in parts:
      if not self._fits([*chosen, part]):
        scores += self._chain(chosen)
        chosen = []
      chosen.append(part)
    return scores + (self._chain(chosen) if chosen else [])

  def _fits(self, parts: Sequence[parts_lib.Part]) -> bool:
    """True if a microbatch holds the parts."""
    lengths = [part.stop for part in parts]
    return not any(p.batch for p in batching.places(lengths, self._shape))

  def _chain(self, parts: Sequence[parts_lib.Part]) -> list[Score]:
    zeros = [0.0] * len(parts)
    windows = [hint_batching.until(p.trajectory, p.stop) for p in parts]
    packed = batching.pack(windows, zeros, self._shape)
    (batch,), places = packed.microbatches, packed.places
    consumed_BT = np.full(batch.tokens_BT.shape, -1)
    for part, place in zip(parts, places, strict=True):
      consumed_BT[place.row, place.span] = part.consumed_T[: part.stop]
    logprobs = [np.zeros(len(p.trajectory), np.float32) for p in parts]
    differing = [np.zeros(len(p.trajectory), np.int32) for p in parts]
    entries = None
    for version in sorted({v for part in parts for v in part.versions}):
      batch = batch.replace(own_BT=consumed_BT == version)
      values = self.policies[version]
      scores, entries = self._functions.chain(values, batch, entries)
      logprobs_BT, differing_BT = map(
        np.asarray, (scores.logprobs_BT, scores.differing_BT)
      )
      for i, (part, (_, row, _, span)) in enumerate(
        zip(parts, places, strict=True)
      ):
        # Compared tokens were sampled by the pass over the token before.
        stop = part.stop
        sampled_T = part.trajectory.policy_version_T[:stop] == version
        logprobs[i][:stop][sampled_T] = logprobs_BT[row, span][sampled_T]
        own_T = part.consumed_T[:stop] == version
        differing[i][:stop][own_T] = differing_BT[row, span][own_T]
    return [Score(*s) for s in zip(parts, logprobs, differing, strict=True)]


def measure(scores: Sequence[Score], num_layers: int) -> dict[str, Any]:
  """Mismatch of tokens scored by their own weights, replayed and afresh.

  'exact_agreement' is the share of replayed routes, by token and layer, that
  the weights which consumed the token choose again.
  """
  metrics: dict[str, Any] = {}
  for is_recorded, suffix in ((True, '_exact'), (False, '_afresh')):
    chosen = [s for s in scores if s.part.is_recorded == is_recorded]
    ratios = [s.log_ratios for s in chosen]
    metrics[f'tokens{suffix}'] = sum(map(len, ratios))
    if not chosen:
      continue
    kl = mismatch.k3(np.concatenate(ratios)).mean()
    metrics[f'mismatch_kl{suffix}'] = float(kl)
    if is_recorded:
      # No pass needs to consume the last token.
      computed = [s.differing_T[: s.part.stop - 1] for s in chosen]
      differing = sum(int(differing_T.sum()) for differing_T in computed)
      routes = num_layers * sum(map(len, computed))
      metrics['exact_agreement'] = 1 - differing / max(routes, 1)
  return metrics


def scores_of(
  trajectories: Sequence[records.Trajectory],
  places: Sequence[batching.RowSpan],
  scored: Sequence[steps.Scores],
  *,
  first: int = 0,
  replay: bool,
) -> list[Score]:
  """What the trainer's own pass says of trajectories, numbered from `first`."""
  logprobs = comparison.per_token(places, [s.logprobs_BT for s in scored])
  differing = comparison.per_token(places, [s.differing_BT for s in scored])
  return [
    Score(
      parts_lib.Part(i, t, t.consumed_version_T, t.loss_mask_T, replay), *arrays
    )
    for i, (t, *arrays) in enumerate(
      zip(trajectories, logprobs, differing, strict=True), first
    )
  ]


def free_and_costly(
  own: Sequence[Score], version: int, *, replay: bool
) -> tuple[list[Score], list[parts_lib.Part]]:
  """Divides what the trainer's own pass scored into parts.

  Returns:
    Scores of the parts that the trained version sampled itself, which are
    exact, and the parts that need passes of their own.
  """
  free, costly = [], []
  for score in own:
    i, t = score.part[:2]
    for part in parts_lib.parts_of(i, t, replay=replay):
      is_own = bool((part.consumed_T == version).all())
      if is_own and part.is_recorded == replay:
        free.append(score._replace(part=part))
      else:
        costly.append(part)
  return free, costly


# Least divisor, and the age from which on tokens count as one age.
_TINY, _OLDEST = 1e-30, 99

# Weight of a part that no gradient comes from, among those drawn at random.
_LEAST = 1e-6


class Suspicion:
  """Ranks parts by what the trainer's own pass says of a step's trajectories.

  A move of the policy changes log p of a token by about (1 - p) times what is
  common to the tokens of its age.
  """

  def __init__(self, own: Sequence[Score], version: int, layers: int):
    self._version, self._layers = version, layers
    columns = zip(*map(self._terms, own), strict=True)
    ages_Z, surprise_Z, change_Z, square_Z = map(np.concatenate, columns)

    def by_age(x_Z, of_Z):
      sums = [
        np.bincount(ages_Z, weights=w_Z, minlength=1) for w_Z in (x_Z, of_Z)
      ]
      return sums[0] / np.maximum(sums[1], _TINY)

    self._changes = by_age(change_Z, surprise_Z)
    self._squares = by_age(square_Z, surprise_Z**2)
    self._squares[0] = 0
    stale = sum(int((s.part.consumed_T < version).sum()) for s in own)
    self._differing = sum(int(s.differing_T.sum()) for s in own) / max(stale, 1)

  def _terms(self, score: Score) -> tuple[np.ndarray, ...]:
    """Ages of tokens, 1 - p, changes of ratios, and squares of log ratios."""
    part, ratios_Z = score.part, score.log_ratios
    ages_Z = self._version - part.trajectory.policy_version_T[part.compared_T]
    # By the trainer, since a record may lie.
    logprobs_Z = score.logprobs_T[part.compared_T].astype(np.float64)
    change_Z = np.abs(np.expm1(np.clip(ratios_Z, -3.0, 1.0)))
    surprise_Z = -np.expm1(np.minimum(logprobs_Z, 0))
    return np.clip(ages_Z, 0, _OLDEST), surprise_Z, change_Z, ratios_Z**2

  def ranks(
    self, score: Score, advantage: float, hints: float
  ) -> tuple[float, float, float]:
    """Returns the ranks of a part of which hints weigh so much.

    How far a false record would change the gradient, beyond the policy's move;
    the size of the gradient, times how much nearer to the trained weights its
    stale tokens are than by that move; and that size alone.
    """
    ages_Z, surprise_Z, change_Z, square_Z = self._terms(score)
    change_Z = change_Z - self._changes[ages_Z] * surprise_Z
    change = max(float(change_Z.sum()), 0.0)
    if score.part.is_recorded:
      stale = (score.part.consumed_T < self._version).sum()
      differing = score.differing_T.sum() - self._differing * stale
      change += max(float(differing), 0.0) / self._layers
    surprise = float(surprise_Z.sum())
    # Of hints a turn has a weight, however many tokens it has.
    size = abs(advantage) * surprise + hints
    force = abs(advantage) + hints / (1 + surprise)
    due = float((self._squares[ages_Z] * surprise_Z**2).sum())
    seen = float(square_Z[ages_Z > 0].sum())
    near = (due / max(seen, _TINY)) ** 0.5
    return force * change, size * near, size
