"""Targeted textual feedback: a hinted teacher on the tokens of a faulty turn.

A reward says that an episode failed; a hint says which turn failed, and why.
The teacher, an earlier version of the policy, reads the hint before that turn
and scores the tokens that the student wrote without it. On this turn only, the
student is trained towards the teacher's distribution:

  lambda / |Y| * sum over t in Y of
    clip(p_train / p_rollout, max c) * D(student_t, sg teacher_t)

added to the loss of RL (Composer 2.5; SDPO, arXiv 2601.20802; OPSD, arXiv
2601.18734) before both are divided by the number of rollouts: a whole turn
weighs lambda, however long, while each token of a rollout weighs its advantage.
The student replays its recorded routes; the teacher, whose context differs,
routes afresh. With the live policy as teacher, the policy degrades until calls
are invalid (`experiments/studies/hint`), so the teacher is the policy that RL
began with, or a slow average.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.core import batches, checks
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head
from composer_jax.parallel import exchange, shardings, shards
from composer_jax.rl.hints import batching

# KL(student || teacher), KL(teacher || student), and the Jensen-Shannon
# divergence between them.
DIVERGENCES = ('reverse', 'forward', 'jsd')

# Tokens of a device whose logits, student's and teacher's, are held at once.
_CHUNK = 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HintLossOptions:
  """Weight of hints, and comparison of student and teacher.

  Attributes:
    weight: lambda, the weight of a hinted turn, where a token of advantage 1
      has 1; 0 ignores hints.
    divergence: 'reverse' for KL(policy || teacher), 'forward', or 'jsd'.
    teacher: 'frozen' for the policy that RL began with, 'ema' for an average
      that follows the policy.
    ema_rate: share of its distance to the policy that 'ema' moves in a step.
    ratio_cap: c, the largest weight p_train / p_rollout of a token.
  """

  weight: float = 1.0
  divergence: str = 'reverse'
  teacher: str = 'frozen'
  ema_rate: float = 0.01
  ratio_cap: float = 2.0

  def __post_init__(self):
    checks.one_of(self, 'divergence', DIVERGENCES)
    checks.one_of(self, 'teacher', ('frozen', 'ema'))
    checks.number(self, 0, 'weight')
    checks.number(self, 1, 'ratio_cap')
    is_share = 0 < self.ema_rate < 1
    checks.require(self, 'ema_rate', is_share, 'lie in (0, 1), both excluded')


OFF = HintLossOptions(weight=0.0)


class HintStats(flax.struct.PyTreeNode, kw_only=True):
  """Sums over the tokens of hinted turns, so that microbatches add up.

  Attributes:
    loss: loss with lambda and all weights.
    divergence: divergence in nats, unweighted.
    gap: teacher's minus student's log-probability of the written token; well
      below 0 where the hint speaks against it.
    truncated: number of tokens whose importance ratio met its cap.
    k3: sum of `mismatch.k3` of the written tokens, in float32.
  """

  loss: jax.Array
  num_tokens: jax.Array
  divergence: jax.Array
  gap: jax.Array
  truncated: jax.Array
  k3: jax.Array


def parts_of(plan: exchange.ExchangePlan | None) -> int:
  """Number of device groups over which the rows of a batch are sharded."""
  return shardings.product(plan.batch_axes, plan.mesh) if plan else 1


def loss(
  model: decoder.Decoder,
  values: decoder.Variables,
  teacher: decoder.Variables,
  batch: batches.HintBatch,
  options: HintLossOptions,
) -> tuple[HintStats, decoder.DecoderOutput]:
  """Returns a microbatch's sums and the decoder's output for the student.

  `loss` has a gradient by `values` alone.
  """
  written, read = batch.student, batch.teacher
  output = model.apply(
    values,
    written.tokens_BT,
    written.segment_ids_BT,
    written.positions_BT,
    expert_ids_MBTA=written.expert_ids_MBTA,
  )
  teacher = jax.lax.stop_gradient(teacher)
  with jax.named_scope('teacher'):
    teacher_BTD = model.apply(
      teacher, read.tokens_BT, read.segment_ids_BT, read.positions_BT
    ).hidden_BTD
  name = _unembedding(model.config)
  with jax.named_scope('hints'):
    stats = compare(
      model,
      (values['params'][name], teacher['params'][name]),
      (output.hidden_BTD, teacher_BTD),
      batch,
      options,
    )
  return stats, output


def gradients(
  model: decoder.Decoder,
  values: decoder.Variables,
  teacher: decoder.Variables,
  batch: batches.HintBatch,
  options: HintLossOptions,
) -> tuple[Any, HintStats, decoder.DecoderOutput]:
  """Returns the gradient of the student's parameters, and what `loss` does."""

  name = decoder.trained(values)

  def loss_function(params):
    student = {**values, name: params}
    stats, output = loss(model, student, teacher, batch, options)
    return stats.loss, (stats, output)

  grads, aux = jax.grad(loss_function, has_aux=True)(values[name])
  return grads, *aux


def compare(
  model: decoder.Decoder,
  weights: tuple[jax.Array, jax.Array],
  hidden_BTD: tuple[jax.Array, jax.Array],
  batch: batches.HintBatch,
  options: HintLossOptions,
) -> HintStats:
  """Returns the sums of a microbatch; pairs are of student and teacher.

  `weights` make logits of hidden states.
  """
  plan = model.plan
  name = _unembedding(model.config)
  spec = shards.specs_of(plan, f'params/{name}', weights[0])
  rows, seq_len = batch.student_slots_BT.shape
  num_slots = batching.num_slots(rows // parts_of(plan), seq_len)

  def stage(weights, hidden, batch):
    student_BTD, teacher_BTD = hidden
    teacher_XD = _by_slot(teacher_BTD, batch.teacher_slots_BT, num_slots, plan)
    # In float32, in which the gradient adds up over chunks.
    student, teacher = (
      shards.gather(w, spec, dtype=student_BTD.dtype).astype(jnp.float32)
      for w in weights
    )
    tokens = _by_token(student_BTD, batch, plan)
    weights = (student, teacher)
    sums = _summed(weights, tokens, teacher_XD, options, model.config)
    # A gradient inside a shard must not pass through a sum over the mesh.
    return shards.stacked(sums)

  where = shards.tokens_spec(plan)
  # Routes are not needed, and `where` does not fit the order of their axes.
  bare = batch.replace(student=batch.student.replace(expert_ids_MBTA=None))
  fixed = jax.lax.stop_gradient
  stage = shards.per_shard(
    stage,
    plan,
    in_specs=((spec, spec), where, where),
    out_specs=shards.stacked_spec(plan),
  )
  sums = stage(
    (weights[0], fixed(weights[1])), (hidden_BTD[0], fixed(hidden_BTD[1])), bare
  )
  return jax.tree.map(lambda x: x.sum(0), sums)


def _unembedding(config: model_config.ModelConfig) -> str:
  return 'embedding' if config.tie_embeddings else 'unembedding'


def _by_slot(hidden_BTD, slots_BT, num_slots, plan):
  """Returns the teacher's hidden states, [num_slots, D], in order of slots.

  A turn's two sides may lie on different devices of a part, so each gets all
  states of the part. A token is predicted by the state before it.
  """
  slots_BT = head.of_next(slots_BT, plan)
  places_BT = jnp.where(slots_BT > 0, slots_BT - 1, num_slots)
  states_XD = jnp.zeros((num_slots, hidden_BTD.shape[-1]), hidden_BTD.dtype)
  states_XD = states_XD.at[places_BT].set(hidden_BTD, mode='drop')
  axes = plan.sequence_axes if plan else ()
  return jax.lax.psum(states_XD, axes) if axes else states_XD


def _by_token(hidden_BTD, batch, plan) -> tuple[jax.Array, ...]:
  """Hidden states of a device's tokens, and arrays about the token after each.

  These are slots, ids, weights, the rollout's log-probabilities, temperatures.
  Tokens with a slot come first.
  """
  student = batch.student
  arrays_BT = (
    batch.student_slots_BT,
    student.tokens_BT,
    student.loss_weights_BT,
    student.rollout_logprobs_BT,
    student.temperatures_BT,
  )
  arrays_Z = [head.of_next(x_BT, plan).reshape(-1) for x_BT in arrays_BT]
  order_Z = jnp.argsort(arrays_Z[0] == 0, stable=True)
  tokens = (hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), *arrays_Z)
  return tuple(x_Z[order_Z] for x_Z in tokens)


def _summed(
  weights: tuple[jax.Array, jax.Array],
  tokens: tuple[jax.Array, ...],
  teacher_XD: jax.Array,
  options: HintLossOptions,
  config: model_config.ModelConfig,
) -> HintStats:
  """Sums over a device's tokens in chunks, skipping chunks without a slot.

  The backward pass recomputes the logits of a chunk.
  """
  num_tokens = len(tokens[0])
  size = min(_CHUNK, num_tokens)
  missing = -num_tokens % size

  def chunked(x_Z):
    x_Z = jnp.pad(x_Z, ((0, missing),) + ((0, 0),) * (x_Z.ndim - 1))
    return x_Z.reshape(-1, size, *x_Z.shape[1:])

  @jax.checkpoint
  def compared(weights, chunk):
    return _sums_of(weights, chunk, teacher_XD, options, config)

  def step(sums, chunk):
    nothing = jax.tree.map(jnp.zeros_like, sums)
    _, slots_Z, *_ = chunk
    # Tokens with a slot come first.
    chunk_sums = jax.lax.cond(
      slots_Z[0] > 0, compared, lambda *_: nothing, weights, chunk
    )
    return jax.tree.map(jnp.add, sums, chunk_sums), None

  names = [field.name for field in dataclasses.fields(HintStats)]
  nothing = HintStats(**dict.fromkeys(names, jnp.float32(0)))
  return jax.lax.scan(step, nothing, jax.tree.map(chunked, tokens))[0]


def _sums_of(weights, tokens, teacher_XD, options, config) -> HintStats:
  hidden_ZD, slots_Z, ids_Z, weights_Z, logprobs_Z, temperatures_Z = tokens
  name = _unembedding(config)
  # Slot 0 reads an arbitrary state, which `total` masks.
  states_ZD = teacher_XD[jnp.maximum(slots_Z - 1, 0)]
  student_ZV, teacher_ZV = (
    head.logits({'params': {name: weight}}, x_ZD[None], config)[0]
    / jnp.where(slots_Z > 0, temperatures_Z, 1)[:, None]
    for weight, x_ZD in zip(weights, (hidden_ZD, states_ZD), strict=True)
  )
  divergence_Z = divergence(student_ZV, teacher_ZV, options.divergence)
  fixed = jax.lax.stop_gradient

  def written(logits_ZV):
    logprobs_ZV = jax.nn.log_softmax(fixed(logits_ZV))
    return jnp.take_along_axis(logprobs_ZV, ids_Z[:, None], axis=-1)[:, 0]

  student_Z, teacher_Z = written(student_ZV), written(teacher_ZV)
  ratio_Z = jnp.exp(student_Z - logprobs_Z)
  scale_Z = jnp.minimum(ratio_Z, options.ratio_cap)
  has_slot_Z = slots_Z > 0
  terms_Z = weights_Z * scale_Z * divergence_Z

  def total(values_Z):
    return jnp.where(has_slot_Z, values_Z, 0).sum(dtype=jnp.float32)

  return HintStats(
    loss=options.weight * total(terms_Z),
    num_tokens=total(has_slot_Z),
    divergence=fixed(total(divergence_Z)),
    gap=total(teacher_Z - student_Z),
    truncated=total(ratio_Z >= options.ratio_cap),
    k3=total(ratio_Z - 1 - (student_Z - logprobs_Z)),
  )


def divergence(
  student_logits_ZV: jax.Array, teacher_logits_ZV: jax.Array, kind: str
) -> jax.Array:
  """Returns the divergence D_Z in nats; only the student has a gradient.

  With M the mean of both, 'jsd' is (KL(student || M) + KL(teacher || M)) / 2.
  Logits are float32.
  """
  student_ZV = jax.nn.log_softmax(student_logits_ZV)
  teacher_ZV = jax.lax.stop_gradient(jax.nn.log_softmax(teacher_logits_ZV))
  fixed_ZV = jax.lax.stop_gradient(student_ZV)
  if kind == 'forward':
    value_Z = _kl(teacher_ZV, fixed_ZV)
    slope_ZV = jnp.exp(fixed_ZV) - jnp.exp(teacher_ZV)
  elif kind == 'reverse':
    value_Z = _kl(fixed_ZV, teacher_ZV)
    slope_ZV = jnp.exp(fixed_ZV) * (fixed_ZV - teacher_ZV)
  else:
    half = jnp.log(0.5)
    mixture_ZV = jnp.logaddexp(fixed_ZV + half, teacher_ZV + half)
    value_Z = (_kl(fixed_ZV, mixture_ZV) + _kl(teacher_ZV, mixture_ZV)) / 2
    slope_ZV = jnp.exp(fixed_ZV) * (fixed_ZV - mixture_ZV) / 2
  # The gradient by log-probabilities, without its constant terms, which cancel
  # as probabilities sum to 1: exactly 0 if student and teacher are equal.
  moving_Z = (slope_ZV * student_ZV).sum(-1)
  return value_Z + moving_Z - jax.lax.stop_gradient(moving_Z)


def _kl(left_ZV: jax.Array, right_ZV: jax.Array) -> jax.Array:
  return (jnp.exp(left_ZV) * (left_ZV - right_ZV)).sum(-1)


def metrics(stats: HintStats, scale: float) -> dict[str, float]:
  """Metrics of sums on the host, by the names that `telemetry` explains."""
  tokens = max(float(stats.num_tokens), 1.0)
  return {
    'hint_loss': float(stats.loss) * scale,
    'hint_divergence': float(stats.divergence) / tokens,
    'hint_gap': float(stats.gap) / tokens,
    'hint_truncated': float(stats.truncated) / tokens,
    'mismatch_kl_hints': float(stats.k3) / tokens,
  }
