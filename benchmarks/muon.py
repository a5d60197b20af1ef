"""Muon on sharded matrices of a mixture of experts, beside optax's.

  python -m benchmarks.muon [--quick] [--maxtext=FOLDER] [CASE ...]
  python -m benchmarks.muon --tpu [--libtpu=FOLDER]
  python -m benchmarks.muon --gpu [--tiny]

Six meshes of eight emulated devices and one device alone; 332 matrices with
sides in the ratio of Kimi K2's (`muon_cases.SMALL`). Counts of compiled
programs on one device, loops times their trips
(`composer_jax.plan.hlo.overlap`):
  'flops': operations of products, against Newton-Schulz without repetition and
    padding; with the peer's method ('standard') and by default ('gram').
  'bytes': bytes received by a device, ours in bfloat16 (the default of
    accelerators) and in float32; the limit lets each matrix visit one owner and
    come back.
  'memory': temporaries.
  'collectives': their number against the plan's.
And measured:
  'time': steps per CPU second, ours and the peer's in turns; 'standard' has the
    peer's method and coefficients, and the results are compared.
The peer is `optax.contrib.muon` with the right dimensions for each parameter,
in float32, which is all it offers for float32 parameters. With --maxtext, also
MaxText's Muon that knows shardings (`muon_peers.add_maxtext`).
--tpu compiles steps of K2's size for v5p pods with the real compiler, which
needs libtpu but no TPU (`muon_tpu`); --gpu measures on one GPU (`muon_gpu`).
"""

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

from benchmarks import interleaved

# Least ratio to optax with our defaults; a goal without a known limit.
_TIME_GOALS = {'fsdp8': 2.2, 'ep2_fsdp4': 3.0, 'ep8': 6.0, 'one': 1.1}
_MAXTEXT_GOAL = 1.25
_QUICK_MESHES = ('ep8', 'fsdp8')
_QUICK_TIME = 'fsdp8'


class _Mesh:
  """One mesh with its compiled steps, made when first asked for."""

  def __init__(self, name: str, maxtext: bool):
    import jax

    from benchmarks import muon_cases

    self.name = name
    self.maxtext = maxtext
    self.placed = muon_cases.MESHES[name]
    self.tree = self.placed.tree
    self.devices = self.placed.num_devices
    self.shardings = None
    if self.devices > 1:
      self.shardings = self.placed.on(jax.devices())
    self.step = functools.cache(self._step)

  @property
  def peers(self) -> tuple[str, ...]:
    return ('optax', 'maxtext') if self.maxtext else ('optax',)

  def choices(self, method: str, dtype: str = 'auto'):
    from composer_jax.optim.muon import transform

    if method == 'gram':
      return transform.MuonChoices(dtype=dtype)
    return transform.MuonChoices(
      coefficients='keller', method='standard', dtype=dtype
    )

  def plan(self, method: str):
    import jax.numpy as jnp

    from benchmarks import muon_programs

    return muon_programs.plan(
      self.tree, self.shardings, self.choices(method), jnp.float32
    )

  def _step(self, which: str, dtype: str = 'auto'):
    from benchmarks import muon_peers, muon_programs

    if which in ('optax', 'maxtext'):
      make = getattr(muon_peers, f'{which}_transform')
      transform = make(self.tree, self.shardings)
    else:
      transform = muon_programs.ours(
        self.tree, self.shardings, self.choices(which, dtype)
      )
    return muon_programs.compile_step(transform, self.tree, self.shardings)


# Peers by the names under which they are reported.
_PEERS = {'optax': 'optax.contrib.muon', 'maxtext': "MaxText's Muon"}


def _line(
  mesh: _Mesh, claim: str, ours: float, peer: float, against: str, **fields
) -> None:
  interleaved.report(
    'muon',
    f'{claim}: {mesh.name}',
    ([ours], [peer]),
    against=_PEERS[against],
    **fields,
  )


def flops(mesh: _Mesh, rounds: int) -> None:
  del rounds
  even = mesh.placed.even_flops()
  for peer in mesh.peers:
    for method, times in (('standard', 1.08), ('gram', 0.89)):
      _line(
        mesh,
        f'operations of a device, {method}',
        mesh.step(method).program.flops / even,
        mesh.step(peer).program.flops / even,
        peer,
        unit='times an even share',
        limit=1.0,
        goal=f'<= {times:g}',
        met=lambda ours, _, times=times: ours <= times,
        note=f'an even share is {even / 1e9:.4g} GFLOP',
      )


def traffic(mesh: _Mesh, rounds: int) -> None:
  del rounds
  if mesh.shardings is None:
    return
  for dtype, itemsize in (('bfloat16', 2), ('float32', 4)):
    least = mesh.placed.least_bytes(itemsize)
    ours = mesh.step('gram', dtype).program
    for peer in mesh.peers:
      _line(
        mesh,
        f'bytes into a device, {dtype}',
        ours.wire_bytes / least,
        mesh.step(peer).program.wire_bytes / least,
        peer,
        unit='times the least',
        limit=1.0,
        goal='<= 1.1',
        met=lambda ours, _: ours <= 1.1,
        note=f'the least is {least / 1e6:.4g} MB; the peer sends float32',
      )


def memory(mesh: _Mesh, rounds: int) -> None:
  del rounds
  if mesh.shardings is None:
    return
  for peer in mesh.peers:
    _line(
      mesh,
      'temporaries',
      mesh.step('gram').temp_bytes / 1e6,
      mesh.step(peer).temp_bytes / 1e6,
      peer,
      unit='MB',
      limit=None,
      goal='ratio <= 1',
      met=lambda _, ratio: ratio <= 1,
    )


def collectives(mesh: _Mesh, rounds: int) -> None:
  del rounds
  if mesh.shardings is None:
    return
  from composer_jax.plan import muon_model

  step = mesh.step('gram')
  planned: dict[str, int] = {}
  for group in mesh.plan('gram').groups:
    for kind, number, _ in muon_model.collectives(group):
      planned[kind] = planned.get(kind, 0) + number
  counts = {
    kind: len(step.program.of_kind(kind))
    for kind in {c.kind for c in step.program.collectives}
  }
  in_loops = sum(bool(c.loops) for c in step.program.collectives)
  as_planned = counts == {k: n for k, n in planned.items() if n}
  for peer in mesh.peers:
    peer_step = mesh.step(peer)
    _line(
      mesh,
      'collectives',
      sum(counts.values()),
      len(peer_step.program.collectives),
      peer,
      unit='collectives',
      limit=sum(planned.values()),
      goal='those planned, none in a loop, no warning',
      met=lambda *_: as_planned and not in_loops and not step.warnings,
      note=f'planned {planned}; the peer has {peer_step.warnings} warnings of '
      'full rematerialization',
    )


def _running(step: Any) -> Callable[[], float]:
  import jax

  from benchmarks import muon_programs

  arguments = muon_programs.random_arguments(step)

  def run() -> float:
    jax.block_until_ready(step.run(*arguments))
    return 1.0

  return run


def speed(mesh: _Mesh, rounds: int) -> None:
  running = {
    name: _running(mesh.step(name))
    for name in ('standard', 'gram', *mesh.peers)
  }
  peak = interleaved.peak()
  for peer in mesh.peers:
    for method in ('standard', 'gram'):
      least = _TIME_GOALS.get(mesh.name) if method == 'gram' else None
      if peer == 'maxtext' and least:
        least = _MAXTEXT_GOAL
      flops = mesh.step(method).program.flops * mesh.devices
      interleaved.report(
        'muon',
        f'time of a step, {method}: {mesh.name}',
        interleaved.rates(running[method], running[peer], rounds),
        against=_PEERS[peer],
        unit='steps per CPU second',
        limit=peak / flops,
        goal=f'ratio >= {least:g}' if least else 'none',
        met=lambda _, ratio, least=least: least is None or ratio >= least,
      )
  _parity(mesh)


def _parity(mesh: _Mesh) -> None:
  """Compares the update of the same method and coefficients."""
  import jax
  import numpy as np

  from benchmarks import muon_programs

  results = []
  for name in ('standard', 'optax'):
    step = mesh.step(name)
    updates, _ = step.run(*muon_programs.random_arguments(step))
    results.append(jax.device_get(updates))
  ours, peer = results
  largest = max(float(np.abs(x).max()) for x in peer.values())
  apart = max(float(np.abs(ours[k] - x).max()) for k, x in peer.items())
  interleaved.report(
    'muon',
    f'largest difference to optax.contrib.muon: {mesh.name}',
    ([apart / largest], []),
    unit='of the largest element',
    limit=None,
    goal='<= 1e-5',
    met=lambda ours, _: ours <= 1e-5,
  )


_CASES = {
  'flops': flops,
  'bytes': traffic,
  'memory': memory,
  'collectives': collectives,
  'time': speed,
}


def _on_cpu(arguments: argparse.Namespace) -> None:
  flags = os.environ.get('XLA_FLAGS', '')
  count = '--xla_force_host_platform_device_count=8'
  os.environ['XLA_FLAGS'] = f'{flags} {count}'
  os.environ['JAX_PLATFORMS'] = 'cpu'
  interleaved.pin_to_one_core()
  from benchmarks import muon_cases, muon_peers

  if arguments.maxtext:
    muon_peers.add_maxtext(arguments.maxtext)
  names = [*muon_cases.MESHES]
  chosen = set(arguments.cases)
  if unknown := chosen - {*_CASES, *names}:
    raise SystemExit(
      f'{sorted(unknown)} are unknown cases; known are {[*_CASES]} and {names}.'
    )
  default = _QUICK_MESHES if arguments.quick else names
  for name in [name for name in names if name in chosen] or default:
    mesh = _Mesh(name, bool(arguments.maxtext) and name != 'one')
    for case in [case for case in _CASES if case in chosen] or _CASES:
      if case == 'time' and arguments.quick and name != _QUICK_TIME:
        continue
      _CASES[case](mesh, 2 if arguments.quick else 5)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  option = functools.partial(parser.add_argument, action='store_true')
  parser.add_argument(
    'cases',
    nargs='*',
    metavar='CASE',
    help=f"of {', '.join(_CASES)}, and meshes as 'fsdp8'; default: all",
  )
  option('--quick', help='two rounds, two of the meshes, one of them timed')
  parser.add_argument(
    '--maxtext', metavar='FOLDER', help='where maxtext==0.2.5 lies'
  )
  option('--tpu', help="compile for v5p pods; CASE is 'wide512', 'k2_512', ...")
  parser.add_argument('--libtpu', metavar='FOLDER', help='where libtpu lies')
  option('--gpu', help="measure on this process's device")
  option('--tiny', help='with --gpu: matrices that a CPU can take')
  arguments = parser.parse_args()
  if arguments.tpu:
    from benchmarks import muon_tpu

    muon_tpu.main(arguments)
  elif arguments.gpu:
    from benchmarks import muon_gpu

    muon_gpu.main(arguments)
  else:
    _on_cpu(arguments)


if __name__ == '__main__':
  main()
