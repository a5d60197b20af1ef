"""Muon for any tree of parameters, called as `optax.contrib.muon` is.

  optimizer = alias.muon(0.02)
  state = optimizer.init(params)

`optim.groups` builds the optimizer of a stage; this module is for scripts with
a model and a loop of their own. Parameters are taken for matrices or left to
Adam by `optim.muon.inference`, and shardings are read off the arrays.
"""

import dataclasses
import textwrap
from typing import Any

import jax
import optax
from flax import struct
from jax.sharding import AbstractMesh, NamedSharding, Sharding
from optax.contrib import MuonDimensionNumbers

from composer_jax.core import trees
from composer_jax.optim import roles
from composer_jax.optim.muon import inference, places, planner, transform
from composer_jax.optim.muon import newton_schulz as iteration
from composer_jax.optim.muon import plan as muon_plan

_DEFAULT = iteration.NewtonSchulz()
_IN_INIT = 'Call init outside of jit, with the parameters on the mesh'
_IN_UPDATE = (
  'The state was made with parameters that were not on it: move them with '
  'jax.device_put(params, shardings) before init'
)


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
  give `shardings`. Otherwise `update` raises an error, as it does if gradients
  or momentum are seen to lie elsewhere than their parameters. With
  `optax.inject_hyperparams`, give it static_args=('beta', 'consistent_rms').

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
    shardings: tree, or prefix of the tree, of the parameters' NamedShardings;
      those that are missing are read off the arrays.
  """
  for name, value in (('beta', beta), ('consistent_rms', consistent_rms)):
    if isinstance(value, jax.Array):
      raise TypeError(
        f'{name} must be a number, not an array ({value}). With '
        'optax.inject_hyperparams, give it '
        "static_args=('beta', 'consistent_rms')."
      )
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
    built, placed = build(params, None)
    return PlacedState(inner=built.init(params), placed=placed)

  def update(updates, state, params=None, **extra_args):
    tree = updates if params is None else params
    built, _ = build(tree, [place for _, place in state.placed])
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
  placed = _placed(params, matrices, shardings, None)
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
  leaves = jax.tree.leaves(numbers, is_leaf=is_leaf)
  try:
    if not all(map(is_leaf, leaves)):
      raise ValueError('a leaf is neither')
    whole = jax.tree.broadcast(numbers, params, is_leaf=is_leaf)
  except ValueError as error:
    raise ValueError(
      'muon_weight_dimension_numbers must be a tree like the parameters, or a '
      'prefix of it, of MuonDimensionNumbers and None; got '
      f'{textwrap.shorten(str(numbers), 200)}. The parameters are '
      f'{textwrap.shorten(", ".join(trees.flatten_names(params)), 400)}.'
    ) from error
  by_leaf = jax.tree.structure(params).flatten_up_to(whole)
  pairs = zip(trees.flatten_names(params).items(), by_leaf, strict=True)
  return {n: _matrix(n, x.shape, of) for (n, x), of in pairs if of is not None}


def _matrix(
  name: str, shape: tuple[int, ...], numbers: MuonDimensionNumbers
) -> roles.Matrix:
  planner.check_size(name, shape)
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

  They are the given ones, those kept since `init` (in the order of matrices,
  whose names may differ: nnx.Optimizer passes variables to `init` alone; None
  in `init`), or the arrays' own; arrays that have another sharding are an
  error.
  """
  arrays = trees.flatten_names(params)
  known = _given(shardings, arrays)
  if kept and not known:
    known = dict(zip(matrices, kept, strict=False))
  placed: dict[str, Any] = {}
  for name in matrices:
    if places.is_local(arrays[name]):
      placed[name] = None
      continue
    ndim, seen = arrays[name].ndim, places.of(arrays[name])
    place = known.get(name, seen)
    if isinstance(place, AbstractMesh):
      raise ValueError(
        f'Parameter {name} is on {places.in_words(seen, ndim)}, and arrays on '
        'Auto axes do not tell under jit how they lie. '
        f'{_IN_INIT if kept is None else _IN_UPDATE}, or give '
        'muon(shardings=...) the tree of their NamedShardings '
        '(jax.tree.map(lambda x: x.sharding, params)).'
      )
    if differ := places.disagreement(seen, place, ndim):
      raise ValueError(
        f'Parameter {name} is on {differ[0]}, but by '
        f'{"the state" if shardings is None else "shardings"} it is on '
        f'{differ[1]}. Move it there with jax.device_put, or leave shardings '
        'out and call init with the parameters as they lie.'
      )
    is_single = place is None or place.num_devices == 1
    if not is_single and not isinstance(place, NamedSharding):
      raise ValueError(
        f'Parameter {name} is on {place}, which names no axes of a mesh. Move '
        'it with jax.device_put(x, NamedSharding(mesh, spec)), or give '
        'muon(shardings=...) the NamedSharding that it equals.'
      )
    placed[name] = place if isinstance(place, NamedSharding) else None
  meshes = {place and place.mesh for place in placed.values()}
  if len(meshes) > 1 and all(m is None or m.size == 1 for m in meshes):
    return {}
  if len(meshes) > 1:
    words = {n: places.in_words(p, arrays[n].ndim) for n, p in placed.items()}
    raise ValueError(
      'All parameters that Muon updates must be on one mesh; they are on '
      f'{words}. Bring them there with jax.device_put(params, shardings).'
    )
  return placed if meshes - {None} else {}


def _given(shardings: Any, arrays: dict[str, Any]) -> dict[str, Sharding]:
  """Returns the given shardings by the names of parameters."""
  known = {}
  for path, place in trees.flatten_names(shardings).items():
    if not isinstance(place, Sharding):
      raise ValueError(
        f'shardings must hold NamedShardings; {path or "it"} is {place!r}. '
        'NamedSharding(mesh, spec) makes one of a PartitionSpec.'
      )

    # A sharding of a whole subtree is a prefix, as in jax.device_put.
    def below(prefix):
      return [n for n in arrays if f'{n}/'.startswith(f'{prefix}/')]

    # A tree of nnx's variables has one more level.
    names = list(arrays) if not path else below(path)
    names = names or below(path.removesuffix('/value'))
    if not names:
      raise ValueError(
        f'shardings has an entry {path}, but no parameter has this name; they '
        f'are {", ".join(arrays)}. Give the tree of the parameters or a prefix '
        'of it.'
      )
    known |= dict.fromkeys(names, place)
  return known
