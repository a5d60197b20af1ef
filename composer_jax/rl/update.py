"""One update of the policy from finished groups, and what it measured.

Both the synchronous loop and the asynchronous trainer call `update`; they
differ only in where the groups come from.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import records
from composer_jax.rl import advantage, batching
from composer_jax.rl import step as steps
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions:
  """How groups become a gradient.

  Attributes:
    prompts: P, groups per optimizer step.
    rollouts_per_prompt: R.
    replay: replay recorded routes; False routes afresh (for comparison).
    reward: 'verdict', or 'shuffled' for the control that must not learn.
    kl_coefficient: of the detached k1 penalty in the reward; 0 needs no
      reference.
    ratio_cap: C of the truncated importance ratio.
    mismatch_every: steps between measurements of the mismatch KL both with
      and without replay, which cost one more forward pass; 0 never.
    seed: of the shuffled control.
  """

  prompts: int
  rollouts_per_prompt: int
  replay: bool
  reward: str
  kl_coefficient: float
  ratio_cap: float
  mismatch_every: int
  seed: int

  def __post_init__(self):
    if self.reward not in ('verdict', 'shuffled'):
      raise ValueError(
        f"rl.reward must be 'verdict' or 'shuffled', not {self.reward!r}."
      )
    if self.prompts < 1 or self.rollouts_per_prompt < 2:
      raise ValueError(
        'rl.prompts must be at least 1 and rl.rollouts_per_prompt at least '
        f'2 (a group of one has no baseline); got {self.prompts} and '
        f'{self.rollouts_per_prompt}.'
      )
    if self.kl_coefficient < 0 or self.ratio_cap < 1:
      raise ValueError(
        'rl.kl_coefficient must not be negative and rl.ratio_cap must be at '
        f'least 1; got {self.kl_coefficient} and {self.ratio_cap}.'
      )
    if self.reward == 'shuffled' and self.kl_coefficient:
      raise ValueError(
        "rl.reward='shuffled' must not learn, and a KL penalty would teach: "
        f'rl.kl_coefficient must be 0 with it, not {self.kl_coefficient}.'
      )


def _trajectories(
  groups: list[records.Group],
) -> list[records.Trajectory]:
  return [t for g in groups for r in g.rollouts for t in r.trajectories]


def _informative(
  trajectories: list[records.Trajectory], advantages: list[float]
) -> tuple[list[records.Trajectory], list[float]]:
  """Leaves out what has no advantage: its gradient is exactly zero.

  Once the policy solves most groups whole, that is most of the work. All are
  kept where none has an advantage, so that a step always has a batch.
  """
  kept = [i for i, a in enumerate(advantages) if a] or range(len(advantages))
  return [trajectories[i] for i in kept], [advantages[i] for i in kept]


def _score(
  functions: steps.Functions,
  values: Any,
  trajectories: list[records.Trajectory],
  shape: batching.BatchShape,
) -> list[np.ndarray]:
  """Log-probabilities of `values` about every token, one array a trajectory."""
  packed = batching.pack(trajectories, [0.0] * len(trajectories), shape)
  # The reference has its own routes: another policy's may not be replayed.
  scored = [np.asarray(functions.score(values, fresh(b))) for b in packed]
  where = batching.places([len(t) for t in trajectories], shape)
  return [scored[place.batch][place.row, place.span] for place in where]


def rewards_of(
  groups: list[records.Group],
  options: UpdateOptions,
  functions: steps.Functions,
  reference: Any,
  shape: batching.BatchShape,
) -> list[np.ndarray]:
  """Rewards of each group, with the control and the KL penalty applied."""
  if options.reward == 'shuffled':
    return [advantage.shuffled_rewards(g, options.seed) for g in groups]
  if options.kl_coefficient == 0:
    return [np.array([r.reward for r in g.rollouts]) for g in groups]
  scored = iter(_score(functions, reference, _trajectories(groups), shape))
  penalized = []
  for group in groups:
    logprobs = [
      np.concatenate([next(scored) for _ in r.trajectories])
      for r in group.rollouts
    ]
    penalized.append(
      advantage.kl_penalized_rewards(group, logprobs, options.kl_coefficient)
    )
  return penalized


def update(
  state: train_state.TrainState,
  groups: list[records.Group],
  functions: steps.Functions,
  options: UpdateOptions,
  shape: batching.BatchShape,
  *,
  reference: Any = None,
) -> tuple[train_state.TrainState, dict[str, Any]]:
  """Trains once on `groups`.

  Rollouts without an advantage take no part in the batch. Statistics of its
  tokens (entropy, mismatch, truncated, replay_agreement, expert_load and
  sampled_tokens) are therefore of those with one, unless none has one; those
  of rewards, verdicts and staleness are of all.

  Args:
    state: donated.
    groups: exactly `options.prompts` of them; their order does not matter.
    functions: of `rl.step.build`.
    options: of the run.
    shape: of the microbatches.
    reference: policy values for the KL penalty; None without one.

  Returns:
    The next state and the metrics of the step.

  Raises:
    FloatingPointError: a loss or gradient is not finite; `state` is lost, the
      last checkpoint is not.
  """
  groups = sorted(groups, key=lambda g: g.group)
  rewards = rewards_of(groups, options, functions, reference, shape)
  by_group = [
    advantage.group_advantages(g, rewards_R)
    for g, rewards_R in zip(groups, rewards, strict=True)
  ]
  trajectories, advantages = _informative(
    _trajectories(groups),
    [
      float(a)
      for g, advantages_R in zip(groups, by_group, strict=True)
      for r, a in zip(g.rollouts, advantages_R, strict=True)
      for _ in r.trajectories
    ],
  )
  version = int(state.step)
  values = functions.policy(state)
  packed = batching.pack(trajectories, advantages, shape)
  sums = None
  for batch in packed:
    sums = functions.add_microbatch(
      values, sums, batch if options.replay else fresh(batch)
    )
  assert sums is not None
  other_kl = None
  if options.mismatch_every and version % options.mismatch_every == 0:
    # Before `apply`, which may take the buffers of `values`.
    other_kl = steps.mismatch_kl(
      functions, values, [fresh(b) if options.replay else b for b in packed]
    )
  scale = 1.0 / (options.prompts * options.rollouts_per_prompt)
  state, grad_norm = functions.apply(state, sums, jnp.float32(scale))
  # Everything is dispatched: the host counts while the device computes.
  measured = measure(groups, by_group, version)
  found, grad_norm, other_kl = jax.device_get(
    (sums.replace(grads=None), grad_norm, other_kl)
  )
  stats, tokens = found.stats, max(float(found.stats.num_tokens), 1.0)
  measured |= {
    'loss': float(found.loss) * scale,
    'grad_norm': float(grad_norm),
    'entropy': float(stats.entropy) / tokens,
    'mismatch_kl': float(stats.mismatch_kl) / tokens,
    'mismatch_max': float(found.max_logit_gap),
    'truncated': float(stats.truncated) / tokens,
    'replay_agreement': float(found.replay_agreement_M.min()) / len(packed),
    'expert_load_max': train_step.expert_load_max(found.load_ME),
    'expert_load': found.load_ME.tolist(),
    'sampled_tokens': tokens,
    'microbatches': len(packed),
  }
  if other_kl is not None:
    # What was trained on says one, the pass beside it the other.
    both = measured['mismatch_kl'], float(other_kl)
    names = ['mismatch_kl_replay', 'mismatch_kl_no_replay']
    measured |= zip(names if options.replay else names[::-1], both, strict=True)
  for name in ('loss', 'grad_norm'):
    if not math.isfinite(measured[name]):
      raise FloatingPointError(
        f'rl step {version}: {name} is {measured[name]}; statistics: '
        f'{ {k: v for k, v in measured.items() if k != "expert_load"} }. '
        'The last checkpoint is intact; lower --config.rl.learning_rate.'
      )
  return state, measured


def fresh(batch: Any) -> Any:
  """The batch with every token routed by the trainer's own router.

  The routes stay an array (of NO_ROUTE), so that the same compiled program
  serves both.
  """
  return batch.replace(
    expert_ids_MBTA=np.full_like(batch.expert_ids_MBTA, records.NO_ROUTE)
  )


def verdict_counts(rollouts: list[records.Rollout]) -> dict[str, int]:
  """Counts rollouts by what was found; each is one of the four."""
  found = [r.verdict for r in rollouts]
  graded = [v for v in found if v.status == records.GRADED]
  passed = sum(v.passed for v in graded)
  return {
    'passed': passed,
    'failed': len(graded) - passed,
    records.UNFINISHED: sum(v.status == records.UNFINISHED for v in found),
    records.INFRASTRUCTURE: sum(
      v.status == records.INFRASTRUCTURE for v in found
    ),
  }


def measure(
  groups: list[records.Group], advantages: list[np.ndarray], version: int
) -> dict[str, Any]:
  """Metrics that need no device: rewards, verdicts, staleness.

  Args:
    groups: of the step.
    advantages: of each group, advantages_R; a group without any that is not 0
      does not inform.
    version: of the policy that is trained.
  """
  rollouts = [r for g in groups for r in g.rollouts]
  judged = [r for r in rollouts if r.verdict.status != records.INFRASTRUCTURE]
  turns = sum(r.num_turns for r in rollouts)
  ages = [
    version - int(t.policy_version_T[t.loss_mask_T].min())
    for r in rollouts
    for t in r.trajectories
    if t.loss_mask_T.any()
  ]
  return {
    'reward': float(np.mean([r.reward for r in rollouts])),
    'pass_rate': sum(r.verdict.passed for r in judged) / max(len(judged), 1),
    **verdict_counts(rollouts),
    'staleness': max(ages, default=0),
    'staleness_mean': float(np.mean(ages)) if ages else 0.0,
    'invalid_rate': sum(r.num_invalid for r in rollouts) / max(turns, 1),
    'turns': turns / len(rollouts),
    'tokens': float(
      np.mean([sum(len(t) for t in r.trajectories) for r in rollouts])
    ),
    'flags': sum(bool(r.flags) for r in rollouts),
    'informative_groups': float(np.mean([np.any(a) for a in advantages])),
    'sandbox_ms': 1e3 * float(np.mean([r.sandbox_seconds for r in rollouts])),
    'groups': [g.group for g in groups],
  }
