"""Meshes that the search proposes, and the traffic that it models."""

import json

import pytest

from composer_jax.models import config as model_config
from composer_jax.optim.muon import cost
from composer_jax.parallel import layouts
from composer_jax.pipeline import spec as specs
from composer_jax.plan.modelled import search
from tests.plan import params_test

RATES = cost.BY_NAME['cpu']


def test_meshes_are_all_ways_to_divide():
  found = [(m.replica, m.fsdp, m.context) for m in search.meshes(8)]
  assert len(found) == len({*found}) == 10
  assert all(r * f * c == 8 for r, f, c in found)
  assert (1, 1, 8) in found
  assert max(m.context for m in search.meshes(64)) == 8


def traffic(*sizes, **change):
  fields = params_test.fields('tiny') | dict(num_layers=2, num_dense_layers=1)
  model = model_config.ModelConfig.from_dict(fields | change)
  mesh = specs.Mesh(**dict(zip(('replica', 'fsdp', 'context'), sizes)))
  rows = mesh.replica * mesh.fsdp
  return search.traffic(model, mesh, layouts.TRAIN, rows, 64, RATES)


def test_one_replica_sums_nothing_and_one_device_gathers_nothing():
  whole, halves = traffic(1, 8, 1), traffic(2, 4, 1)
  # Norms alone are whole on each device.
  assert whole['sums'] < 0.1 * halves['sums']
  # Half of a replica's devices gather a smaller part of the same weights.
  assert halves['weights'] < whole['weights']
  alone = traffic(1, 1, 1)
  assert alone['weights'] == alone['gradients'] == alone['sums'] == 0
  assert 'rows' not in alone


@pytest.mark.slow
def test_recomputation_gathers_weights_again():
  once, twice = (traffic(1, 8, 1, remat=r) for r in (False, True))
  assert twice['weights'] == pytest.approx(2 * once['weights'])
  assert twice['gradients'] == once['gradients']


@pytest.mark.slow
def test_the_command_proposes_the_best_few():
  code, text, _ = params_test.command(
    *('--config=configs/models/tiny.py', '--what=search', '--json'),
    *('--topology=v5p:2x2x2', '--seq_len=64', '--optimizer=adam'),
  )
  assert code == 0
  (table,) = json.loads(text)['search']
  assert 'not compiled' in table['title']
  rows = table['rows']
  assert 1 < len(rows) <= 5 and rows[0]['fits'] == 'yes'
  scores = [max(r['products_s'], r['wire_s']) / r['tokens'] for r in rows]
  assert scores == sorted(scores)
