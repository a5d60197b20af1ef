"""Next-token loss of pretraining and fine-tuning, and on held-out text."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head, mtp
from composer_jax.parallel import exchange
from composer_jax.train import state as train_state

# (variables, batch) -> (weighted sum of -log p, sum of weights).
SumFunction = Callable[
  [dict[str, Any], batches.LMBatch], tuple[jax.Array, jax.Array]
]


class Totals(NamedTuple):
  """Denominators of the means over a batch."""

  loss_weight: jax.Array  # sum of the loss weights
  num_tokens: jax.Array  # int32, padding excluded


def totals(batch: batches.LMBatch) -> Totals:
  return Totals(
    # float32 sums: a batch has more tokens than bfloat16 has integers.
    loss_weight=batch.loss_weights_BT.sum(),
    num_tokens=jnp.sum(batch.segment_ids_BT != 0, dtype=jnp.int32),
  )


class LossStats(flax.struct.PyTreeNode, kw_only=True):
  """Statistics of a batch, or a microbatch's share, which `summed` adds up.

  Attributes:
    loss: weighted mean of -log p, nats per token, without the routers' losses.
    aux_loss: load balancing loss, summed over MoE layers, before its weight;
      over microbatches their mean weighted by tokens.
    z_loss: mean squared log-sum-exp of the routers' logits, summed over MoE
      layers, before its weight.
    num_tokens: int32 number of tokens that are not padding.
    load_ME: int32 number of tokens sent to each expert.
    max_logits_LN: largest attention logit of each layer and head; None if not
      measured.
    rounds_M: int32 rounds of each MoE layer's exchange, over microbatches the
      most; None where no token travels.
    heads: sums of the heads for multi-token prediction; None if not trained.
  """

  loss: jax.Array
  aux_loss: jax.Array
  z_loss: jax.Array
  loss_weight: jax.Array
  num_tokens: jax.Array
  load_ME: jax.Array
  max_logits_LN: jax.Array | None = None
  rounds_M: jax.Array | None = None
  heads: mtp.HeadStats | None = None


def summed(stats: LossStats) -> LossStats:
  """Returns a batch's statistics from those of its microbatches, stacked."""
  absent = {'max_logits_LN': None, 'rounds_M': None}
  maxima = {name: getattr(stats, name) for name in absent}
  sums = jax.tree.map(lambda a: a.sum(0), stats.replace(**absent))
  return sums.replace(**jax.tree.map(lambda a: a.max(0), maxima))


def negative_logprob_sum(
  variables: decoder.Variables,
  batch: batches.LMBatch,
  *,
  model: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
  with_max_logits: bool = False,
) -> tuple[jax.Array, decoder.DecoderOutput]:
  """Returns the weighted sum of -log p over a batch, and the forward pass."""
  tokens_BT, segment_ids_BT = batch.tokens_BT, batch.segment_ids_BT
  output = decoder.Decoder(model, plan).apply(
    variables,
    tokens_BT,
    segment_ids_BT,
    batch.positions_BT,
    with_max_logits=with_max_logits,
  )
  logprobs_BT, _ = head.target_logprobs(
    variables, output.hidden_BTD, tokens_BT, segment_ids_BT, None, model, plan
  )
  return -(batch.loss_weights_BT * logprobs_BT).sum(), output


def loss(*args: Any, **options: Any) -> tuple[jax.Array, LossStats]:
  """Returns what `loss_and_states` does, without the hidden states."""
  total_loss, (stats, _) = loss_and_states(*args, **options)
  return total_loss, stats


def loss_and_states(
  values: Any,
  selection_bias: Any,
  batch: batches.LMBatch,
  *,
  model: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
  with_max_logits: bool = False,
  whole: Totals | None = None,
  base: Any = None,
  beside: Any = None,
) -> tuple[jax.Array, tuple[LossStats, jax.Array]]:
  """Returns the training loss, with the routers' losses, and statistics.

  Beside these, hidden_BTD of the decoder, for `models.mtp`.

  For a microbatch both are its share of the batch's. The routers' losses are
  means over a microbatch, weighted by its tokens: the z-loss adds up to that of
  the batch, while each microbatch is balanced by itself.

  A batch without a weighted token, a bug of the stream, has a loss of NaN,
  which stops the run.

  Args:
    values: the policy's values of the parameters (`state.policy_values`).
    with_max_logits: true to measure the attention logits that QK-clip needs.
    whole: totals of the batch; None if `batch` is no microbatch.
    base: frozen parameters, if `values` are adapters.
    beside: variables of the backward pass (`state.for_backward`).
  """
  total, output = negative_logprob_sum(
    {**train_state.variables(values, selection_bias, base), **(beside or {})},
    batch,
    model=model,
    plan=plan,
    with_max_logits=with_max_logits,
  )
  routes, part = output.stats, totals(batch)
  aux_loss, z_loss = routes.aux_loss_M.sum(), routes.z_loss_M.sum()
  if whole is None:
    whole = part
  else:
    share = part.num_tokens / whole.num_tokens
    aux_loss, z_loss = aux_loss * share, z_loss * share
  mean = total / whole.loss_weight
  total_loss = mean
  for weight, value in (
    (model.moe.aux_loss_weight, aux_loss),
    (model.moe.z_loss_weight, z_loss),
  ):
    # XLA keeps 0 * x, here and in the gradient: a zero weight leaves it out.
    if weight:
      total_loss += weight * value
  stats = LossStats(
    loss=mean,
    aux_loss=aux_loss,
    z_loss=z_loss,
    loss_weight=part.loss_weight,
    num_tokens=part.num_tokens,
    load_ME=routes.load_ME,
    max_logits_LN=output.max_logits_LN,
    rounds_M=output.rounds_M,
  )
  return total_loss, (stats, output.hidden_BTD)


def heldout_sums(
  model: model_config.ModelConfig, *, plan: exchange.ExchangePlan | None
) -> SumFunction:
  """Returns a function of held-out batches, which uses the policy's values."""

  def sums(variables, batch):
    name = decoder.trained(variables)
    values = {name: train_state.policy_values(variables[name], model)}
    total, _ = negative_logprob_sum(
      variables | values, batch, model=model, plan=plan
    )
    return total, batch.loss_weights_BT.sum()

  return sums


def mean_loss(
  sum_function: SumFunction,
  variables: dict[str, Any],
  heldout: Iterable[batches.LMBatch],
) -> float:
  """Returns nats per weighted token; a ValueError if no token has a weight."""
  # All dispatched before any is read.
  parts = [sum_function(variables, batch) for batch in heldout]
  total = sum(float(t) for t, _ in parts)
  weight = sum(float(w) for _, w in parts)
  if not weight:
    raise ValueError(
      f'None of the {len(parts)} held-out batches has a token with a loss '
      'weight; check the held-out data and its loss mask.'
    )
  return total / weight
