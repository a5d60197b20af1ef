"""A tree of small matrices, and the meshes for the tests of Muon.

No group divides over 8 owners, since there are three layers and one matrix.
"""

import contextlib
import functools
import os
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.optim import roles
from composer_jax.optim.muon import plan as muon_plan
from composer_jax.optim.muon import planner
from composer_jax.optim.muon import transform as muon
from tests import compiling

L, E, D, F, S, N, H = 3, 8, 16, 24, 32, 4, 8
_EXPERT = roles.Matrix(rows=(2,), columns=(3,))
_DENSE = roles.Matrix(rows=(1,), columns=(2,))

# Shape and matrix by name; S is the width of the shared expert.
PARAMETERS = {
  'gate': ((L, E, D, F), _EXPERT),
  'up': ((L, E, D, F), _EXPERT),
  'down': ((L, E, F, D), _EXPERT),
  'shared_up': ((L, D, S), _DENSE),
  'shared_down': ((L, S, D), _DENSE),
  'query': ((L, D, N, H), roles.Matrix(rows=(1,), columns=(3,))),
  'value': ((L, D, N, H), roles.Matrix(rows=(1,), columns=(2, 3))),
  'out': ((L, N, H, D), roles.Matrix(rows=(2,), columns=(3,))),
  'alone': ((D, F), roles.Matrix(rows=(0,), columns=(1,))),
}
MATRICES = {name: matrix for name, (_, matrix) in PARAMETERS.items()}


class Case(NamedTuple):
  """A mesh and the mesh axes that shard parameters.

  Attributes:
    mesh: size of each mesh axis.
    expert: mesh axes of the experts.
    embed: mesh axes of D in expert parameters.
    ffw: mesh axes of F in expert parameters.
    dense: mesh axes of D in other parameters.
    tensor: mesh axes of S and N in other parameters.
  """

  mesh: dict[str, int]
  expert: tuple[str, ...] = ()
  embed: tuple[str, ...] = ()
  ffw: tuple[str, ...] = ()
  dense: tuple[str, ...] = ()
  tensor: tuple[str, ...] = ()


CASES = {
  'ep8': Case({'e': 8}, expert=('e',), dense=('e',)),
  'fsdp8': Case({'d': 8}, embed=('d',), dense=('d',)),
  'ep2_fsdp4': Case(
    {'e': 2, 'd': 4}, expert=('e',), embed=('d',), dense=('e', 'd')
  ),
  'hsdp': Case({'r': 2, 'd': 4}, embed=('d',), dense=('d',)),
  'ep2_fsdp2_tp2': Case(
    {'e': 2, 'd': 2, 't': 2},
    expert=('e',),
    embed=('d',),
    ffw=('t',),
    dense=('e', 'd'),
    tensor=('t',),
  ),
  'dual': Case({'r': 2, 'd': 4}, expert=('r',), embed=('d',), dense=('d',)),
  'data_parallel': Case({'r': 2, 'd': 4}),
}


def shardings(
  case: Case, axis_type: AxisType = AxisType.Auto
) -> dict[str, NamedSharding]:
  mesh = jax.make_mesh(
    tuple(case.mesh.values()),
    tuple(case.mesh),
    axis_types=(axis_type,) * len(case.mesh),
  )
  e, d, f, dense, t = (axes or None for axes in case[1:])
  specs = {
    'gate': P(None, e, d, f),
    'up': P(None, e, d, f),
    'down': P(None, e, f, d),
    'shared_up': P(None, dense, t),
    'shared_down': P(None, t, dense),
    'query': P(None, dense, t),
    'value': P(None, dense, t),
    'out': P(None, t, None, dense),
    'alone': P(dense, t),
  }
  return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


OPTIONS = muon.MuonChoices(deterministic=True)
# On CPUs the planner would rather repeat work than exchange it.
TOLD = planner.PlanOptions(chunks=6, repeats=False)


class Program(NamedTuple):
  """A compiled update.

  Attributes:
    run: (gradients, momentum) -> (updates, momentum), of host arrays.
    update: the compiled function.
    plan: plan of the update.
    text: HLO of the program.
    warnings: text that XLA printed while compiling it.
    shardings: shardings of the parameters; None on one device.
  """

  run: Any
  update: Any
  plan: muon_plan.MuonPlan
  text: str
  warnings: str
  shardings: dict[str, NamedSharding] | None


@functools.cache
def program(
  name: str | None,
  axis_type: AxisType = AxisType.Auto,
  options: muon.MuonChoices = OPTIONS,
  fixed: planner.PlanOptions = TOLD,
  names: tuple[str, ...] = tuple(PARAMETERS),
) -> Program:
  """Compiles Muon's update on the mesh of a case; None for one device."""
  places = shardings(CASES[name], axis_type) if name else None
  shapes = {
    n: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=places and places[n])
    for n, (shape, _) in PARAMETERS.items()
    if n in names
  }
  matrices = {n: MATRICES[n] for n in shapes}
  transform = muon.scale_by_muon(
    matrices, shardings=places, options=options, fixed=fixed
  )
  state = muon.MuonState(jax.ShapeDtypeStruct((), jnp.int32), shapes)
  lowered = jax.jit(lambda g, s: transform.update(g, s)).lower(shapes, state)
  compiled, warnings = watched(
    lambda: lowered.compile(compiler_options=compiling.AS_USERS_DO)
  )

  def run(gradients, momentum):
    gradients, momentum = (
      {n: jax.device_put(tree[n], places and places[n]) for n in shapes}
      for tree in (gradients, momentum)
    )
    state = muon.MuonState(np.int32(3), momentum)
    updates, state = compiled(gradients, state)
    return jax.tree.map(np.asarray, (updates, state.momentum))

  plan = planner.make(
    shapes, matrices, shardings=places, newton_schulz=options, fixed=fixed
  )
  return Program(run, compiled, plan, compiled.as_text(), warnings, places)


@contextlib.contextmanager
def uncached():
  """Disables the compilation cache, whose programs print no warnings."""
  folder = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', None)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update('jax_compilation_cache_dir', folder)
    compilation_cache.reset_cache()


def watched(compile):
  """Returns the result of `compile`, and the text that C++ prints to stderr."""
  saved = os.dup(2)
  with tempfile.TemporaryFile() as file, uncached():
    os.dup2(file.fileno(), 2)
    try:
      result = compile()
    finally:
      os.dup2(saved, 2)
      os.close(saved)
    file.seek(0)
    return result, file.read().decode(errors='replace')


@functools.cache
def values(seed: int) -> dict[str, np.ndarray]:
  random = np.random.default_rng(seed)
  return {
    name: random.normal(size=shape).astype(np.float32)
    for name, (shape, _) in PARAMETERS.items()
  }
