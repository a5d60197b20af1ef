"""Heads that predict further tokens, and their loss (DeepSeek-V3, section 2.2).

The k-th of D heads reads at token t the state that the head before it has there
(the first: the decoder's, after its final norm) and the embedding of token
t + k, and predicts token t + k + 1:

  x_t = [norm(embedding_{t+k}); norm(state_t)] projection
  state_t = decoder layer(x)_t,  logits_t = unembedding(final norm(state_t))

Embedding and unembedding are the decoder's. Tokens for which t + k lies in
another document are padding, and no loss is taken across documents.

The loss has a gradient by the heads alone: decoder, embedding, unembedding and
teacher are constants, so that training heads changes no bit of the policy. The
heads route their tokens themselves; no route of theirs is in a record.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from composer_jax.core import batches, checks
from composer_jax.kernels import linear, norm, rows
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head, router, stacks
from composer_jax.parallel import exchange, sequence, shards

# Parameters of a head outside of its decoder layer.
_OUTSIDE = ('embedding_norm', 'hidden_norm', 'projection', 'final_norm')


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLossOptions:
  """What heads are trained towards.

  Attributes:
    target: 'distribution' for that of the main head at the token predicted from
      (self-distillation, its KL divergence), or 'tokens' for the next tokens.
    top_k: likeliest words that a target distribution is cut to, and renormed
      over; 0 takes all.
  """

  target: str = 'distribution'
  top_k: int = 0

  def __post_init__(self):
    checks.one_of(self, 'target', ('distribution', 'tokens'))
    checks.at_least(self, 0, 'top_k')


class HeadStats(flax.struct.PyTreeNode, kw_only=True):
  """Sums over a batch, by head, so that microbatches add up.

  Attributes:
    loss_K: weighted sum of the loss in nats.
    agrees_K: weighted number of tokens whose likeliest word is the main head's.
    weight_K: sum of the loss weights of the predicted tokens.
    load_KE: int32 tokens sent to each expert; None for dense layers.
  """

  loss_K: jax.Array
  agrees_K: jax.Array
  weight_K: jax.Array
  load_KE: jax.Array | None


def metrics(stats: HeadStats) -> dict[str, list[float]]:
  """Returns means by head, from sums on the host."""
  weights = [max(float(weight), 1e-9) for weight in stats.weight_K]

  def means(sums_K):
    return [float(s) / w for s, w in zip(sums_K, weights, strict=True)]

  return {
    'mtp_loss': means(stats.loss_K),
    'mtp_agreement': means(stats.agrees_K),
  }


class _Ahead(NamedTuple):
  """A batch seen from so many tokens before; 0 beyond the document."""

  tokens_BT: jax.Array
  segment_ids_BT: jax.Array
  weights_BT: jax.Array


def states(
  heads: decoder.Variables,
  variables: decoder.Variables,
  hidden_BTD: jax.Array,
  batch: batches.LMBatch,
  *,
  config: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
) -> list[tuple[jax.Array, stacks.LayerOutput]]:
  """Runs all heads over a packed batch.

  Args:
    heads: variables of the heads, `variables['mtp']` of a model.
    hidden_BTD: hidden states of the decoder after its final norm.

  Returns:
    For each head, hidden_BTD after its final norm, for `models.head`, and its
    layer's results.
  """
  ahead = _ahead(batch, _depth(config), plan)
  return _states(heads, variables, hidden_BTD, batch, ahead, config, plan)


def loss(
  params: Any,
  selection_bias: Any,
  variables: decoder.Variables,
  hidden_BTD: jax.Array,
  batch: batches.LMBatch,
  *,
  config: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
  options: HeadLossOptions,
) -> tuple[jax.Array, HeadStats]:
  """Returns the sum over heads and tokens of the weighted loss, and statistics.

  A head's prediction has the loss weight of the predicted token. The routers'
  losses of the heads are added with the weights of the model's, per token.

  Args:
    params: parameters of the heads, rounded as the policy's are.
    variables: the decoder's, which have no gradient.
    hidden_BTD: states that the decoder made of the batch, without a gradient.
  """
  variables, hidden_BTD = jax.lax.stop_gradient((variables, hidden_BTD))
  heads = {'params': params, 'selection_bias': selection_bias}
  with jax.named_scope('mtp'):
    ahead = _ahead(batch, _depth(config) + 1, plan)
    made = _states(heads, variables, hidden_BTD, batch, ahead, config, plan)
    total, sums, loads = jnp.float32(0), [], []
    for depth, (state_BTD, output) in enumerate(made, start=1):
      pair, target = (state_BTD, hidden_BTD), ahead[depth]
      sums.append(
        _compare(variables, pair, target, depth, config, plan, options)
      )
      total += sums[-1]['loss']
      if output.stats is None:
        continue
      of_layer = jax.tree.map(lambda x: x.sum(1), output.stats.router)
      stats = router.statistics(of_layer, config.moe)
      loads.append(stats.load_ME[0])
      # A sum over tokens, which adds up over microbatches.
      tokens = of_layer.num_tokens[0].astype(jnp.float32)
      # XLA keeps 0 * x: a zero weight leaves it out.
      if config.moe.aux_loss_weight:
        total += config.moe.aux_loss_weight * tokens * stats.aux_loss_M[0]
      if config.moe.z_loss_weight:
        total += config.moe.z_loss_weight * tokens * stats.z_loss_M[0]
  by_head = {
    f'{name}_K': jnp.stack([s[name] for s in sums]) for name in sums[0]
  }
  return total, HeadStats(
    **by_head, load_KE=jnp.stack(loads) if loads else None
  )


def _depth(config):
  assert config.mtp is not None
  return config.mtp.depth


def _ahead(batch, most, plan) -> list[_Ahead]:
  """Returns the batch seen from 1 to `most` tokens before."""

  def stage(*arrays):
    whole = [sequence.gather_row(x_BT, plan) for x_BT in arrays]
    _, segments_BT, _ = whole
    places_T = jnp.arange(segments_BT.shape[1])
    made = []
    for n in range(1, most + 1):
      moved = [jnp.roll(x_BT, -n, axis=1) for x_BT in whole]
      follows_BT = (moved[1] == segments_BT) & (places_T < len(places_T) - n)
      made.append(
        _Ahead(
          *(
            sequence.own_part(jnp.where(follows_BT, x_BT, 0), plan)
            for x_BT in moved
          )
        )
      )
    return made

  where = shards.tokens_spec(plan)
  stage = shards.per_shard(stage, plan, in_specs=(where,) * 3, out_specs=where)
  return stage(batch.tokens_BT, batch.segment_ids_BT, batch.loss_weights_BT)


def _states(heads, variables, hidden_BTD, batch, ahead, config, plan):
  # In bf16: formats of few bits are for the experts of the decoder.
  config, made = config.precise(), []
  kind = 'moe' if config.mtp.layer == 'moe' else 'ffw'
  inner = ('attention_norm', 'attention', 'ffw_norm', kind)
  for depth in range(config.mtp.depth):
    cut = functools.partial(jax.tree.map, lambda x: x[depth : depth + 1])  # noqa: B023
    layers = cut(heads['params']['layers'])
    stack = {'params': {name: layers[name] for name in inner}}
    if bias := heads.get('selection_bias'):
      stack['selection_bias'] = cut(bias['layers'])
    tokens_BT, segment_ids_BT, _ = ahead[depth]
    given = (tokens_BT, segment_ids_BT, batch.positions_BT)
    x_BTD, context = decoder.embed(variables, given, config, plan)
    outside = {name: layers[name] for name in _OUTSIDE}
    x_BTD = _join(outside, x_BTD, hidden_BTD, config, plan)
    hidden_BTD, output = stacks.run(
      'layers',
      stack,
      x_BTD,
      context,
      (None, None),
      config=config,
      plan=plan,
      within='mtp/',
    )
    final = {
      'params': {'final_norm': {'scale': outside['final_norm']['scale'][0]}}
    }
    made.append((decoder.final_norm(final, hidden_BTD, config, plan), output))
  return made


def join(
  params: Any,
  x_BTD: jax.Array,
  hidden_BTD: jax.Array,
  config: model_config.ModelConfig,
) -> jax.Array:
  """Returns the input of a head's layer, by whole parameters of the head."""

  def stage(params, parts_BTD):
    weight, scales = params
    both = zip(parts_BTD, scales, strict=True)
    normed = [norm.rms_norm(x, s, config.norm_eps) for x, s in both]
    return linear.linear(jnp.concatenate(normed, axis=-1), weight)

  scales = [params[f'{n}_norm']['scale'] for n in ('embedding', 'hidden')]
  scales = [scale_D.astype(jnp.float32) for scale_D in scales]
  weight = params['projection'].astype(x_BTD.dtype)
  return rows.map_rows(
    stage, (weight, scales), (x_BTD, hidden_BTD), numerics=config.numerics
  )


def _join(params, x_BTD, hidden_BTD, config, plan):
  """Joins in shards; `params` have a leading axis of 1."""
  spec = shards.specs_of(
    plan, 'mtp/params/layers/projection', params['projection']
  )
  spec = P(*spec[1:])

  def stage(params, x_BTD, hidden_BTD):
    weight = shards.gather(params['projection'], spec, dtype=x_BTD.dtype)
    whole = {**params, 'projection': weight}
    return join(whole, x_BTD, hidden_BTD, config)

  where = shards.tokens_spec(plan)
  params = jax.tree.map(lambda x: x[0], params)
  specs = jax.tree.map(lambda _: P(), params) | {'projection': spec}
  stage = shards.per_shard(
    stage, plan, in_specs=(specs, where, where), out_specs=where
  )
  return stage(params, x_BTD, hidden_BTD)


def _compare(variables, hidden, target, depth, config, plan, options):
  """Returns sums of a head: its loss, its agreement and its weight.

  `hidden` are the head's states and the decoder's; `target` is the batch seen
  from `depth` + 1 tokens before.
  """
  config = dataclasses.replace(config, numerics='fast')
  name = 'embedding' if config.tie_embeddings else 'unembedding'
  weight = variables['params'][name]
  spec = shards.specs_of(plan, f'params/{name}', weight)

  def stage(weight, student_BTD, states_BTD, target):
    # The decoder predicts the same token from `depth` tokens later.
    whole_BTD = sequence.gather_row(states_BTD, plan)
    teacher_BTD = sequence.own_part(jnp.roll(whole_BTD, -depth, axis=1), plan)
    num_words = weight.shape[0 if config.tie_embeddings else 1]
    chunk = head.words_at_once(2 * target.tokens_BT.size, num_words)
    chunk = min(chunk, num_words)
    how = head.Chunked(chunk, spec, weight.dtype.name, config)
    flat = lambda x_BT: x_BT.reshape(-1, *x_BT.shape[2:])
    arrays = map(flat, (student_BTD, teacher_BTD, *target))
    student_ZD, teacher_ZD, targets_Z, _, weights_Z = arrays
    given = (teacher_ZD, targets_Z, weights_Z)
    losses_Z, agrees_Z = _compared(how, options, weight, student_ZD, given)
    sums = {
      'loss': losses_Z.sum(),
      'agrees': agrees_Z.sum(),
      'weight': weights_Z.sum(),
    }
    # A gradient inside a shard must not pass through a sum over the mesh.
    return shards.stacked(sums)

  where = shards.tokens_spec(plan)
  stage = shards.per_shard(
    stage,
    plan,
    in_specs=(spec, where, where, where),
    out_specs=shards.stacked_spec(plan),
  )
  return jax.tree.map(lambda x: x.sum(0), stage(weight, *hidden, target))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _compared(how, options, weight, student_ZD, given):
  """Returns the weighted loss and agreement of tokens, in chunks of words.

  Only `student_ZD` has a gradient, which the forward pass computes: the logits
  are not needed again.
  """
  return _compared_forward(how, options, weight, student_ZD, given)[0]


class _Tops(NamedTuple):
  """Running statistics of a distribution over words."""

  top_Z: jax.Array
  best_Z: jax.Array  # int32 likeliest word
  total_Z: jax.Array  # sum of exponentials, over the largest one
  largest_ZX: jax.Array  # the `top_k` largest logits, or none

  def add(self, logits_ZV: jax.Array, start: Any) -> '_Tops':
    top_Z = jnp.maximum(self.top_Z, logits_ZV.max(-1))
    sum_Z = jnp.exp(logits_ZV - top_Z[:, None]).sum(-1)
    best_Z = start + jnp.argmax(logits_ZV, axis=-1).astype(jnp.int32)
    largest_ZX, count = self.largest_ZX, self.largest_ZX.shape[-1]
    if count:
      among = jnp.concatenate([largest_ZX, logits_ZV], axis=-1)
      largest_ZX, _ = jax.lax.top_k(among, count)
    return _Tops(
      top_Z,
      jnp.where(top_Z > self.top_Z, best_Z, self.best_Z),
      self.total_Z * jnp.exp(self.top_Z - top_Z) + sum_Z,
      largest_ZX,
    )

  def log_z(self) -> jax.Array:
    """Returns the normaliser of the distribution, cut to its top words."""
    if self.largest_ZX.shape[-1]:
      return jax.nn.logsumexp(self.largest_ZX, axis=-1)
    return self.top_Z + jnp.log(self.total_Z)


def _compared_forward(how, options, weight, student_ZD, given):
  teacher_ZD, targets_Z, weights_Z = given
  zeros_Z = jnp.zeros(targets_Z.shape, jnp.float32)
  top_k = options.top_k if options.target == 'distribution' else 0

  def tops(count):
    none_ZX = jnp.full((*targets_Z.shape, count), -jnp.inf)
    return _Tops(zeros_Z - jnp.inf, jnp.zeros_like(targets_Z), zeros_Z, none_ZX)

  def logits(part):
    pair = (student_ZD, teacher_ZD)
    return [head.logits_of(part, x_ZD, how.config) for x_ZD in pair]

  def measure(both, start, pair_ZV):
    return [t.add(x_ZV, start) for t, x_ZV in zip(both, pair_ZV, strict=True)]

  def pull(both, sums, start, pair_ZV, part):
    losses_Z, d_student_ZD = sums
    student, teacher = both
    student_ZV, teacher_ZV = pair_ZV
    log_p_ZV = student_ZV - student.log_z()[:, None]
    if options.target == 'tokens':
      words_V = jnp.arange(student_ZV.shape[-1])
      q_ZV = (words_V == (targets_Z - start)[:, None]).astype(jnp.float32)
      gap_ZV = -log_p_ZV
    else:
      log_q_ZV = teacher_ZV - teacher.log_z()[:, None]
      q_ZV, gap_ZV = jnp.exp(log_q_ZV), log_q_ZV - log_p_ZV
      if top_k:
        is_top_ZV = teacher_ZV >= teacher.largest_ZX[:, -1:]
        q_ZV = jnp.where(is_top_ZV, q_ZV, 0)
    losses_Z += (q_ZV * gap_ZV).sum(-1)
    d_logits_ZV = weights_Z[:, None] * (jnp.exp(log_p_ZV) - q_ZV)
    d_student_ZD += jnp.einsum(
      'ZV,VD->ZD' if how.config.tie_embeddings else 'ZV,DV->ZD',
      d_logits_ZV.astype(part.dtype),
      part,
      preferred_element_type=jnp.float32,
    )
    return losses_Z, d_student_ZD

  both = [tops(0), tops(top_k)]
  sums = (zeros_Z, jnp.zeros(student_ZD.shape, jnp.float32))
  if how.chunk == weight.shape[how.words]:
    part = shards.gather(weight, how.spec, dtype=student_ZD.dtype)
    pair_ZV = logits(part)
    both = measure(both, 0, pair_ZV)
    sums = pull(both, sums, 0, pair_ZV, part)
  else:

    def first(carry, start, part):
      _, both = carry
      return (carry[0], measure(both, start, logits(part))), None

    def second(carry, start, part):
      _, both, sums = carry
      return (carry[0], both, pull(both, sums, start, logits(part), part)), None

    parts = head.parts_of(how, weight, student_ZD.dtype)
    # The first entry gives the dtype of the weight's parts.
    (_, both), _ = head.fold(first, (student_ZD, both), how, weight, parts)
    carry = (student_ZD, both, sums)
    (_, both, sums), _ = head.fold(second, carry, how, weight, parts)
  losses_Z, d_student_ZD = sums
  agrees_Z = both[0].best_Z == both[1].best_Z
  out = (weights_Z * losses_Z, weights_Z * agrees_Z)
  return out, d_student_ZD.astype(student_ZD.dtype)


def _compared_backward(how, options, d_student_ZD, d_out):
  del how, options
  # A loss weighs its tokens by `weights_Z`, which the gradient has already.
  return None, d_out[0][:, None].astype(d_student_ZD.dtype) * d_student_ZD, None


_compared.defvjp(_compared_forward, _compared_backward)
