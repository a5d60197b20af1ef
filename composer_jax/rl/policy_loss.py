"""The policy-gradient losses, and statistics of the same tokens.

Guided path, 7 of 10: `rl.step` differentiates this on batches of `rl.batching`.
With ratio = p_train / p_rollout, A the advantage and sg the stop-gradient, a
loss is minus the sum over sampled tokens of

  tis             sg(min(ratio, C)) A log p, as in IMPALA (arXiv 1802.01561)
  sequence_mask   the same, where low <= the sequence's geometric mean ratio
                  <= high, and nothing elsewhere
  icepop          sg(ratio) A log p where low <= ratio <= high
  cispo           sg(clip(ratio, low, high)) A log p (arXiv 2506.13585)
  grpo, dapo      min(ratio A, clip(ratio, low, high) A), with a higher high in
                  dapo (arXiv 2402.03300, 2503.14476)
  gspo            the same with the sequence's geometric mean in place of the
                  ratio, sg(mean) p / sg(p) for each token (arXiv 2507.18071)

At ratio 1 every gradient is that of REINFORCE with the group's baseline. A
sequence is one context window, of which an episode may have several. The caller
divides the sum by constants only, never by a length (Dr. GRPO).
"""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.core import batches, checks

# Default (low, high) of each loss: bounds on the ratio, or on its geometric
# mean over a sequence, which is far nearer to 1. A low of 0 bounds nothing.
BOUNDS = {
  'tis': (),
  'sequence_mask': (0.99, 1.01),
  'icepop': (0.5, 5.0),
  'cispo': (0.0, 1.28),
  'grpo': (0.8, 1.2),
  'dapo': (0.8, 1.28),
  'gspo': (1 - 3e-4, 1 + 4e-4),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
  """The policy loss and its bounds on the ratio.

  Attributes:
    name: name of a loss in `BOUNDS`; 'tis' is truncated importance sampling.
    ratio_cap: C, the largest ratio of a token in 'tis' and 'sequence_mask'.
    bounds: (low, high) of all losses but 'tis'; () for those of `BOUNDS`.
  """

  name: str = 'tis'
  ratio_cap: float = 2.0
  bounds: tuple[float, ...] = ()

  def __post_init__(self):
    checks.one_of(self, 'name', tuple(BOUNDS))
    checks.require(self, 'ratio_cap', self.ratio_cap >= 1, 'be at least 1')
    if not self.bounds:
      return
    if not BOUNDS[self.name]:
      raise ValueError(
        f'--config.rl.loss.bounds ({self.bounds}) mean nothing to '
        f'{self.name!r}: leave them (), and set ratio_cap instead.'
      )
    is_range = len(self.bounds) == 2 and (
      0 <= self.bounds[0] <= 1 <= self.bounds[1]
    )
    rule = 'be (low, high) with 0 <= low <= 1 <= high, or () for the usual ones'
    checks.require(self, 'bounds', is_range, rule)

  @property
  def range(self) -> tuple[float, ...]:
    return tuple(self.bounds) or BOUNDS[self.name]


class PolicyStats(flax.struct.PyTreeNode, kw_only=True):
  """Sums over sampled tokens, so that microbatches add up; entropy in nats.

  `truncated` counts tokens whose ratio was replaced by a bound (only clipped
  losses then drop their gradient), `dropped` those without a gradient.
  """

  num_tokens: jax.Array
  entropy: jax.Array
  truncated: jax.Array | float = 0.0
  dropped: jax.Array | float = 0.0


# (train_logprobs_BT, entropy_BT, batch) -> loss of a microbatch, statistics.
Loss = Callable[..., tuple[jax.Array, PolicyStats]]


def loss(
  train_logprobs_BT: jax.Array,
  entropy_BT: jax.Array,
  batch: batches.RLBatch,
  options: LossOptions = LossOptions(),
) -> tuple[jax.Array, PolicyStats]:
  """Returns the loss of the trained policy on a microbatch, and statistics."""
  weights_BT = batch.loss_weights_BT
  fixed_BT = jax.lax.stop_gradient(train_logprobs_BT)
  log_ratio_BT = fixed_BT - batch.rollout_logprobs_BT
  mean_BT = None
  if options.name in ('sequence_mask', 'gspo'):
    mean_BT = _sequence_ratios(log_ratio_BT, batch)
  if options.name in ('grpo', 'dapo', 'gspo'):
    sampled_BT = jnp.exp(log_ratio_BT) if mean_BT is None else mean_BT
    terms_BT, truncated_BT = _clipped(
      options, sampled_BT, train_logprobs_BT, batch.advantages_BT
    )
    dropped_BT = truncated_BT
  else:
    ratio_BT, truncated_BT, dropped_BT = _detached(
      options, jnp.exp(log_ratio_BT), mean_BT
    )
    terms_BT = ratio_BT * batch.advantages_BT * train_logprobs_BT
  stats = PolicyStats(
    num_tokens=weights_BT.sum(),
    entropy=(entropy_BT * weights_BT).sum(),
    truncated=(truncated_BT * weights_BT).sum(),
    dropped=(dropped_BT * weights_BT).sum(),
  )
  return -(terms_BT * weights_BT).sum(), jax.lax.stop_gradient(stats)


def _detached(
  options: LossOptions, ratio_BT: jax.Array, mean_BT: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Weights of A log p, and masks of truncated and of dropped tokens."""
  nothing_BT = jnp.zeros_like(ratio_BT, bool)
  truncated_BT = ratio_BT >= options.ratio_cap
  weights_BT = jnp.minimum(ratio_BT, options.ratio_cap)
  if options.name == 'tis':
    return weights_BT, truncated_BT, nothing_BT
  low, high = options.range
  if mean_BT is not None:
    kept_BT = (mean_BT >= low) & (mean_BT <= high)
    return jnp.where(kept_BT, weights_BT, 0.0), truncated_BT, ~kept_BT
  inside_BT = (ratio_BT >= low) & (ratio_BT <= high)
  if options.name == 'cispo':
    return jnp.clip(ratio_BT, low, high), ~inside_BT, nothing_BT
  return jnp.where(inside_BT, ratio_BT, 0.0), nothing_BT, ~inside_BT


def _clipped(
  options: LossOptions,
  ratio_BT: jax.Array,
  train_logprobs_BT: jax.Array,
  advantages_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """min(ratio A, clip(ratio) A) with the gradient of p; also a mask of clipped.

  Only the side that the advantage pushes to is clipped: a ratio that is too
  high is not raised further, and a ratio that is too low is not lowered.
  """
  low, high = options.range
  kept_BT = jnp.where(advantages_BT > 0, ratio_BT < high, ratio_BT > low)
  # Its value is 1, its gradient that of log p.
  one_BT = jnp.exp(train_logprobs_BT - jax.lax.stop_gradient(train_logprobs_BT))
  bound_BT = jnp.clip(ratio_BT, low, high)
  moving_BT = jnp.where(kept_BT, ratio_BT * one_BT, bound_BT)
  return moving_BT * advantages_BT, ~kept_BT


def _sequence_ratios(
  log_ratio_BT: jax.Array, batch: batches.RLBatch
) -> jax.Array:
  """The geometric mean ratio of each sequence, at each of its tokens.

  Rows may be sharded and their tokens in any order; 1 without sampled tokens.
  """
  num_segments = log_ratio_BT.shape[1] + 1  # one a token at most, and padding
  weights_BT = batch.loss_weights_BT

  def sums(values_T, ids_T):
    return jax.ops.segment_sum(values_T, ids_T, num_segments)[ids_T]

  totals_BT = jax.vmap(sums)(log_ratio_BT * weights_BT, batch.segment_ids_BT)
  counts_BT = jax.vmap(sums)(weights_BT, batch.segment_ids_BT)
  return jnp.exp(totals_BT / jnp.maximum(counts_BT, 1.0))
