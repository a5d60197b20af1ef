"""Lines of metrics: speed, routers, repeated steps and Muon's plan."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.optim import groups
from composer_jax.parallel import topology
from composer_jax.train import lm_loss, reporting
from composer_jax.train import step as train_step


def test_a_device_of_unknown_peak_has_a_speed_and_no_mfu(monkeypatch):
  def read(platform, device_kind):
    device = types.SimpleNamespace(platform=platform, device_kind=device_kind)
    monkeypatch.setattr(jax, 'devices', lambda: [device])
    speed = reporting.Speed(1e6)
    speed.add(10)
    assert speed.read() == {}
    speed.add(10)
    return speed.read()

  assert read('gpu', 'NVIDIA L40S').keys() == {'tokens_per_s'}
  assert read('cpu', 'cpu')['mfu'] > 0
  actual = read('gpu', 'NVIDIA L4')
  peak = 121e12 * jax.device_count()
  assert actual['mfu'] == pytest.approx(1e6 * actual['tokens_per_s'] / peak)


def test_routers_and_attention_are_reported_and_losses_must_be_finite():
  written = []
  writer = types.SimpleNamespace(
    write=lambda stage, step, **metrics: written.append(metrics)
  )
  reporter = reporting.Reporter(
    'cpt',
    writer=writer,
    bar=types.SimpleNamespace(update=lambda step, **metrics: None),
    speed=types.SimpleNamespace(add=lambda tokens: None, read=dict),
    learning_rates=np.array([0.5, 0.25, 0.25]),
    log_every=1,
  )

  def metrics(z_loss, max_logits_LN=None):
    return train_step.StepMetrics(
      loss=lm_loss.LossStats(
        loss=np.float32(1),
        aux_loss=np.float32(2),
        z_loss=np.float32(z_loss),
        loss_weight=np.float32(4),
        num_tokens=np.int32(5),
        load_ME=np.array([[1, 3]]),
        max_logits_LN=max_logits_LN,
      ),
      update=train_step.UpdateStats(
        grad_norm=np.float32(6), update_norm=np.float32(7)
      ),
    )

  reporter.push(1, metrics(3.0, np.float32([[1, 4], [2, 0]])))
  reporter.push(2, metrics(3.0))
  reporter.push(3, metrics(np.inf))
  assert 'max_logit' not in written[1]
  assert (written[0]['aux_loss'], written[0]['z_loss']) == (2.0, 3.0)
  assert written[0]['max_logit'] == 4.0
  assert written[0]['max_logit_layers'] == [4.0, 2.0]
  with pytest.raises(FloatingPointError, match='step 3: .*z_loss inf'):
    reporter.flush()


@pytest.mark.parametrize('rounds', [1, 2])
def test_shards_of_experts_and_rounds_are_reported(rounds):
  written = []
  reporter = reporting.Reporter(
    'cpt',
    writer=types.SimpleNamespace(
      write=lambda stage, step, **metrics: written.append((step, metrics))
    ),
    bar=types.SimpleNamespace(update=lambda step, **metrics: None),
    speed=types.SimpleNamespace(add=lambda tokens: None, read=dict),
    learning_rates=np.ones(1),
    log_every=1,
    expert_shards=2,
  )
  # Two layers; in the second all rows go to the second shard.
  load_ME = np.array([[100, 60, 140, 100], [0, 0, 150, 250]], np.int32)
  nothing = np.float32(0)
  loss = lm_loss.LossStats(
    loss=nothing,
    aux_loss=nothing,
    z_loss=nothing,
    loss_weight=nothing,
    num_tokens=np.int32(200),
    load_ME=load_ME,
    rounds_M=np.array([1, rounds]),
  )
  update = train_step.UpdateStats(grad_norm=nothing, update_norm=nothing)
  metrics = train_step.StepMetrics(loss=loss, update=update)
  reporter.push(1, metrics)
  reporter.flush()
  ((step, line),) = written
  assert step == 1
  assert line['shard_load_max'] == 2.0
  assert line['exchange_rounds'] == rounds


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


def test_work_is_reported_by_device():
  mesh = topology.make_mesh(1, 2, 1, devices=jax.devices()[:2])
  shardings = {
    'up': NamedSharding(mesh, P(None, 'fsdp')),
    'down': NamedSharding(mesh, P(None, None, 'fsdp')),
  }
  unsharded, shared = plan_of(), plan_of(shardings=shardings)
  # 20 p^2 q + 10 p^3 operations for each of 12 matrices of 4 x 8.
  flops = 12 * (20 * 4 * 4 * 8 + 10 * 4 * 4 * 4)
  for plan, devices in ((unsharded, 1), (shared, 2)):
    actual = reporting.muon_metrics(plan)
    assert actual['muon_matrices'] == 12 and actual['muon_groups'] == 1
    assert actual['muon_flops'] == actual['muon_flops_ideal'] == flops / devices
  assert reporting.muon_metrics(unsharded)['muon_bytes'] == 0
  # Half of 12 matrices go to their owner and back, and half of each is there.
  assert reporting.muon_metrics(shared)['muon_bytes'] == 2 * 12 * 4 * 8 * 4 / 4


def test_there_may_be_no_matrices_or_no_muon():
  assert reporting.muon_metrics(plan_of(('.', 'adam')))['muon_matrices'] == 0
  assert reporting.muon_metrics(None) == {}
