"""Scores tokens by exactly the weights that sampled them, at any staleness.

The trainer's own pass scores a stale token by newer weights, so that a false
record hides behind the policy's change. Here each token is computed by the
version that consumed it, from cache entries of the versions before: a chain of
passes, one a version, as the engine computed it. What differs then is rounding,
or a lie. The policies kept for this take 2 bytes a parameter and version,
sharded as the trainer's; a step has about 16 bytes a parameter besides.

A step can afford a share of its rows. Half of them go to the trajectories whose
record, if it were false, would change the gradient most by what the trainer's
own pass saw; the others are drawn at random. Tokens that the trained version
sampled itself need no other pass, and are all compared.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from composer_jax.core import records
from composer_jax.rl import batching, comparison, mismatch
from composer_jax.rl import step as steps


class Part(NamedTuple):
  """The tokens of a trajectory that one chain of passes can score.

  Attributes:
    index: number of the trajectory among the candidates.
    trajectory: its record, without routes where these are not of this chain.
    consumed_T: version that computes each token.
    compared_T: true for the tokens to be compared.
    is_recorded: true if the routes are replayed.
  """

  index: int
  trajectory: records.Trajectory
  consumed_T: np.ndarray
  compared_T: np.ndarray
  is_recorded: bool


class Score(NamedTuple):
  """A part, log p of its tokens, and the layers whose routes differ, by token.

  Both are by the weights of the chain, over all tokens of the trajectory.
  """

  part: Part
  logprobs_T: np.ndarray
  differing_T: np.ndarray

  @property
  def log_ratios(self) -> np.ndarray:
    recorded_T = self.part.trajectory.logprobs_T
    ratios_T = self.logprobs_T.astype(np.float64) - recorded_T
    return ratios_T[self.part.compared_T]


def parts_of(
  index: int, trajectory: records.Trajectory, *, replay: bool
) -> Iterator[Part]:
  """Yields the parts that cover a trajectory's sampled tokens.

  Routes and `consumed_version_T` are those of the last time that the cache was
  computed. A token that was sampled before that read another cache: that of its
  own version alone, or one of several versions, which nothing records and no
  part covers.
  """
  t = trajectory
  sampled_by, read, consumed_T = (getattr(t, name) for name in records.VERSIONS)
  # The version that consumed the token before, and thus sampled this one.
  before_T = np.insert(consumed_T[:-1], 0, consumed_T[0])
  is_last_T = (read == consumed_T[0]) & (sampled_by == before_T)
  if (compared_T := t.loss_mask_T & is_last_T).any():
    yield Part(index, t, consumed_T, compared_T, replay)
  is_whole_T = t.loss_mask_T & ~is_last_T & (read == sampled_by)
  if is_whole_T.any():
    ids_TMA = np.full_like(t.expert_ids_TMA, records.NO_ROUTE)
    t = dataclasses.replace(t, expert_ids_TMA=ids_TMA)
  for version in np.unique(sampled_by[is_whole_T]):
    compared_T = is_whole_T & (sampled_by == version)
    yield Part(index, t, np.full(len(t), version), compared_T, False)


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
    self._share, self._seed, self._credit = share, seed, 0.0

  def keep(self, version: int, values: Any) -> None:
    """Keeps a copy of a policy's values and forgets those too old."""
    if self._max_staleness:
      self.policies[version] = self._functions.compact(values)
    for old in [v for v in self.policies if v < version - self._max_staleness]:
      del self.policies[old]

  def knows(self, part: Part) -> bool:
    """True if the policies of a part are kept."""
    return set(part.consumed_T.tolist()) <= self.policies.keys()

  def choose(
    self, parts: Sequence[Part], suspicion: Sequence[float], rows: int, key: int
  ) -> list[Score]:
    """Scores parts of the known versions while a step's share lasts.

    Args:
      parts: parts that need passes of their own.
      suspicion: rank of each candidate trajectory; the largest goes first.
      rows: rows that the step trains on.
      key: number that, with the seed, determines the random half.
    """
    self._credit = min(self._credit + self._share * rows, self._share * rows)
    known = list(filter(self.knows, parts))
    ranked = sorted(range(len(known)), key=lambda i: -suspicion[known[i].index])
    drawn = np.random.default_rng((self._seed, key)).permutation(len(known))
    pairs = zip(ranked, drawn.tolist(), strict=True)
    waiting = [known[i] for i in dict.fromkeys(i for p in pairs for i in p)]
    scores: list[Score] = []
    while waiting and self._credit > 0:
      count = self._fitting(waiting)
      scores += self._chain(waiting[:count])
      waiting = waiting[count:]
    return scores

  def score(self, parts: Sequence[Part]) -> list[Score]:
    """Scores all parts, whatever it costs."""
    scores: list[Score] = []
    while len(scores) < len(parts):
      rest = parts[len(scores) :]
      scores += self._chain(rest[: self._fitting(rest)])
    return scores

  def _fitting(self, parts: Sequence[Part]) -> int:
    """Returns how many of the first parts a microbatch holds."""
    for count in range(1, len(parts)):
      lengths = [len(p.trajectory) for p in parts[: count + 1]]
      if any(place.batch for place in batching.places(lengths, self._shape)):
        return count
    return len(parts)

  def _chain(self, parts: Sequence[Part]) -> list[Score]:
    zeros = [0.0] * len(parts)
    packed = batching.pack([p.trajectory for p in parts], zeros, self._shape)
    (batch,), places = packed.microbatches, packed.places
    consumed_BT = np.full(batch.tokens_BT.shape, -1)
    for part, place in zip(parts, places, strict=True):
      consumed_BT[place.row, place.span] = part.consumed_T
    logprobs = [np.zeros(len(p.trajectory), np.float32) for p in parts]
    differing = [np.zeros(len(p.trajectory), np.int32) for p in parts]
    entries = None
    for version in sorted({int(v) for p in parts for v in p.consumed_T}):
      batch = batch.replace(own_BT=consumed_BT == version)
      values = self.policies[version]
      scores, entries = self._functions.chain(values, batch, entries)
      self._credit -= self._shape.rows
      logprobs_BT, differing_BT = map(
        np.asarray, (scores.logprobs_BT, scores.differing_BT)
      )
      for i, (part, (_, row, _, span)) in enumerate(
        zip(parts, places, strict=True)
      ):
        # Compared tokens were sampled by the pass over the token before.
        sampled_T = part.trajectory.policy_version_T == version
        logprobs[i][sampled_T] = logprobs_BT[row, span][sampled_T]
        own_T = part.consumed_T == version
        differing[i][own_T] = differing_BT[row, span][own_T]
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
      # No pass consumes the last token.
      differing = sum(int(s.differing_T[:-1].sum()) for s in chosen)
      routes = num_layers * sum(len(s.differing_T) - 1 for s in chosen)
      metrics['exact_agreement'] = 1 - differing / max(routes, 1)
  return metrics


def free_and_costly(
  packed: batching.PackedTrajectories,
  scored: Sequence[steps.Scores],
  others: Sequence[records.Trajectory],
  version: int,
  *,
  replay: bool,
) -> tuple[list[Score], list[Score], list[Part]]:
  """Divides candidates by what the trainer's own pass says of them.

  Candidates are the trained trajectories, in their order, then `others`.

  Returns:
    Scores of the trainer's pass: of the parts that the trained version sampled
    itself, which are exact, and of all trained trajectories. Last, the parts
    that need passes of their own.
  """
  logprobs = comparison.per_token(packed, [s.logprobs_BT for s in scored])
  differing = comparison.per_token(packed, [s.differing_BT for s in scored])
  trained = [
    Score(Part(i, t, t.consumed_version_T, t.loss_mask_T, replay), *arrays)
    for i, (t, *arrays) in enumerate(
      zip(packed.trajectories, logprobs, differing, strict=True)
    )
  ]
  free, costly = [], []
  for i, t in enumerate([*packed.trajectories, *others]):
    for part in parts_of(i, t, replay=replay):
      is_own = bool((part.consumed_T == version).all())
      if is_own and part.is_recorded == replay and i < len(trained):
        free.append(trained[i]._replace(part=part))
      else:
        costly.append(part)
  return free, trained, costly


def suspicion(score: Score, advantage: float, num_layers: int) -> float:
  """How far a false record would change the gradient, by the trainer's pass."""
  ratio_T = np.expm1(np.clip(score.log_ratios, -3.0, 1.0))
  changes = np.abs(ratio_T).sum() + score.differing_T.sum() / num_layers
  return abs(advantage) * float(changes)
