"""Rollout workers of a run, as threads of the test's process."""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator

from composer_jax import wiring
from composer_jax.delta import transport
from composer_jax.fleet import joining
from composer_jax.fleet.leases import holder
from composer_jax.pipeline import reinforce, rollout_worker, stages
from tests.pipeline import runs


class Worker:
  """A worker, from joining to the end of the run.

  Attributes:
    leases: its door to the fleet, the last one; None before it has joined.
    version: policy version that it serves; None before the first.
    failure: error that ended it, None for none.
    groups: (group, first member) of every lease that it delivered.
  """

  def __init__(
    self,
    spec,
    workdir,
    tokenizer,
    name: str,
    *,
    ready: Callable[[], None] = lambda: None,
    act: Callable[['Worker', int], None] = lambda worker, group: None,
  ):
    """Starts it.

    Args:
      ready: called before it joins.
      act: called with the worker and the group that it is about to deliver.
    """
    self._spec, self._workdir, self._tokenizer = spec, workdir, tokenizer
    self._ready, self._act = ready, act
    self.name, self.groups = name, []
    self.leases: holder.StoredLeases | None = None
    self.version: int | None = None
    self.failure: BaseException | None = None
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def _run(self) -> None:
    try:
      self._serve()
    except BaseException as error:  # noqa: BLE001
      self.failure = error

  def _serve(self) -> None:
    spec, workdir = self._spec, self._workdir
    key = workdir / transport.KEY
    while not key.exists():  # Of a run that has hardly begun.
      time.sleep(0.01)
    docs = joining.open_documents(str(workdir / 'store'), key, 'policy')
    folder = workdir / transport.WORKERS / self.name
    joined = joining.join(docs, key, folder, within_s=300.0)
    # As the main does.
    config = joined.config
    config['delta']['store'] = str(workdir / 'store')
    assert set(wiring.content_of(spec)) <= joined.identity.keys()
    spec, orders = wiring.spec_of(config), {}
    systems = wiring.systems_of(spec)
    names = map(f'{self.name}{{}}'.format, itertools.chain([''], range(9)))

    def join():
      self.leases = leases = joined.leases(
        next(names), 0.0, reinforce._capacity(spec), wiring.rules_of(spec)
      )
      deliver, take = leases.deliver, leases.take

      def remember(lease, group):
        self._act(self, group.group)
        self.groups.append((group.group, lease.first))
        deliver(lease, group)

      def note_version(version):
        self.version = version
        return take(version)

      leases.deliver, leases.take = remember, note_version
      return leases

    join()
    with contextlib.ExitStack() as stack:
      runner = stack.enter_context(systems.open_runner(joined.level))
      receiver = systems.transport(folder).receiver(in_background=True)
      stack.enter_context(contextlib.closing(receiver))
      served = reinforce._served(
        spec, systems, receiver, self.leases.note, within_s=300.0
      )
      collector = stages.collector_of(
        spec, systems, self._tokenizer, runner, split='train', orders=orders
      )
      stack.callback(lambda: self.leases.close())
      self._ready()
      self.leases.start()
      is_done = lambda: self.leases.is_over or self._stopping.is_set()
      worker = rollout_worker.RolloutWorker(
        collector, orders, self.leases, served, join=join
      )
      rollout_worker.run(worker, is_done)

  def hang(self) -> None:
    """Reports and uploads nothing from now on, as after SIGSTOP."""
    self.leases._stopping.set()
    self.leases._wake.set()

  def end(self) -> None:
    self._stopping.set()
    self._thread.join(60)
    assert not self._thread.is_alive()


@contextlib.contextmanager
def running(spec, workdir, tokenizer, count: int) -> Iterator[list[Worker]]:
  """Starts workers, which join together and end with the run."""
  barrier = threading.Barrier(count, timeout=300)
  workers = [
    Worker(spec, workdir, tokenizer, f'w{i}', ready=barrier.wait)
    for i in range(count)
  ]
  yield workers
  for worker in workers:
    worker.end()
    assert worker.failure is None, worker.failure


def spec_of(spec, **fleet):
  """The spec with workers that the test starts, and options of the fleet."""
  rl = dataclasses.replace(spec.rl, placement='processes')
  spec = dataclasses.replace(spec, rl=rl)
  return runs.changed(spec, 'fleet', workers=0, **fleet)
