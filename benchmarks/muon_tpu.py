"""Muon's step at the size of Kimi K2, compiled by the real TPU compiler.

`python -m benchmarks.muon --tpu [--libtpu=FOLDER] [CASE ...]`; nothing runs, no
TPU is needed. libtpu comes from

    pip install --target=FOLDER --no-deps libtpu==0.0.42.1

Cases: 'wide512' shards experts over 32 groups of 16 chips, and other matrices
over all 512; 'dual512' shards experts over 64 and 8, and other matrices over 8,
replicated; both have 1.03T parameters, experts and attention alone. 'k2_256',
'k2_512' and 'k2_1024' are the config of Kimi K2 in this project's layout, with
latents and with the dense layer, whose three matrices are giants.

A step takes gradients, momentum and parameters in bfloat16 and replaces the
last two. Lines: operations against an even share of standard Newton-Schulz (for
Kimi K2's config, of the method at hand), bytes against `Placed.least_bytes`,
temporaries, products issued while an asynchronous collective is in flight,
exchanges with products between their start and end, seconds to compile, and the
seconds of a step as the plan models it, which nobody has measured. `standard`
and `gram` are the methods of Newton-Schulz.
"""

import argparse
import importlib.util
import os
import re
import sys
from typing import Any

from benchmarks import interleaved

_METHODS = ('standard', 'gram')
_OPTIONS = {'xla_tpu_enable_async_all_to_all': 'true'}
_POD = {256: 'v5p:8x8x4', 512: 'v5p:8x8x8', 1024: 'v5p:8x8x16'}
CASES = ('wide512', 'dual512', 'k2_256', 'k2_512', 'k2_1024')


def _placed(case: str) -> Any:
  from benchmarks import muon_cases
  from configs.models import kimi_k2

  devices = int(case.removeprefix('wide').removeprefix('dual').split('_')[-1])
  if case.startswith('wide'):
    return muon_cases.k2_wide(devices)
  if case.startswith('dual'):
    return muon_cases.k2_dual(devices)
  mesh = (2, devices // 4, 2)  # name in plan.topologies
  return muon_cases.configured(kimi_k2.get_config().to_dict(), mesh, 'hsdp')


class _Case:
  """A placed tree on a pod, and steps compiled for it."""

  def __init__(self, name: str):
    from jax.experimental import topologies

    self.name = name
    self.placed = _placed(name)
    pod = topologies.get_topology_desc(
      platform='tpu', topology_name=_POD[self.placed.num_devices]
    )
    self.shardings = self.placed.on(pod.devices)

  def compile(self, transform: Any) -> Any:
    import jax.numpy as jnp

    from benchmarks import muon_programs

    return muon_programs.compile_step(
      transform,
      self.placed.tree,
      self.shardings,
      dtype=jnp.bfloat16,
      applies=True,
      compiler_options=_OPTIONS,
    )

  def choices(self, method: str) -> Any:
    from composer_jax.optim.muon import transform

    # By default the sides of a group of matrices decide its method.
    return transform.MuonChoices(method={'gram': 'auto'}.get(method, method))

  def ours(self, method: str) -> Any:
    from benchmarks import muon_programs

    return self.compile(
      muon_programs.ours(self.placed.tree, self.shardings, self.choices(method))
    )

  def plan(self, method: str) -> Any:
    import jax.numpy as jnp

    from benchmarks import muon_programs

    return muon_programs.plan(
      self.placed.tree, self.shardings, self.choices(method), jnp.bfloat16
    )

  def maxtext(self) -> Any:
    from benchmarks import muon_peers

    tree = self.placed.tree
    return self.compile(muon_peers.maxtext_transform(tree, self.shardings))

  def optax(self) -> Any:
    from benchmarks import muon_peers

    return self.compile(muon_peers.optax_transform(self.placed.tree))


def _report(case: _Case, method: str, step: Any, peer: Any) -> None:
  placed, program = case.placed, step.program
  is_k2 = case.name.startswith('k2')

  def line(what, read, **fields):
    figures = ([read(step)], [read(peer[1])] if peer else [])
    against = peer[0] if peer else ''
    name = f'{what}, {method}: {case.name}'
    interleaved.report('muon', name, figures, against=against, **fields)

  even, times = placed.even_flops(), 1.02
  if is_k2:
    # Giants count here: every device runs the same program, so this is the
    # critical path.
    even, times = placed.even_flops(method), 1.05
  elif method == 'gram':
    times = 0.81
  line(
    'operations of a chip',
    lambda s: s.program.flops / even,
    unit='times an even share',
    limit=1.0,
    goal=f'<= {times}',
    met=lambda ours, _: ours <= times,
    note=f'an even share is {even / 1e12:.4g} TFLOP',
  )
  least = placed.least_bytes(2)
  line(
    'bytes into a chip',
    lambda s: s.program.wire_bytes / least,
    unit='times the least',
    limit=1.0,
    goal='<= 1.05',
    met=lambda ours, _: ours <= 1.05,
    note=f'the least is {least / 1e6:.4g} MB',
  )
  local = 2 * placed.local_elements
  line(
    'temporaries',
    lambda s: s.temp_bytes / local,
    unit='times the local update',
    limit=None,
    goal='<= 1.5',
    met=lambda ours, _: ours <= 1.5,
    note=f'the local update has {local / 1e9:.3g} GB',
  )
  line(
    'products with a collective in flight',
    lambda s: s.program.overlap,
    unit='of products',
    limit=1.0,
    goal='>= 0.9',
    met=lambda ours, _: ours >= 0.9,
  )
  exchanges = program.of_kind('all-to-all')
  line(
    'exchanges with products inside',
    lambda s: sum(c.hidden > 0 for c in s.program.of_kind('all-to-all')),
    unit='exchanges',
    limit=len(exchanges),
    goal='all but the first and the last',
    met=lambda *_: all(c.hidden > 0 for c in exchanges[1:-1]),
    note=f'{len(exchanges)} exchanges',
  )
  line(
    'compilation',
    lambda s: s.seconds,
    unit='CPU seconds',
    limit=None,
    goal='< 60, and < 30 GB on a chip',
    met=lambda ours, _: ours < 60 and step.peak_bytes < 30e9,
    note=f'{step.peak_bytes / 1e9:.1f} GB on a chip',
  )


def _modelled(case: _Case, method: str) -> None:
  """Reports the plan's own estimate, chunk after chunk, beside its roofline."""
  from composer_jax.optim.muon import cost
  from composer_jax.plan import muon_model

  plan, rates = case.plan(method), cost.BY_NAME['v5p']
  chunks = muon_model.chunk_times(plan, rates)
  interleaved.report(
    'muon',
    f'modelled step on v5p, {method}: {case.name}',
    ([muon_model.pipelined_seconds(chunks)], []),
    unit='s',
    limit=muon_model.roofline_seconds(plan, rates),
    goal='<= 0.2 on 512 chips',
    met=lambda ours, _: ours <= 0.2 * 512 / case.placed.num_devices,
  )


def _optax(case: _Case, step: Any) -> None:
  """Reports the temporaries that optax's step takes or would take."""
  import jax

  try:
    gigabytes = case.optax().temp_bytes / 1e9
  except jax.errors.JaxRuntimeError as error:
    match = re.search(r'temporaries \(([\d.]+)G\)', str(error))
    if match is None:
      raise
    gigabytes = float(match.group(1)) * 2**30 / 1e9
  interleaved.report(
    'muon',
    f'temporaries in GB, gram: {case.name}',
    ([step.temp_bytes / 1e9], [gigabytes]),
    against='optax.contrib.muon',
    unit='GB',
    limit=None,
    goal='none',
    met=lambda *_: True,
    note='a chip has 103 GB',
  )


def main(arguments: argparse.Namespace) -> None:
  if arguments.libtpu:
    sys.path.append(arguments.libtpu)
  if importlib.util.find_spec('libtpu') is None:
    raise SystemExit(
      'no libtpu: pip install --target=FOLDER --no-deps libtpu==0.0.42.1, '
      'then --libtpu=FOLDER.'
    )
  if unknown := set(arguments.cases) - {*CASES}:
    raise SystemExit(f'{sorted(unknown)} are no cases; there are {CASES}.')
  # libtpu's lock keeps a TPU for one process; there is no TPU here.
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  os.environ['TPU_WORKER_HOSTNAMES'] = 'localhost'
  os.environ['JAX_PLATFORMS'] = 'cpu'
  from benchmarks import muon_peers

  if arguments.maxtext:
    muon_peers.add_maxtext(arguments.maxtext)
  names = arguments.cases or (CASES[:1] if arguments.quick else CASES)
  for name in names:
    case = _Case(name)
    peer = None
    if arguments.maxtext:
      peer = ("MaxText's Muon", case.maxtext())
    for method in _METHODS[1 if arguments.quick else 0 :]:
      step = case.ours(method)
      _report(case, method, step, peer)
      _modelled(case, method)
      if method == 'gram' and not arguments.quick:
        _optax(case, step)
