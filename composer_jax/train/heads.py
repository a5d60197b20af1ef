"""Training of the heads for multi-token prediction, with the policy or alone.

Heads have a state, an optimizer (AdamW without decay) and a clip of their own,
so that their loss needs no weight against that of the policy. Their gradient
is taken apart from the policy's, of a forward pass that both share
(`models.mtp`): no bit of the policy depends on its heads.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from composer_jax.core import checks
from composer_jax.models import config as model_config
from composer_jax.models import decoder, mtp
from composer_jax.optim import groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSection(mtp.HeadLossOptions):
  """When and how the heads of `model.mtp` are trained; unused without any.

  Attributes:
    cpt: in pretraining, 'joint' with the policy, 'alone' with the policy
      frozen, or 'off'.
    sft: the same in fine-tuning.
    rl: 'joint', on the tokens that the policy sampled, or 'off'.
    learning_rate: peak rate of the heads, on the stage's schedule.
    grad_clip: largest global norm of the heads' gradient.
  """

  cpt: str = 'joint'
  sft: str = 'joint'
  rl: str = 'joint'
  learning_rate: float = 1e-3
  grad_clip: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    checks.one_of(self, 'cpt', ('joint', 'alone', 'off'))
    checks.one_of(self, 'sft', ('joint', 'alone', 'off'))
    checks.one_of(self, 'rl', ('joint', 'off'))
    checks.positive(self, 'learning_rate', 'grad_clip')

  def training(
    self,
    stage: str,
    model: model_config.ModelConfig,
    optimizer: groups.OptimizerOptions,
  ) -> 'HeadTraining | None':
    """Returns the training in 'cpt', 'sft' or 'rl'; None if there is none.

    `optimizer` is that of the stage, whose schedule the heads follow.
    """
    mode = getattr(self, stage)
    if model.mtp is None or mode == 'off':
      return None
    own = dict(learning_rate=self.learning_rate, grad_clip=self.grad_clip)
    return HeadTraining(
      is_alone=mode == 'alone',
      loss=mtp.HeadLossOptions(target=self.target, top_k=self.top_k),
      optimizer=dataclasses.replace(
        optimizer,
        name='adam',
        state='float32',
        offload=False,
        weight_decay=0.0,
        **own,
      ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTraining:
  """Training of the heads in one stage.

  Attributes:
    is_alone: true if the policy is frozen.
    loss: what the heads are trained towards.
    optimizer: options of the heads' optimizer.
  """

  is_alone: bool
  loss: mtp.HeadLossOptions
  optimizer: groups.OptimizerOptions


class HeadProgram(NamedTuple):
  """Training of heads in a step.

  Attributes:
    loss: what the heads are trained towards.
    optimizer: transform of the heads' parameters.
    is_alone: true if the policy is frozen.
    places: shardings of the heads' parameters; None leaves them to XLA.
  """

  loss: mtp.HeadLossOptions
  optimizer: optax.GradientTransformation
  is_alone: bool = False
  places: Any = None


def program(
  training: HeadTraining | None,
  model: model_config.ModelConfig,
  total_steps: int,
  places: Any = None,
) -> HeadProgram | None:
  """Builds the heads' part of a step; None if they are not trained.

  `places` are shardings of the model's variables, or None.
  """
  if training is None:
    return None
  params, axes = (tree['mtp']['params'] for tree in decoder.abstract(model))
  return HeadProgram(
    training.loss,
    groups.optimizer(
      training.optimizer, params=params, axes=axes, total_steps=total_steps
    ),
    training.is_alone,
    places and places['mtp']['params'],
  )


def gradient(
  params: Any, *args: Any, weight: jax.Array | float = 1.0, **options: Any
) -> tuple[Any, mtp.HeadStats]:
  """Returns the gradient of `mtp.loss` over `weight`, and its statistics."""

  def loss(params):
    total, stats = mtp.loss(params, *args, **options)
    return total / jnp.maximum(weight, 1e-9), stats

  return jax.grad(loss, has_aux=True)(params)
