"""Trainers of several gloo processes: equal to one, killed, gone on with."""

import contextlib
import re
import shutil
import time

import jax
import numpy as np
import psutil
import pytest

from composer_jax.telemetry import writer as writers
from composer_jax.train.checkpoints import manager
from tests import programs
from tests.e2e import jobs

IMPORTS = (*programs.IMPORTS, 'tensorboardX')
# Arguments are those of `forked.run`.
FORKED = """
import sys
from tests.fleet import forked
forked.run(*sys.argv[1:])
"""
# The smoke job's pretraining, shorter: every process compiles it.
QUICK = (
  '--config.model.num_layers=1',
  '--config.model.num_dense_layers=0',
  '--config.model.moe.num_shared=0',
  '--config.cpt.steps=3',
  '--config.cpt.decay_steps=1',
  '--config.cpt.warmup_steps=1',
  '--config.cpt.checkpoint_every=1',
  '--config.cpt.optimizer=adam',
  '--config.telemetry.tensorboard=False',
)


def arguments(workdir, *more):
  start = ['-m', 'experiments.pretrain', f'--config={jobs.CONFIG}']
  return [*start, f'--workdir={workdir}', *QUICK, *more]


def gang(launch, workdir, *more, victim=''):
  """Runs a supervised trainer, of which a process may die."""
  return programs.run_code(
    FORKED,
    launch,
    str(workdir),
    str(victim),
    '0',
    *arguments(workdir, *more),
    env=jobs.environment(),
    imports=IMPORTS,
    timeout_s=jobs.TIMEOUT_S,
  )


def run_alone(workdir, *more):
  """Runs the same main as a single process."""
  _, module, *flags = arguments(workdir, *more)
  return programs.run(
    module,
    *flags,
    env=jobs.environment(),
    imports=IMPORTS,
    timeout_s=jobs.TIMEOUT_S,
  )


def rows(path):
  """Returns the metrics that must be bit-equal, by step."""
  kept = [
    {k: v for k, v in row.items() if k not in jobs.UNCERTAIN}
    for row in writers.read(path)
  ]
  return [row for row in kept if row['stage'] == 'cpt']


def like(workdir, step):
  """Returns shapes of a checkpoint's arrays, for one device."""
  checkpoints = manager.Checkpoints(workdir / 'checkpoints' / 'cpt', keep=None)
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with contextlib.closing(checkpoints):
    arrays = checkpoints.record(step)['arrays']
  return {
    name: jax.ShapeDtypeStruct(a['shape'], a['dtype'], sharding=device)
    for name, a in arrays.items()
  }


def restore(workdir, step):
  checkpoints = manager.Checkpoints(workdir / 'checkpoints' / 'cpt', keep=None)
  with contextlib.closing(checkpoints):
    return checkpoints.restore(step, like(workdir, step))[0]


def flip_bit(path, share):
  """Flips a bit of a file, so far from its beginning."""
  data = bytearray(path.read_bytes())
  data[int(len(data) * share)] ^= 1
  path.write_bytes(data)


@pytest.fixture(
  scope='module',
  params=[pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)],
)
def killed(request, tmp_path_factory):
  """Number of processes, of which the last died, and their workdir."""
  count = request.param
  workdir = tmp_path_factory.mktemp('killed') / 'run'
  done = gang(
    f'local:{count}x1',
    workdir,
    f'--config.mesh.replica={count}',
    victim=count - 1,
  )
  assert done.returncode == 1, done.stderr
  message = f'error: process {count - 1} died by SIGKILL; no restarts are left'
  assert message in done.stderr, done.stderr + done.stdout
  return count, workdir


def test_one_process_goes_on_as_several_would(killed, tmp_path):
  """Bit for bit where two add: a sum of more has an order of its own."""
  count, workdir = killed
  # The dead one had done its last step, which no checkpoint has.
  last = f'fleet/epoch_1/process_{count - 1}'
  whole = rows(workdir / last)
  assert [r['step'] for r in whole] == [0, 1, 2, 3, 3]
  alone = tmp_path / 'run'
  shutil.copytree(workdir, alone)
  done = run_alone(alone, f'--config.mesh.replica={count}')
  assert done.returncode == 0, done.stderr
  found = rows(alone)
  if count == 2:
    assert found == whole
  assert [r['step'] for r in found] == [0, 1, 2, 3, 3]
  for one, several in zip(found, whole, strict=True):
    for name in one.keys() & {'loss', 'heldout_loss', 'grad_norm'}:
      # Three roundings of a float32 sum, in each of three steps.
      np.testing.assert_allclose(one[name], several[name], rtol=1e-5)


def test_a_flipped_bit_is_seen_whichever_process_wrote_it(killed, tmp_path):
  """Or it lies where nothing is read, and every array is what it was."""
  count, workdir = killed
  step = max(int(p.name) for p in workdir.glob('checkpoints/cpt/[0-9]'))
  for process in range(count):
    copied = tmp_path / str(process)
    shutil.copytree(workdir / 'checkpoints', copied / 'checkpoints')
    folder = copied / f'checkpoints/cpt/{step}/state/ocdbt.process_{process}'
    largest = max(folder.glob('d/*'), key=lambda path: path.stat().st_size)
    intact, told = restore(copied, step), []
    for share in np.arange(1, 8) / 8:
      flip_bit(largest, share)
      try:
        found = restore(copied, step)
      except manager.DamagedCheckpoint as error:
        told.append(str(error))
      else:
        jax.tree.map(np.testing.assert_array_equal, found, intact)
      flip_bit(largest, share)
    assert len(told) >= 4
    assert all(f'step {step}' in text for text in told)


def members(log, pid, start=1, of=0):
  """Waits for a start; returns process ids by number, of a host from `of`."""
  pattern = re.compile(rf'start {start}: .* here {{({of}: .*)}}')
  found = wait_for(lambda: pattern.search(log.read_text()), pid)
  return dict(map(int, pair.split(':')) for pair in found[1].split(','))


def wait_for(condition, pid):
  """Returns what the condition gives once that is true; `pid` must not end."""
  process = psutil.Process(pid)
  while not (found := condition()):
    assert process.is_running(), 'it ended'
    assert process.status() != psutil.STATUS_ZOMBIE, 'it ended'
    time.sleep(0.02)
  return found
