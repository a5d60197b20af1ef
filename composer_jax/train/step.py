"""One optimizer step, as pure functions.

A batch may be split into n microbatches of every n-th row, so that rows stay on
their devices. A mean over the batch is the sum of the microbatches' shares
(`lm_loss.Totals`).
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import batches, checks
from composer_jax.models import config as model_config
from composer_jax.models import router
from composer_jax.optim import groups, layerwise
from composer_jax.parallel import exchange, shardings, shards
from composer_jax.train import heads as train_heads
from composer_jax.train import lm_loss
from composer_jax.train import state as train_state


class UpdateStats(flax.struct.PyTreeNode, kw_only=True):
  """Global norms of a gradient before clipping, and of the update added."""

  grad_norm: jax.Array
  update_norm: jax.Array


class StepMetrics(flax.struct.PyTreeNode, kw_only=True):
  """Metrics of one step; read on the host one step late."""

  loss: lm_loss.LossStats
  update: UpdateStats
  heads: UpdateStats | None = None


StepFunction = Callable[
  [train_state.TrainState, batches.LMBatch],
  tuple[train_state.TrainState, StepMetrics],
]


def apply_gradients(
  state: train_state.TrainState,
  gradients: Any,
  load_ME: Any,
  *,
  optimizer: optax.GradientTransformation,
  bias_rate: float,
  max_logits_LN: jax.Array | None = None,
) -> tuple[train_state.TrainState, UpdateStats]:
  """Moves masters and selection bias once.

  `load_ME` is the number of tokens sent to each expert over the global batch
  (None without experts), `bias_rate` the step of the selection bias
  (DeepSeek-V3: 0.001; 0 freezes it). An optimizer that clips by attention
  logits needs `max_logits_LN`.
  """
  gradients = optax.tree.cast(gradients, jnp.float32)
  update = optax.with_extra_args_support(optimizer).update
  extra = dict(max_logits=max_logits_LN, step=state.step)
  updates, opt_state = update(gradients, state.opt_state, state.params, **extra)
  if isinstance(updates, layerwise.Moved):
    params, updates = updates
  else:
    params = groups.apply_updates(state.params, updates, state.step)
  bias = jax.tree.map(
    lambda bias_ME: router.update_selection_bias(bias_ME, load_ME, bias_rate),
    state.selection_bias,
  )
  after = state.replace(
    step=state.step + 1,
    params=params,
    selection_bias=bias,
    opt_state=opt_state,
  )
  stats = UpdateStats(
    grad_norm=optax.tree.norm(gradients), update_norm=optax.tree.norm(updates)
  )
  return after, stats


def make(
  model: model_config.ModelConfig,
  optimizer: optax.GradientTransformation,
  *,
  plan: exchange.ExchangePlan | None,
  bias_rate: float,
  clips_logits: bool = False,
  accumulate: int = 1,
  places: Any = None,
  heads: train_heads.HeadProgram | None = None,
) -> StepFunction:
  """Returns the language-model step; it traces under any mesh.

  Args:
    clips_logits: true if the optimizer needs the largest attention logits.
    places: shardings in which gradients add up; None leaves them to XLA.
    heads: training of heads for multi-token prediction; None for none.
  """
  is_alone = heads is not None and heads.is_alone

  def gradient(trained, beside, state, batch, whole=None):
    values, head_values = trained
    loss = functools.partial(
      lm_loss.loss_and_states,
      selection_bias=state.selection_bias,
      batch=batch,
      model=model,
      plan=plan,
      with_max_logits=clips_logits,
      whole=whole,
      base=state.base,
      beside=beside,
    )
    if is_alone:
      (_, (stats, hidden_BTD)), gradients = loss(values), {}
    else:
      function = jax.value_and_grad(loss, has_aux=True)
      (_, (stats, hidden_BTD)), gradients = function(values)
    if heads is None:
      return (gradients, {}), stats
    bias = state.selection_bias
    head_gradients, head_stats = train_heads.gradient(
      head_values,
      state.heads.selection_bias,
      train_state.variables(values, bias, state.base),
      hidden_BTD,
      batch,
      config=model,
      plan=plan,
      options=heads.loss,
      weight=(whole or lm_loss.totals(batch)).loss_weight,
    )
    return (gradients, head_gradients), stats.replace(heads=head_stats)

  def step(state, batch):
    # Once a step. The gradient of the rounding is 1.
    values = train_state.policy_values(state.params, model)
    beside = train_state.for_backward(state.params, model, state.step)
    head_values = {}
    if heads is not None:
      head_values = train_state.head_values(state.heads.params, model)
    trained = (values, head_values)
    if accumulate == 1:
      gradients, loss_stats = gradient(trained, beside, state, batch)
    else:
      whole = lm_loss.totals(batch)
      gradients, stats = _sum_gradients(
        lambda piece: gradient(trained, beside, state, piece, whole),
        ({} if is_alone else values, head_values),
        split(batch, accumulate, plan),
        places and ({} if is_alone else places, heads.places if heads else {}),
      )
      loss_stats = lm_loss.summed(stats)
    with jax.named_scope('update'):
      head_update = None
      if is_alone:
        after = state.replace(step=state.step + 1)
        update_stats = UpdateStats(
          grad_norm=jnp.float32(0), update_norm=jnp.float32(0)
        )
      else:
        after, update_stats = apply_gradients(
          state,
          gradients[0],
          loss_stats.load_ME,
          optimizer=optimizer,
          bias_rate=bias_rate,
          max_logits_LN=loss_stats.max_logits_LN,
        )
      if heads is not None:
        assert loss_stats.heads is not None
        after_heads, head_update = apply_gradients(
          state.heads,
          gradients[1],
          loss_stats.heads.load_KE,
          optimizer=heads.optimizer,
          bias_rate=bias_rate,
        )
        after = after.replace(heads=after_heads)
    return after, StepMetrics(
      loss=loss_stats, update=update_stats, heads=head_update
    )

  return step


def check_rows(rows: int, accumulate: int, shards: int, name: str) -> None:
  """Raises a ValueError unless rows divide into microbatches and shards."""
  parts = f'accumulate ({accumulate}) times replica x fsdp ({shards})'
  checks.divides(accumulate * shards, parts, rows, name)


def split(
  batch: batches.LMBatch, accumulate: int, plan: exchange.ExchangePlan | None
) -> batches.LMBatch:
  """Returns microbatches on a leading axis; row r goes to r % accumulate."""
  rows = batch.tokens_BT.shape[0]
  num_shards = shardings.product(plan.batch_axes, plan.mesh) if plan else 1
  check_rows(rows, accumulate, num_shards, 'batch_size')

  def divide(array_BT):
    pieces = (rows // accumulate, accumulate, *array_BT.shape[1:])
    pieces = jnp.moveaxis(jnp.reshape(array_BT, pieces), 1, 0)
    if plan is None:
      return pieces
    place = NamedSharding(plan.mesh, P(None, *shards.tokens_spec(plan)))
    return jax.lax.with_sharding_constraint(pieces, place)

  return jax.tree.map(divide, batch)


def _sum_gradients(function, like, microbatches, places):
  """Returns the sum of gradients, in float32, and the stacked statistics.

  Gradients have the shapes of `like`.
  """

  def placed(tree):
    if places is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, places)

  def add(sums, microbatch):
    gradients, stats = function(microbatch)
    return placed(jax.tree.map(jnp.add, sums, gradients)), stats

  with jax.named_scope('accumulate'):
    zeros = placed(optax.tree.zeros_like(like, dtype=jnp.float32))
    return jax.lax.scan(add, zeros, microbatches)


def expert_load_max(load_ME: jax.Array) -> float:
  """Returns the largest ratio of an expert's load to its layer's mean."""
  load_ME = jnp.asarray(load_ME, jnp.float32)
  return float((load_ME.max(-1) / load_ME.mean(-1)).max())
