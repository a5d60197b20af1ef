"""How far rollout and trainer differ about the same tokens, and a gate on it.

Numpy on the host: differences of float32 log-probabilities near 1e-7 square to
1e-14, which float32 sums lose. What is measured is health, never part of a
gradient; `rl.update` says when. The statistics are those of R3
(arXiv 2510.11370): mean KL, its tail, the share of ratios beyond a factor, and
routes that differ. Metrics have the names that `telemetry` explains.
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

# Below it expm1(x) - x cancels: four terms of its series are exact there.
_SERIES_BELOW = 1e-3


def k3(log_ratios: np.ndarray) -> np.ndarray:
  """r - 1 - log r, never negative (Schulman 2020), in float64."""
  x = np.asarray(log_ratios, np.float64)
  small = np.abs(x) < _SERIES_BELOW
  s = np.where(small, x, 0.0)
  series = s**2 * (1 / 2 + s * (1 / 6 + s * (1 / 24 + s / 120)))
  # A ratio beyond the range of float64 is infinite, which every band refuses.
  with np.errstate(over='ignore'):
    return np.where(small, series, np.expm1(x) - x)


def log_ratios(
  trajectories: Sequence[records.Trajectory],
  train_logprobs: Sequence[np.ndarray],
) -> list[np.ndarray]:
  """log p_train - log p_rollout of the sampled tokens of each trajectory.

  The difference of two float32 is exact in float64.
  """
  return [
    (np.asarray(logprobs_T, np.float64) - t.logprobs_T)[t.loss_mask_T]
    for t, logprobs_T in zip(trajectories, train_logprobs, strict=True)
  ]


def gap(log_ratios_Z: np.ndarray, suffix: str = '') -> dict[str, float]:
  """Summarises sampled tokens; {} where there are none.

  Mean k3 estimates KL(rollout || trainer) in nats a token. 'large' is the share
  of tokens whose ratio is above LARGE_RATIO or below its inverse.
  """
  if not len(log_ratios_Z):
    return {}
  k3_Z, size_Z = k3(log_ratios_Z), np.abs(log_ratios_Z)
  return {
    f'mismatch_kl{suffix}': float(k3_Z.mean()),
    # A value that occurs: between a finite and an infinite one is none.
    f'mismatch_p99{suffix}': float(np.quantile(k3_Z, 0.99, method='higher')),
    f'mismatch_max{suffix}': float(size_Z.max()),
    f'mismatch_large{suffix}': float((size_Z > math.log(LARGE_RATIO)).mean()),
  }


def ages(
  trajectory: records.Trajectory, version: int, *, refreshed: bool
) -> np.ndarray:
  """By how many versions the trainer is ahead of what gave each token.

  Where the engine keeps its KV cache over a swap of weights, a token sampled
  afterwards was computed from keys and values of older weights as well: its
  log-probability is that of no one version. So every token is as old as the
  oldest up to it; versions never decrease, which makes that the first. Only an
  engine that refreshes its caches gives tokens the age of their own version.
  """
  if refreshed:
    return version - trajectory.policy_version_T
  return np.full(len(trajectory), version - trajectory.policy_version_T[0])


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
  """
  ratios_Z = np.concatenate(log_ratios(trajectories, train_logprobs))
  is_fresh = [
    ages(t, version, refreshed=refreshed)[t.loss_mask_T] == 0
    for t in trajectories
  ]
  fresh_Z = ratios_Z[np.concatenate(is_fresh)]
  return {
    'fresh_tokens': len(fresh_Z),
    **gap(ratios_Z),
    **gap(fresh_Z, '_fresh'),
  }


def route_agreement(
  recorded: Sequence[np.ndarray], own: Sequence[np.ndarray]
) -> dict[str, Any]:
  """Compares routes_TMA of trajectories as sets; {} where none is recorded.

  The trainer's `own` are of a pass that routed every token afresh. Says which
  share of recorded tokens has the same experts, in the lowest and in each MoE
  layer, and which share differs in at least one.
  """
  recorded_ZMA = np.concatenate(recorded)
  known_Z = (recorded_ZMA != records.NO_ROUTE).all((-2, -1))
  if not known_Z.any():
    return {}
  sets_ZMA, own_ZMA = (
    np.sort(ids_ZMA[known_Z], -1)
    for ids_ZMA in (recorded_ZMA, np.concatenate(own))
  )
  same_ZM = (sets_ZMA == own_ZMA).all(-1)
  return {
    'route_agreement': float(same_ZM.mean(0).min()),
    'route_agreement_layers': same_ZM.mean(0).tolist(),
    'routed_differently': float(1 - same_ZM.all(-1).mean()),
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateOptions:
  """The bands of a healthy step, and what happens to another; in float32.

  Three runs of first_loop.py had, with replay, a mean k3 of 6e-14 on fresh
  tokens; at staleness 1, with the policy one step on, a mean k3 of at most
  0.010, at most 0.0016 of tokens at a ratio of 2, and at least 0.956 of routes
  unchanged. A tape that is shifted or of other layers agrees by chance alone,
  which `min_agreement` sees in steps without a fresh token, too.

  Attributes:
    action: 'stop' ends the run before the gradient of such a step reaches the
      weights, at the price of a wait before the optimizer is dispatched; 'flag'
      says so and goes on; 'off' does not look.
    max_kl_fresh: nats a token where both have the same weights: rounding is
      1e-13, a step of RL 1e-8 to 1e-2. Without replay near ties need 1e-4.
    max_kl: nats a token, stale or not: ten times the largest seen.
    max_p99: nats, of a token's k3: a ratio of 4, or of an eighteenth.
    max_large_ratio_share: tokens beyond a ratio of 2; R3's sign of a collapse.
    min_agreement: routes in the lowest layer. A tape that is a token off has
      0.1, so that a fifth of the trajectories may not be.
  """

  action: str = 'stop'
  max_kl_fresh: float = 1e-9
  max_kl: float = 0.1
  max_p99: float = 2.0
  max_large_ratio_share: float = 0.1
  min_agreement: float = 0.8

  def __post_init__(self):
    checks.one_of(self, 'action', ('stop', 'flag', 'off'))
    checks.number(self, 0, 'max_kl_fresh', 'max_kl', 'max_p99')
    checks.number(self, 0, 'max_large_ratio_share', 'min_agreement')
    for name in ('max_large_ratio_share', 'min_agreement'):
      checks.require(
        self, name, getattr(self, name) <= 1, 'be a share, in 0..1'
      )


class OutOfBand(ValueError):
  """A step whose mismatch left its band under action 'stop'.

  `metrics` are the step's, up to its gradient, which was not applied.
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
  groups: Sequence[int], ratios: Sequence[np.ndarray]
) -> tuple[int, float]:
  """The group whose trajectories have the largest mean k3, and that mean."""
  of_group: dict[int, list[np.ndarray]] = collections.defaultdict(list)
  for group, ratios_Z in zip(groups, ratios, strict=True):
    of_group[group].append(ratios_Z)
  means = {g: k3(np.concatenate(r)).mean() for g, r in of_group.items()}
  group = max(means, key=lambda g: means[g])
  return group, float(means[group])
