"""How far rollout and trainer differ about the same tokens, and a gate on it.

Numpy on the host: differences of float32 log-probabilities near 1e-7 square to
1e-14, which float32 sums lose. What is measured is health, never part of a
gradient; `rl.update` says when. The statistics are those of R3
(arXiv 2510.11370): mean KL, its tail, the share of ratios beyond a factor, and
routes that differ.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.core import checks, records

# Tau of the share of tokens that one side finds so many times likelier. R3
# takes more than a tenth of them beyond 2 as the sign of a collapse.
LARGE_RATIO = 2.0

_ACTIONS = ('stop', 'flag', 'off')

# Below it expm1(x) - x cancels: four terms of its series are exact there.
_SERIES_BELOW = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
  """Of some sampled tokens, in float64.

  Attributes:
    tokens: how many.
    kl: mean k3, an estimate of KL(rollout || trainer) in nats a token.
    p99: of k3, 99 % of the tokens have at most this.
    max: largest |log p_train - log p_rollout|.
    large: share of tokens whose ratio is above LARGE_RATIO or below its
      inverse.
  """

  tokens: int
  kl: float
  p99: float
  max: float
  large: float

  def metrics(self, suffix: str = '') -> dict[str, float]:
    """By the names that `telemetry.writer` explains."""
    names = ('kl', 'p99', 'max', 'large')
    return {f'mismatch_{n}{suffix}': getattr(self, n) for n in names}


def log_ratios(
  train_logprobs: np.ndarray, rollout_logprobs: np.ndarray
) -> np.ndarray:
  """log p_train - log p_rollout; the difference is exact in float64."""
  return np.asarray(train_logprobs, np.float64) - rollout_logprobs


def k3(log_ratios: np.ndarray) -> np.ndarray:
  """r - 1 - log r, never negative (Schulman 2020), in float64."""
  x = np.asarray(log_ratios, np.float64)
  small = np.abs(x) < _SERIES_BELOW
  s = np.where(small, x, 0.0)
  series = s**2 * (1 / 2 + s * (1 / 6 + s * (1 / 24 + s / 120)))
  # A ratio beyond the range of float64 is infinite, which every band refuses.
  with np.errstate(over='ignore'):
    return np.where(small, series, np.expm1(x) - x)


def gap(log_ratios_Z: np.ndarray) -> Gap | None:
  """Summarises sampled tokens; None where there are none."""
  if not len(log_ratios_Z):
    return None
  k3_Z, size_Z = k3(log_ratios_Z), np.abs(log_ratios_Z)
  return Gap(
    tokens=len(k3_Z),
    kl=float(k3_Z.mean()),
    # A value that occurs: between a finite and an infinite one is none.
    p99=float(np.quantile(k3_Z, 0.99, method='higher')),
    max=float(size_Z.max()),
    large=float((size_Z > math.log(LARGE_RATIO)).mean()),
  )


def ages(
  trajectory: records.Trajectory, version: int, *, refreshed: bool
) -> np.ndarray:
  """By how many versions the trainer is ahead of what gave each token.

  Where the engine keeps its KV cache over a swap of weights, a token sampled
  afterwards was computed from keys and values of older weights as well: its
  log-probability is that of no one version. So every token is as old as the
  oldest up to it; versions never decrease, which makes that the first. Only an
  engine that refreshes its caches gives tokens the age of their own version.

  Args:
    trajectory: what was sampled.
    version: that is trained.
    refreshed: whether the engine refreshes its caches at a swap.
  """
  if refreshed:
    return version - trajectory.policy_version_T
  return np.full(len(trajectory), version - trajectory.policy_version_T[0])


def total(
  trajectories: Sequence[records.Trajectory],
  train_logprobs: Sequence[np.ndarray],
) -> Gap:
  """Of all sampled tokens of trajectories, of which there is at least one.

  Args:
    trajectories: what was sampled.
    train_logprobs: of each, about each of its tokens.
  """
  found = gap(np.concatenate(_sampled_ratios(trajectories, train_logprobs)))
  assert found is not None
  return found


def _sampled_ratios(
  trajectories: Sequence[records.Trajectory],
  train_logprobs: Sequence[np.ndarray],
) -> list[np.ndarray]:
  return [
    log_ratios(logprobs_T, t.logprobs_T)[t.loss_mask_T]
    for t, logprobs_T in zip(trajectories, train_logprobs, strict=True)
  ]


def measure(
  trajectories: Sequence[records.Trajectory],
  train_logprobs: Sequence[np.ndarray],
  version: int,
  *,
  refreshed: bool,
) -> dict[str, float]:
  """Mismatch of a step: of all sampled tokens, and of those of age 0.

  What is of age 0 isolates the mismatch: the weights are the same on both
  sides, and what is left is arithmetic, or a record that lies.

  Args:
    trajectories: that were trained on.
    train_logprobs: of each, about each of its tokens.
    version: that is trained.
    refreshed: see `ages`.
  """
  ratios_Z = np.concatenate(_sampled_ratios(trajectories, train_logprobs))
  is_fresh_Z = np.concatenate(
    [
      ages(t, version, refreshed=refreshed)[t.loss_mask_T] == 0
      for t in trajectories
    ]
  )
  found: dict[str, float] = {'fresh_tokens': int(is_fresh_Z.sum())}
  for suffix, some in (
    ('', gap(ratios_Z)),
    ('_fresh', gap(ratios_Z[is_fresh_Z])),
  ):
    if some is not None:
      found |= some.metrics(suffix)
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteAgreement:
  """Recorded routes beside those that the trainer would take.

  Attributes:
    tokens: that have a record.
    layers_M: share of them with the same set of experts, for each MoE layer.
    differing: share of them that differ in at least one layer.
  """

  tokens: int
  layers_M: np.ndarray
  differing: float

  def metrics(self) -> dict[str, Any]:
    """By the names that `telemetry.writer` explains."""
    return {
      'route_agreement': float(self.layers_M.min()),
      'route_agreement_layers': self.layers_M.tolist(),
      'routed_differently': self.differing,
    }


def route_agreement(
  recorded: Sequence[np.ndarray], own: Sequence[np.ndarray]
) -> RouteAgreement | None:
  """Compares routes_TMA of trajectories as sets; None where none is recorded.

  Args:
    recorded: expert ids of each trajectory, NO_ROUTE where there is no record.
    own: the trainer's, of a pass that routed every token afresh.
  """
  recorded_ZMA = np.concatenate(recorded)
  own_ZMA = np.concatenate(own)
  known_Z = (recorded_ZMA != records.NO_ROUTE).all((-2, -1))
  if not known_Z.any():
    return None
  same_ZM = (
    np.sort(recorded_ZMA[known_Z], -1) == np.sort(own_ZMA[known_Z], -1)
  ).all(-1)
  return RouteAgreement(
    tokens=int(known_Z.sum()),
    layers_M=same_ZM.mean(0),
    differing=float(1 - same_ZM.all(-1).mean()),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateOptions:
  """The bands of a healthy step, and what happens to another.

  `min_agreement` holds for every step, stale or fresh: a tape that is shifted
  or of other layers agrees by chance, which is far below what an optimizer step
  or two leave of the routes. A tight bound on fresh tokens alone would add
  nothing to `max_kl_fresh`, and a step of stale rollouts has none of them.

  Attributes:
    action: 'stop' ends the run before the gradient of such a step reaches the
      weights, at the price of a wait for the forward passes before the
      optimizer is dispatched; 'flag' says so and goes on; 'off' does not look.
    max_kl_fresh: of `mismatch_kl_fresh`, which is zero but for the order of
      sums where rollout and trainer have the same weights and routes.
    max_kl: of `mismatch_kl`, whatever its age.
    max_p99: of `mismatch_p99`.
    max_large_ratio_share: of `mismatch_large`.
    min_agreement: of `replay_agreement` and `route_agreement`, the lowest
      layer's.
  """

  action: str = 'stop'
  max_kl_fresh: float = 1e-9
  max_kl: float = 0.1
  max_p99: float = 2.0
  max_large_ratio_share: float = 0.1
  min_agreement: float = 0.8

  def __post_init__(self):
    checks.one_of(self, 'action', _ACTIONS)
    checks.number(self, 0, 'max_kl_fresh', 'max_kl', 'max_p99')
    checks.number(self, 0, 'max_large_ratio_share', 'min_agreement')
    for name in ('max_large_ratio_share', 'min_agreement'):
      if getattr(self, name) > 1:
        raise ValueError(
          f'GateOptions.{name} ({getattr(self, name)}) is a share: it must lie '
          'in 0..1.'
        )


class OutOfBand(ValueError):
  """A step whose mismatch left its band under action 'stop'.

  Attributes:
    metrics: of the step, up to its gradient, which was not applied.
  """

  def __init__(self, message: str, metrics: dict[str, Any]):
    super().__init__(message)
    self.metrics = metrics


_RECORD = (
  'the records are not of the weights or tokens they name: look at the routes '
  '(alignment, order of layers), at the versions, and at whether rollout and '
  'trainer compute alike (--config.model.compute_dtype, numerics; without '
  '--config.rl.replay near ties are routed differently now and then)'
)
_POLICY = (
  'the policy moved too far from the rollouts, or the records are not theirs: '
  'look at mismatch_kl_fresh, staleness and --config.rl.learning_rate'
)
_ROUTES = (
  'the recorded routes are not those of these tokens and layers: look at the '
  'layers of this measure for one that stands out'
)
# metric -> (option, what to look at)
_BANDS = {
  'mismatch_kl_fresh': ('max_kl_fresh', _RECORD),
  'mismatch_kl': ('max_kl', _POLICY),
  'mismatch_p99': ('max_p99', _POLICY),
  'mismatch_large': ('max_large_ratio_share', _POLICY),
  'replay_agreement': ('min_agreement', _ROUTES),
  'route_agreement': ('min_agreement', _ROUTES),
}


def breaches(metrics: dict[str, Any], options: GateOptions) -> list[str]:
  """Says for each measure outside of its band what, by how much, and why.

  A measure that the step does not have (no token is fresh, no route recorded)
  is in its band; one that is NaN is not.
  """
  said = []
  for name, (option, look) in _BANDS.items():
    if options.action == 'off' or name not in metrics:
      continue
    value, bound = metrics[name], getattr(options, option)
    is_low = option.startswith('min')
    if value >= bound if is_low else value <= bound:
      continue
    side = 'at least' if is_low else 'at most'
    said.append(
      f'{name} is {value:.3g}, its band is {side} {bound:.3g} '
      f'(--config.rl.gate.{option}): {look}'
    )
  return said


def worst(
  names: Sequence[Any],
  trajectories: Sequence[records.Trajectory],
  train_logprobs: Sequence[np.ndarray],
) -> tuple[Any, float]:
  """The name whose trajectories have the largest mean k3, and that mean.

  Args:
    names: of each trajectory; several may share one.
    trajectories: as in `measure`.
    train_logprobs: as in `measure`.
  """
  ratios: dict[Any, list[np.ndarray]] = collections.defaultdict(list)
  sampled = _sampled_ratios(trajectories, train_logprobs)
  for name, ratios_Z in zip(names, sampled, strict=True):
    ratios[name].append(ratios_Z)
  means = {n: float(k3(np.concatenate(r)).mean()) for n, r in ratios.items()}
  found = max(means, key=lambda n: means[n])
  return found, means[found]
