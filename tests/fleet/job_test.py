"""Whole jobs of several processes: equal to one process, whatever befalls."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from tests import programs
from tests.e2e import jobs, kill_test
from tests.fleet import trainer_test

pytestmark = pytest.mark.slow

SMALL = (
  *trainer_test.QUICK,
  '--config.sft.optimizer=adam',
  '--config.evaluation.episodes=4',
  '--config.rl.steps=3',
  '--config.rl.mesh.replica=2',
)
HSDP = (
  '--config.layout=hsdp',
  '--config.mesh.replica=2',
  '--config.mesh.fsdp=2',
  '--config.mesh.context=2',
  '--config.model.num_layers=2',
  '--config.model.num_dense_layers=1',
  '--config.model.moe.num_shared=1',
  '--config.cpt.optimizer=muon',
)


@contextlib.contextmanager
def process(module, *arguments, log, **variables):
  """Starts a main as a user does; ends it with the block."""
  with log.open('a') as out:
    started = subprocess.Popen(
      [sys.executable, '-m', module, *arguments],
      cwd=programs.ROOT,
      env=jobs.environment() | variables,
      stdin=subprocess.DEVNULL,
      stdout=out,
      stderr=subprocess.STDOUT,
    )
  try:
    yield started
  finally:
    started.terminate()
    started.wait(60)


@pytest.fixture(scope='module')
def eight(tmp_path_factory):
  """Workdir of pretraining by one process with eight devices."""
  workdir = tmp_path_factory.mktemp('eight') / 'run'
  done = trainer_test.run_alone(workdir, *HSDP)
  assert done.returncode == 0, done.stderr
  return workdir


@pytest.mark.parametrize('launch', ['local:2x4', 'local:4x2'])
def test_eight_devices_compute_the_same_however_they_are_divided(
  eight, launch, tmp_path
):
  """But for the order in which collectives add more than two numbers."""
  divided = tmp_path / 'run'
  done = trainer_test.gang(launch, divided, *HSDP)
  assert done.returncode == 0, done.stderr + done.stdout
  pairs = zip(trainer_test.rows(eight), trainer_test.rows(divided), strict=True)
  for one, several in pairs:
    assert (one['stage'], one['step']) == (several['stage'], several['step'])
    for name in one.keys() & {'loss', 'heldout_loss', 'grad_norm'}:
      print(launch, one['step'], name, one[name], several[name])
      np.testing.assert_allclose(several[name], one[name], rtol=1e-5)
  weights = jobs.weights(divided, 'cpt')
  largest = {
    name: np.abs(weights[name] - array).max()
    for name, array in jobs.weights(eight, 'cpt').items()
  }
  print(launch, sorted(largest.values())[-4:])
  assert max(largest.values()) < 1e-5


def test_a_job_struck_at_many_moments_ends_bit_for_bit_the_same(tmp_path):
  """Each moment takes another process, by SIGKILL or by SIGSTOP."""
  workdir, log = tmp_path / 'struck', tmp_path / 'log'
  blows = itertools.cycle([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
  moments = [m for m in kill_test.STRIKES if not m.worker]
  command = ['-c', trainer_test.FORKED, 'local:2x1', str(workdir), '', '50']
  command += ['-m', 'experiments.composer', *jobs.arguments(workdir, *SMALL)]
  with programs.zygote() as zygote, log.open('a') as out:
    pid = zygote.start(
      command,
      env=jobs.environment(),
      out=out.fileno(),
      err=out.fileno(),
      imports=trainer_test.IMPORTS,
    )
    for number, (moment, blow) in enumerate(zip(moments, blows, strict=False)):
      trainer_test.wait_for(lambda m=moment: m.is_due(workdir), pid)
      victim = trainer_test.members(log, pid, number + 1)[number % 2]
      os.kill(victim, blow)
      print(f'{moment.name}: {blow.name} of process {number % 2}', flush=True)
      again = f'[fleet] start {number + 2}:'
      trainer_test.wait_for(lambda t=again: t in log.read_text(), pid)
    assert zygote.exit_code() == 0, log.read_text()[-3000:]
  # No start but those after a blow.
  assert log.read_text().count('[fleet] start ') == 1 + len(moments)
  straight = tmp_path / 'straight'
  done = jobs.run(straight, *SMALL)
  assert done.returncode == 0, done.stderr
  kill_test.assert_same(workdir, straight)
  trained = [r for r in jobs.metrics(straight) if r['stage'] == 'rl']
  assert any(r['grad_norm'] > 0 for r in trained)


def supervise(log, workdir, *more, host, count=2):
  """Starts the supervisor of one of several hosts."""
  _, module, *flags = trainer_test.arguments(workdir, *more)
  return process(
    module,
    *flags,
    '--launch=env',
    '--start_s=300',
    log=log,
    COMPOSER_JAX_HOST=str(host),
    COMPOSER_JAX_HOSTS=str(count),
    COMPOSER_JAX_DEVICES='1',
  )


def test_a_lost_host_that_comes_back_joins_again(tmp_path):
  workdir, logs = tmp_path / 'run', [tmp_path / 'log_0', tmp_path / 'log_1']
  with supervise(logs[0], workdir, host=0) as first:
    with supervise(
      logs[1], workdir, '--config.cpt.steps=4', host=1
    ) as stranger:
      assert stranger.wait() == 1
    assert 'config.cpt.steps is 3 on host 0 and 4 on host 1' in (
      logs[1].read_text()
    )
    logs[1].unlink()
    with supervise(logs[1], workdir, host=1) as second:
      trainer_test.members(logs[1], second.pid, of=1)
      saved = workdir / 'checkpoints' / 'cpt' / '1'
      trainer_test.wait_for(saved.exists, second.pid)
      second.kill()
    with supervise(logs[1], workdir, host=1) as second:
      assert (first.wait(), second.wait()) == (0, 0), logs[0].read_text()
  rows = trainer_test.rows(workdir)
  assert [r['step'] for r in rows] == [0, 1, 2, 3, 3]


@pytest.fixture
def cluster():
  ray = pytest.importorskip('ray')
  from ray import cluster_utils

  started = cluster_utils.Cluster()
  try:
    yield started
  finally:
    ray.shutdown()
    started.shutdown()


def test_ray_replaces_a_host_whose_node_is_lost(cluster, tmp_path):
  workdir, log = tmp_path / 'run', tmp_path / 'log'
  _, module, *flags = trainer_test.arguments(workdir, '--config.cpt.steps=40')
  cluster.add_node(num_cpus=0)  # Of the driver.
  nodes = {}
  for _ in range(3):
    node = cluster.add_node(num_cpus=1)
    nodes[node.all_processes['raylet'][0].process.pid] = node
  with process(
    module, *flags, '--launch=ray:2x1', log=log, RAY_ADDRESS=cluster.address
  ) as driver:
    saved = workdir / 'checkpoints' / 'cpt' / '1'
    trainer_test.wait_for(saved.exists, driver.pid)
    member = trainer_test.members(log, driver.pid, of=1)[1]
    ancestors = {parent.pid for parent in psutil.Process(member).parents()}
    (raylet,) = ancestors & nodes.keys()
    cluster.remove_node(nodes[raylet])
    assert driver.wait() == 0, log.read_text()[-3000:]
  assert 'starting again' in log.read_text()
  rows = trainer_test.rows(workdir)
  assert [r['step'] for r in rows if 'loss' in r] == list(range(1, 41))
