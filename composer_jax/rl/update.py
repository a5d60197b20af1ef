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
from composer_jax.rl import (
  advantage,
  batching,
  behaviour,
  comparison,
  mismatch,
  policy_loss,
)
from composer_jax.rl import step as steps
from composer_jax.rl.hints import distill, step
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
    loss: which policy-gradient loss.
    mismatch_every: steps between measurements of the mismatch both with and
      without replay, which cost one more forward pass; 0 never.
    refreshed: whether the engine refreshes its caches when weights change;
      see `mismatch.ages`.
    gate: what the mismatch of a step may be.
    seed: of the shuffled control.
    hints: what those on faulty turns weigh beside the reward.
  """

  prompts: int
  rollouts_per_prompt: int
  replay: bool
  reward: str
  kl_coefficient: float
  loss: policy_loss.LossOptions
  mismatch_every: int
  refreshed: bool
  gate: mismatch.GateOptions
  seed: int
  hints: distill.HintLossOptions = distill.OFF

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
    if self.kl_coefficient < 0:
      raise ValueError(
        f'rl.kl_coefficient must not be negative; it is {self.kl_coefficient}.'
      )
    if self.reward == 'shuffled' and (self.kl_coefficient or self.hints.weight):
      raise ValueError(
        "rl.reward='shuffled' must not learn, and a KL penalty or hints would "
        'teach: rl.kl_coefficient and hints.loss.weight must be 0 with it, not '
        f'{self.kl_coefficient} and {self.hints.weight}.'
      )


def _trajectories(
  groups: list[records.Group],
) -> list[records.Trajectory]:
  return [t for g in groups for r in g.rollouts for t in r.trajectories]


def _trained(
  groups: list[records.Group],
  by_group: list[np.ndarray],
  shape: batching.BatchShape,
) -> tuple[comparison.Packed, list[int]]:
  """What a step trains on, and the group of each of its trajectories.

  Leaves out what has no advantage: its gradient is exactly zero. Once the
  policy solves most groups whole, that is most of the work. All are kept where
  none has an advantage, so that a step always has a batch.
  """
  every = [
    (t, float(a), g.group)
    for g, advantages_R in zip(groups, by_group, strict=True)
    for r, a in zip(g.rollouts, advantages_R, strict=True)
    for t in r.trajectories
  ]
  kept = [item for item in every if item[1]] or every
  trajectories, advantages, ids = (list(x) for x in zip(*kept, strict=True))
  return comparison.pack(trajectories, advantages, shape), ids


def _score(
  functions: steps.Functions,
  values: Any,
  trajectories: list[records.Trajectory],
  shape: batching.BatchShape,
) -> list[np.ndarray]:
  """Log-probabilities of `values` about every token, one array a trajectory."""
  packed = comparison.pack(trajectories, [0.0] * len(trajectories), shape)
  # The reference has its own routes: another policy's may not be replayed.
  return packed.logprobs(
    [functions.score(values, comparison.fresh(b)) for b in packed.microbatches]
  )


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
  teacher: Any = None,
) -> tuple[train_state.TrainState, dict[str, Any]]:
  """Trains once on `groups`.

  Rollouts without an advantage take no part in the batch. Statistics of its
  tokens (entropy, mismatch, truncated, routes, expert_load and sampled_tokens)
  are therefore of those with one, unless none has one; those of rewards,
  verdicts and staleness are of all.

  Under a gate that stops, the host looks at the log-probabilities before it
  dispatches the optimizer: the gradient of misaligned records must not reach
  the weights, let alone be published. That costs one wait a step. Under any
  other gate everything is dispatched first.

  Args:
    state: donated.
    groups: exactly `options.prompts` of them; their order does not matter.
    functions: of `rl.step.build`.
    options: of the run.
    shape: of the microbatches.
    reference: policy values for the KL penalty; None without one.
    teacher: policy values that read the hints, where `options.hints` names a
      frozen teacher; None without hints. The state has the average itself.

  Returns:
    The next state and the metrics of the step.

  Raises:
    mismatch.OutOfBand: the gate stopped the step; nothing was applied.
    FloatingPointError: a loss or gradient is not finite; `state` is lost, the
      last checkpoint is not.
  """
  groups = sorted(groups, key=lambda g: g.group)
  rewards = rewards_of(groups, options, functions, reference, shape)
  by_group = [
    advantage.group_advantages(g, rewards_R)
    for g, rewards_R in zip(groups, rewards, strict=True)
  ]
  by_group = advantage.normalized(groups, by_group, options.loss.normalizer)
  trained, ids = _trained(groups, by_group, shape)
  version = int(state.step)
  values = functions.policy(state)
  sums, scores, others = None, [], []
  is_due = options.mismatch_every and version % options.mismatch_every == 0
  for batch in trained.microbatches:
    way, other = batch, comparison.fresh(batch)
    if not options.replay:
      way, other = other, way
    sums, scored = functions.add_microbatch(values, sums, way)
    scores.append(scored)
    if is_due:
      # Before `apply`, which may take the buffers of `values`.
      others.append(functions.score(values, other))
  assert sums is not None
  if options.hints.teacher == 'ema':
    teacher = {**values, 'params': state.teacher}
  hinted = None
  if options.hints.weight:
    sums, hinted = step.add(
      sums, groups, functions, shape, values, teacher, replay=options.replay
    )
  scale = 1.0 / (options.prompts * options.rollouts_per_prompt)
  # The host counts while the device computes.
  measured = measure(groups, by_group, version)
  found = sums.replace(grads=None)

  def look() -> list[str]:
    num_batches = len(trained.microbatches)
    on_host = jax.device_get(found)
    measured.update(_of_sums(on_host, scale, num_batches))
    _check_finite('loss', measured, version)
    if hinted is not None:
      measured.update(hinted.metrics(scale))
    if options.replay:
      measured.update(comparison.replay_metrics(on_host))
    measured.update(_compare(trained, scores, others, options, version))
    if repeated := sum(s.attempts - 1 for s in scores):
      measured['repeated_microbatches'] = repeated
    said = mismatch.breaches(measured, options.gate)
    if options.gate.action != 'off':
      measured.update(gate_breaches=len(said), gate=said)
    return said

  if options.gate.action == 'stop' and (said := look()):
    worst = mismatch.worst(ids, trained.trajectories, trained.logprobs(scores))
    raise mismatch.OutOfBand(_stopped(version, said, *worst), measured)
  state, grad_norm = functions.apply(state, sums, jnp.float32(scale))
  if options.gate.action != 'stop':
    look()
  measured['grad_norm'] = float(grad_norm)
  _check_finite('grad_norm', measured, version)
  return state, measured


def _of_sums(
  sums: steps.StepSums, scale: float, num_batches: int
) -> dict[str, Any]:
  """Metrics of the sums of `num_batches`, on the host, without a gradient."""
  stats, tokens = sums.stats, max(float(sums.stats.num_tokens), 1.0)
  return {
    'loss': float(sums.loss) * scale,
    'entropy': float(stats.entropy) / tokens,
    'truncated': float(stats.truncated) / tokens,
    'dropped': float(stats.dropped) / tokens,
    'expert_load_max': train_step.expert_load_max(sums.load_ME),
    'expert_load': sums.load_ME.tolist(),
    'sampled_tokens': tokens,
    'microbatches': num_batches,
  }


def _compare(
  trained: comparison.Packed,
  scores: list[steps.Scores],
  others: list[steps.Scores],
  options: UpdateOptions,
  version: int,
) -> dict[str, Any]:
  """Mismatch of the pass that was trained with and, where due, both ways."""
  metrics: dict[str, Any] = mismatch.measure(
    trained.trajectories,
    trained.logprobs(scores),
    version,
    refreshed=options.refreshed,
  )
  replayed, afresh = scores, others
  if not options.replay:
    replayed, afresh = others, scores
  if others:
    metrics |= comparison.both_ways(trained, replayed, afresh)
  if afresh:
    metrics |= comparison.route_metrics(trained, afresh)
  return metrics


def _stopped(version: int, said: list[str], group: int, kl: float) -> str:
  return (
    f'rl step {version + 1}: {"; ".join(said)}. Of its groups, {group} is the '
    f'worst (mean k3 {kl:.3g}). Its gradient was not applied, and the last '
    'checkpoint is intact. To sample its groups anew delete their files in '
    'groups/ and run the same command again; to go on with them as they are '
    'add --config.rl.gate.action=flag.'
  )


def _check_finite(name: str, metrics: dict[str, Any], version: int) -> None:
  """Raises a FloatingPointError with the step and its statistics."""
  if not math.isfinite(metrics[name]):
    told = {k: v for k, v in metrics.items() if k != 'expert_load'}
    raise FloatingPointError(
      f'rl step {version}: {name} is {metrics[name]}; statistics: {told}. '
      'The last checkpoint is intact; lower --config.rl.learning_rate.'
    )


def verdict_counts(rollouts: list[records.Rollout]) -> dict[str, int]:
  """Counts rollouts by what was found; each is one of the four.

  One that a monitor flagged did not pass, whatever its tests say.
  """
  statuses = [r.verdict.status for r in rollouts]
  passed = sum(r.verdict.passed and not r.flags for r in rollouts)
  return {
    'passed': passed,
    'failed': statuses.count(records.GRADED) - passed,
    records.UNFINISHED: statuses.count(records.UNFINISHED),
    records.INFRASTRUCTURE: statuses.count(records.INFRASTRUCTURE),
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
  counts = verdict_counts(rollouts)
  turns = sum(r.num_turns for r in rollouts)
  ages = [
    version - int(t.policy_version_T[t.loss_mask_T].min())
    for r in rollouts
    for t in r.trajectories
    if t.loss_mask_T.any()
  ]
  return {
    'reward': float(np.mean([r.reward for r in rollouts])),
    'pass_rate': counts['passed'] / max(len(judged), 1),
    **counts,
    'staleness': max(ages, default=0),
    'staleness_mean': float(np.mean(ages)) if ages else 0.0,
    'invalid_rate': sum(r.num_invalid for r in rollouts) / max(turns, 1),
    'turns': turns / len(rollouts),
    'tokens': float(
      np.mean([sum(len(t) for t in r.trajectories) for r in rollouts])
    ),
    'flags': sum(bool(r.flags) for r in rollouts),
    **behaviour.measure(rollouts),
    'informative_groups': float(np.mean([np.any(a) for a in advantages])),
    'sandbox_ms': 1e3 * float(np.mean([r.sandbox_seconds for r in rollouts])),
    'groups': [g.group for g in groups],
  }
