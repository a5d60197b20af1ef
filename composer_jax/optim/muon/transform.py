"""Muon as optax transforms whose Newton-Schulz is distributed by a plan.

Momentum orthogonalised at each parameter's natural granularity (per layer, per
expert, per head), K. Jordan 2024, with the update scale of Moonlight
(arXiv 2502.16982). Equal to `optax.contrib.muon` where both apply, on any mesh:
`optim.muon.plan` says which device orthogonalises what and
`optim.muon.exchange` does it.

The pieces compose: `orthogonalize_momentum`, then what works on an orthogonal
update, then `scale_by_shape`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from composer_jax.core import trees
from composer_jax.optim import (
  roles as role_names,
)
from composer_jax.optim.muon import (
  exchange,
  newton_schulz,
  planner,
)
from composer_jax.optim.muon import (
  plan as muon_plan,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonOptions:
  """How matrices are updated.

  Attributes:
    beta: decay of the momentum.
    rms: see `scale_by_shape`.
    newton_schulz: how a matrix is orthogonalised.
    plan: how the work is shared out.
    momentum_dtype: of the state; None: as the parameter. The arithmetic is in
      float32.
  """

  beta: float = 0.95
  rms: float | None = 0.2
  # In quotes: the field shadows the module.
  newton_schulz: 'newton_schulz.NewtonSchulz' = newton_schulz.NewtonSchulz()
  plan: muon_plan.PlanOptions = muon_plan.PlanOptions()
  momentum_dtype: str | None = None

  def __post_init__(self):
    if not 0 <= self.beta < 1:
      raise ValueError(
        f'beta must be at least 0 and less than 1, not {self.beta}: it is the '
        "momentum's share of itself."
      )


class MuonState(NamedTuple):
  """Steps taken and the momentum; neither coefficients nor plan are state."""

  count: jax.Array
  momentum: Any


def plan_of(
  params: Any,
  matrices: Any,
  *,
  shardings: Any = None,
  options: MuonOptions = MuonOptions(),
) -> muon_plan.MuonPlan:
  """Returns who orthogonalises what, from shapes alone.

  Args:
    params: tree of arrays or shapes.
    matrices: tree of `roles.Matrix` (`roles.matrices`).
    shardings: tree of NamedShardings; None: all on one device.
    options: of the transform.

  Raises:
    ValueError: a parameter without a matrix or a NamedSharding, by name.
  """
  named = trees.flatten_names(matrices)
  shapes = {
    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    for name, leaf in trees.flatten_names(params).items()
  }
  missing = sorted(set(shapes) - set(named))
  if missing:
    raise ValueError(
      f'Muon was given parameter {missing[0]} of shape '
      f'{shapes[missing[0]].shape} and no matrix for it; give it a role, or '
      "leave it to another transform with 'adam'."
    )
  placed = _named_shardings(shardings)
  if placed is not None:
    for name, shape in shapes.items():
      if not isinstance(placed.get(name), jax.sharding.NamedSharding):
        raise ValueError(
          f'Muon was given shardings, but for parameter {name} of shape '
          f'{shape.shape} it is {placed.get(name)}; give each leaf a '
          'NamedSharding on one mesh, or shardings=None on one device.'
        )
  return planner.make(
    shapes,
    {name: named[name] for name in shapes},
    shardings=placed and {name: placed[name] for name in shapes},
    newton_schulz=options.newton_schulz,
    options=options.plan,
  )


def _named_shardings(
  shardings: Any,
) -> dict[str, jax.sharding.NamedSharding] | None:
  return None if shardings is None else trees.flatten_names(shardings)


def orthogonalize_momentum(
  matrices: Any,
  *,
  shardings: Any = None,
  options: MuonOptions = MuonOptions(),
  blocks: bool = False,
) -> optax.GradientTransformation:
  """Replaces gradients by their orthogonalised Nesterov momentum.

  Args:
    matrices: tree of the parameters' structure with a `roles.Matrix` at each
      leaf (and `optax.MaskedNode()` where another transform owns it).
    shardings: tree of the parameters' NamedShardings, which gradients and
      momentum share; None: all on one device.
    options: `rms` is not used.
    blocks: orthogonalise what a device holds of each matrix by itself.
  """
  beta = options.beta

  def init(params):
    momentum = jax.tree.map(
      lambda p: jnp.zeros_like(p, dtype=options.momentum_dtype), params
    )
    return MuonState(count=jnp.zeros([], jnp.int32), momentum=momentum)

  def update(updates, state, params=None):
    del params
    _check_shapes(updates, state.momentum)
    count = jnp.asarray(optax.safe_increment(state.count))

    # Bias corrections only change the ratio of momentum to gradient in the
    # look-ahead; Newton-Schulz drops any common factor. In float32, as nothing
    # can be added to the largest count.
    steps = count.astype(jnp.float32)
    ahead = beta / (1 - beta ** (steps + 1))
    here = (1 - beta) / (1 - beta**steps)
    # Without memory the momentum is the gradient.
    weight = here / ahead if beta else jnp.zeros([])

    # One product in each sum: compilers that fuse it into the sum then have no
    # choice, and every mesh gets the same bits.
    def accumulate(m, g):
      wide = m.astype(jnp.float32)
      wide += (1 - beta) * (g.astype(jnp.float32) - wide)
      return wide.astype(m.dtype)

    def direction(m, g, weight):
      wide = accumulate(m, g).astype(jnp.float32)
      return wide + weight * g.astype(jnp.float32)

    with jax.named_scope('muon'):
      directions, momentum = exchange.orthogonalize(
        plan_of(updates, matrices, shardings=shardings, options=options),
        trees.flatten_names(state.momentum),
        trees.flatten_names(updates),
        rule=exchange.Rule(accumulate, direction, weight),
        options=options.newton_schulz,
        shardings=_named_shardings(shardings),
        is_whole=not blocks,
      )
      momentum = trees.map_names(lambda name, _: momentum[name], updates)
      updates = trees.map_names(
        lambda name, g: directions[name].astype(g.dtype), updates
      )
    return updates, MuonState(count=count, momentum=momentum)

  return optax.GradientTransformation(init, update)


def _check_shapes(gradients: Any, momentum: Any) -> None:
  """Raises ValueError where the two differ in names or shapes."""
  new, old = (
    {name: leaf.shape for name, leaf in trees.flatten_names(tree).items()}
    for tree in (gradients, momentum)
  )
  for name in sorted(set(new) | set(old)):
    if new.get(name) != old.get(name):
      raise ValueError(
        f'The gradient of {name} has shape {new.get(name)}, but its momentum '
        f'{old.get(name)}; initialise the state with the parameters whose '
        'gradients these are.'
      )


def update_scale(
  shape: tuple[int, ...], matrix: role_names.Matrix, rms: float | None
) -> float:
  """Returns the factor on an orthogonal matrix, see `scale_by_shape`."""
  rows = math.prod(shape[d] for d in matrix.rows)
  columns = math.prod(shape[d] for d in matrix.columns)
  if rms is None:
    return math.sqrt(max(1.0, columns / rows))
  return rms * math.sqrt(max(rows, columns))


def scale_by_shape(
  matrices: Any, rms: float | None = 0.2
) -> optax.GradientTransformation:
  """Scales orthogonal matrices by their own sides.

  Args:
    matrices: see `orthogonalize_momentum`.
    rms: root mean square aimed at, as AdamW's (Moonlight uses 0.2): the factor
      is rms * sqrt(max(rows, columns)), as an orthogonal matrix has an RMS of
      1 / sqrt(max(rows, columns)). None: sqrt(max(1, columns / rows)).
  """
  named = trees.flatten_names(matrices)

  def scale(name, u):
    factor = update_scale(u.shape, named[name], rms)
    return (factor * u.astype(jnp.float32)).astype(u.dtype)

  return optax.stateless(lambda updates, _: trees.map_names(scale, updates))


def scale_by_muon(
  matrices: Any,
  *,
  shardings: Any = None,
  options: MuonOptions = MuonOptions(),
) -> optax.GradientTransformation:
  """Replaces gradients by scaled orthogonal Nesterov momentum.

  Args:
    matrices: see `orthogonalize_momentum`.
    shardings: see there.
    options: see `MuonOptions`.
  """
  direction = orthogonalize_momentum(
    matrices, shardings=shardings, options=options
  )
  scaling = scale_by_shape(matrices, options.rms)

  def update(updates, state, params=None):
    updates, state = direction.update(updates, state, params)
    updates, _ = scaling.update(updates, optax.EmptyState(), params)
    return updates, state

  return optax.GradientTransformation(direction.init, update)


def muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  roles: Any,
  axes: Any,
  shardings: Any = None,
  options: MuonOptions = MuonOptions(),
  weight_decay: float = 0.1,
  adam: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
  """Muon for matrices, with decoupled weight decay, and Adam for the rest.

  Args:
    learning_rate: of both, since updates have AdamW's RMS.
    roles: tree of role strings, `roles.tree(params, axes)`.
    axes: tree of PartitionSpecs of logical axis names.
    shardings: tree of the parameters' NamedShardings; None: one device.
    options: of Muon.
    weight_decay: times the learning rate; Adam's default decays what has two
      dimensions or more besides batch axes.
    adam: whole transform of the parameters whose role is 'adam'; None: AdamW
      with b1 0.9 and b2 0.95.
  """
  named_roles = trees.flatten_names(roles)
  named_axes = {n: tuple(a) for n, a in trees.flatten_names(axes).items()}

  def is_decayed(name, leaf):
    del leaf
    batch = role_names.BATCH_AXES
    return sum(a not in batch for a in named_axes.get(name, ())) >= 2

  adam = adam or optax.adamw(
    learning_rate,
    b1=0.9,
    b2=0.95,
    weight_decay=weight_decay,
    mask=lambda params: trees.map_names(is_decayed, params),
  )

  def build(params):
    missing = sorted(set(trees.flatten_names(params)) - set(named_roles))
    if missing:
      raise ValueError(
        f'Parameter {missing[0]} has no role; roles must have the structure of '
        'the parameters, as roles.tree(params, axes) has.'
      )
    matrices = role_names.matrices(params, axes, roles)
    matrix_transform = optax.chain(
      scale_by_muon(matrices, shardings=shardings, options=options),
      optax.add_decayed_weights(weight_decay),
      optax.scale_by_learning_rate(learning_rate),
    )
    labels = trees.map_names(
      lambda name, _: (
        'adam' if named_roles[name] == role_names.ADAM else 'muon'
      ),
      params,
    )
    return optax.partition({'muon': matrix_transform, 'adam': adam}, labels)

  def update(updates, state, params=None):
    return build(updates).update(updates, state, params)

  return optax.GradientTransformation(
    lambda params: build(params).init(params), update
  )
