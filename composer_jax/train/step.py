"""One optimizer step: pure functions, jitted by whoever drives them."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.models import router
from composer_jax.parallel import exchange
from composer_jax.train import accumulation, lm_loss
from composer_jax.train import state as train_state


class UpdateStats(flax.struct.PyTreeNode, kw_only=True):
  """Size of one update.

  Attributes:
    grad_norm: global norm before clipping.
    update_norm: global norm of what was added to the masters.
  """

  grad_norm: jax.Array
  update_norm: jax.Array


class StepMetrics(flax.struct.PyTreeNode, kw_only=True):
  """What one step reports; read on the host one step late."""

  loss: lm_loss.LossStats
  update: UpdateStats


StepFunction = Callable[
  [train_state.TrainState, batches.LMBatch],
  tuple[train_state.TrainState, StepMetrics],
]


def apply_gradients(
  state: train_state.TrainState,
  gradients: Any,
  load_ME: jax.Array,
  *,
  optimizer: optax.GradientTransformation,
  bias_rate: float,
  max_logits_LN: jax.Array | None = None,
) -> tuple[train_state.TrainState, UpdateStats]:
  """Moves masters and selection bias once.

  Args:
    state: before the step.
    gradients: of the masters.
    load_ME: tokens sent to each expert over the whole global batch.
    optimizer: optax transform, clipping included.
    bias_rate: step of the selection bias (DeepSeek-V3: 0.001); 0 freezes it.
    max_logits_LN: of the forward pass, for an optimizer that clips by them.
  """
  extra = {} if max_logits_LN is None else {'max_logits': max_logits_LN}
  updates, opt_state = optax.with_extra_args_support(optimizer).update(
    gradients, state.opt_state, state.params, **extra
  )
  bias = jax.tree.map(
    lambda bias_ME: router.update_selection_bias(bias_ME, load_ME, bias_rate),
    state.selection_bias,
  )
  after = state.replace(
    step=state.step + 1,
    params=optax.apply_updates(state.params, updates),
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
) -> StepFunction:
  """Returns the language-model step; it traces under any mesh.

  Args:
    model: what to train.
    optimizer: optax transform, clipping included.
    plan: where tokens and experts lie.
    bias_rate: step of the selection bias; 0 freezes it.
    clips_logits: whether the optimizer wants the largest attention logits.
    accumulate: microbatches that a batch is worked through in, one after
      another; loss and gradient are those of the batch whole.
    places: shardings of the parameters, in which gradients add up.
  """

  def gradient(params, state, batch, whole=None):
    function = jax.value_and_grad(lm_loss.loss, has_aux=True)
    (_, stats), gradients = function(
      params,
      state.selection_bias,
      batch,
      model=model,
      plan=plan,
      with_max_logits=clips_logits,
      whole=whole,
    )
    return gradients, stats

  def step(state, batch):
    if accumulate == 1:
      gradients, loss_stats = gradient(state.params, state, batch)
    else:
      whole = lm_loss.totals(batch)
      gradients, stats = accumulation.gradients(
        lambda params, piece: gradient(params, state, piece, whole),
        state.params,
        batch,
        accumulate,
        plan=plan,
        places=places,
      )
      loss_stats = lm_loss.summed(stats)
    with jax.named_scope('update'):
      after, update_stats = apply_gradients(
        state,
        gradients,
        loss_stats.load_ME,
        optimizer=optimizer,
        bias_rate=bias_rate,
        max_logits_LN=loss_stats.max_logits_LN,
      )
    return after, StepMetrics(loss=loss_stats, update=update_stats)

  return step


def expert_load_max(load_ME: jax.Array) -> float:
  """Returns the busiest expert's load over the mean, of the worst layer."""
  load_ME = jnp.asarray(load_ME, jnp.float32)
  return float((load_ME.max(-1) / load_ME.mean(-1)).max())
