"""Trainers of several gloo processes: equal to one, killed, gone on with."""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from composer_jax.telemetry import writer as writers
from composer_jax.train.checkpoints import manager
from tests import programs
from tests.e2e import jobs

IMPORTS = (*programs.IMPORTS, 'tensorboardX')
FORKED = """
import json, sys
from tests.fleet import forked
forked.run(sys.argv[1], sys.argv[2], *sys.argv[4:], **json.loads(sys.argv[3]))
"""
# The smoke job's pretraining, shorter.
QUICK = (
  '--config.cpt.steps=3',
  '--config.cpt.decay_steps=1',
  '--config.cpt.warmup_steps=1',
  '--config.cpt.checkpoint_every=1',
  '--config.cpt.optimizer=adam',
  '--config.telemetry.tensorboard=False',
)
FOUR = '--config.mesh.replica=4'


def arguments(workdir, *more):
  start = ['-m', 'experiments.pretrain', f'--config={jobs.CONFIG}']
  return [*start, f'--workdir={workdir}', *QUICK, *more]


def gang(launch, workdir, *more, **options):
  """Returns the arguments of Python that run a supervised trainer."""
  options = json.dumps({'restarts': 0, **options})
  command = arguments(workdir, *more)
  return ['-c', FORKED, launch, str(workdir), options, *command]


def run(*command):
  return programs.run_code(*command, env=jobs.environment(), imports=IMPORTS)


def run_alone(workdir, *more):
  """Runs the same main as a single process."""
  _, module, *flags = arguments(workdir, *more)
  return programs.run(module, *flags, env=jobs.environment(), imports=IMPORTS)


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


def flip_bit(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


@pytest.fixture(scope='module')
def two(tmp_path_factory):
  """Workdir of a run by two processes; tests change copies of it."""
  workdir = tmp_path_factory.mktemp('two') / 'run'
  done = run(*gang('local:2x1', workdir)[1:])
  assert done.returncode == 0, done.stderr + done.stdout
  return workdir


def test_two_processes_compute_what_one_does(two, tmp_path):
  """Bit for bit: a sum of two has one order."""
  whole = rows(two)
  assert [r['step'] for r in whole] == [0, 1, 2, 3, 3]
  assert rows(two / 'fleet' / 'epoch_1' / 'process_1') == whole
  workdir = tmp_path / 'run'
  shutil.copytree(two, workdir)
  # One process does the last step again, from what two had saved.
  shutil.rmtree(workdir / 'exports')
  shutil.rmtree(workdir / 'checkpoints' / 'cpt' / '3')
  done = run_alone(workdir)
  assert done.returncode == 0, done.stderr
  assert rows(workdir) == whole
  first, second = restore(two, 3), restore(workdir, 3)
  for name in first:
    np.testing.assert_array_equal(first[name], second[name], name)


def test_a_flipped_bit_is_seen_whichever_process_wrote_it(two, tmp_path):
  for process in range(2):
    workdir = tmp_path / str(process)
    shutil.copytree(two / 'checkpoints', workdir / 'checkpoints')
    folder = workdir / 'checkpoints/cpt/3/state'
    files = (folder / f'ocdbt.process_{process}' / 'd').iterdir()
    flip_bit(max(files, key=lambda path: path.stat().st_size))
    with pytest.raises(manager.DamagedCheckpoint, match='step 3'):
      restore(workdir, 3)


@contextlib.contextmanager
def started(command, log):
  """Starts a supervisor with its own zygote; yields the zygote."""
  with programs.zygote() as zygote, log.open('a') as out:
    zygote.start(
      command,
      env=jobs.environment(),
      out=out.fileno(),
      err=out.fileno(),
      imports=IMPORTS,
    )
    yield zygote


def members(log, start=1, of=0):
  """Waits for a start; returns process ids by number, of a host from `of`."""
  pattern = re.compile(rf'start {start}: .* here {{({of}: .*)}}')
  found = wait_for(lambda: pattern.search(log.read_text()))
  return dict(map(int, pair.split(':')) for pair in found[1].split(','))


def wait_for(condition, within_s=600):
  deadline = time.monotonic() + within_s
  while not (found := condition()):
    assert time.monotonic() < deadline
    time.sleep(0.02)
  return found


def test_after_a_kill_one_process_goes_on(two, tmp_path):
  workdir, log = tmp_path / 'run', tmp_path / 'log'
  workdir.mkdir()
  shutil.copytree(two / 'corpus', workdir / 'corpus')
  for name in ('tokenizer.json', 'sandbox.json'):
    shutil.copy(two / name, workdir)
  with started(gang('local:4x1', workdir, FOUR), log) as zygote:
    pids = members(log)
    wait_for((workdir / 'checkpoints' / 'cpt' / '1').exists)
    os.kill(pids[3], signal.SIGKILL)
    assert zygote.exit_code() == 1
  assert 'process 3 died by SIGKILL; no restarts are left' in log.read_text()
  for pid in pids.values():
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)
  done = run_alone(workdir, FOUR)
  assert done.returncode == 0, done.stderr
  assert [r['step'] for r in rows(workdir)] == [0, 1, 2, 3, 3]
