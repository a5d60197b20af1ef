"""One optimizer step of reinforcement learning under router replay.

A step is a few microbatches of one static shape, whose gradients add up, and
one update. The trainer differentiates at the policy's own values (the bf16
cast of the masters) and applies the gradient to the float32 masters, so that
what it scores is exactly what the rollout engine served.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from composer_jax.core import batches
from composer_jax.models import decoder, head
from composer_jax.rl import policy_loss
from composer_jax.train import policy_values
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step


class StepSums(flax.struct.PyTreeNode, kw_only=True):
  """What microbatches add up to before the update.

  Attributes:
    grads: pytree like the parameters.
    loss: sum of the policy-gradient terms.
    stats: sums over sampled tokens.
    load_ME: tokens per MoE layer and expert.
    replay_agreement_M: sum over microbatches; divide by their number.
    max_logit_gap: largest |log p_train - log p_rollout| of a sampled token.
  """

  grads: Any
  loss: jax.Array
  stats: policy_loss.PolicyStats
  load_ME: jax.Array
  replay_agreement_M: jax.Array
  max_logit_gap: jax.Array


@dataclasses.dataclass(frozen=True)
class Functions:
  """The jitted functions of a run; each compiles once.

  Attributes:
    policy: state -> the policy's variables in float32: the masters rounded to
      bfloat16, which is what the engine serves.
    add_microbatch: (values, sums | None, batch) -> sums.
    apply: (state, sums, scale) -> (state, grad_norm), state donated.
    score: (values, batch) -> logprobs_BT, routed afresh or replayed as the
      batch says.
  """

  policy: Callable[..., Any]
  add_microbatch: Callable[..., StepSums]
  apply: Callable[..., tuple[train_state.TrainState, jax.Array]]
  score: Callable[..., jax.Array]


def forward(
  model: decoder.Decoder, values: Any, batch: batches.RLBatch
) -> tuple[jax.Array, jax.Array, decoder.DecoderOutput]:
  """Returns (logprobs_BT, entropy_BT, output) at the batch's temperatures."""
  # Linen's annotation of `apply` is a union; the model returns this.
  output: Any = model.apply(
    values,
    batch.tokens_BT,
    batch.segment_ids_BT,
    batch.positions_BT,
    expert_ids_MBTA=batch.expert_ids_MBTA,
  )
  logprobs_BT, entropy_BT = head.target_logprobs(
    values,
    output.hidden_BTD,
    batch.tokens_BT,
    batch.segment_ids_BT,
    batch.temperatures_BT,
    model.config,
  )
  return logprobs_BT, entropy_BT, output


def microbatch_sums(
  model: decoder.Decoder,
  values: Any,
  batch: batches.RLBatch,
  *,
  ratio_cap: float,
) -> StepSums:
  """Gradient and statistics of one microbatch at the policy's values."""

  def loss_function(params):
    logprobs_BT, entropy_BT, output = forward(
      model, {**values, 'params': params}, batch
    )
    loss = policy_loss.truncated_policy_gradient(
      logprobs_BT,
      batch.rollout_logprobs_BT,
      batch.advantages_BT,
      batch.loss_weights_BT,
      ratio_cap=ratio_cap,
    )
    stats = policy_loss.policy_stats(
      logprobs_BT,
      batch.rollout_logprobs_BT,
      entropy_BT,
      batch.loss_weights_BT,
      ratio_cap=ratio_cap,
    )
    gap_BT = jnp.abs(logprobs_BT - batch.rollout_logprobs_BT)
    gap = (gap_BT * batch.loss_weights_BT).max()
    return loss, (stats, output.stats, gap)

  (loss, (stats, routes, gap)), grads = jax.value_and_grad(
    loss_function, has_aux=True
  )(values['params'])
  return StepSums(
    grads=grads,
    loss=loss,
    stats=stats,
    load_ME=routes.load_ME,
    replay_agreement_M=routes.replay_agreement_M,
    max_logit_gap=gap,
  )


def add(left: StepSums, right: StepSums) -> StepSums:
  total = jax.tree.map(jnp.add, left, right)
  gap = jnp.maximum(left.max_logit_gap, right.max_logit_gap)
  return total.replace(max_logit_gap=gap)


def build(
  model: decoder.Decoder,
  optimizer: optax.GradientTransformation,
  *,
  ratio_cap: float,
) -> Functions:
  """Jits the functions of a run."""

  @jax.jit
  def policy(state):
    variables = state.variables()
    params = policy_values.straight_through(variables['params'])
    return {**variables, 'params': params}

  @jax.jit
  def first(values, batch):
    return microbatch_sums(model, values, batch, ratio_cap=ratio_cap)

  add_donated = jax.jit(add, donate_argnums=0)

  def add_microbatch(values, sums, batch):
    # Two programs, not one with an optional argument: the large one compiles
    # once whether or not something was summed before.
    new = first(values, batch)
    return new if sums is None else add_donated(sums, new)

  def apply(state, sums, scale):
    grads = jax.tree.map(lambda g: g * scale, sums.grads)
    # RL leaves the selection bias alone: recorded routes were chosen with it.
    state, stats = train_step.apply_gradients(
      state, grads, sums.load_ME, optimizer=optimizer, bias_rate=0.0
    )
    return state, stats.grad_norm

  @jax.jit
  def score(values, batch):
    return forward(model, values, batch)[0]

  return Functions(
    policy=policy,
    add_microbatch=add_microbatch,
    apply=jax.jit(apply, donate_argnums=0),
    score=score,
  )


def mismatch_kl(
  functions: Functions, values: Any, packed: list[batches.RLBatch]
) -> jax.Array:
  """Mean k3 of KL(rollout || trainer) over the sampled tokens of a step.

  Returns at once, as any jitted function does: reading it waits.

  Args:
    functions: of `build`.
    values: policy values to score with.
    packed: microbatches whose routes are replayed where they are recorded.
  """
  total, count = jnp.float32(0), 0.0
  for batch in packed:
    logprobs_BT = functions.score(values, batch)
    k3_BT = policy_loss.k3(logprobs_BT, batch.rollout_logprobs_BT)
    total += (k3_BT * batch.loss_weights_BT).sum()
    count += float(batch.loss_weights_BT.sum())
  return total / max(count, 1.0)
