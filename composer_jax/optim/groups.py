"""The optimizer of a stage: which parameter gets which, from one record.

Roles of parameters are `optim.roles`'s; nothing is guessed from the number of
dimensions.
"""

import dataclasses
from typing import Any

import jax
import optax

from composer_jax.core import checks, trees
from composer_jax.optim import adam, qk_clip, roles, schedules
from composer_jax.optim.muon import (
  block_periodic,
  newton_schulz,
  normuon,
)
from composer_jax.optim.muon import (
  plan as muon_plan,
)
from composer_jax.optim.muon import (
  transform as muon,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonChoices:
  """What a run can choose about Muon; each is a field of its config.

  Attributes:
    beta: decay of the momentum.
    rms: root mean square of an update at learning rate 1.
    coefficients: of Newton-Schulz, see `newton_schulz.NewtonSchulz`.
    steps: of it; 0 takes as many as the list of coefficients is meant for.
    method: 'auto', 'standard' or 'gram', see there.
    dtype: of its operands, see there.
    deterministic: a momentum is orthogonalised to the same bits on every mesh,
      see there. What sums over devices before and after, the clipping of
      gradients and `neuron_norm`, may still round in another order.
    wire_dtype: of what devices exchange, see `optim.muon.plan.PlanOptions`.
    momentum_dtype: of the state.
    period: steps from one orthogonalisation of whole matrices to the next;
      between them each device orthogonalises its own block. 1: always whole.
    block_ratio: of the step size of blocks to that of whole matrices.
    neuron_norm: gives the units of a matrix equal step sizes (NorMuon).
    qk_clip: the largest attention logit a head may have; 0 neither clips nor
      measures.
    roles: (regex of names, role) pairs that replace the roles by axes.
  """

  beta: float = 0.95
  rms: float = 0.2
  coefficients: str = 'polar_express'
  steps: int = 0
  method: str = 'auto'
  dtype: str = 'auto'
  deterministic: bool = False
  wire_dtype: str = 'auto'
  momentum_dtype: str = 'float32'
  period: int = 1
  block_ratio: float = 1.0
  neuron_norm: bool = False
  qk_clip: float = 0.0
  roles: tuple[tuple[str, str], ...] = ()

  def __post_init__(self):
    checks.at_least(self, 0, 'steps')
    checks.at_least(self, 1, 'period')
    checks.boolean(self, 'deterministic', 'neuron_norm')
    checks.positive(self, 'rms', 'block_ratio')
    checks.number(self, 0, 'beta')
    if self.beta >= 1:
      raise ValueError(
        f'MuonChoices.beta must be less than 1, not {self.beta}: a momentum '
        'that forgets nothing never sees another gradient.'
      )
    if self.deterministic and self.period > 1:
      raise ValueError(
        f'MuonChoices.period {self.period} orthogonalises blocks, which are '
        'what a mesh makes them; deterministic needs period=1.'
      )
    checks.number(self, 0, 'qk_clip')
    checks.one_of(self, 'momentum_dtype', ('float32', 'bfloat16'))
    for pair in self.roles if _is_sequence(self.roles) else [self.roles]:
      is_pair = _is_sequence(pair) and len(pair) == 2
      if not is_pair or not all(isinstance(part, str) for part in pair):
        raise ValueError(
          f'MuonChoices.roles must hold pairs (regex, role), not {pair!r}; '
          "for one of them write (('router', 'embed->route'),)."
        )
    # JSON and the command line have lists; programs are cached by this record.
    object.__setattr__(self, 'roles', tuple(map(tuple, self.roles)))
    self.muon_options()

  def muon_options(self) -> muon.MuonOptions:
    """Returns the part that is of Muon itself, checked."""
    return muon.MuonOptions(
      beta=self.beta,
      rms=self.rms,
      newton_schulz=newton_schulz.NewtonSchulz(
        coefficients=self.coefficients,
        steps=self.steps or None,
        method=self.method,
        dtype=self.dtype,
        deterministic=self.deterministic,
      ),
      plan=muon_plan.PlanOptions(wire_dtype=self.wire_dtype),
      momentum_dtype=self.momentum_dtype,
    )


def _is_sequence(value: Any) -> bool:
  return isinstance(value, list | tuple)


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
    muon: choices of Muon; unused by 'adam'.
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
  muon: MuonChoices = MuonChoices()
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
    checks.number(self, 0, 'weight_decay')

  @property
  def clips_logits(self) -> bool:
    """Whether `update` wants `max_logits`."""
    return self.name == 'muon' and self.muon.qk_clip > 0


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
  return optax.chain(
    adam.scale_by_adam(options.b1, options.b2, options.eps),
    optax.add_decayed_weights(options.weight_decay, decayed),
    optax.scale_by_learning_rate(rate),
  )


def _muon(
  options: OptimizerOptions,
  rate: schedules.Schedule,
  matrices: Any,
  shardings: Any,
) -> optax.GradientTransformation:
  choices = options.muon
  direction = block_periodic.orthogonalize_momentum(
    matrices,
    period=choices.period,
    ratio=choices.block_ratio,
    shardings=shardings,
    options=choices.muon_options(),
  )
  neuron_norm = [normuon.scale_by_neuron_norm(matrices)]
  return optax.chain(
    direction,
    *(neuron_norm if choices.neuron_norm else []),
    muon.scale_by_shape(matrices, choices.rms),
    optax.add_decayed_weights(options.weight_decay),
    optax.scale_by_learning_rate(rate),
  )


def optimizer(
  options: OptimizerOptions,
  *,
  params: Any,
  axes: Any,
  total_steps: int,
  shardings: Any = None,
) -> optax.GradientTransformation:
  """Builds the transform of a stage: clipping, then Muon and AdamW.

  Where the options clip logits, `update` wants `max_logits` beside the rest.

  Args:
    options: hyperparameters.
    params: tree of arrays or shapes, without boxes.
    axes: tree of PartitionSpecs of logical names, see `roles.tree`.
    total_steps: of the schedule.
    shardings: tree of NamedShardings of the parameters, whose mesh shares out
      Newton-Schulz; None: all on one device.
  """
  named = {n: tuple(a) for n, a in trees.flatten_names(axes).items()}
  is_muon = options.name == 'muon'
  overrides = options.muon.roles if is_muon else ()
  role_tree = roles.tree(params, axes, overrides)
  # Vectors (norms, biases) are spared by weight decay; stacking them over
  # layers does not make them matrices.
  is_decayed = {
    n: sum(a not in roles.BATCH_AXES for a in named.get(n, ())) >= 2
    for n in trees.flatten_names(params)
  }
  rate = schedule(options, total_steps, options.learning_rate)
  clip = adam.clip_by_global_norm(options.grad_clip)
  if not is_muon:
    decayed = trees.map_names(lambda n, _: is_decayed[n], params)
    return optax.chain(clip, _adamw(options, rate, decayed))

  decayed = trees.map_names(
    lambda n, r: is_decayed[n] if r == roles.ADAM else optax.MaskedNode(),
    role_tree,
  )
  matrices = roles.matrices(params, axes, role_tree)
  adam_rate = schedule(options, total_steps, options.adam_learning_rate)
  both = optax.partition(
    {
      'muon': _muon(options, rate, matrices, shardings),
      roles.ADAM: _adamw(options, adam_rate, decayed),
    },
    jax.tree.map(lambda r: r if r == roles.ADAM else 'muon', role_tree),
  )
  if not options.clips_logits:
    return optax.chain(clip, both)
  return optax.chain(clip, both, qk_clip.qk_clip(options.muon.qk_clip))


def plan(
  options: OptimizerOptions, *, params: Any, axes: Any, shardings: Any = None
) -> muon_plan.MuonPlan | None:
  """Returns which device orthogonalises what; None where none does.

  Args:
    options: as of `optimizer`, like the others.
    params: tree of arrays or shapes.
    axes: tree of PartitionSpecs of logical names.
    shardings: tree of NamedShardings of the parameters.
  """
  if options.name != 'muon':
    return None
  role_tree = roles.tree(params, axes, options.muon.roles)
  # Without those of AdamW, for which there is nothing to plan.
  matrices = trees.flatten_names(roles.matrices(params, axes, role_tree))
  return muon.plan_of(
    {n: p for n, p in trees.flatten_names(params).items() if n in matrices},
    matrices,
    shardings=shardings,
    options=options.muon.muon_options(),
  )
