"""Compiles one step of an optimizer over a tree and reads the program."""

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import muon_cases
from composer_jax.optim import roles
from composer_jax.optim.muon import plan as muon_plan
from composer_jax.optim.muon import planner
from composer_jax.optim.muon import transform as muon
from composer_jax.plan.hlo import overlap

# Rate and decay of an applied step; the figures do not depend on them.
_RATE, _DECAY = 1e-3, 0.1
# XLA's warning where it can reshard only by gathering everything.
_WARNING = b'Involuntary full rematerialization'

_Shardings = Mapping[str, jax.sharding.NamedSharding]


def matrices(tree: muon_cases.Tree) -> dict[str, roles.Matrix]:
  return {
    name: roles.Matrix(
      rows=leaf.rows, columns=leaf.columns, swapped=leaf.is_swapped
    )
    for name, leaf in tree.items()
  }


def ours(
  tree: muon_cases.Tree,
  shardings: _Shardings | None,
  choices: muon.MuonChoices,
) -> optax.GradientTransformation:
  return muon.scale_by_muon(
    matrices(tree), shardings=shardings, options=choices
  )


def plan(
  tree: muon_cases.Tree,
  shardings: _Shardings | None,
  choices: muon.MuonChoices,
  dtype: Any,
) -> muon_plan.MuonPlan:
  """Returns the plan of `ours`."""
  return planner.make(
    _shapes(tree, shardings, dtype),
    matrices(tree),
    shardings=shardings,
    newton_schulz=choices,
  )


@dataclasses.dataclass(frozen=True)
class Step:
  """A compiled step.

  Attributes:
    run: executable of the step.
    arguments: shapes and shardings of its arguments.
    program: operations and collectives read from the executable.
    temp_bytes: temporaries of one device, beside arguments and results.
    peak_bytes: peak memory of one device.
    warnings: number of reshardings that gather everything.
    seconds: CPU seconds to trace and to compile.
  """

  run: Callable[..., Any]
  arguments: tuple[Any, ...]
  program: overlap.Program
  temp_bytes: int
  peak_bytes: int
  warnings: int
  seconds: float


def compile_step(
  transform: optax.GradientTransformation,
  tree: muon_cases.Tree,
  shardings: _Shardings | None,
  *,
  dtype: Any = jnp.float32,
  applies: bool = False,
  compiler_options: dict[str, str] | None = None,
) -> Step:
  """Compiles (gradients, state) -> (updates, state).

  Args:
    transform: optax transform of the gradients.
    tree: parameters by name.
    shardings: sharding of each parameter; None for one device.
    dtype: dtype of gradients and momentum.
    applies: true to compile (gradients, state, params) -> (state, params)
      instead, with weight decay, in place.
    compiler_options: options of XLA.
  """
  shapes = _shapes(tree, shardings, dtype)
  state = _placed(jax.eval_shape(transform.init, shapes), shardings)

  def update(gradients, state):
    return transform.update(gradients, state)

  def apply(gradients, state, params):
    updates, state = transform.update(gradients, state, params)
    return state, jax.tree.map(
      lambda p, u: (p - _RATE * (u + _DECAY * p)).astype(p.dtype),
      params,
      updates,
    )

  arguments = (shapes, state, shapes) if applies else (shapes, state)
  places = None
  if shardings is not None:
    places = jax.tree.map(
      lambda x: x.sharding, arguments[1:] if applies else arguments
    )
  jitted = jax.jit(
    apply if applies else update,
    out_shardings=places,
    donate_argnums=(1, 2) if applies else (),
    compiler_options=compiler_options,
  )
  start = time.process_time()
  with _stderr() as printed:
    compiled = jitted.lower(*arguments).compile()
  seconds = time.process_time() - start
  memory, text = compiled.memory_analysis(), compiled.as_text()
  assert memory is not None
  assert text is not None
  return Step(
    run=compiled,
    arguments=arguments,
    program=overlap.read(text),
    temp_bytes=memory.temp_size_in_bytes,
    peak_bytes=memory.temp_size_in_bytes
    + memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes,
    warnings=printed.count(_WARNING),
    seconds=seconds,
  )


def random_arguments(step: Step) -> tuple[Any, ...]:
  """Returns normal gradients and an empty state, with the step's shardings."""
  gradients, *_ = step.arguments
  keys = jax.random.split(jax.random.key(0), len(gradients))

  def draw(key, like):
    # Drawn on the host, since a device of a mesh may hold only a part.
    values = jax.random.normal(key, like.shape, like.dtype)
    return _place(values, like)

  drawn = {
    name: draw(key, like)
    for key, (name, like) in zip(keys, gradients.items(), strict=True)
  }
  return drawn, empty_state(step)


def empty_state(step: Step, momentum: dict[str, jax.Array] | None = None):
  """Returns the state before the first step, with this momentum if given."""
  _, state, *_ = step.arguments
  if momentum is not None:
    state = with_momentum(state, momentum)
  empty = jax.tree.map(
    lambda x: (
      x if isinstance(x, jax.Array) else _place(jnp.zeros(x.shape, x.dtype), x)
    ),
    state,
  )
  return _with_coefficients(empty)


def momentum_of(state: Any) -> dict[str, jax.Array]:
  """Returns the arrays of a state that are named after parameters."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {name: x for path, x in leaves if (name := _parameter(path))}


def with_momentum(state: Any, momentum: Mapping[str, jax.Array]) -> Any:
  """Returns the state with the arrays of `momentum_of` replaced."""

  def replace(path, x):
    name = _parameter(path)
    return momentum[name] if name else x

  return jax.tree_util.tree_map_with_path(replace, state)


def _parameter(path: Any) -> str | None:
  keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
  return keys[-1] if keys else None


def _place(values, like):
  return (
    values if like.sharding is None else jax.device_put(values, like.sharding)
  )


def _with_coefficients(state):
  """Fills in the coefficients that optax and MaxText keep in their state."""

  def fill(path, x):
    is_coefficients = getattr(path[-1], 'name', '') == 'ns_coeffs'
    if not is_coefficients:
      return x
    return jax.device_put(
      jnp.asarray((3.4445, -4.7750, 2.0315), x.dtype), x.sharding
    )

  return jax.tree_util.tree_map_with_path(fill, state)


def _shapes(
  tree: muon_cases.Tree, shardings: _Shardings | None, dtype: Any
) -> dict[str, jax.ShapeDtypeStruct]:
  return {
    name: jax.ShapeDtypeStruct(
      leaf.shape, dtype, sharding=shardings[name] if shardings else None
    )
    for name, leaf in tree.items()
  }


def _placed(state: Any, shardings: _Shardings | None) -> Any:
  """Shards arrays of a parameter like the parameter; replicates all others."""
  if shardings is None:
    return state
  mesh = next(iter(shardings.values())).mesh

  def place(path, x):
    name = _parameter(path)
    sharding = shardings[name] if name else jax.NamedSharding(mesh, jax.P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree_util.tree_map_with_path(place, state)


@contextlib.contextmanager
def _stderr() -> Iterator[bytearray]:
  """Catches what C++ writes to stderr, which bypasses Python's stream."""
  printed = bytearray()
  descriptor = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield printed
    finally:
      os.dup2(descriptor, 2)
      os.close(descriptor)
      file.seek(0)
      printed.extend(file.read())
