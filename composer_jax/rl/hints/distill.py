"""Targeted textual feedback: a hinted teacher on the tokens of a faulty turn.

A reward says that an episode failed; a hint says which turn failed, and why.
The teacher, an earlier version of the policy itself, reads the hint before that
turn and scores the tokens that the student wrote without it. On this turn, and
nowhere else, the student is drawn to the teacher's distribution:

  lambda / |Y| * sum over t in Y of
    clip(p_train / p_rollout, max c) * D(student_t, sg teacher_t)

added to the loss of RL (Composer 2.5; SDPO, arXiv 2601.20802; OPSD, arXiv
2601.18734), before the rollouts of the step divide both: a turn as a whole
weighs lambda, however long, where each token of a rollout weighs its advantage.
The student replays its recorded routes; the teacher's context is another, so
its routes are its own. A teacher that is the live policy drags itself along
until calls fall apart (`experiments/studies/hint`): it is the policy that RL
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

# Tokens of a device whose logits, the student's and the teacher's, are at hand
# at once.
_CHUNK = 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HintLossOptions:
  """What hints weigh, and how student and teacher are compared.

  Attributes:
    weight: lambda, of a hinted turn beside a rollout of advantage 1; 0 ignores
      hints.
    divergence: KL(policy || teacher) for 'reverse', or 'forward', or 'jsd'.
    teacher: 'frozen', the policy that RL began with, or 'ema', an average that
      follows the policy.
    ema_rate: share of the distance that the average goes in each step.
    ratio_cap: c, of p_train / p_rollout.
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
    is_right = 0 < self.ema_rate < 1
    checks.require(self, 'ema_rate', is_right, 'lie in (0, 1), both excluded')


OFF = HintLossOptions(weight=0.0)


class HintStats(flax.struct.PyTreeNode, kw_only=True):
  """Sums over the tokens of hinted turns, so that microbatches add up.

  Attributes:
    loss: lambda and all weights included.
    divergence: nats, unweighted.
    gap: log-probability of the token as written, the teacher's minus the
      student's; well below 0 where the hint speaks against it.
    truncated: tokens whose importance ratio met its cap.
  """

  loss: jax.Array
  num_tokens: jax.Array
  divergence: jax.Array
  gap: jax.Array
  truncated: jax.Array


def parts_of(plan: exchange.ExchangePlan | None) -> int:
  """Groups of devices that share the rows of a batch out."""
  return shardings.product(plan.batch_axes, plan.mesh) if plan else 1


def loss(
  model: decoder.Decoder,
  values: decoder.Variables,
  teacher: decoder.Variables,
  batch: batches.HintBatch,
  options: HintLossOptions,
) -> HintStats:
  """Returns the sums of a microbatch; only `loss` has a gradient.

  It is that of the student's variables, `values`; `teacher` has none.
  """
  written, read = batch.student, batch.teacher
  written_BTD = model.apply(
    values,
    written.tokens_BT,
    written.segment_ids_BT,
    written.positions_BT,
    expert_ids_MBTA=written.expert_ids_MBTA,
  ).hidden_BTD
  teacher = jax.lax.stop_gradient(teacher)
  with jax.named_scope('teacher'):
    read_BTD = model.apply(
      teacher, read.tokens_BT, read.segment_ids_BT, read.positions_BT
    ).hidden_BTD
  name = _unembedding(model.config)
  with jax.named_scope('hints'):
    return compare(
      model,
      (values['params'][name], teacher['params'][name]),
      (written_BTD, read_BTD),
      batch,
      options,
    )


def gradients(
  model: decoder.Decoder,
  values: decoder.Variables,
  teacher: decoder.Variables,
  batch: batches.HintBatch,
  options: HintLossOptions,
) -> tuple[Any, HintStats]:
  """Returns the gradient of the student's parameters, and the sums."""

  def loss_function(params):
    student = {**values, 'params': params}
    stats = loss(model, student, teacher, batch, options)
    return stats.loss, stats

  grads, stats = jax.grad(loss_function, has_aux=True)(values['params'])
  return grads, stats


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
    written_BTD, read_BTD = hidden
    theirs_XD = _by_slot(read_BTD, batch.teacher_slots_BT, num_slots, plan)
    # The gradient adds up over chunks in float32.
    ours, theirs = (
      shards.gather(w, spec, dtype=written_BTD.dtype).astype(jnp.float32)
      for w in weights
    )
    tokens = _of_tokens(written_BTD, batch, plan)
    sums = _summed((ours, theirs), tokens, theirs_XD, options, model.config)
    # No sum over the mesh may lie on the way of a gradient inside of a shard.
    return shards.stacked(sums)

  where = shards.tokens_spec(plan)
  # Routes have their axes in another order, and no use here.
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

  A row's two sides may lie on any of the devices that share rows, each of which
  gets all of the part. What predicts a token is the state before it.
  """
  slots_BT = head.of_next(slots_BT, plan)
  places_BT = jnp.where(slots_BT > 0, slots_BT - 1, num_slots)
  states_XD = jnp.zeros((num_slots, hidden_BTD.shape[-1]), hidden_BTD.dtype)
  states_XD = states_XD.at[places_BT].set(hidden_BTD, mode='drop')
  axes = plan.sequence_axes if plan else ()
  return jax.lax.psum(states_XD, axes) if axes else states_XD


def _of_tokens(hidden_BTD, batch, plan) -> tuple[jax.Array, ...]:
  """Of a device's tokens, what predicts the next of each; with a slot first.

  Hidden states, slots, ids, weights, rollout's log-probabilities, temperatures.
  """
  student = batch.student
  arrays_BT = (
    batch.student_slots_BT,
    student.tokens_BT,
    student.loss_weights_BT,
    student.rollout_logprobs_BT,
    student.temperatures_BT,
  )
  slots_Z, *rest = (head.of_next(x_BT, plan).reshape(-1) for x_BT in arrays_BT)
  order_Z = jnp.argsort(slots_Z == 0, stable=True)
  tokens = (hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), slots_Z, *rest)
  return tuple(x_Z[order_Z] for x_Z in tokens)


def _summed(
  weights: tuple[jax.Array, jax.Array],
  tokens: tuple[jax.Array, ...],
  theirs_XD: jax.Array,
  options: HintLossOptions,
  config: model_config.ModelConfig,
) -> HintStats:
  """Sums over a device's tokens, in chunks; those without a slot cost nothing.

  The backward pass makes the logits of a chunk again.
  """
  num_tokens = len(tokens[0])
  size = min(_CHUNK, num_tokens)
  missing = -num_tokens % size

  def chunked(x_Z):
    x_Z = jnp.pad(x_Z, ((0, missing),) + ((0, 0),) * (x_Z.ndim - 1))
    return x_Z.reshape(-1, size, *x_Z.shape[1:])

  @jax.checkpoint
  def compared(weights, chunk):
    return _sums_of(weights, chunk, theirs_XD, options, config)

  def step(sums, chunk):
    nothing = jax.tree.map(jnp.zeros_like, sums)
    _, slots_Z, *_ = chunk
    # Chunks without a slot are all behind those with one.
    more = jax.lax.cond(
      slots_Z[0] > 0, compared, lambda *_: nothing, weights, chunk
    )
    return jax.tree.map(jnp.add, sums, more), None

  names = [field.name for field in dataclasses.fields(HintStats)]
  nothing = HintStats(**dict.fromkeys(names, jnp.float32(0)))
  return jax.lax.scan(step, nothing, jax.tree.map(chunked, tokens))[0]


def _sums_of(weights, tokens, theirs_XD, options, config) -> HintStats:
  hidden_ZD, slots_Z, ids_Z, weights_Z, logprobs_Z, temperatures_Z = tokens
  name = _unembedding(config)
  # A slot of 0 reads some other state, and weighs nothing.
  states_ZD = theirs_XD[jnp.maximum(slots_Z - 1, 0)]
  ours_ZV, theirs_ZV = (
    head.logits({'params': {name: weight}}, x_ZD[None], config)[0]
    / jnp.where(slots_Z > 0, temperatures_Z, 1)[:, None]
    for weight, x_ZD in zip(weights, (hidden_ZD, states_ZD), strict=True)
  )
  apart_Z = divergence(ours_ZV, theirs_ZV, options.divergence)
  fixed = jax.lax.stop_gradient

  def written(logits_ZV):
    logprobs_ZV = jax.nn.log_softmax(fixed(logits_ZV))
    return jnp.take_along_axis(logprobs_ZV, ids_Z[:, None], axis=-1)[:, 0]

  ours_Z, theirs_Z = written(ours_ZV), written(theirs_ZV)
  ratio_Z = jnp.exp(ours_Z - logprobs_Z)
  scale_Z = jnp.minimum(ratio_Z, options.ratio_cap)
  has_slot_Z = slots_Z > 0
  terms_Z = weights_Z * scale_Z * apart_Z

  def total(values_Z):
    return jnp.where(has_slot_Z, values_Z, 0).sum(dtype=jnp.float32)

  return HintStats(
    loss=options.weight * total(terms_Z),
    num_tokens=total(has_slot_Z),
    divergence=fixed(total(apart_Z)),
    gap=total(theirs_Z - ours_Z),
    truncated=total(ratio_Z >= options.ratio_cap),
  )


def divergence(
  student_logits_ZV: jax.Array, teacher_logits_ZV: jax.Array, kind: str
) -> jax.Array:
  """Returns the divergence D_Z in nats, with a gradient of the student's.

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
  # By the log-probabilities, without what adds up to nothing because those sum
  # to 1: so it is exactly 0 where student and teacher are the same.
  moving_Z = (slope_ZV * student_ZV).sum(-1)
  return value_Z + moving_Z - jax.lax.stop_gradient(moving_Z)


def _kl(left_ZV: jax.Array, right_ZV: jax.Array) -> jax.Array:
  return (jnp.exp(left_ZV) * (left_ZV - right_ZV)).sum(-1)


def metrics(stats: HintStats, scale: float) -> dict[str, float]:
  """By the names that `telemetry` explains; of sums on the host."""
  tokens = max(float(stats.num_tokens), 1.0)
  return {
    'hint_loss': float(stats.loss) * scale,
    'hint_divergence': float(stats.divergence) / tokens,
    'hint_gap': float(stats.gap) / tokens,
    'hint_truncated': float(stats.truncated) / tokens,
  }
