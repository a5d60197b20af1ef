"""One optimizer step of reinforcement learning under router replay.

Guided path, 8 of 10: `rl.policy_loss` on `models.decoder`. A step sums the
gradients of a few microbatches of one static shape and updates once. It
differentiates at the policy's values (the bf16 cast of the float32 masters) and
moves the masters, so it scores exactly the weights that the engine served.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import batches
from composer_jax.models import decoder, head, mtp, stacks
from composer_jax.parallel import exchange, sequence, shardings
from composer_jax.rl import policy_loss
from composer_jax.rl.hints import distill
from composer_jax.train import heads as train_heads
from composer_jax.train import placement as train_placement
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step


class StepSums(flax.struct.PyTreeNode, kw_only=True):
  """Sums over microbatches before the update.

  Attributes:
    grads: gradients, a pytree like the parameters.
    stats: sums over sampled tokens.
    load_ME: tokens per MoE layer and expert.
    num_routed: number of tokens, padding excluded.
    replay_agreement_M, replay_replaced_M: shares of
      `batches.RouteStats` times num_routed, so that they add up.
    head_grads: gradients of the heads for multi-token prediction; None if they
      are not trained.
    heads: sums of the heads, likewise.
  """

  grads: Any
  loss: jax.Array
  stats: policy_loss.PolicyStats
  load_ME: jax.Array
  num_routed: jax.Array
  replay_agreement_M: jax.Array
  replay_replaced_M: jax.Array
  head_grads: Any = None
  heads: mtp.HeadStats | None = None

  def without_grads(self) -> 'StepSums':
    return self.replace(grads=None, head_grads=None)


class Scores(flax.struct.PyTreeNode, kw_only=True):
  """Results of a forward pass for each token, for the host to compare.

  Attributes:
    logprobs_BT: log-probabilities at the batch's temperatures.
    differing_BT: int32 number of MoE layers whose recorded route is not the
      router's own choice.
  """

  logprobs_BT: jax.Array
  expert_ids_MBTA: jax.Array
  differing_BT: jax.Array


@dataclasses.dataclass(frozen=True)
class Functions:
  """The jitted functions of a run; each compiles once.

  Attributes:
    policy: state -> the policy's variables in float32: the masters rounded to
      bfloat16, which is what the engine serves.
    add_microbatch: (values, sums | None, batch) -> (sums, scores of the batch).
    for_backward: state -> the variables that `add_microbatch` and `add_hints`
      need beside the policy's; often none.
    compact: values -> the same in bfloat16, which is exact, to be kept.
    apply: (state, sums, scale) -> (state, grad_norm), state donated.
    score: (values, batch) -> scores, replaying the batch's routes if any.
    chain: (values, batch, entries) -> (scores, entries): `score` with the cache
      entries of the passes before, None for the first; see `RLBatch.own_BT`.
    add_hints: (values, teacher, sums, HintBatch) -> (sums, HintStats, scores of
      the student).
    parts: number of device groups over which the rows of a batch are sharded.
  """

  policy: Callable[..., Any]
  for_backward: Callable[..., Any]
  compact: Callable[[Any], Any]
  add_microbatch: Callable[..., tuple[StepSums, Scores]]
  apply: Callable[..., tuple[train_state.TrainState, jax.Array]]
  score: Callable[..., Scores]
  chain: Callable[..., tuple[Scores, Any]]
  add_hints: Callable[..., tuple[StepSums, distill.HintStats, Scores]]
  parts: int


def forward(
  model: decoder.Decoder,
  values: Any,
  batch: batches.RLBatch,
  cached: stacks.Cached | None = None,
) -> tuple[Scores, jax.Array, decoder.DecoderOutput]:
  """Returns scores and entropy_BT, in batch order, and the decoder's output."""
  output = model.apply(
    values,
    batch.tokens_BT,
    batch.segment_ids_BT,
    batch.positions_BT,
    expert_ids_MBTA=batch.expert_ids_MBTA,
    cached=cached,
  )
  return *_scored(model, values, batch, output), output


def _scored(
  model: decoder.Decoder,
  values: Any,
  batch: batches.RLBatch,
  output: decoder.DecoderOutput,
) -> tuple[Scores, jax.Array]:
  logprobs_BT, entropy_BT = head.target_logprobs(
    values,
    output.hidden_BTD,
    batch.tokens_BT,
    batch.segment_ids_BT,
    batch.temperatures_BT,
    model.config,
    model.plan,
  )
  scores = Scores(
    logprobs_BT=logprobs_BT,
    expert_ids_MBTA=output.expert_ids_MBTA,
    differing_BT=(~output.agrees_MBT).sum(0, dtype=jnp.int32),
  )
  return scores, entropy_BT


def _readable(tree: Any, plan: exchange.ExchangePlan | None) -> Any:
  """Replicates what hosts read: a process sees the shards of its devices."""
  if plan is None or jax.process_count() == 1:
    return tree
  return jax.lax.with_sharding_constraint(tree, NamedSharding(plan.mesh, P()))


def _for_host(scores: Scores, plan: exchange.ExchangePlan | None) -> Scores:
  """Undoes the sequence order of context shards, unknown to the host."""
  scores = _readable(scores, plan)
  if plan is None or plan.sequence_order == 'contiguous':
    return scores
  context = shardings.product(plan.sequence_axes, plan.mesh)
  places = np.argsort(sequence.order(scores.logprobs_BT.shape[1], context))
  return scores.replace(
    logprobs_BT=jnp.take(scores.logprobs_BT, places, axis=1),
    differing_BT=jnp.take(scores.differing_BT, places, axis=1),
    expert_ids_MBTA=jnp.take(scores.expert_ids_MBTA, places, axis=2),
  )


def microbatch_sums(
  model: decoder.Decoder,
  values: Any,
  batch: batches.RLBatch,
  *,
  loss: policy_loss.Loss = policy_loss.loss,
  heads: train_heads.HeadProgram | None = None,
) -> tuple[StepSums, Scores]:
  """Gradient and scores of one microbatch at the policy's values."""
  name = decoder.trained(values)

  def loss_function(params):
    variables = {**values, name: params}
    scores, entropy_BT, output = forward(model, variables, batch)
    total, stats = loss(scores.logprobs_BT, entropy_BT, batch)
    return total, (stats, output.stats, scores, output.hidden_BTD)

  (total, (stats, routes, scores, hidden_BTD)), grads = jax.value_and_grad(
    loss_function, has_aux=True
  )(values[name])
  head_grads = head_stats = None
  if heads is not None:
    head_grads, head_stats = train_heads.gradient(
      values['mtp']['params'],
      values['mtp'].get('selection_bias', {}),
      values,
      hidden_BTD,
      batch,
      config=model.config,
      plan=model.plan,
      options=heads.loss,
    )
  num_routed = (batch.segment_ids_BT != 0).sum().astype(jnp.float32)
  sums = StepSums(
    grads=grads,
    loss=total,
    stats=stats,
    load_ME=routes.load_ME,
    num_routed=num_routed,
    replay_agreement_M=routes.replay_agreement_M * num_routed,
    replay_replaced_M=routes.replay_replaced_M * num_routed,
    head_grads=head_grads,
    heads=head_stats,
  )
  return sums, _for_host(scores, model.plan)


def add(left: Any, right: Any) -> Any:
  return jax.tree.map(jnp.add, left, right)


def scorer(
  model: decoder.Decoder,
  put: Callable[[batches.RLBatch], Any] = lambda batch: batch,
  compiler_options: dict[str, Any] | None = None,
) -> Callable[..., Scores]:
  """Jits (values, batch) -> scores; `put` places a numpy batch."""

  @functools.partial(jax.jit, compiler_options=compiler_options)
  def score(values, batch):
    return _for_host(forward(model, values, batch)[0], model.plan)

  return lambda values, batch: score(values, put(batch))


def _rounded(variables, config):
  """Returns variables of masters with the policy's values."""
  name = decoder.trained(variables)
  values = {name: train_state.policy_values(variables[name], config)}
  if 'mtp' in variables:
    own = variables['mtp']
    params = train_state.head_values(own['params'], config)
    values['mtp'] = {**own, 'params': params}
  return {**variables, **values}


def _heads_after(state, sums, heads):
  """Returns heads after the mean over sampled tokens, whatever advantages."""
  weight = jnp.maximum(sums.heads.weight_K[0], 1)
  grads = jax.tree.map(lambda g: g / weight, sums.head_grads)
  after, _ = train_step.apply_gradients(
    state,
    grads,
    sums.heads.load_KE,
    optimizer=heads.optimizer,
    bias_rate=0.0,
  )
  return after


def build(
  model: decoder.Decoder,
  optimizer: optax.GradientTransformation,
  *,
  loss: policy_loss.Loss = policy_loss.loss,
  hints: distill.HintLossOptions = distill.OFF,
  placement: train_placement.Placement | None = None,
  compiler_options: dict[str, Any] | None = None,
  heads: train_heads.HeadProgram | None = None,
) -> Functions:
  """Jits the functions of a run.

  `placement` shards state and batches (None: the first device) and must be the
  one of the model's plan. The optimizer clips gradients. `heads` trains heads
  for multi-token prediction on the tokens that were sampled; None trains none.
  """
  jit = functools.partial(jax.jit, compiler_options=compiler_options)
  put = placement.put if placement is not None else lambda batch: batch

  def placed(grads, places=None):
    """Shards gradients, and thus their sums, like their parameters.

    Sums are float32, whatever the masters are.
    """
    grads = optax.tree.cast(grads, jnp.float32)
    if placement is None:
      return grads
    if places is None:
      places = placement.variables[decoder.trained(placement.variables)]
    return jax.lax.with_sharding_constraint(grads, places)

  rounded = jit(functools.partial(_rounded, config=model.config))

  def policy(state):
    # Frozen parameters are handed on: no step donates them.
    variables = state.variables()
    return {**variables, **rounded(decoder.without_base(variables))}

  @jit
  def first(values, batch):
    sums, scores = microbatch_sums(model, values, batch, loss=loss, heads=heads)
    others = _readable(sums.without_grads(), model.plan)
    head_grads = heads and placed(sums.head_grads, heads.places)
    return others.replace(
      grads=placed(sums.grads), head_grads=head_grads
    ), scores

  add_donated = jit(add, donate_argnums=0)

  def add_microbatch(values, sums, batch):
    added, scores = first(values, put(batch))
    # Two programs, so that the large one compiles once, sums or not.
    return (added if sums is None else add_donated(sums, added)), scores

  @jit
  def chain(values, batch, entries):
    cached = stacks.Cached(own_BT=batch.own_BT, entries=entries)
    scores, _, output = forward(model, values, batch, cached)
    return _for_host(scores, model.plan), output.entries

  @jit
  def hint_gradients(values, teacher, batch):
    grads, stats, output = distill.gradients(
      model, values, teacher, batch, hints
    )
    scores, _ = _scored(model, values, batch.student, output)
    stats = _readable(stats, model.plan)
    return placed(grads), stats, _for_host(scores, model.plan)

  @functools.partial(jit, donate_argnums=0)
  def add_grads(sums, grads):
    return sums.replace(grads=add(sums.grads, grads))

  def add_hints(values, teacher, sums, batch):
    grads, stats, scores = hint_gradients(values, teacher, put(batch))
    return add_grads(sums, grads), stats, scores

  @functools.partial(jit, donate_argnums=0)
  def apply_own(state, sums, scale):
    grads = jax.tree.map(lambda g: g * scale, sums.grads)
    # RL leaves the selection bias alone: recorded routes were chosen with it.
    state, stats = train_step.apply_gradients(
      state, grads, sums.load_ME, optimizer=optimizer, bias_rate=0.0
    )
    if heads is not None:
      state = state.replace(heads=_heads_after(state.heads, sums, heads))
    if hints.teacher == 'ema' and hints.weight:
      state = train_state.follow(state, hints.ema_rate)
    return state, stats.grad_norm

  def apply(state, sums, scale):
    after, grad_norm = apply_own(state.own(), sums, scale)
    return after.replace(base=state.base), grad_norm

  def for_backward(state):
    return train_state.for_backward(state.params, model.config, state.step)

  cast = jit(decoder.policy)

  return Functions(
    policy=policy,
    for_backward=jit(for_backward),
    compact=lambda values: {**values, **cast(values)},
    add_microbatch=add_microbatch,
    apply=apply,
    score=scorer(model, put, compiler_options),
    chain=lambda values, batch, entries: chain(values, put(batch), entries),
    add_hints=add_hints,
    parts=distill.parts_of(model.plan),
  )
