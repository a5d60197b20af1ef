"""Workers and sandboxes on a Ray cluster whose nodes come and go."""

import time

import numpy as np
import psutil
import pytest

from composer_jax.fleet import joining
from composer_jax.fleet.leases import ledger as ledgers
from tests.e2e import jobs
from tests.fleet import job_test, trainer_test

pytestmark = pytest.mark.slow

cluster = job_test.cluster
STEPS = 6
SMALL = (
  *trainer_test.QUICK,
  '--config.sft.optimizer=adam',
  '--config.evaluation.episodes=4',
  f'--config.rl.steps={STEPS}',
)


def add_node(cluster, num_cpus):
  """Adds a node, also on a machine so busy that Ray gives one up."""
  for _ in range(20):
    try:
      return cluster.add_node(num_cpus=num_cpus)
    except Exception as error:  # noqa: BLE001  It raises no other.
      print(error)
  raise AssertionError('no node starts')


def workers_of(nodes):
  """Returns (node, process) of the workers that run."""
  found = []
  for node in nodes:
    raylet = psutil.Process(node.all_processes['raylet'][0].process.pid)
    for process in raylet.children(recursive=True):
      try:
        if 'experiments.worker' in process.cmdline():
          found.append((node, process))
      except psutil.Error:
        continue
  return found


def test_nodes_that_are_removed_and_added_change_no_bit(cluster, tmp_path):
  straight = tmp_path / 'straight'
  done = jobs.run(straight, *SMALL)
  assert done.returncode == 0, done.stderr[-3000:]
  workdir, logs = tmp_path / 'run', [tmp_path / 'trainer', tmp_path / 'fleet']
  jobs.copy_before_rl(straight, workdir)
  add_node(cluster, 0)  # Of the driver.
  # For a worker and two sandboxes each.
  nodes = [add_node(cluster, 3) for _ in range(3)]
  more = ('--config.fleet.workers=0', '--config.fleet.members=1')
  more += ('--config.fleet.lease_s=6.0', '--config.delta.poll_s=0.2')
  store, key = workdir / 'store', workdir / 'delta.key'
  flags = (f'--store={store}', f'--key={key}', f'--ray={cluster.address}')
  flags += ('--workers=2', '--boxes=4', '--drain_s=5')
  steps = lambda: len(jobs.steps(workdir, 'rl'))
  with job_test.process(
    'experiments.composer',
    *jobs.arguments(workdir, *SMALL, *more),
    log=logs[0],
  ) as trainer:
    trainer_test.wait_for(key.exists, trainer.pid)
    with job_test.process('experiments.fleet', *flags, log=logs[1]) as fleet:
      lost = []
      for due in (1, 3):
        trainer_test.wait_for(lambda n=due: steps() >= n, trainer.pid)
        node, process = trainer_test.wait_for(
          lambda: workers_of(nodes), fleet.pid
        )[0]
        cluster.remove_node(node)
        nodes.remove(node)
        lost.append(process.pid)
        nodes.append(add_node(cluster, 3))
        # It is placed again while the run goes on.
        trainer_test.wait_for(
          lambda: len(workers_of(nodes)) == 2 or steps() == STEPS, fleet.pid
        )
      codes = trainer.wait(), fleet.wait()
      assert codes == (0, 0), '\n'.join(p.read_text()[-3000:] for p in logs)
  assert not [pid for pid in lost if psutil.pid_exists(pid)]
  docs = joining.open_documents(str(store), key, 'policy')
  ledger = ledgers.from_json(docs.read_ledger()[0])
  assert ledger.totals() == {'trained': {'list_functions': 2 * STEPS}}
  weights = jobs.weights(workdir, 'rl')
  for name, array in jobs.weights(straight, 'rl').items():
    np.testing.assert_array_equal(weights[name], array, err_msg=name)
  assert (
    "of a cluster with {'CPU': 9.0" in logs[1].read_text().replace('"', "'")
    or 'for each worker of a cluster with' in logs[1].read_text()
  )


def test_who_finds_no_room_waits_for_a_node(cluster, tmp_path):
  """As the demand of a cluster that scales itself."""
  ray = pytest.importorskip('ray')
  from composer_jax.fleet import ray_workers

  add_node(cluster, 1)
  command = ['sleep', '600', '#']
  with ray_workers.starting(cluster.address, command, 'k', 1) as (start, text):
    assert "{'CPU': 1}" in text
    first, second = start(0), start(1)
    demand = lambda: [
      group['state'] for group in ray.util.placement_group_table().values()
    ]
    deadline = time.monotonic() + 120
    while sorted(demand()) != ['CREATED', 'PENDING']:
      assert time.monotonic() < deadline, demand()
      time.sleep(0.1)
    add_node(cluster, 1)
    while demand() != ['CREATED', 'CREATED']:
      assert time.monotonic() < deadline, demand()
      time.sleep(0.1)
    for worker in (first, second):
      worker.terminate()
    while first.poll() is None or second.poll() is None:
      assert time.monotonic() < deadline
      time.sleep(0.1)


def test_a_cluster_that_does_not_answer_is_told(tmp_path):
  pytest.importorskip('ray')
  from composer_jax.fleet import ray_workers

  with (
    pytest.raises(ValueError, match='--ray=auto names no Ray cluster'),
    ray_workers.starting('auto', [], '', 1),
  ):
    raise AssertionError
