"""Which parameter gets which optimizer, read off its logical axes.

Roles are strings over the logical axis names a parameter was created with:
'embed->ffw' is a matrix from embed to ffw, every axis not named in it a batch
axis. Nothing is guessed from the number of dimensions: a parameter of two or
more dimensions without labels, or with labels nobody knows, is an error.
"""

import dataclasses
from typing import Any

import jax
import optax

from composer_jax.core import trees
from composer_jax.optim import muon, newton_schulz, schedules

ADAM = 'adam'

# Axes along which parameters are independent matrices. Heads are among them:
# attention is orthogonalised head by head.
BATCH_AXES = ('layer', 'expert', 'gate_up', 'heads', 'kv_heads')
# A parameter with one of these is a table, a classifier or a scale, not a map
# between activations.
ADAM_AXES = ('vocab', 'route', 'norm')
MATRIX_AXES = ('embed', 'ffw', 'head_dim', 'q_lora', 'kv_lora')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
  """Both optimizers, their schedule and the clipping before them.

  Attributes:
    name: 'muon' (matrices on Muon, the rest on AdamW) or 'adam' (all AdamW).
    learning_rate: peak for Muon's matrices, and for all when name is 'adam'.
    adam_learning_rate: peak for what Muon leaves to AdamW; unused by 'adam'.
    warmup_steps: linear warm-up, in optimizer steps.
    decay_steps: linear decay at the end, in optimizer steps.
    final_ratio: share of the peak left at the end.
    weight_decay: decoupled, times the learning rate; spares vectors.
    grad_clip: gradients are scaled down to this global norm.
    beta: Muon's momentum.
    rms: root mean square of Muon's update at learning rate 1.
    preset: Newton-Schulz coefficients, see `newton_schulz`.
    b1: Adam's first moment decay.
    b2: Adam's second moment decay.
    eps: Adam's.
  """

  name: str
  learning_rate: float
  adam_learning_rate: float
  warmup_steps: int
  decay_steps: int
  final_ratio: float
  weight_decay: float = 0.1
  grad_clip: float = 1.0
  beta: float = 0.95
  rms: float = 0.2
  preset: str = 'keller'
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8

  def __post_init__(self):
    if self.name not in ('muon', 'adam'):
      raise ValueError(
        f"optimizer name must be 'muon' or 'adam', not {self.name!r}."
      )
    for field in ('learning_rate', 'adam_learning_rate', 'grad_clip'):
      if not getattr(self, field) > 0:
        raise ValueError(
          f'{field} must be positive, not {getattr(self, field)}.'
        )


def role(name: str, axes: tuple[str | None, ...], ndim: int) -> str:
  """Returns the role of one parameter.

  Args:
    name: for the message.
    axes: logical axis names, one per dimension.
    ndim: dimensions of the parameter.

  Raises:
    ValueError: labels are missing, unknown or not a matrix.
  """
  unlabelled = len(axes) != ndim or None in axes
  if unlabelled and ndim < 2:
    return ADAM
  known = BATCH_AXES + ADAM_AXES + MATRIX_AXES
  sides = tuple(a for a in axes if a not in BATCH_AXES)
  is_table = any(a in ADAM_AXES for a in axes)
  is_matrix = is_table or len(sides) <= 2
  if unlabelled or not set(axes) <= set(known) or not is_matrix:
    raise ValueError(
      f'Parameter {name} has {ndim} dimensions with logical axes {axes}; '
      f'each must be one of {known}, and at most two outside {BATCH_AXES}. '
      'Label it with nn.with_logical_partitioning, or teach '
      'optim/groups.py its axes.'
    )
  return ADAM if is_table or len(sides) < 2 else '->'.join(map(str, sides))


def roles(params: Any, axes: Any) -> Any:
  """Returns the tree of roles.

  Args:
    params: tree of arrays or shapes, without boxes.
    axes: tree of the same structure with a PartitionSpec of logical axis names
      at each leaf (`nn.get_partition_spec` of the boxed tree).
  """
  named = trees.flatten_names(axes)
  return trees.map_names(
    lambda name, leaf: role(name, tuple(named.get(name, ())), leaf.ndim),
    params,
  )


def _matrix(role_name: str, axes: tuple[str, ...]) -> muon.Matrix:
  rows, columns = role_name.split('->')
  if rows == columns:  # A square map, such as embed->embed.
    first = axes.index(rows)
    return muon.Matrix(rows=(first,), columns=(axes.index(rows, first + 1),))
  return muon.Matrix(rows=(axes.index(rows),), columns=(axes.index(columns),))


def schedule(
  options: OptimizerOptions, total_steps: int, peak: float
) -> schedules.Schedule:
  """Returns the schedule of a stage for one of its two peaks."""
  return schedules.warmup_stable_decay(
    peak,
    total_steps=total_steps,
    warmup_steps=options.warmup_steps,
    decay_steps=options.decay_steps,
    final_ratio=options.final_ratio,
  )


def _adamw(
  options: OptimizerOptions, rate: schedules.Schedule, decayed: Any
) -> optax.GradientTransformation:
  return optax.adamw(
    rate,
    b1=options.b1,
    b2=options.b2,
    eps=options.eps,
    weight_decay=options.weight_decay,
    mask=decayed,
  )


def optimizer(
  options: OptimizerOptions, *, params: Any, axes: Any, total_steps: int
) -> optax.GradientTransformation:
  """Builds the transform of a stage: clipping, then Muon and AdamW.

  Args:
    options: hyperparameters.
    params: tree of arrays or shapes, without boxes.
    axes: tree of PartitionSpecs of logical names, see `roles`.
    total_steps: of the schedule.
  """
  named = {n: tuple(a) for n, a in trees.flatten_names(axes).items()}
  role_tree = roles(params, axes)
  # Vectors (norms, biases) are spared by weight decay; stacking them over
  # layers does not make them matrices.
  is_decayed = {
    n: sum(a not in BATCH_AXES for a in named.get(n, ())) >= 2
    for n in trees.flatten_names(params)
  }
  rate = schedule(options, total_steps, options.learning_rate)
  clip = optax.clip_by_global_norm(options.grad_clip)
  if options.name == 'adam':
    decayed = trees.map_names(lambda n, _: is_decayed[n], params)
    return optax.chain(clip, _adamw(options, rate, decayed))

  matrices = trees.map_names(
    lambda n, r: optax.MaskedNode() if r == ADAM else _matrix(r, named[n]),
    role_tree,
  )
  decayed = trees.map_names(
    lambda n, r: is_decayed[n] if r == ADAM else optax.MaskedNode(),
    role_tree,
  )
  muon_transform = optax.chain(
    muon.scale_by_muon(
      matrices,
      beta=options.beta,
      rms=options.rms,
      options=newton_schulz.NewtonSchulz(preset=options.preset),
    ),
    optax.add_decayed_weights(options.weight_decay),
    optax.scale_by_learning_rate(rate),
  )
  adam_rate = schedule(options, total_steps, options.adam_learning_rate)
  labels = jax.tree.map(lambda r: ADAM if r == ADAM else 'muon', role_tree)
  return optax.chain(
    clip,
    optax.partition(
      {'muon': muon_transform, ADAM: _adamw(options, adam_rate, decayed)},
      labels,
    ),
  )
