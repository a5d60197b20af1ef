"""Workers and sandboxes on a Ray cluster whose nodes come and go."""

import time

import psutil
import pytest

from composer_jax.fleet import joining
from composer_jax.fleet.leases import ledger as ledgers
from tests.e2e import fleet_test, jobs
from tests.fleet import job_test, trainer_test

pytestmark = pytest.mark.slow

cluster = job_test.cluster
by_two_devices = fleet_test.by_two_devices


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


def test_nodes_that_are_removed_and_added_change_no_bit(
  cluster, by_two_devices, tmp_path
):
  workdir, logs = tmp_path / 'run', [tmp_path / 'trainer', tmp_path / 'fleet']
  jobs.copy_before_rl(by_two_devices, workdir)
  add_node(cluster, 0)  # Of the driver.
  # For a worker and two sandboxes each.
  nodes = [add_node(cluster, 3) for _ in range(3)]
  more = (
    *fleet_test.RUN,
    fleet_test.TWO,
    '--config.fleet.workers=0',
    '--config.fleet.members=1',
  )
  more += ('--config.fleet.lease_s=6.0', '--config.delta.poll_s=0.2')
  store, key = workdir / 'store', workdir / 'delta.key'
  flags = (f'--store={store}', f'--key={key}', f'--ray={cluster.address}')
  flags += ('--workers=2', '--boxes=4', '--drain_s=5')
  steps = lambda: len(jobs.steps(workdir, 'rl'))
  with job_test.process(
    'experiments.composer',
    *jobs.arguments(workdir, *more),
    log=logs[0],
  ) as trainer:
    trainer_test.wait_for(key.exists, trainer.pid)
    with job_test.process('experiments.fleet', *flags, log=logs[1]) as fleet:
      trainer_test.wait_for(lambda: steps() >= 1, trainer.pid)
      found = trainer_test.wait_for(lambda: workers_of(nodes), fleet.pid)
      # All that have a worker: the run goes on once others are placed.
      for node in dict.fromkeys(node for node, _ in found):
        cluster.remove_node(node)
        add_node(cluster, 3)
      codes = trainer.wait(), fleet.wait()
      assert codes == (0, 0), '\n'.join(p.read_text()[-3000:] for p in logs)
  assert not [p for _, p in found if p.is_running()]
  docs = joining.open_documents(str(store), key, 'policy')
  ledger = ledgers.from_json(docs.read_ledger()[0])
  fleet_test.assert_same(workdir, by_two_devices, ledger)
  assert 'for each worker of a cluster with' in logs[1].read_text()


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
