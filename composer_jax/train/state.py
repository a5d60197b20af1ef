"""State of a training stage between steps, and its shardings."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder, experts, layer


class TrainState(flax.struct.PyTreeNode, kw_only=True):
  """State of training.

  Attributes:
    step: int32 number of optimizer steps done.
    params: masters, of the adapters if there are any.
    selection_bias: biases of sigmoid routers, updated outside the optimizer; {}
      for softmax routers.
    teacher: moving average of the masters; {} without one.
    base: frozen bfloat16 parameters of a model with adapters; else {}.
    heads: TrainState of the heads for multi-token prediction; {} without any.
  """

  step: jax.Array
  params: Any
  selection_bias: Any
  opt_state: Any
  teacher: Any = dataclasses.field(default_factory=dict)
  base: Any = dataclasses.field(default_factory=dict)
  heads: Any = dataclasses.field(default_factory=dict)

  def variables(self) -> dict[str, Any]:
    own = variables(self.params, self.selection_bias, self.base)
    return own | ({'mtp': self.heads.variables()} if self.heads else {})

  def trained(self) -> dict[str, Any]:
    """Returns what an export has: float32 masters, and nothing frozen."""
    kept = decoder.without_base(self.variables())
    return jax.tree.map(lambda x: x.astype(jnp.float32), kept)

  def own(self) -> 'TrainState':
    """Returns what training changes, which checkpoints have."""
    return self.replace(base={})


def variables(
  params: Any, selection_bias: Any, base: Any = None
) -> dict[str, Any]:
  """Returns the variables of `models.decoder`."""
  bias = {'selection_bias': selection_bias} if selection_bias else {}
  if base:
    return {'params': base, 'adapters': params, **bias}
  return {'params': params, **bias}


@jax.custom_jvp
def _rounded(x: jax.Array) -> jax.Array:
  if x.dtype == jnp.bfloat16:
    return x
  # Not astype(bfloat16).astype(float32), which XLA may drop
  # (xla_allow_excess_precision) and whose transpose rounds the gradient.
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


@_rounded.defjvp
def _rounded_jvp(primals, tangents):
  return _rounded(*primals), tangents[0]


def policy_values(params: Any, config: model_config.ModelConfig) -> Any:
  """Rounds masters to the policy's grids, keeping dtype and gradient.

  Experts are rounded to the config's format, and all else to bfloat16. The
  trainer's forward pass must use the values that rollout serves; gradient and
  updates act on the masters (straight-through).
  """
  with jax.named_scope('policy_values'):
    params = experts.in_format(trees.on_device(params), config)
    return jax.tree.map(_rounded, params)


def for_backward(
  params: Any, config: model_config.ModelConfig, step: jax.Array
) -> dict[str, Any]:
  """Returns the variables that only the backward pass of experts reads.

  {} where it reads none. Else 'backward' has the experts' weights in bfloat16,
  from before their rounding, or the step that random numbers depend on.
  """
  c, moe = config.precision, {}
  if not c.enabled or not (c.draws or c.backward == 'bf16'):
    return {}
  if c.backward == 'bf16':
    given = trees.on_device(params)['moe_layers']['moe']
    moe = {name: _rounded(given[name]) for name in layer.EXPERT_ARRAYS}
  made = {'moe_layers': {'moe': jax.lax.stop_gradient(moe)}, 'step': step}
  return {'backward': made}


def head_values(params: Any, config: model_config.ModelConfig) -> Any:
  """Rounds masters of heads, whose experts have no format of few bits."""
  return policy_values(params, config.precise())


def create(
  model_variables: dict[str, Any],
  optimizer: optax.GradientTransformation,
  *,
  with_teacher: bool = False,
  dtype: str = 'float32',
  heads: optax.GradientTransformation | None = None,
) -> TrainState:
  """Makes the first state; it has the frozen parameters that are given.

  `dtype` is that of the masters, and `heads` the optimizer of heads that are
  trained; None carries them along.
  """
  name = decoder.trained(model_variables)
  wide = model_variables[name]
  params = optax.tree.cast(wide, dtype)
  return TrainState(
    step=jnp.zeros([], jnp.int32),
    params=params,
    selection_bias=model_variables.get('selection_bias', {}),
    opt_state=optimizer.init(params),
    # Copies, since a step donates each buffer of its state once.
    teacher=jax.tree.map(jnp.copy, wide) if with_teacher else {},
    base={} if name == 'params' else model_variables.get('params', {}),
    heads=create(model_variables['mtp'], heads or optax.identity())
    if 'mtp' in model_variables
    else {},
  )


def place(
  create: Callable[[dict[str, Any]], TrainState],
  model_variables: dict[str, Any],
  places: Any,
) -> TrainState:
  """Returns create(variables) in its shardings, the frozen base not copied."""
  made = jax.jit(create, out_shardings=places.own())
  state = made(decoder.without_base(model_variables))
  return state.replace(base=model_variables['params'] if places.base else {})


def follow(state: TrainState, rate: float) -> TrainState:
  """Moves the teacher by the share `rate` of its distance to the masters."""
  return state.replace(
    teacher=jax.tree.map(
      lambda slow, fast: slow + rate * (fast - slow),
      state.teacher,
      trees.on_device(state.params),
    )
  )


def shardings(
  abstract: TrainState,
  variable_shardings: dict[str, Any],
  mesh: Mesh | AbstractMesh,
  offload: bool = False,
) -> Any:
  """Returns shardings of the state: moments are sharded as their parameters."""
  trained = variable_shardings[decoder.trained(variable_shardings)]
  host = lambda place: place.with_memory_kind('pinned_host')
  masters = jax.tree.map(host, trained) if offload else trained
  by_name = trees.flatten_names(masters)
  shapes = {n: p.shape for n, p in trees.flatten_names(abstract.params).items()}
  replicated = NamedSharding(mesh, P())

  def place(name: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    if not leaf.ndim:
      return replicated
    # Optax nests the parameter tree in its own: the name ends alike.
    parts = name.split('/')
    ends = ['/'.join(parts[start:]) for start in range(len(parts))]
    parameter = next((end for end in ends if end in by_name), None)
    if parameter is not None and leaf.shape == shapes[parameter]:
      return by_name[parameter]
    if parameter is None or leaf.shape[:-1] != shapes[parameter][:-1]:
      raise ValueError(
        f'Optimizer state {name} of shape {leaf.shape} must have the name and '
        f'the shape of a parameter; the parameters are {shapes}.'
      )
    # Numbers of blocks of rows (`optim.eight_bits`), whole in each shard.
    return NamedSharding(mesh, P(*by_name[parameter].spec[: leaf.ndim - 1]))

  place_of: Any = TrainState  # Holds shardings here, where arrays are declared.
  return place_of(
    step=replicated,
    params=masters,
    selection_bias=variable_shardings.get('selection_bias', {}),
    opt_state=trees.map_names(place, abstract.opt_state),
    teacher=trained if abstract.teacher else {},
    base=variable_shardings['params'] if abstract.base else {},
    heads=shardings(abstract.heads, variable_shardings['mtp'], mesh)
    if abstract.heads
    else {},
  )
