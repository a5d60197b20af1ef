"""Muon for any tree of parameters, called as `optax.contrib.muon` is.

  optimizer = alias.muon(0.02)
  state = optimizer.init(params)

`optim.groups` builds the optimizer of a stage; this module is for scripts with
a model and a loop of their own. Parameters are taken for matrices or left to
Adam by `optim.muon.inference`, and shardings are read off the arrays.
"""

import dataclasses
from typing import Any

import jax
import optax
from flax import struct
from jax.sharding import (
  AbstractMesh,
  AxisType,
  NamedSharding,
  PartitionSpec,
  Sharding,
)
from optax.contrib import MuonDimensionNumbers

from composer_jax.core import trees
from composer_jax.optim import roles
from composer_jax.optim.muon import inference, planner, transform
from composer_jax.optim.muon import newton_schulz as iteration
from composer_jax.optim.muon import plan as muon_plan

_DEFAULT = iteration.NewtonSchulz()


class PlacedState(struct.PyTreeNode):
  """State of `muon`.

  Attributes:
    placed: (name, sharding) of Muon's parameters, static, from `init`: under
      `jit` the shardings of arrays on Auto axes are unknown.
  """

  inner: Any
  placed: tuple[tuple[str, NamedSharding], ...] = struct.field(
    pytree_node=False
  )


def muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  newton_schulz: iteration.NewtonSchulz = _DEFAULT,
  beta: float = 0.95,
  weight_decay: float = 0.0,
  consistent_rms: float | None = None,
  adam: optax.GradientTransformation | None = None,
  muon_weight_dimension_numbers: Any = None,
  shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Orthogonalises the momentum of matrices; other parameters go to Adam.

  If parameters are on a mesh with Auto axes, call `init` outside of `jit`, or
  give `shardings`. Otherwise `update` raises an error.

  Args:
    learning_rate: step size or schedule of all parameters.
    newton_schulz: coefficients, method and dtype of the orthogonalisation;
      `NewtonSchulz(coefficients='keller')` has those of optax.
    beta: decay of the momentum.
    weight_decay: decoupled weight decay of Muon's parameters, times the
      learning rate.
    consistent_rms: root mean square of an update at learning rate 1 (0.2 is
      AdamW's); None scales by sqrt(max(1, fan_out / fan_in)).
    adam: transform of all other parameters; None is optax's choice, AdamW with
      Nesterov's momentum and without weight decay.
    muon_weight_dimension_numbers: tree, or prefix of the tree, with
      `optax.contrib.MuonDimensionNumbers` of matrices and None for Adam, or a
      function of the parameters that returns it; None infers it.
    shardings: tree of the parameters' NamedShardings; None reads them off the
      arrays.
  """
  options = transform.MuonChoices(
    beta=beta, rms=consistent_rms, **dataclasses.asdict(newton_schulz)
  )
  if adam is None:
    adam = optax.adamw(learning_rate, weight_decay=0.0, nesterov=True)

  def build(params, kept):
    matrices = _matrices(params, muon_weight_dimension_numbers)
    placed = _placed(params, matrices, shardings, kept)
    matrix_transform = optax.chain(
      transform.scale_by_muon(matrices, shardings=placed, options=options),
      optax.add_decayed_weights(weight_decay),
      optax.scale_by_learning_rate(learning_rate),
    )
    labels = trees.map_names(
      lambda name, _: 'muon' if name in matrices else 'adam', params
    )
    built = optax.partition({'muon': matrix_transform, 'adam': adam}, labels)
    return built, tuple(placed.items())

  def init(params: Any) -> Any:
    built, placed = build(params, {})
    return PlacedState(inner=built.init(params), placed=placed)

  def update(updates, state, params=None, **extra_args):
    tree = updates if params is None else params
    built, _ = build(tree, dict(state.placed))
    updates, inner = built.update(updates, state.inner, params, **extra_args)
    return updates, state.replace(inner=inner)

  return optax.GradientTransformationExtraArgs(init, update)


def plan(
  params: Any,
  *,
  newton_schulz: iteration.NewtonSchulz = _DEFAULT,
  muon_weight_dimension_numbers: Any = None,
  shardings: Any = None,
) -> muon_plan.MuonPlan:
  """Returns the plan that `muon` with the same arguments follows."""
  matrices = _matrices(params, muon_weight_dimension_numbers)
  placed = _placed(params, matrices, shardings, {})
  return planner.make(
    params, matrices, shardings=placed, newton_schulz=newton_schulz
  )


def _matrices(params: Any, numbers: Any) -> dict[str, roles.Matrix]:
  """Returns the matrices among the parameters by '/'-joined name."""
  if numbers is None:
    numbers = inference.dimension_numbers
  if callable(numbers):
    numbers = numbers(params)
  # None would be an empty subtree.
  is_leaf = lambda x: x is None or isinstance(x, MuonDimensionNumbers)
  whole = jax.tree.broadcast(numbers, params, is_leaf=is_leaf)
  by_leaf = jax.tree.structure(params).flatten_up_to(whole)
  pairs = zip(trees.flatten_names(params).items(), by_leaf, strict=True)
  return {n: _matrix(n, x.shape, of) for (n, x), of in pairs if of is not None}


def _matrix(
  name: str, shape: tuple[int, ...], numbers: MuonDimensionNumbers
) -> roles.Matrix:
  sides = [(s,) if isinstance(s, int) else tuple(s) for s in numbers]
  try:
    rows, columns = (tuple(range(len(shape))[d] for d in s) for s in sides)
  except IndexError:
    rows = columns = ()
  if not rows or not columns or len({*rows, *columns}) < sum(map(len, sides)):
    raise ValueError(
      f'Parameter {name} of shape {shape} has {numbers}; each side must have '
      'at least one dimension of the parameter, and none twice. None instead '
      'of dimension numbers leaves a parameter to Adam.'
    )
  return roles.Matrix(rows=rows, columns=columns, swapped=columns < rows)


def _placed(
  params: Any, matrices: dict[str, roles.Matrix], shardings: Any, kept: Any
) -> dict[str, NamedSharding]:
  """Returns shardings of Muon's parameters by name; {} on one device.

  They are the given ones, those kept since `init`, or the arrays' own; arrays
  that have another sharding are an error.
  """
  arrays = trees.flatten_names(params)
  known = trees.flatten_names(shardings) or kept
  placed: dict[str, Any] = {}
  for name in matrices:
    ndim, seen = arrays[name].ndim, _sharding(arrays[name])
    place = placed[name] = known.get(name, seen)
    if isinstance(place, AbstractMesh):
      raise ValueError(
        f'Parameter {name} is on {_words(seen, ndim)}, and arrays on Auto axes '
        'do not tell under jit how they lie. Call init outside of jit, with '
        'the parameters on the mesh, or give muon(shardings=...) the tree of '
        'their NamedShardings (jax.tree.map(lambda x: x.sharding, params)).'
      )
    # Of an array on Auto axes only the mesh is known, which ends the words.
    if seen is not None and not _words(place, ndim).endswith(
      _words(seen, ndim)
    ):
      raise ValueError(
        f'Parameter {name} is on {_words(seen, ndim)}, but by '
        f'{"the state" if shardings is None else "shardings"} it is on '
        f'{_words(place, ndim)}. Move it there with jax.device_put, or leave '
        'shardings out and call init with the parameters as they lie.'
      )
  meshes = {getattr(place, 'mesh', None) for place in placed.values()}
  if len(meshes) > 1:
    places = {n: _words(p, arrays[n].ndim) for n, p in placed.items()}
    raise ValueError(
      'All parameters that Muon updates must be on one mesh; they are on '
      f'{places}. Bring them there with jax.device_put(params, shardings).'
    )
  return placed if meshes - {None} else {}


def _sharding(x: Any) -> Sharding | AbstractMesh | None:
  """Returns an array's sharding, or only its mesh; None if unknown."""
  if not isinstance(x, jax.core.Tracer):
    return getattr(x, 'sharding', None)
  sharding = jax.typeof(x).sharding
  if all(kind == AxisType.Explicit for kind in sharding.mesh.axis_types):
    return None if sharding.mesh.empty else sharding
  return sharding.mesh if sharding.mesh.size > 1 else None


def _words(place: Any, ndim: int) -> str:
  if isinstance(place, AbstractMesh):
    return f'mesh {dict(place.shape)}'
  if not isinstance(place, NamedSharding) or place.mesh.size == 1:
    return 'one device'
  spec = PartitionSpec(*planner.mesh_axes(place, ndim))
  return f'{spec} of mesh {dict(place.mesh.shape)}'
