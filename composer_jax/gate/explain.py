"""Which lie explains a record that the gate refused.

Each hypothesis undoes one lie, and the trajectory is scored again, by the same
weights. The one after which the least mean k3 is left is the best explanation;
none is proof.
"""

from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.gate import audit, parts
from composer_jax.rl import mismatch

# Mean k3 that rounding may leave.
_ROUNDING = 1e-11

# An explanation leaves at most this share of the mean k3, and at most so much.
_BETTER, _CLOSE = 25, 0.1

# A fit takes so many tokens, since it has a number to choose, and a plausible
# scale.
_FITTED, _SCALES = 4, (0.2, 5.0)

# Factors by which a recorded temperature may be wrong.
_FACTORS = (0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.4, 2.0)


def worst(
  breached: Container[str],
  exact: Sequence[audit.Score],
  own: Sequence[audit.Score],
) -> audit.Score | None:
  """The score that a breached band is about and that breaches it most.

  `exact` are of the chains and `own` of the trainer's pass over everything.
  None if no band that tells of single tokens was breached.
  """

  def kl(score):
    return mismatch.k3(score.log_ratios).mean()

  def differing(score):
    return score.differing_T.mean()

  def missing(score):
    ids_TMA = score.part.trajectory.expert_ids_TMA[:-1]
    return (ids_TMA == records.NO_ROUTE).mean()

  recorded = [s for s in exact if s.part.is_recorded]
  afresh = [s for s in exact if not s.part.is_recorded]
  for name, scores, measure in (
    ('mismatch_kl_exact', recorded, kl),
    ('exact_agreement', recorded, differing),
    ('mismatch_kl_afresh', afresh, kl),
    ('unrecorded', own, missing),
    ('mismatch_kl', own, kl),
    ('mismatch_p99', own, kl),
    ('mismatch_large', own, kl),
    ('replay_agreement', own, differing),
    ('route_agreement', own, differing),
  ):
    scores = [s for s in scores if s.part.compared_T.any()]
    if name in breached and scores:
      return max(scores, key=measure)
  return None


def _moved(ids_TMA: np.ndarray, by: int) -> np.ndarray:
  """Routes under other tokens; those without one keep none."""
  moved_TMA = np.full_like(ids_TMA, records.NO_ROUTE)
  source = slice(max(-by, 0), len(ids_TMA) - 1 - max(by, 0))
  target = slice(max(by, 0), len(ids_TMA) - 1 - max(-by, 0))
  moved_TMA[target] = ids_TMA[source]
  return moved_TMA


def _rescored(
  part: parts.Part, versions: Sequence[int], due: float | None
) -> Iterator[tuple[str, parts.Part]]:
  """Yields hypotheses and the part to score under each."""
  t = part.trajectory

  def changed(**fields):
    values = {name: getattr(t, name) for name in t.__slots__} | fields
    return part._replace(trajectory=records.Trajectory(**values))

  ids_TMA = t.expert_ids_TMA
  lost_TMA = np.full_like(ids_TMA, records.NO_ROUTE)
  if part.is_recorded:
    for words, other_TMA in (
      ('routes a token late', _moved(ids_TMA, -1)),
      ('routes a token early', _moved(ids_TMA, 1)),
      ('routes of its layers in reverse order', ids_TMA[:, ::-1].copy()),
      ('routes a layer late', np.roll(ids_TMA, -1, 1)),
      ('routes a layer early', np.roll(ids_TMA, 1, 1)),
      # Fits whatever the others fit, so it comes last.
      ('routes not of its tokens', lost_TMA),
    ):
      yield words, changed(expert_ids_TMA=other_TMA)
  temperatures = [t.temperature * factor for factor in _FACTORS]
  for temperature in [due, *temperatures] if due else temperatures:
    words = f'sampled at temperature {temperature:.3g}, not {t.temperature:.3g}'
    yield words, changed(temperature=temperature)
  for version in versions:
    same_T = np.full(len(t), version, np.int32)
    fields = dict.fromkeys(records.VERSIONS, same_T)
    words = f'computed by version {version}, not as labelled'
    if set(part.consumed_T) != {version}:
      yield words, changed(**fields)._replace(consumed_T=same_T)
      own = changed(**fields, expert_ids_TMA=lost_TMA)
      yield f'{words}, by its own routes', own._replace(consumed_T=same_T)


def _refitted(score: audit.Score) -> Iterator[tuple[str, np.ndarray]]:
  """Yields hypotheses about log-probabilities, and the log ratios left."""
  ratios_Z = score.log_ratios
  recorded_Z = score.part.trajectory.logprobs_T[score.part.compared_T]
  true_Z = ratios_Z + recorded_Z
  scale = float(recorded_Z @ true_Z / max(true_Z @ true_Z, 1e-12))
  if len(ratios_Z) >= _FITTED and _SCALES[0] <= scale <= _SCALES[1]:
    words = f'log-probabilities times {scale:.3g}'
    yield words, scale * true_Z - recorded_Z
  if len(ratios_Z) >= _FITTED:
    shift = float(np.median(-ratios_Z))
    yield f'log-probabilities shifted by {shift:.3g}', ratios_Z + shift
  is_zero_Z = recorded_Z == 0
  if is_zero_Z.any() and not is_zero_Z.all():
    words = f'{int(is_zero_Z.sum())} tokens of context marked as sampled'
    yield words, ratios_Z[~is_zero_Z]


def explain(
  auditor: audit.Auditor, score: audit.Score, temperature: float | None = None
) -> str:
  """Describes a trajectory's mismatch and the lie that explains it best.

  `temperature` is the run's, if it is known.
  """
  part = score.part
  if auditor.knows(part):
    # What the trainer's own pass says may be the policy's move.
    (score,) = auditor.score([part])
  before = float(mismatch.k3(score.log_ratios).mean())
  text = (
    f'mean k3 {before:.3g} over {int(part.compared_T.sum())} tokens of '
    f'versions {sorted(set(part.consumed_T.tolist()))}, '
    f'{int(score.differing_T.sum())} routes differ'
  )
  ids_TMA = part.trajectory.expert_ids_TMA[:-1]
  missing = int((ids_TMA == records.NO_ROUTE).any((-2, -1)).sum())
  if part.is_recorded and missing:
    text += f', {missing} tokens lack a route'
  if before <= _ROUNDING:
    return f'{text}; its log-probabilities are right'
  left = [(mismatch.k3(r_Z).mean(), words) for words, r_Z in _refitted(score)]
  if auditor.knows(part):
    cases = list(_rescored(part, sorted(auditor.policies), temperature))
    scores = auditor.score([other for _, other in cases])
    left += [
      (mismatch.k3(s.log_ratios).mean(), words)
      for (words, _), s in zip(cases, scores, strict=True)
    ]
  left.append((before, 'as it is'))
  least = min(k3 for k3, _ in left)
  # The first of those that leave rounding, or else the best.
  after, words = next(x for x in left if x[0] <= max(least, _ROUNDING))
  if not after < min(before / _BETTER, _CLOSE):
    size = float(np.sqrt(np.square(score.log_ratios).mean()))
    return f'{text}; no single lie explains it, as noise of {size:.2g} would'
  return f'{text}; it fits best if {words} (mean k3 {after:.3g} then)'


def evidence(score: audit.Score) -> dict[str, Any]:
  """Arrays about each token of a trajectory, for `experiments.mismatch`."""
  t = score.part.trajectory
  return {
    **{name: np.asarray(getattr(t, name)) for name in t.__slots__},
    'train_logprobs_T': score.logprobs_T,
    'compared_T': score.part.compared_T,
    'differing_T': score.differing_T,
  }
