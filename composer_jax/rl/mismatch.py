"""How far rollout and trainer differ about the same tokens.

Float64 numpy on the host: differences of float32 log-probabilities near 1e-7
square to 1e-14, which float32 sums lose. The measures are never part of a
gradient; `rl.update` and the gate call them. The statistics are those of R3
(arXiv 2510.11370): mean KL, its tail, the share of ratios beyond a factor.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.core import checks, records

# Ratio of probabilities, either way, above which a token counts as 'large'. R3
# takes a share of more than a tenth beyond 2 as the sign of a collapse.
LARGE_RATIO = 2.0

# Below this expm1(x) - x cancels, and four terms of its series are exact.
_SERIES_BELOW = 1e-3


def k3(log_ratios: np.ndarray) -> np.ndarray:
  """r - 1 - log r, never negative (Schulman 2020), in float64."""
  x = np.asarray(log_ratios, np.float64)
  small = np.abs(x) < _SERIES_BELOW
  s = np.where(small, x, 0.0)
  series = s**2 * (1 / 2 + s * (1 / 6 + s * (1 / 24 + s / 120)))
  # A ratio beyond float64 becomes infinite, which every band refuses.
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
    # 'higher' takes a value that occurs: interpolating with inf would give NaN.
    f'mismatch_p99{suffix}': float(np.quantile(k3_Z, 0.99, method='higher')),
    f'mismatch_max{suffix}': float(size_Z.max()),
    f'mismatch_large{suffix}': float((size_Z > math.log(LARGE_RATIO)).mean()),
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateOptions:
  """The bands of a healthy step, and the action on any other; for float32.

  'Exact' is what the weights that sampled a token say of it (`gate.audit`):
  honest records have a mean k3 of 1e-13 and no route that differs. Other bands
  are wider, since the trained policy is some steps on: three runs of the study
  first_loop at staleness 1 had a mean k3 of at most 0.010, a ratio above 2 for
  at most 0.0016 of tokens, and at least 0.956 of routes unchanged.

  Attributes:
    action: 'stop' ends the run before the step's gradient reaches the weights,
      at the price of a wait before the optimizer is dispatched; 'flag' reports
      the step and goes on; 'off' does not check.
    share: share of the stale and hinted tokens that are scored by the weights
      that sampled them, and of the step's rows whose passes this may take, but
      at least one chain; 0 for none, 1 for all tokens. Each is in as many
      passes as its cache has versions, at most `max_staleness + 1`; a pass took
      0.44 of a row's training on a CPU.
    max_kl_exact: largest mean k3, in nats a token, of tokens scored exactly.
    min_exact_agreement: smallest share of replayed routes that the weights
      which made them choose again.
    max_kl_afresh: the same without routes, where near ties may differ; honest
      runs had at most 5e-13.
    max_unrecorded: largest share of consumed tokens without a route, in replay.
    max_kl: largest mean k3 of all tokens, ten times the largest seen.
    max_kl_hints: largest mean k3 of hinted turns.
    max_p99: largest 99th percentile of k3; 2 nats are a ratio of 4 or of 1/18.
    max_large_ratio_share: largest share of tokens beyond a ratio of 2.
    min_agreement: smallest share of equal routes in the worst layer. A tape
      that is one token off has 0.1; 0.8 refuses a fifth of such trajectories.
  """

  action: str = 'stop'
  share: float = 0.1
  max_kl_exact: float = 1e-9
  min_exact_agreement: float = 0.999
  max_kl_afresh: float = 1e-5
  max_unrecorded: float = 0.0
  max_kl: float = 0.1
  max_kl_hints: float = 0.1
  max_p99: float = 2.0
  max_large_ratio_share: float = 0.1
  min_agreement: float = 0.8

  def __post_init__(self):
    checks.one_of(self, 'action', ('stop', 'flag', 'off'))
    names = [f.name for f in dataclasses.fields(self)][1:]
    nats = [name for name in names if 'kl' in name or 'p99' in name]
    checks.number(self, 0, *nats)
    checks.number(self, 0, *(n for n in names if n not in nats), highest=1)


class OutOfBand(ValueError):
  """A step that the gate stopped before its gradient was applied."""

  def __init__(self, message: str, metrics: dict[str, Any]):
    super().__init__(message)
    self.metrics = metrics
