"""Held-out loss."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.parallel import exchange
from composer_jax.train import lm_loss, policy_values

SumFunction = Callable[
  [dict[str, Any], batches.LMBatch], tuple[jax.Array, jax.Array]
]


def make(
  model: model_config.ModelConfig, *, plan: exchange.ExchangePlan | None
) -> SumFunction:
  """Returns (variables, batch) -> (weighted sum of -log p, sum of weights)."""

  def sums(variables, batch):
    values = policy_values.straight_through(variables['params'])
    total, _ = lm_loss.negative_logprob_sum(
      {**variables, 'params': values}, batch, model=model, plan=plan
    )
    return total, batch.loss_weights_BT.sum()

  return sums


def mean_loss(
  sum_function: SumFunction,
  variables: dict[str, Any],
  heldout: Iterable[batches.LMBatch],
) -> float:
  """Returns nats per weighted token over all batches.

  Raises:
    ValueError: no token carries weight.
  """
  # All dispatched before any is read.
  parts = [sum_function(variables, batch) for batch in heldout]
  total = sum(float(t) for t, _ in parts)
  weight = sum(float(w) for _, w in parts)
  if not weight:
    raise ValueError(
      f'The {len(parts)} held-out batches hold no token with a loss weight.'
    )
  return total / weight
