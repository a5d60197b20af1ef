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


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions:
  """How groups become a gradient.

  Attributes:
    prompts: P, groups per optimizer step.
    rollouts_per_prompt: R.
    rows: of one microbatch.
    seq_len: of one microbatch row.
    replay: replay recorded routes; False routes afresh (for comparison).
    reward: 'verdict', or 'shuffled' for the control that must not learn.
    kl_coefficient: of the detached k1 penalty in the reward; 0 needs no
      reference.
    ratio_cap: C of the truncated importance ratio.
    mismatch_every: steps between measurements of the mismatch KL without
      replay, which costs one more forward pass; 0 never.
    seed: of the shuffled control.
  """

  prompts: int
  rollouts_per_prompt: int
  rows: int
  seq_len: int
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


def _trajectories(
  groups: list[records.Group],
) -> list[records.Trajectory]:
  return [t for g in groups for r in g.rollouts for t in r.trajectories]


def _informative(
  trajectories: list[records.Trajectory], advantages: list[float]
) -> tuple[list[records.Trajectory], list[float]]:
  """Leaves out what has no advantage: its gradient is exactly zero.

  Once the policy solves most groups whole, that is most of the work. Statistics
  over tokens are those of the rest. All are kept where none has an advantage,
  so that a step always has a batch.
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
  scored: list[np.ndarray] = [np.zeros(0)] * len(trajectories)
  rows = batching.assign_rows([len(t) for t in trajectories], shape.seq_len)
  zeros = [0.0] * len(trajectories)
  packed = batching.pack(trajectories, zeros, shape)
  for i, batch in enumerate(packed):
    # The reference has its own routes: another policy's may not be replayed.
    batch = batch.replace(
      expert_ids_MBTA=np.full_like(batch.expert_ids_MBTA, records.NO_ROUTE)
    )
    logprobs_BT = np.asarray(functions.score(values, batch))
    for row, members in enumerate(rows[i * shape.rows : (i + 1) * shape.rows]):
      offset = 0
      for member in members:
        end = offset + len(trajectories[member])
        scored[member] = logprobs_BT[row, offset:end]
        offset = end
  return scored


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
  advantages = [
    float(a)
    for g, rewards_R in zip(groups, rewards, strict=True)
    for r, a in zip(
      g.rollouts, advantage.group_advantages(g, rewards_R), strict=True
    )
    for _ in r.trajectories
  ]
  trajectories, advantages = _informative(_trajectories(groups), advantages)
  version = int(state.step)
  values = functions.policy(state)
  packed = batching.pack(trajectories, advantages, shape)
  sums = None
  for batch in packed:
    sums = functions.add_microbatch(
      values, sums, batch if options.replay else fresh(batch)
    )
  assert sums is not None
  measured = measure(groups, version)
  if options.mismatch_every and version % options.mismatch_every == 0:
    for name, replay in (('_replay', True), ('_no_replay', False)):
      measured[f'mismatch_kl{name}'] = steps.mismatch_kl(
        functions,
        values,
        [b if replay else fresh(b) for b in packed],
      )
  scale = 1.0 / (options.prompts * options.rollouts_per_prompt)
  loss, stats, load_ME, agreement_M, gap = jax.device_get(
    (
      sums.loss,
      sums.stats,
      sums.load_ME,
      sums.replay_agreement_M,
      sums.max_logit_gap,
    )
  )
  state, grad_norm = functions.apply(state, sums, jnp.float32(scale))
  tokens = max(float(stats.num_tokens), 1.0)
  measured |= {
    'loss': float(loss) * scale,
    'grad_norm': float(grad_norm),
    'entropy': float(stats.entropy) / tokens,
    'mismatch_kl': float(stats.mismatch_kl) / tokens,
    'mismatch_max': float(gap),
    'truncated': float(stats.truncated) / tokens,
    'replay_agreement': float(agreement_M.min()) / len(packed),
    'expert_load_max': float((load_ME.max(1) / load_ME.mean(1)).max()),
    'expert_load': load_ME.tolist(),
    'sampled_tokens': tokens,
    'microbatches': len(packed),
  }
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


def measure(groups: list[records.Group], version: int) -> dict[str, Any]:
  """Metrics that need no device: rewards, verdicts, staleness."""
  rollouts = [r for g in groups for r in g.rollouts]
  judged = [r for r in rollouts if r.verdict.status != records.INFRASTRUCTURE]
  turns = sum(r.num_turns for r in rollouts)
  ages = [
    version - int(t.policy_version_T[t.loss_mask_T].min())
    for r in rollouts
    for t in r.trajectories
    if t.loss_mask_T.any()
  ]
  spread = [np.std([r.reward for r in g.rollouts]) > 0 for g in groups]
  return {
    'reward': float(np.mean([r.reward for r in rollouts])),
    'pass_rate': sum(r.verdict.passed for r in judged) / max(len(judged), 1),
    'infrastructure': len(rollouts) - len(judged),
    'staleness': max(ages, default=0),
    'staleness_mean': float(np.mean(ages)) if ages else 0.0,
    'invalid_rate': sum(r.num_invalid for r in rollouts) / max(turns, 1),
    'turns': turns / len(rollouts),
    'tokens': float(
      np.mean([sum(len(t) for t in r.trajectories) for r in rollouts])
    ),
    'flags': sum(bool(r.flags) for r in rollouts),
    'informative_groups': float(np.mean(spread)),
    'sandbox_ms': 1e3 * float(np.mean([r.sandbox_seconds for r in rollouts])),
    'groups': [g.group for g in groups],
  }
