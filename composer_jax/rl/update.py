"""One update of the policy from finished groups, and its metrics."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import batches, checks, records
from composer_jax.models import mtp
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
  """Options of a policy update that the config shows.

  Attributes:
    prompts: groups of an optimizer step.
    rollouts_per_prompt: episodes of a group.
    replay: true to replay the routes that the engine recorded; false to route
      every token afresh.
    reward: 'verdict', or 'shuffled', the control that must not learn.
    kl_coefficient: reward lost per nat of k1 to the policy that RL began with.
    loss: policy gradient and its bounds on p_train / p_rollout.
    mismatch_every: steps between two comparisons of the mismatch with and
      without replay, each one more forward pass; 0 for none.
  """

  prompts: int = 8
  rollouts_per_prompt: int = 8
  replay: bool = True
  reward: str = 'verdict'
  kl_coefficient: float = 0.0
  loss: policy_loss.LossOptions = policy_loss.LossOptions()
  mismatch_every: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions(LearningOptions):
  """All options of a policy update.

  Attributes:
    seed: seed of the run, used by the shuffled control.
    hints: loss of hints on faulty turns.
  """

  seed: int = 0
  hints: distill.HintLossOptions = distill.OFF

  def __post_init__(self):
    checks.one_of(self, 'reward', ('verdict', 'shuffled'))
    checks.number(self, 0, 'kl_coefficient')
    checks.at_least(self, 1, 'prompts')
    is_group = self.rollouts_per_prompt >= 2
    rule = 'be at least 2: a group of one has no baseline'
    checks.require(self, 'rollouts_per_prompt', is_group, rule)
    if self.reward == 'shuffled' and (self.kl_coefficient or self.hints.weight):
      raise ValueError(
        "rl.reward='shuffled' is a control that must not learn, so "
        'rl.kl_coefficient and hints.loss.weight must be 0 with it, not '
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
  windows = [t for g in groups for r in g.rollouts for t in r.trajectories]
  packed = batching.pack(windows, [0.0] * len(windows), shape)
  # The reference routes its tokens itself: replay is for the same policy.
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
) -> tuple[batching.PackedTrajectories, list[float]]:
  """Packs what a step trains on; also returns its advantages.

  Leaves out trajectories without an advantage, whose gradient is exactly zero:
  once the policy solves most groups, that is most of the work. If none has an
  advantage, keeps all, so that a step always has a batch.
  """
  items = [
    (t, float(a))
    for g, advantages_R in zip(groups, by_group, strict=True)
    for r, a in zip(g.rollouts, advantages_R, strict=True)
    for t in r.trajectories
  ]
  kept = [item for item in items if item[1]] or items
  trajectories, advantages = (list(x) for x in zip(*kept, strict=True))
  return batching.pack(trajectories, advantages, shape), advantages


def add_hints(
  sums: steps.StepSums,
  groups: list[records.Group],
  functions: steps.Functions,
  shape: batching.BatchShape,
  values: Any,
  teacher: Any,
  *,
  replay: bool,
) -> tuple[
  steps.StepSums, dict[str, int], distill.HintStats | None, comparison.Hinted
]:
  """Adds the gradient of all hints of a step to its sums, which it donates.

  Hints count whatever the advantage of their rollout. With `replay` the student
  takes its recorded routes. Also returns counts of hints, their statistics on
  the device (None without hints), and the student's windows and scores.
  """
  microbatches, counts, students = hint_batching.pack(
    groups, shape, num_parts=functions.parts
  )
  total, scores = None, []
  for batch in microbatches:
    if not replay:
      batch = batch.replace(student=comparison.fresh(batch.student))
    sums, stats, scored = functions.add_hints(values, teacher, sums, batch)
    scores.append(scored)
    total = stats if total is None else jax.tree.map(jnp.add, total, stats)
  return sums, counts, total, comparison.Hinted(students, scores)


def compile_ahead(
  state: train_state.TrainState,
  functions: steps.Functions,
  shape: batching.BatchShape,
  teacher: Any,
) -> None:
  """Compiles the gradients of `update` on padding, before there are groups.

  The optimizer, which donates the state, compiles in the first step.
  """
  values = functions.policy(state) | functions.for_backward(state)
  padding = batches.RLBatch(**batching.padding(shape))
  sums, _ = functions.add_microbatch(values, None, padding)
  if teacher is not None:
    hints = hint_batching.microbatch([], shape, 0)
    functions.add_hints(values, teacher, sums, hints)


def teacher_of(
  state: train_state.TrainState,
  hints: distill.HintLossOptions,
  functions: steps.Functions,
  frozen: Any,
) -> Any:
  """Returns the teacher, rounded as policies are: the average, or frozen."""
  if hints.teacher == 'ema':
    return functions.policy(state.replace(params=state.teacher))
  return frozen


def update(
  state: train_state.TrainState,
  groups: list[records.Group],
  functions: steps.Functions,
  options: UpdateOptions,
  shape: batching.BatchShape,
  *,
  reference: Any = None,
  teacher: Any = None,
  gate: comparison.Gate | None = None,
  compare: Callable[
    [records.Group, np.ndarray], np.ndarray
  ] = advantage.group_advantages,
) -> tuple[train_state.TrainState, dict[str, Any]]:
  """Trains once on `groups`; returns the next state and the step's metrics.

  The batch leaves out rollouts without an advantage, unless none has one. So do
  the statistics of tokens (entropy, mismatch, truncated, routes, expert_load
  and sampled_tokens); rewards, verdicts and staleness cover all rollouts.

  If the gate stops steps, the host checks the log-probabilities before it
  dispatches the optimizer, which costs one wait per step: the gradient of
  misaligned records must not reach the weights. Otherwise everything is
  dispatched first.

  Args:
    state: training state, donated.
    groups: exactly `options.prompts` groups, in any order.
    reference: policy values for the KL penalty; None without one.
    teacher: policy values of a frozen teacher that reads hints; None without
      one. A teacher that is an average is in `state`.
    gate: judges the records; None trains on whatever they are.
    compare: (group, rewards_R) -> advantages_R.

  Raises:
    mismatch.OutOfBand: the gate stopped the step; nothing was applied.
    FloatingPointError: a loss or gradient is not finite; `state` is lost, but
      the last checkpoint is intact.
  """
  groups = sorted(groups, key=lambda g: g.group)
  rewards = rewards_of(groups, options, functions, reference, shape)
  by_group = list(map(compare, groups, rewards))
  trained, advantages = _trained(groups, by_group, shape)
  version = int(state.step)
  values = functions.policy(state)
  if gate is not None:
    gate.keep(version, values)
  beside = functions.for_backward(state)
  sums, scores, others = None, [], []
  every = options.mismatch_every if gate is not None else 0
  is_due = every and version % every == 0
  for batch in trained.microbatches:
    chosen, other = batch, comparison.fresh(batch)
    if not options.replay:
      chosen, other = other, chosen
    sums, scored = functions.add_microbatch(values | beside, sums, chosen)
    scores.append(scored)
    if is_due:
      # Before `apply`, which may take the buffers of `values`.
      others.append(functions.score(values, other))
  assert sums is not None
  hint_counts, hint_stats, hinted = {}, None, comparison.Hinted([], [])
  if options.hints.weight:
    teacher = teacher_of(state, options.hints, functions, teacher)
    sums, hint_counts, hint_stats, hinted = add_hints(
      *(sums, groups, functions, shape, values | beside, teacher),
      replay=options.replay,
    )
  scale = 1.0 / (options.prompts * options.rollouts_per_prompt)
  # The host counts while the device computes.
  metrics = behaviour.measure(groups, by_group, version)
  without_grads = sums.without_grads()

  def wait_and_check() -> None:
    """Completes the metrics, and lets the gate stop the step."""
    on_host = jax.device_get(without_grads)
    metrics.update(_of_sums(on_host, scale, options.replay))
    metrics['microbatches'] = len(scores)
    _check_finite('loss', metrics, version)
    if 'mtp_loss' in metrics:
      _check_finite('mtp_loss', metrics, version)
    metrics.update(hint_counts)
    if hint_stats is not None:
      metrics.update(distill.metrics(jax.device_get(hint_stats), scale))
    ratios = comparison.ratios(trained, scores)
    metrics.update(mismatch.gap(np.concatenate(ratios)))
    if gate is not None:
      judged = comparison.JudgedStep(
        version=version,
        values=values,
        groups=groups,
        trained=trained,
        advantages=advantages,
        scores=scores,
        others=others,
        hinted=hinted,
        hint_weight=options.hints.weight,
        metrics=metrics,
      )
      metrics.update(gate.judge(judged))

  if gate is not None and gate.stops:
    wait_and_check()
  state, grad_norm = functions.apply(state, sums, jnp.float32(scale))
  if gate is None or not gate.stops:
    wait_and_check()
  metrics['grad_norm'] = float(grad_norm)
  _check_finite('grad_norm', metrics, version)
  return state, metrics


def _of_sums(
  sums: steps.StepSums, scale: float, replay: bool
) -> dict[str, Any]:
  """Metrics of a step's sums on the host; with `replay`, also of the routes."""
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
  if sums.heads is not None:
    metrics |= mtp.metrics(sums.heads)
  if replay:
    num_routed = float(sums.num_routed)
    agreement_M = np.float64(sums.replay_agreement_M) / num_routed
    metrics |= {
      'replay_agreement': float(agreement_M.min()),
      'replay_agreement_layers': agreement_M.tolist(),
      'replay_replaced': float(sums.replay_replaced_M.max()) / num_routed,
    }
  return metrics


def _check_finite(name: str, metrics: dict[str, Any], version: int) -> None:
  """Raises a FloatingPointError with the step and its statistics."""
  if not np.isfinite(metrics[name]).all():
    shown = {k: v for k, v in metrics.items() if k != 'expert_load'}
    raise FloatingPointError(
      f'rl step {version}: {name} is {metrics[name]}; statistics: {shown}. '
      'The last checkpoint is intact; lower --config.rl.learning_rate.'
    )
