"""A fleet in virtual time: the real reconciler, workers and boxes by numbers.

Events are ordered by a heap. The trainer's reconciler, ledger and documents are
those of a run, as is the choice of the groups of a step; workers read real
orders and write real reports, after the latency of their region. What is
simulated are durations: of episodes, each of which needs a box of its region,
of training steps, and of lives.
"""

import collections
import dataclasses
import heapq
import itertools
import json

import numpy as np

from composer_jax.core import files, seams
from composer_jax.fleet.leases import documents, reconciler
from composer_jax.fleet.leases import fleet_store as stores
from composer_jax.pipeline import consumption
from tests.fleet import worlds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """Numbers of a fleet; seconds are virtual.

  Attributes:
    boxes: number of sandboxes, over all regions.
    overtake: groups that may be trained before an older one.
    episode_s: median of an episode's duration, which is lognormal.
    spread: deviation of its logarithm.
    train_s: seconds of a training step.
    wave_s: seconds between preemption waves, each of one region; 0 for none.
    wave_share: share of a region's workers that a wave takes, without a word.
    crash_s: mean life of a worker; 0 for no crashes.
    return_s: seconds after which a worker that was lost comes back.
    speeds: between which workers have theirs.
  """

  workers: int = 60
  boxes: int = 600
  members: int = 8
  prompts: int = 16
  staleness: int = 3
  overtake: int = 0
  steps: int = 30
  capacity: int = 16
  episode_s: float = 60.0
  spread: float = 0.6
  train_s: float = 30.0
  latencies: tuple[float, ...] = (0.05, 0.5, 1.0, 2.0)
  beat_s: float = 20.0
  lease_s: float = 90.0
  tick_s: float = 2.0
  wave_s: float = 0.0
  wave_share: float = 0.3
  crash_s: float = 0.0
  return_s: float = 300.0
  speeds: tuple[float, float] = (0.5, 1.5)
  seed: int = 0


class _Store(worlds.Store):
  """Tells who waits for orders that they were written."""

  def __init__(self, told):
    super().__init__()
    self.ledgers = collections.deque(maxlen=1)
    self._told = told

  def put_at(self, key, data):
    stores.FleetStore.put_at(self, key, data)
    if '/orders/' in key:
      self._told(key.rpartition('/')[2])

  def find_at(self, top):
    # Only workers are looked for, and they are many.
    return sorted(k for k in self.files if k.startswith(top))


class _Worker:
  """A life of a worker; another life has another name."""

  def __init__(self, name, region, speed):
    self.name, self.region, self.speed = name, region, speed
    self.is_alive, self.beat, self.version = True, 0, 0
    self.ledger, self.obeys = '', -1
    self.leases, self.begun, self.left = {}, {}, {}
    self.results = {}


class Simulator:
  """Runs a setting.

  Attributes:
    now: virtual seconds.
    idle_s: seconds in which the trainer waited for groups, by step.
    staleness: staleness of each group that was trained.
    trained: groups of each step.
    sojourns: seconds from lease to result, of each accepted lease.
    leased_s: integral of the number of leased members over time.
    waits: seconds from admission to the first lease, by group.
    starved: number of ticks after which a part waited though somebody had room.
  """

  def __init__(self, setting):
    self.setting, self.now = setting, 0.0
    self.rng = np.random.default_rng(setting.seed)
    self.store = _Store(self._told)
    docs = documents.RunDocuments(self.store, worlds.KEY, 'policy')
    self.docs = docs
    options = reconciler.LeaseOptions(
      lease_s=setting.lease_s, stall_s=1e9, max_lost=1000
    )
    self.said = []
    self.reconciler = reconciler.Reconciler(
      docs, options, clock=lambda: self.now, say=self.said.append
    )
    self._heap, self._count = [], itertools.count()
    num = len(setting.latencies)
    self._free = [setting.boxes // num] * num
    self._queues = [collections.deque() for _ in range(num)]
    self._lives = itertools.count()
    self.workers = {}
    self.version = 0
    self.window = consumption.GroupWindow(
      prompts=setting.prompts,
      max_staleness=setting.staleness,
      overtake=setting.overtake,
      steps=setting.steps,
    )
    self.queue = consumption.GroupQueue(self.window)
    self._training = False
    self._waiting_since = 0.0
    self.idle_s, self.staleness, self.sojourns = [], [], []
    self.waits, self._admitted_at, self._leased_at = {}, {}, {}
    self._orders, self._fates = {}, {}
    self.leased_s = self.starved = 0.0
    self.most_open, self.trained = 0, []
    self._sampled = {}

  def at(self, delay, do, *arguments):
    entry = (self.now + delay, next(self._count), do, arguments)
    heapq.heappush(self._heap, entry)

  def run(self):
    setting = self.setting
    for i in range(setting.workers):
      self.at(self.rng.uniform(0, 5), self._join, i % len(setting.latencies))
    if setting.wave_s:
      self.at(setting.wave_s, self._wave, 0)
    self._admit()
    self.at(0.0, self._tick)
    step_s = setting.train_s + 50 * setting.episode_s
    while self.version < setting.steps:
      assert self.now < 10 * setting.steps * step_s, 'the fleet stands still'
      self.now, _, do, arguments = heapq.heappop(self._heap)
      do(*arguments)
    return self

  # The trainer.

  def _admit(self):
    for group in self.queue.open(self.version):
      if group not in self._orders:
        self._orders[group] = seams.GroupOrder(
          group=group,
          task_id=f'family/{group}',
          min_version=self.window.min_version(group),
          rewards={'version': 0},
        )
        self._admitted_at[group] = self.now

  def _ask(self, ledger):
    ledger.announce(self.version)
    for order in self._orders.values():
      ledger.admit(order, self.setting.members, self.setting.members)
    for group, fate in self._fates.items():
      ledger.settle(group, fate)

  def _finished(self, groups):
    entries = self.reconciler.ledger.entries
    return [g for g in groups if g in entries and entries[g].is_finished]

  def _tick(self):
    s = self.setting
    first = self.window.due(self.version)
    self.reconciler.tick(self._ask, lambda ledger: ledger.fold(first))
    self._orders = {g: o for g, o in self._orders.items() if g >= first}
    self._fates = {g: f for g, f in self._fates.items() if g >= first}
    self._measure()
    if not self._training:
      ids = self.queue.pick(self.version, self._finished)
      if len(ids) == s.prompts:
        self._training = True
        self.queue.take(ids)
        self.idle_s.append(self.now - self._waiting_since)
        self.at(s.train_s, self._trained, ids)
    self.at(s.tick_s, self._tick)

  def _trained(self, ids):
    s = self.setting
    self.staleness += [self.version - self._sampled[g] for g in ids]
    self.trained.append(ids)
    self._fates |= dict.fromkeys(ids, 'trained')
    self.version += 1
    self._training, self._waiting_since = False, self.now
    self._admit()
    # A policy reaches each region after its latency.
    for worker in self.workers.values():
      self.at(2 * s.latencies[worker.region], self._swap, worker, self.version)

  def _measure(self):
    ledger, s = self.reconciler.ledger, self.setting
    open_groups = [g for g, e in ledger.entries.items() if not e.fate]
    self.most_open = max(self.most_open, len(open_groups))
    for group, entry in ledger.entries.items():
      part = entry.parts[0]
      if part.epoch and group not in self.waits:
        self.waits[group] = self.now - self._admitted_at[group]
    waits = any(
      not (e.parts[0].is_leased or e.parts[0].upload or e.fate)
      for e in ledger.entries.values()
    )
    room = (
      any(
        seen.is_live
        and not seen.gone
        and ledger.load_of(name) + s.members <= s.capacity
        for name, seen in self.reconciler._seen.items()
      )
      if waits
      else False
    )
    self.starved += waits and room

  # Workers.

  def _join(self, region):
    name = f'w{next(self._lives)}'
    worker = _Worker(name, region, self.rng.uniform(*self.setting.speeds))
    worker.version = self.version
    self.workers[name] = worker
    if self.setting.crash_s:
      life = self.rng.exponential(self.setting.crash_s)
      self.at(life, self._lose, worker)
    self._beat(worker)

  def _lose(self, worker):
    if not worker.is_alive:
      return
    worker.is_alive = False
    self.workers.pop(worker.name, None)
    for number in worker.begun.values():
      self._release(worker.region, number)
    self.at(self.setting.return_s, self._join, worker.region)

  def _wave(self, number):
    """Takes a share of one region's workers at once."""
    s, region = self.setting, number % len(self.setting.latencies)
    there = [w for w in self.workers.values() if w.region == region]
    for worker in self.rng.permutation(len(there))[
      : int(len(there) * s.wave_share)
    ]:
      self._lose(there[worker])
    self.at(s.wave_s, self._wave, number + 1)

  def _swap(self, worker, version):
    worker.version = max(worker.version, version)
    self._begin(worker)

  def _told(self, name):
    worker = self.workers.get(name)
    if worker is not None:
      self.at(self.setting.latencies[worker.region], self._obey, worker)

  def _obey(self, worker):
    if not worker.is_alive:
      return
    orders = self.docs.read(self.docs.place('orders', worker.name))
    worker.ledger, worker.obeys = orders['ledger'], orders['sequence']
    known = {lease['epoch']: lease for lease in orders['leases']}
    for epoch in worker.begun.keys() - known.keys():
      self._release(worker.region, worker.begun.pop(epoch))
    worker.leases = known
    worker.results = {e: r for e, r in worker.results.items() if e in known}
    for epoch in known:
      self._leased_at.setdefault(epoch, self.now)
    self._begin(worker)
    self._beat(worker, again=False)

  def _begin(self, worker):
    """Begins the leases that its policy may, as far as there are boxes."""
    for epoch, lease in worker.leases.items():
      is_new = epoch not in worker.begun and epoch not in worker.results
      if is_new and lease['order']['min_version'] <= worker.version:
        size = lease['stop'] - lease['first']
        if self._free[worker.region] < size:
          self._queues[worker.region].append(worker)
          return
        self._free[worker.region] -= size
        assert self._free[worker.region] >= 0
        worker.begun[epoch] = size
        seconds = self.seconds(lease['order']['group']) / worker.speed
        self.at(seconds, self._finish, worker, epoch, worker.version)

  def seconds(self, group):
    """Returns a group's time at speed 1, the same for whoever samples it."""
    s = self.setting
    rng = np.random.default_rng((s.seed, group))
    return s.episode_s * np.exp(rng.normal(0, s.spread, s.members)).max()

  def _release(self, region, size):
    self._free[region] += size
    queue = self._queues[region]
    for _ in range(len(queue)):
      self.at(0.0, self._begin, queue.popleft())

  def _finish(self, worker, epoch, version):
    if not worker.is_alive or epoch not in worker.begun:
      return
    self._release(worker.region, worker.begun.pop(epoch))
    name = files.sha256(f'{worker.name}/{epoch}'.encode())
    worker.results[epoch] = (epoch, name, 1000)
    group = worker.leases[epoch]['order']['group']
    self._sampled[group] = version
    self.sojourns.append(self.now - self._leased_at[epoch])
    self.at(self.setting.latencies[worker.region], self._beat, worker, False)

  def _beat(self, worker, again=True):
    if not worker.is_alive:
      return
    worker.beat += 1
    report = documents.WorkerReport(
      ledger=worker.ledger,
      obeys=worker.obeys,
      beat=worker.beat,
      progress=worker.beat,
      version=worker.version,
      capacity=self.setting.capacity,
      is_leaving=False,
      results=tuple(worker.results.values()),
      saved=(),
      returned=(),
      rows=(),
    )
    place = self.docs.place('workers', worker.name)
    self.docs.write(place, dataclasses.asdict(report))
    if again:
      self.at(self.setting.beat_s, self._beat, worker)


def simulate(**fields):
  return Simulator(Setting(**fields)).run()


def summary(sim):
  """Returns the numbers that tests compare, as JSON has them."""
  s = sim.setting
  late = sim.idle_s[len(sim.idle_s) // 3 :]
  return json.dumps(
    {
      'idle': sum(late) / (sum(late) + len(late) * s.train_s),
      'open': sim.most_open,
      'longest_wait': max(sim.waits.values()),
      'lost': sim.reconciler.ledger.lost,
    }
  )
