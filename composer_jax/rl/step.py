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
    num_routed: tokens, padding excluded.
    replay_agreement_M: share in a microbatch times its tokens, so that the sum
      over num_routed is the share in the step. So the next two.
    replay_replaced_M: of `batches.RouteStats`.
    no_route_M: likewise.
  """

  grads: Any
  loss: jax.Array
  stats: policy_loss.PolicyStats
  load_ME: jax.Array
  num_routed: jax.Array
  replay_agreement_M: jax.Array
  replay_replaced_M: jax.Array
  no_route_M: jax.Array


class Scores(flax.struct.PyTreeNode, kw_only=True):
  """What a forward pass says of each token, for the host to compare.

  Attributes:
    logprobs_BT: at the batch's temperatures.
    expert_ids_MBTA: uint16, the experts that each token passed.
  """

  logprobs_BT: jax.Array
  expert_ids_MBTA: jax.Array


@dataclasses.dataclass(frozen=True)
class Functions:
  """The jitted functions of a run; each compiles once.

  Attributes:
    policy: state -> the policy's variables in float32: the masters rounded to
      bfloat16, which is what the engine serves.
    add_microbatch: (values, sums | None, batch) -> (sums, scores of the batch).
    apply: (state, sums, scale) -> (state, grad_norm), state donated.
    score: (values, batch) -> scores, routed afresh or replayed as the batch
      says.
  """

  policy: Callable[..., Any]
  add_microbatch: Callable[..., tuple[StepSums, Scores]]
  apply: Callable[..., tuple[train_state.TrainState, jax.Array]]
  score: Callable[..., Scores]


def forward(
  model: decoder.Decoder, values: Any, batch: batches.RLBatch
) -> tuple[Scores, jax.Array, batches.RouteStats]:
  """Returns scores and entropy_BT at the batch's temperatures, and routes."""
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
  scores = Scores(
    logprobs_BT=logprobs_BT,
    expert_ids_MBTA=output.expert_ids_MBTA,
  )
  return scores, entropy_BT, output.stats


def microbatch_sums(
  model: decoder.Decoder,
  values: Any,
  batch: batches.RLBatch,
  *,
  ratio_cap: float,
) -> tuple[StepSums, Scores]:
  """Gradient and scores of one microbatch at the policy's values."""

  def loss_function(params):
    scores, entropy_BT, routes = forward(
      model, {**values, 'params': params}, batch
    )
    loss = policy_loss.truncated_policy_gradient(
      scores.logprobs_BT,
      batch.rollout_logprobs_BT,
      batch.advantages_BT,
      batch.loss_weights_BT,
      ratio_cap=ratio_cap,
    )
    stats = policy_loss.policy_stats(
      scores.logprobs_BT,
      batch.rollout_logprobs_BT,
      entropy_BT,
      batch.loss_weights_BT,
      ratio_cap=ratio_cap,
    )
    return loss, (stats, routes, scores)

  (loss, (stats, routes, scores)), grads = jax.value_and_grad(
    loss_function, has_aux=True
  )(values['params'])
  num_routed = (batch.segment_ids_BT != 0).sum().astype(jnp.float32)
  sums = StepSums(
    grads=grads,
    loss=loss,
    stats=stats,
    load_ME=routes.load_ME,
    num_routed=num_routed,
    replay_agreement_M=routes.replay_agreement_M * num_routed,
    replay_replaced_M=routes.replay_replaced_M * num_routed,
    no_route_M=routes.no_route_M * num_routed,
  )
  return sums, scores


def add(left: StepSums, right: StepSums) -> StepSums:
  return jax.tree.map(jnp.add, left, right)


def scorer(model: decoder.Decoder) -> Callable[..., Scores]:
  """Jits (values, batch) -> scores."""

  @jax.jit
  def score(values, batch):
    return forward(model, values, batch)[0]

  return score


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
    new, scores = first(values, batch)
    return (new if sums is None else add_donated(sums, new)), scores

  def apply(state, sums, scale):
    grads = jax.tree.map(lambda g: g * scale, sums.grads)
    # RL leaves the selection bias alone: recorded routes were chosen with it.
    state, stats = train_step.apply_gradients(
      state, grads, sums.load_ME, optimizer=optimizer, bias_rate=0.0
    )
    return state, stats.grad_norm

  return Functions(
    policy=policy,
    add_microbatch=add_microbatch,
    apply=jax.jit(apply, donate_argnums=0),
    score=scorer(model),
  )
