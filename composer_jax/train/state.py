"""What a training stage owns between steps, and where it lies."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees


class TrainState(flax.struct.PyTreeNode, kw_only=True):
  """The float32 masters and all that moves with them.

  Attributes:
    step: int32 optimizer steps done.
    params: float32 masters.
    selection_bias: of sigmoid routers, {} for softmax; moved by a sign rule,
      outside the optimizer.
    opt_state: of the optax transform.
    teacher: parameters of an average that follows the masters, {} without one.
  """

  step: jax.Array
  params: Any
  selection_bias: Any
  opt_state: Any
  teacher: Any = dataclasses.field(default_factory=dict)

  def variables(self) -> dict[str, Any]:
    return variables(self.params, self.selection_bias)


def variables(params: Any, selection_bias: Any) -> dict[str, Any]:
  """Returns what `models.decoder` calls its variables."""
  bias = {'selection_bias': selection_bias} if selection_bias else {}
  return {'params': params, **bias}


@jax.custom_jvp
def _rounded(x: jax.Array) -> jax.Array:
  # Not astype(bfloat16).astype(float32): XLA may drop such a pair of
  # conversions (xla_allow_excess_precision), and its transpose would round the
  # gradient. 8 and 7 bits are those of bfloat16.
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


@_rounded.defjvp
def _rounded_jvp(primals, tangents):
  return _rounded(*primals), tangents[0]


def policy_values(params: Any) -> Any:
  """Rounds each master to the bfloat16 grid, keeping dtype and gradient.

  Rollout serves the bfloat16 cast of the masters and bundles carry it, so the
  trainer's forward pass must use the same values, while its gradient and its
  updates act on the masters (straight-through).
  """
  with jax.named_scope('policy_values'):
    return jax.tree.map(_rounded, params)


def create(
  model_variables: dict[str, Any],
  optimizer: optax.GradientTransformation,
  *,
  with_teacher: bool = False,
) -> TrainState:
  """Builds the state of step 0; pure, so that it can be traced or jitted."""
  params = model_variables['params']
  return TrainState(
    step=jnp.zeros([], jnp.int32),
    params=params,
    selection_bias=model_variables.get('selection_bias', {}),
    opt_state=optimizer.init(params),
    # Copies: a step is given its state's buffers, and each only once.
    teacher=jax.tree.map(jnp.copy, params) if with_teacher else {},
  )


def follow(state: TrainState, rate: float) -> TrainState:
  """Moves the teacher by this share of its distance to the masters."""
  return state.replace(
    teacher=jax.tree.map(
      lambda slow, fast: slow + rate * (fast - slow),
      state.teacher,
      state.params,
    )
  )


def shardings(
  abstract: TrainState, variable_shardings: dict[str, Any], mesh: Mesh
) -> Any:
  """Places the state: moments lie as their parameters, scalars everywhere.

  A moment may hold one number for a whole dimension of its parameter (the
  second moment of a unit): such a dimension of size 1 is not divided.

  Raises:
    ValueError: an array of the optimizer belongs to no parameter, by name or
      by shape.
  """
  by_name = trees.flatten_names(variable_shardings['params'])
  shapes = {n: p.shape for n, p in trees.flatten_names(abstract.params).items()}
  replicated = NamedSharding(mesh, P())

  def place(name: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    if not leaf.ndim:
      return replicated
    # Optax nests the parameter tree in its own: the name ends alike.
    parts = name.split('/')
    ends = ['/'.join(parts[start:]) for start in range(len(parts))]
    parameter = next((end for end in ends if end in by_name), None)
    if parameter is None:
      raise ValueError(
        f'Optimizer state {name} of shape {leaf.shape} is named after no '
        f'parameter; the parameters are {sorted(by_name)}.'
      )
    return _fitted(name, leaf.shape, shapes[parameter], by_name[parameter])

  place_of: Any = TrainState  # Holds shardings here, where arrays are declared.
  return place_of(
    step=replicated,
    params=variable_shardings['params'],
    selection_bias=variable_shardings.get('selection_bias', {}),
    opt_state=trees.map_names(place, abstract.opt_state),
    teacher=variable_shardings['params'] if abstract.teacher else {},
  )


def _fitted(
  name: str,
  shape: tuple[int, ...],
  parameter: tuple[int, ...],
  sharding: NamedSharding,
) -> NamedSharding:
  """Returns a parameter's sharding without the dimensions that have shrunk."""
  if shape == parameter:
    return sharding
  axes = (*sharding.spec, *(None,) * (len(parameter) - len(sharding.spec)))
  if len(shape) != len(parameter) or any(
    mine not in (1, its) for mine, its in zip(shape, parameter, strict=True)
  ):
    raise ValueError(
      f'Optimizer state {name} has shape {shape} and its parameter '
      f'{parameter}; each dimension must be that of the parameter, or 1.'
    )
  kept = (a if mine > 1 else None for mine, a in zip(shape, axes, strict=True))
  return NamedSharding(sharding.mesh, P(*kept))
