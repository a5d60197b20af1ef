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
The student replays its recorded routes. The teacher's context is
another, so its routes are its own. A teacher that is the live policy drags
itself along until calls fall apart (`experiments/studies/hint`): it is the
policy that RL began with, or a slow average.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.core import batches, checks
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head
from composer_jax.parallel import shards
from composer_jax.rl.hints import divergences

TEACHERS = ('frozen', 'ema')

# Tokens of a device whose logits, the student's and the teacher's, are at hand
# at once.
_CHUNK = 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HintLossOptions:
  """What hints weigh, and how student and teacher are compared.

  Attributes:
    weight: lambda, of a hinted turn beside a rollout of advantage 1; 0 ignores
      hints.
    divergence: one of `divergences.KINDS`.
    jsd_mix: share of the teacher in the mixture that 'jsd' compares with.
    top_k: words of the teacher that are told apart, all others count as one;
      0 tells all apart.
    teacher: 'frozen', the policy that RL began with, or 'ema', an average that
      follows the policy.
    ema_rate: by which share of the distance, each step.
    ratio_cap: of the importance ratio.
    token_cap: nats; the gradient of a token that is further apart is scaled as
      if it were this far. 0 for no cap.
  """

  weight: float = 0.0
  divergence: str = 'reverse'
  jsd_mix: float = 0.5
  top_k: int = 0
  teacher: str = 'frozen'
  ema_rate: float = 0.01
  ratio_cap: float = 2.0
  token_cap: float = 0.0

  def __post_init__(self):
    checks.one_of(self, 'divergence', divergences.KINDS)
    checks.one_of(self, 'teacher', TEACHERS)
    checks.at_least(self, 0, 'top_k')
    checks.number(self, 0, 'weight', 'token_cap')
    checks.number(self, 1, 'ratio_cap')
    for name in ('jsd_mix', 'ema_rate'):
      if not 0 < getattr(self, name) < 1:
        raise ValueError(
          f'HintLossOptions.{name} ({getattr(self, name)}) must lie between 0 '
          'and 1, both excluded.'
        )


OFF = HintLossOptions()


class HintStats(flax.struct.PyTreeNode, kw_only=True):
  """Sums over the tokens of hinted turns, so that microbatches add up.

  Attributes:
    loss: lambda and all weights included.
    num_tokens: of the turns.
    divergence: nats, unweighted.
    gap: log-probability of the token as written, the teacher's minus the
      student's; well below 0 where the hint speaks against it.
    truncated: tokens whose importance ratio met its cap.
    capped: tokens that are further apart than `token_cap`.
  """

  loss: jax.Array
  num_tokens: jax.Array
  divergence: jax.Array
  gap: jax.Array
  truncated: jax.Array
  capped: jax.Array


def loss(
  model: decoder.Decoder,
  values: decoder.Variables,
  teacher: decoder.Variables,
  batch: batches.HintBatch,
  options: HintLossOptions,
  *,
  num_slots: int,
) -> HintStats:
  """Returns the sums of a microbatch; only `loss` has a gradient.

  Args:
    model: of both.
    values: of the student.
    teacher: variables of the same tree; they have no gradient.
    batch: of `rl.hints.batching.pack`.
    options: of the loss.
    num_slots: of a part; see `rl.hints.batching.num_slots`.
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
      num_slots=num_slots,
    )


def compare(
  model: decoder.Decoder,
  weights: tuple[jax.Array, jax.Array],
  hidden_BTD: tuple[jax.Array, jax.Array],
  batch: batches.HintBatch,
  options: HintLossOptions,
  *,
  num_slots: int,
) -> HintStats:
  """Returns the sums of a microbatch from what its passes gave.

  Args:
    model: of both.
    weights: what makes logits of hidden states; the student's, the teacher's.
    hidden_BTD: of the student, of the teacher.
    batch: of both.
    options: of the loss.
    num_slots: of a part.
  """
  plan = model.plan
  spec = shards.specs_of(
    plan, f'params/{_unembedding(model.config)}', weights[0]
  )

  def stage(weights, hidden, batch):
    written_BTD, read_BTD = hidden
    theirs_XD = _by_slot(read_BTD, batch.teacher_slots_BT, num_slots, plan)
    ours, theirs = (_whole(w, spec, written_BTD.dtype) for w in weights)
    tokens = _of_tokens(written_BTD, batch, plan)
    found = _summed((ours, theirs), tokens, theirs_XD, options, model.config)
    # No sum over the mesh may lie on the way of a gradient inside of a shard.
    return shards.stacked(found)

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
  found = stage(
    (weights[0], fixed(weights[1])), (hidden_BTD[0], fixed(hidden_BTD[1])), bare
  )
  return jax.tree.map(lambda x: x.sum(0), found)


def _unembedding(config: model_config.ModelConfig) -> str:
  return 'embedding' if config.tie_embeddings else 'unembedding'


def _whole(weight, spec, dtype):
  whole = shards.gather(weight, spec, dtype=dtype)
  # The gradient adds up over chunks in this dtype.
  return whole.astype(jnp.float32)


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


class _Tokens(flax.struct.PyTreeNode, kw_only=True):
  """Of a device's tokens, what is about to predict the next of each."""

  hidden_ZD: jax.Array
  slots_Z: jax.Array
  ids_Z: jax.Array
  weights_Z: jax.Array
  logprobs_Z: jax.Array
  temperatures_Z: jax.Array


def _of_tokens(hidden_BTD, batch, plan) -> _Tokens:
  """Those with a slot come first."""
  student = batch.student

  def flat(array_BT):
    return head.of_next(array_BT, plan).reshape(-1)

  slots_Z = flat(batch.student_slots_BT)
  tokens = _Tokens(
    hidden_ZD=hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
    slots_Z=slots_Z,
    ids_Z=flat(student.tokens_BT),
    weights_Z=flat(student.loss_weights_BT),
    logprobs_Z=flat(student.rollout_logprobs_BT),
    temperatures_Z=flat(student.temperatures_BT),
  )
  order_Z = jnp.argsort(slots_Z == 0, stable=True)
  return jax.tree.map(lambda x_Z: x_Z[order_Z], tokens)


def _summed(
  weights: tuple[jax.Array, jax.Array],
  tokens: _Tokens,
  theirs_XD: jax.Array,
  options: HintLossOptions,
  config: model_config.ModelConfig,
) -> HintStats:
  """Sums over a device's tokens, in chunks; those without a slot cost nothing.

  The backward pass makes the logits of a chunk again.
  """
  num_tokens = len(tokens.slots_Z)
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
    # Chunks without a slot are all behind those with one.
    found = jax.lax.cond(
      chunk.slots_Z[0] > 0, compared, lambda *_: nothing, weights, chunk
    )
    return jax.tree.map(jnp.add, sums, found), None

  zero = jnp.float32(0)
  nothing = HintStats(
    loss=zero,
    num_tokens=zero,
    divergence=zero,
    gap=zero,
    truncated=zero,
    capped=zero,
  )
  return jax.lax.scan(step, nothing, jax.tree.map(chunked, tokens))[0]


def _sums_of(weights, tokens: _Tokens, theirs_XD, options, config) -> HintStats:
  name = _unembedding(config)
  # A slot of 0 reads some other state, and weighs nothing.
  states_ZD = theirs_XD[jnp.maximum(tokens.slots_Z - 1, 0)]
  ours_ZV, theirs_ZV = (
    head.logits({'params': {name: weight}}, hidden_ZD[None], config)[0]
    / jnp.where(tokens.slots_Z > 0, tokens.temperatures_Z, 1)[:, None]
    for weight, hidden_ZD in zip(
      weights, (tokens.hidden_ZD, states_ZD), strict=True
    )
  )
  apart_Z = divergences.divergence(
    ours_ZV,
    theirs_ZV,
    options.divergence,
    jsd_mix=options.jsd_mix,
    top_k=options.top_k,
  )
  fixed = jax.lax.stop_gradient
  ours_Z, theirs_Z = (
    _logprobs(fixed(logits_ZV), tokens.ids_Z)
    for logits_ZV in (ours_ZV, theirs_ZV)
  )
  ratio_Z = jnp.exp(ours_Z - tokens.logprobs_Z)
  scale_Z = jnp.minimum(ratio_Z, options.ratio_cap)
  capped_Z = jnp.zeros_like(scale_Z, bool)
  if options.token_cap:
    # Not min(D, cap), which would take the gradient from the very tokens that
    # the hint is about.
    capped_Z = fixed(apart_Z) > options.token_cap
    scale_Z *= jnp.where(capped_Z, options.token_cap / fixed(apart_Z), 1)
  has_slot_Z = tokens.slots_Z > 0
  terms_Z = tokens.weights_Z * scale_Z * apart_Z

  def total(values_Z):
    return jnp.where(has_slot_Z, values_Z, 0).sum(dtype=jnp.float32)

  return HintStats(
    loss=options.weight * total(terms_Z),
    num_tokens=total(has_slot_Z),
    divergence=fixed(total(apart_Z)),
    gap=total(theirs_Z - ours_Z),
    truncated=total(ratio_Z >= options.ratio_cap),
    capped=total(capped_Z),
  )


def _logprobs(logits_ZV, ids_Z):
  logprobs_ZV = jax.nn.log_softmax(logits_ZV)
  return jnp.take_along_axis(logprobs_ZV, ids_Z[:, None], axis=-1)[:, 0]


def gradients(
  model: decoder.Decoder,
  values: decoder.Variables,
  teacher: decoder.Variables,
  batch: batches.HintBatch,
  options: HintLossOptions,
  *,
  num_slots: int,
) -> tuple[Any, HintStats]:
  """Gradient of the student's parameters, and sums; arguments as of `loss`."""

  def loss_function(params):
    student = {**values, 'params': params}
    stats = loss(model, student, teacher, batch, options, num_slots=num_slots)
    return stats.loss, stats

  grads, stats = jax.grad(loss_function, has_aux=True)(values['params'])
  return grads, stats


def metrics(stats: HintStats, scale: float) -> dict[str, float]:
  """By the names that `telemetry` explains; of sums on the host."""
  tokens = max(float(stats.num_tokens), 1.0)
  return {
    'hint_loss': float(stats.loss) * scale,
    'hint_divergence': float(stats.divergence) / tokens,
    'hint_gap': float(stats.gap) / tokens,
    'hint_truncated': float(stats.truncated) / tokens,
    'hint_capped': float(stats.capped) / tokens,
  }
