"""Three workers whose turns take ten times as long keep a trainer busy.

Trainer, store, leases and policies are those of a run, in processes; turns
wait, and steps take what they took in the main job. The simulator is given the
same numbers and must tell the same idle share.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from composer_jax.pipeline import reinforce
from composer_jax.rl.hints import distill
from composer_jax.telemetry import writer as writers
from tests import programs
from tests.fleet import simulator, waiting
from tests.pipeline import runs, sync_equality_test, workers

spec = sync_equality_test.spec
tokenizer = sync_equality_test.tokenizer

PROMPTS = MEMBERS = 8
CAPACITY = 600  # members of a worker at once


class PacedWriter(writers.Writer):
  """Has each step take as long as one of the main job, waiting excluded."""

  def write(self, stage, step, **metrics):
    super().write(stage, step, **metrics)
    if stage == 'rl':
      time.sleep(max(0, waiting.STEP_S - metrics['train_s']))


class ReplayedFleet(simulator.Simulator):
  """The simulator with the turns that the workers wait for."""

  factor = 10.0

  def seconds(self, group):
    return max(
      waiting.seconds_of_turns(group, member, self.factor).sum()
      for member in range(self.setting.members)
    )


def idle_share(waits, steps):
  """Returns the share of time waited, once the fleet has filled up."""
  late = waits[len(waits) // 3 :]
  return sum(late) / (sum(late) + sum(steps[len(steps) // 3 :]))


def run_with(spec, tokenizer, workdir, factor, **rl):
  """Returns seconds waited and worked in each step of a run."""
  fields = dict(prompts=PROMPTS, rollouts_per_prompt=MEMBERS, **rl)
  gate = dataclasses.replace(spec.rl.gate, action='off')
  changed = dataclasses.replace(spec.rl, gate=gate, decay_steps=1, **fields)
  spec = dataclasses.replace(spec, rl=changed)
  spec = runs.changed(spec, 'hints', loss=distill.OFF)
  spec = workers.spec_of(spec, lease_s=60.0)
  shape = dict(
    layers=spec.model.num_moe_layers,
    num_experts=spec.model.moe.num_experts,
    num_active=spec.model.moe.num_active,
    vocab_size=spec.model.vocab_size,
    capacity=CAPACITY,
  )
  with sync_equality_test.opened(workdir, spec, tokenizer):
    pass
  with contextlib.ExitStack() as stack:
    for i in range(3):
      store, key = workdir / 'store', workdir / 'delta.key'
      command = [sys.executable, '-m', 'tests.fleet.waiting', f'w{i}', store]
      command += [key, workdir / f'w{i}', json.dumps(shape), str(factor)]
      process = subprocess.Popen(list(map(str, command)), cwd=programs.ROOT)
      stack.callback(process.wait)
      stack.callback(process.kill)
    writer = stack.enter_context(PacedWriter(workdir, tensorboard=False))
    job = runs.job(spec, workdir, writer)
    vars(job)['tokenizer'] = tokenizer
    reinforce.reinforce(job)
  rows = [r for r in writers.read(workdir) if r['stage'] == 'rl']
  ages = np.repeat(*np.array(sum((r['ages'] for r in rows), [])).T)
  print(f'staleness {ages.mean():.1f} on average, {ages.max()} at most')
  assert ages.max() <= spec.rl.max_staleness
  waits = [r['wait_s'] for r in rows]
  print('waited', ' '.join(f'{wait:.2f}' for wait in waits))
  spans = np.diff([r['time'] for r in rows])
  return waits, [waiting.STEP_S, *(spans - waits[1:])]


@pytest.mark.slow
@pytest.mark.parametrize(
  'staleness, overtake, steps, is_busy',
  [(5, 0, 15, False), (40, 64, 60, True)],
)
def test_idle_of_a_real_run_and_of_the_simulator(
  spec, tokenizer, tmp_path, staleness, overtake, steps, is_busy
):
  """Too few groups under way leave a trainer idle; enough do not."""
  window = dict(max_staleness=staleness, overtake=overtake, steps=steps)
  waits, worked = run_with(spec, tokenizer, tmp_path, 10.0, **window)
  real = idle_share(waits, worked)
  setting = simulator.Setting(
    workers=3,
    boxes=3 * CAPACITY,
    members=MEMBERS,
    prompts=PROMPTS,
    staleness=staleness,
    overtake=overtake,
    steps=steps,
    capacity=CAPACITY,
    # Polls of the store.
    latencies=(0.2,),
    tick_s=0.2,
    beat_s=7.5,
    lease_s=60.0,
    train_s=float(np.mean(worked)),
    speeds=(1.0, 1.0),
  )
  sim = ReplayedFleet(setting).run()
  simulated = idle_share(sim.idle_s, [setting.train_s] * steps)
  print(
    f'{(staleness + 1) * PROMPTS - overtake} groups under way, steps of '
    f'{setting.train_s:.2f} s: idle {real:.3f}, simulated {simulated:.3f}'
  )
  if is_busy:
    assert real < 0.05 and simulated < 0.05
  else:
    assert real > 0.3 and simulated == pytest.approx(real, rel=0.15)
