"""A batch in pieces: gradients of microbatches that add up to those of it.

Every n-th row makes a microbatch, so that a device's own rows become its rows
of each microbatch and nothing is exchanged. What is a mean over the batch is
each microbatch's share of it (`lm_loss.Totals`), so that sums are all there is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.parallel import exchange
from composer_jax.train import placement

# (parameters, microbatch) -> (gradients, statistics).
GradientFunction = Callable[[Any, Any], tuple[Any, Any]]


def check_rows(rows: int, accumulate: int, shards: int, name: str) -> None:
  """Raises a ValueError unless rows divide into microbatches and shards.

  `name` is that of the batch size, as the user knows it.
  """
  unit = accumulate * shards
  if rows % unit:
    raise ValueError(
      f'{name} ({rows}) must divide by accumulate ({accumulate}) times '
      f'replica x fsdp ({shards}), which share out its rows; the nearest that '
      f'does is {max(round(rows / unit), 1) * unit}.'
    )


def split(
  batch: Any, accumulate: int, plan: exchange.ExchangePlan | None
) -> Any:
  """Returns a batch with a leading axis of microbatches.

  Row r of an LMBatch or RLBatch goes to microbatch r % accumulate.

  Raises:
    ValueError: the rows do not divide.
  """
  rows = batch.tokens_BT.shape[0]
  shards = placement.shards_of(plan.mesh, plan.batch_axes) if plan else 1
  check_rows(rows, accumulate, shards, 'batch_size')

  def divide(path, array):
    # Routes are layer-major: M stands before B.
    dim = int(path[-1].name == 'expert_ids_MBTA')
    shape = array.shape
    pieces = (*shape[:dim], rows // accumulate, accumulate, *shape[dim + 1 :])
    array = jnp.moveaxis(jnp.reshape(array, pieces), dim + 1, 0)
    if plan is None:
      return array
    spec = (plan.batch_axes or None, plan.sequence_axes or None)
    place = NamedSharding(plan.mesh, P(*(None,) * (dim + 1), *spec))
    return jax.lax.with_sharding_constraint(array, place)

  return jax.tree_util.tree_map_with_path(divide, batch)


def gradients(
  function: GradientFunction,
  params: Any,
  batch: Any,
  accumulate: int,
  *,
  plan: exchange.ExchangePlan | None,
  places: Any = None,
) -> tuple[Any, Any]:
  """Returns the sum of gradients over microbatches, and stacked statistics.

  Args:
    function: of one microbatch; they run one after another.
    params: float32 masters, in whose dtype gradients add up.
    batch: see `split`, also for the next two.
    accumulate: microbatches.
    plan: where rows lie.
    places: shardings of the gradients; None leaves them to the compiler.
  """

  def placed(tree):
    if places is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, places)

  def add(sums, microbatch):
    gradients, stats = function(params, microbatch)
    return placed(jax.tree.map(jnp.add, sums, gradients)), stats

  with jax.named_scope('accumulate'):
    zeros = placed(jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, zeros, split(batch, accumulate, plan))
