"""Muon's step on one accelerator, at the size of a model of 7B parameters.

`python -m benchmarks.muon --gpu`: 6.7B parameters in the matrices of 16 layers
of 64 experts, in bfloat16, gradients and momentum too (54 GB with the updates):
steps/s, ours standard and by default, against `optax.contrib.muon` in turns and
against `torch.optim.Muon` with a parameter per matrix, which runs before, in a
process of its own (`muon_torch`). 'peak' lines give the share of the device's
peak that the products of ours reach. A CPU runs it too; `--tiny` takes small
matrices, whose figures mean nothing.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import interleaved

_GOAL = 0.6  # share of the device's peak
_METHODS = ('standard', 'gram')


def _placed(is_tiny: bool) -> Any:
  from benchmarks import muon_cases

  if is_tiny:
    tree = muon_cases.moe(
      layers=2,
      experts=4,
      embed=64,
      ffw=32,
      shared_ffw=32,
      heads=2,
      head_dim=16,
    )
  else:
    tree = muon_cases.moe(
      layers=16,
      experts=64,
      embed=2048,
      ffw=1024,
      shared_ffw=1024,
      heads=16,
      head_dim=128,
    )
  return muon_cases.Placed(tree, {}, {})


def _torch_rates(tree: Any, dtype: str, steps: int) -> list[float]:
  """Returns steps/s of torch's Muon."""
  matrices = [(*leaf.sides, leaf.num_matrices) for leaf in tree.values()]
  task = {'matrices': matrices, 'dtype': dtype, 'steps': steps}
  process = subprocess.run(
    [sys.executable, '-m', 'benchmarks.muon_torch'],
    input=json.dumps(task) + '\n',
    capture_output=True,
    text=True,
    check=False,
  )
  if process.returncode:
    raise SystemExit(f'torch.optim.Muon failed: {process.stderr[-2000:]}')
  return [1 / s for s in json.loads(process.stdout.splitlines()[-1])['seconds']]


@dataclasses.dataclass
class _Arrays:
  """Arrays that ours and the peer share in turns; two of each take 80 GB."""

  gradients: Any
  momentum: Any
  params: Any


def _arrays(step: Any) -> _Arrays:
  import jax
  import jax.numpy as jnp

  from benchmarks import muon_programs

  gradients, state = muon_programs.random_arguments(step)
  params = jax.tree.map(jnp.zeros_like, gradients)
  return _Arrays(gradients, muon_programs.momentum_of(state), params)


def _running(step: Any, arrays: _Arrays) -> Callable[[], float]:
  """Returns a function that takes one step, in place, each time."""
  import jax

  from benchmarks import muon_programs

  state = muon_programs.empty_state(step, arrays.momentum)

  def run() -> float:
    nonlocal state
    state = muon_programs.with_momentum(state, arrays.momentum)
    state, arrays.params = step.run(arrays.gradients, state, arrays.params)
    jax.block_until_ready((state, arrays.params))
    arrays.momentum = muon_programs.momentum_of(state)
    return 1.0

  return run


def _compiled(tree: Any, dtype: str) -> dict[str, Any]:
  import jax

  from benchmarks import muon_peers, muon_programs
  from composer_jax.optim.muon import transform

  steps = {}
  for method in _METHODS:
    choices = transform.MuonChoices(method={'gram': 'auto'}.get(method, method))
    steps[method] = muon_programs.compile_step(
      muon_programs.ours(tree, None, choices),
      tree,
      None,
      dtype=dtype,
      applies=True,
    )
  try:
    steps['optax'] = muon_programs.compile_step(
      muon_peers.optax_transform(tree), tree, None, dtype=dtype, applies=True
    )
  except jax.errors.JaxRuntimeError as error:
    print(f'optax: {str(error)[:200]}', file=sys.stderr)
  return steps


def main(arguments: argparse.Namespace) -> None:
  if arguments.tiny:
    interleaved.pin_to_one_core()
  # torch goes first: JAX keeps most of the device's memory once it has it.
  tree = _placed(arguments.tiny).tree
  rounds = 3 if arguments.quick else 7
  dtype = 'bfloat16'
  torch_rates = _torch_rates(tree, dtype, rounds)
  steps = _compiled(tree, dtype)
  peak = interleaved.peak()
  size = 'tiny' if arguments.tiny else '7B'
  for method in _METHODS:
    flops = steps[method].program.flops
    rates_pair = _against_optax(steps, method, rounds)
    for peer, rates in (
      ('optax.contrib.muon', rates_pair[1]),
      ('torch.optim.Muon', torch_rates),
    ):
      interleaved.report(
        'muon',
        f'time of a step, {size}, {method}',
        (rates_pair[0], rates),
        against=peer,
        unit='steps/s',
        limit=peak / flops,
        goal='ratio >= 1',
        met=lambda _, ratio: ratio >= 1,
      )
    interleaved.report(
      'muon',
      f'share of the peak, {size}, {method}',
      ([rate * flops / peak for rate in rates_pair[0]], []),
      unit='of the peak',
      limit=1.0,
      goal=f'>= {_GOAL}',
      met=lambda ours, _: ours >= _GOAL,
    )


def _against_optax(
  steps: dict[str, Any], method: str, rounds: int
) -> tuple[list[float], list[float]]:
  import jax

  if 'optax' in steps:
    arrays = _arrays(steps[method])
    ours, peer = (_running(steps[n], arrays) for n in (method, 'optax'))
    try:
      return interleaved.rates(ours, peer, rounds)
    except jax.errors.JaxRuntimeError as error:  # optax does not fit
      print(f'optax: {str(error)[:200]}', file=sys.stderr)
      del steps['optax'], arrays, ours, peer
  ours = _running(steps[method], _arrays(steps[method]))
  return interleaved.rates(ours, lambda: 0.0, rounds)[0], []
