"""One update of the policy from finished groups, and what it measured."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import checks, records
from composer_jax.rl import (
  advantage,
  batching,
  behaviour,
  comparison,
  mismatch,
  policy_loss,
)
from composer_jax.rl import step as steps
from composer_jax.rl.hints import batching as hint_batching
from composer_jax.rl.hints import distill
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningOptions:
  """What a step learns of its groups.

  Attributes:
    prompts: groups of an optimizer step.
    rollouts_per_prompt: episodes of a group.
    replay: replays the routes that the engine recorded; else tokens are routed
      afresh.
    reward: 'verdict', or 'shuffled', the control that must not learn.
    kl_coefficient: reward lost per nat of k1 to the policy that RL began with.
    loss: which policy gradient, and how much of p_train / p_rollout it
      believes.
    mismatch_every: steps from one measurement of the mismatch with and without
      replay, which costs one more forward pass, to the next; 0 for none.
    gate: what the mismatch of rollout and trainer may be.
  """

  prompts: int = 8
  rollouts_per_prompt: int = 8
  replay: bool = True
  reward: str = 'verdict'
  kl_coefficient: float = 0.0
  loss: policy_loss.LossOptions = policy_loss.LossOptions()
  mismatch_every: int = 10
  gate: mismatch.GateOptions = mismatch.GateOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions(LearningOptions):
  """How groups become a gradient.

  Attributes:
    refreshed: whether the engine refreshes its caches when weights change; see
      `mismatch.ages`.
    seed: the run's, which the shuffled control draws with.
    hints: what those on faulty turns weigh beside the reward.
  """

  refreshed: bool = False
  seed: int = 0
  hints: distill.HintLossOptions = distill.OFF

  def __post_init__(self):
    checks.one_of(self, 'reward', ('verdict', 'shuffled'))
    checks.number(self, 0, 'kl_coefficient')
    if self.prompts < 1 or self.rollouts_per_prompt < 2:
      raise ValueError(
        'rl.prompts must be at least 1 and rl.rollouts_per_prompt at least '
        f'2 (a group of one has no baseline); got {self.prompts} and '
        f'{self.rollouts_per_prompt}.'
      )
    if self.reward == 'shuffled' and (self.kl_coefficient or self.hints.weight):
      raise ValueError(
        "rl.reward='shuffled' must not learn, and a KL penalty or hints would "
        'teach: rl.kl_coefficient and hints.loss.weight must be 0 with it, not '
        f'{self.kl_coefficient} and {self.hints.weight}.'
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
  every = [t for g in groups for r in g.rollouts for t in r.trajectories]
  packed = batching.pack(every, [0.0] * len(every), shape)
  # The reference has its own routes: another policy's may not be replayed.
  afresh = map(comparison.fresh, packed.microbatches)
  scores = [functions.score(reference, batch) for batch in afresh]
  scored = iter(comparison.logprobs(packed, scores))
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


def _trained(
  groups: list[records.Group],
  by_group: list[np.ndarray],
  shape: batching.BatchShape,
) -> tuple[batching.PackedTrajectories, list[int]]:
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
  return batching.pack(trajectories, advantages, shape), ids


def add_hints(
  sums: steps.StepSums,
  groups: list[records.Group],
  functions: steps.Functions,
  shape: batching.BatchShape,
  values: Any,
  teacher: Any,
  *,
  replay: bool,
) -> tuple[steps.StepSums, dict[str, int], distill.HintStats | None]:
  """Adds the gradient of all hints of a step to its sums, which it donates.

  Hints count whatever the advantage of their rollout. `replay` lets the student
  take its recorded routes. Also returns counts of hints, and their statistics
  on the device, if there are any hints.
  """
  microbatches, counts = hint_batching.pack(
    groups, shape, num_parts=functions.parts
  )
  total = None
  for batch in microbatches:
    if not replay:
      batch = batch.replace(student=comparison.fresh(batch.student))
    sums, stats = functions.add_hints(values, teacher, sums, batch)
    total = stats if total is None else jax.tree.map(jnp.add, total, stats)
  return sums, counts, total


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
  """Trains once on `groups`; returns the next state and the step's metrics.

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
    reference: policy values for the KL penalty; None without one.
    teacher: policy values that read the hints, where `options.hints` names a
      frozen teacher; None without hints. The state has the average itself.

  Raises:
    mismatch.OutOfBand: the gate stopped the step; nothing was applied.
    FloatingPointError: a loss or gradient is not finite; `state` is lost, the
      last checkpoint is not.
  """
  groups = sorted(groups, key=lambda g: g.group)
  rewards = rewards_of(groups, options, functions, reference, shape)
  by_group = list(map(advantage.group_advantages, groups, rewards))
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
  hint_counts, hint_stats = {}, None
  if options.hints.weight:
    if options.hints.teacher == 'ema':
      teacher = {**values, 'params': state.teacher}
    sums, hint_counts, hint_stats = add_hints(
      sums, groups, functions, shape, values, teacher, replay=options.replay
    )
  scale = 1.0 / (options.prompts * options.rollouts_per_prompt)
  # The host counts while the device computes.
  measured = behaviour.measure(groups, by_group, version)
  without_grads = sums.replace(grads=None)

  def look() -> list[str]:
    on_host = jax.device_get(without_grads)
    measured.update(_of_sums(on_host, scale, options.replay))
    measured['microbatches'] = len(scores)
    _check_finite('loss', measured, version)
    measured.update(hint_counts)
    if hint_stats is not None:
      measured.update(distill.metrics(jax.device_get(hint_stats), scale))
    measured.update(
      mismatch.measure(
        trained.trajectories,
        comparison.logprobs(trained, scores),
        version,
        refreshed=options.refreshed,
      )
    )
    ways = (scores, others) if options.replay else (others, scores)
    measured.update(comparison.both_ways(trained, *ways))
    if repeated := sum(s.attempts - 1 for s in scores):
      measured['repeated_microbatches'] = repeated
    said = mismatch.breaches(measured, options.gate)
    if options.gate.action != 'off':
      measured.update(gate_breaches=len(said), gate=said)
    return said

  if options.gate.action == 'stop' and (said := look()):
    group, kl = mismatch.worst(ids, comparison.ratios(trained, scores))
    raise mismatch.OutOfBand(
      f'rl step {version + 1}: {"; ".join(said)}. Of its groups, {group} is '
      f'the worst (mean k3 {kl:.3g}). Its gradient was not applied, and the '
      'last checkpoint is intact. To sample its groups anew delete their files '
      'in groups/ and run the same command again; to go on with them as they '
      'are add --config.rl.gate.action=flag.',
      measured,
    )
  state, grad_norm = functions.apply(state, sums, jnp.float32(scale))
  if options.gate.action != 'stop':
    look()
  measured['grad_norm'] = float(grad_norm)
  _check_finite('grad_norm', measured, version)
  return state, measured


def _of_sums(
  sums: steps.StepSums, scale: float, replay: bool
) -> dict[str, Any]:
  """Metrics of a step's sums on the host, and of the replay if there is one."""
  stats, tokens = sums.stats, max(float(sums.stats.num_tokens), 1.0)
  metrics = {
    'loss': float(sums.loss) * scale,
    'entropy': float(stats.entropy) / tokens,
    'truncated': float(stats.truncated) / tokens,
    'dropped': float(stats.dropped) / tokens,
    'expert_load_max': train_step.expert_load_max(sums.load_ME),
    'expert_load': sums.load_ME.tolist(),
    'sampled_tokens': tokens,
  }
  if replay:
    num_routed = float(sums.num_routed)
    agreement_M = np.float64(sums.replay_agreement_M) / num_routed
    metrics |= {
      'replay_agreement': float(agreement_M.min()),
      'replay_agreement_layers': agreement_M.tolist(),
      'replay_replaced': float(sums.replay_replaced_M.max()) / num_routed,
      'replay_no_route': float(sums.no_route_M.max()) / num_routed,
    }
  return metrics


def _check_finite(name: str, metrics: dict[str, Any], version: int) -> None:
  """Raises a FloatingPointError with the step and its statistics."""
  if not math.isfinite(metrics[name]):
    told = {k: v for k, v in metrics.items() if k != 'expert_load'}
    raise FloatingPointError(
      f'rl step {version}: {name} is {metrics[name]}; statistics: {told}. '
      'The last checkpoint is intact; lower --config.rl.learning_rate.'
    )
