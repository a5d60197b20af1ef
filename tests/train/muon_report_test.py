"""What a run says of Muon's plan before it begins."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.optim import groups
from composer_jax.parallel import topology
from composer_jax.train import muon_report

PARAMS = {'up': np.zeros((6, 4, 8)), 'down': np.zeros((6, 8, 4))}
AXES = {'up': P('layer', 'embed', 'ffw'), 'down': P('layer', 'ffw', 'embed')}


def plan_of(*roles, shardings=None):
  options = groups.OptimizerOptions(
    name='muon',
    learning_rate=1.0,
    adam_learning_rate=1.0,
    warmup_steps=0,
    decay_steps=0,
    final_ratio=1.0,
    muon=groups.MuonChoices(method='standard', roles=roles),
  )
  params = jax.tree.map(lambda a: a.astype(np.float32), PARAMS)
  return groups.plan(options, params=params, axes=AXES, shardings=shardings)


def test_work_is_told_of_one_device():
  mesh = topology.make_mesh(1, 2, 1, devices=jax.devices()[:2])
  shardings = {
    'up': NamedSharding(mesh, P(None, 'fsdp')),
    'down': NamedSharding(mesh, P(None, None, 'fsdp')),
  }
  whole, shared = plan_of(), plan_of(shardings=shardings)
  # 20 p^2 q + 10 p^3 operations for each of 12 matrices of 4 x 8.
  flops = 12 * (20 * 4 * 4 * 8 + 10 * 4 * 4 * 4)
  for plan, devices in ((whole, 1), (shared, 2)):
    found = muon_report.metrics(plan)
    assert found['muon_matrices'] == 12 and found['muon_groups'] == 1
    assert found['muon_flops'] == found['muon_flops_ideal'] == flops / devices
  assert muon_report.metrics(whole)['muon_bytes'] == 0
  # Half of 12 matrices there, and half of them back, of which half is here.
  assert muon_report.metrics(shared)['muon_bytes'] == 2 * 12 * 4 * 8 * 4 / 4
  first, group = muon_report.lines(shared)
  assert first == (
    'Muon has 12 matrices of 2 parameters, in 1 group over 2 devices. Of a '
    'device, in a step: 19.2k FLOP, 1.00 of an even share by the standard '
    'method; 768 bytes received.'
  )
  assert group == '  4 x 8: owner, 6 on a device, in 1 chunk: down and 1 more'


def test_there_may_be_no_matrices_or_no_muon():
  (line,) = muon_report.lines(plan_of(('.', 'adam')))
  assert line.startswith('Muon has no matrices')
  assert muon_report.lines(None) == [] and muon_report.metrics(None) == {}
