"""A run without models: its store is a dictionary, its workers are puppets.

The trainer's door, the workers' doors and the reconciler are the real ones.
"""

import collections
import contextlib
import dataclasses
import json

import numpy as np

from composer_jax.core import group_bytes, seams
from composer_jax.delta.format import keys
from composer_jax.delta.store import folder
from composer_jax.fleet.leases import documents, exchange, holder
from composer_jax.fleet.leases import fleet_store as stores
from composer_jax.fleet.leases import ledger as ledgers
from tests.fleet import groups

KEY = keys.Hmac(b'k' * 32)
PROMPTS, STEPS, STALENESS = 2, 3, 1


class Killed(BaseException):
  """The process that made a request is no more."""


class _Backend:
  is_writable = True

  def __init__(self, store):
    self.store = store

  def _ask(self, name, key, do):
    """Does a request, with what befalls it."""
    trouble = self.store.trouble(name, key)
    if trouble in ('kill', 'fail'):
      raise Killed if trouble == 'kill' else ConnectionError('no answer')
    done = do()
    if trouble in ('kill after', 'lose'):
      raise Killed if trouble == 'kill after' else ConnectionError('lost')
    return done

  def read(self, key, start, stop, *, fresh=False):
    del fresh

    def do():
      if key not in self.store.files:
        raise FileNotFoundError(2, 'the store does not hold it', key)
      return self.store.files[key][start:stop]

    return self._ask('read', key, do)

  def put(self, key, data):
    self._ask('put', key, lambda: self.store.files.update({key: bytes(data)}))

  def read_tagged(self, key, most=0):
    del most
    found = self._ask('read', key, lambda: self.store.files.get(key))
    return None if found is None else (found, str(self.store.tags[key]))

  def swap(self, key, data, tag, most=0):
    del most

    def do():
      has = str(self.store.tags[key]) if key in self.store.files else None
      if has != tag:
        raise folder.Conflict('another value')
      self.store.files[key] = bytes(data)
      self.store.tags[key] += 1
      self.store.ledgers.append(bytes(data))
      return str(self.store.tags[key])

    return self._ask('swap', key, do)

  def find(self, top):
    keys = [k for k in self.store.files if k.startswith(top)]
    return self._ask('find', top, lambda: dict.fromkeys(keys, 0))

  def delete(self, keys, older_than_s):
    del older_than_s
    for key in keys:
      self._ask('delete', key, lambda key=key: self.store.files.pop(key, None))
    return list(keys)


class Store(stores.FleetStore):
  """A store in memory.

  Attributes:
    trouble: (request, key) -> what befalls it: '', 'fail', 'lose', 'kill' or
      'kill after'.
    ledgers: every ledger that there was.
  """

  def __init__(self):
    super().__init__('world')
    self.files, self.tags = {}, collections.Counter()
    self.trouble = lambda name, key: ''
    self.ledgers = []
    self._backend = _Backend(self)


class World:
  """A run of `STEPS` steps.

  Attributes:
    time: what the clock of the trainer shows.
    trained: groups that each step trained on, as bytes.
    said: what the reconciler told.
  """

  def __init__(self, tmp_path, store=None, **options):
    self.store = store or Store()
    self._tmp_path = tmp_path
    self._options = {'members': 2, 'lease_s': 20.0, **options}
    self.time, self.version = 0.0, 0
    self.trained, self.said = [], []
    self.trainer: exchange.StoredGroups
    self.start()

  def docs(self):
    return documents.RunDocuments(self.store, KEY, 'policy')

  def ledger(self):
    return ledgers.from_json(self.docs().read_ledger()[0])

  def start(self, version=None):
    """Starts the trainer, anew from a version."""
    if version is not None:
      self.version = version
      del self.trained[version:]
    self.trainer = exchange.StoredGroups(
      self.docs(),
      exchange.FleetOptions(**self._options),
      groups.RULES,
      workdir=self._tmp_path,
      setup=exchange.RunSetup(
        fields={'config': {}, 'level': 'static', 'identity': {}}
      ),
      poll_s=0.01,
      say=self.said.append,
      clock=lambda: self.time,
    )
    self.trainer.begin(self.version, self.version * PROMPTS)
    self._admit()

  def _admit(self):
    limit = min(self.version + STALENESS + 1, STEPS) * PROMPTS
    self.trainer.admit(
      [
        seams.GroupOrder(
          group=g,
          task_id=groups.TASK.format(g),
          min_version=max(0, g // PROMPTS - STALENESS),
          rewards=groups.REWARDS,
        )
        for g in range(limit)
      ]
    )
    self.trainer.announce(self.version)

  def train(self):
    """Trains if the groups of the step are there; returns whether."""
    ids = range(self.version * PROMPTS, (self.version + 1) * PROMPTS)
    ready = self.trainer.ready(ids, lambda group: '')
    if ready is None or self.version == STEPS:
      return False
    self.trained.append([group_bytes.to_bytes(g) for g in ready])
    self.version += 1
    self.trainer.trained(ids)
    self._admit()
    return True

  def worker(self, name, capacity=8, docs=None):
    return Puppet(self, name, capacity, docs or self.docs())

  def run(self, workers, rounds=200):
    """Lets everybody act in turn until all steps are trained."""
    for _ in range(rounds):
      if self.version == STEPS:
        return
      self.turn(workers)
    raise AssertionError(f'stuck at {self.version}: {self.said}')

  def turn(self, workers, seconds=1.0):
    self.time += seconds
    # The thread of the fleet waits for its store; the trainer must not end.
    with contextlib.suppress(OSError):
      self.trainer.tick()
    self.train()
    for worker in workers:
      worker.turn()


class Puppet:
  """A worker that plays a lease in one turn.

  Attributes:
    is_stopped: true while it does nothing, as after SIGSTOP.
    make: (lease, version) -> the group that it uploads.
  """

  def __init__(self, world, name, capacity, docs):
    self._world = world
    self.door = holder.StoredLeases(
      docs,
      name,
      holder.HolderTimes(beat_s=0.0, poll_s=0.0),
      capacity=capacity,
      setup=world.trainer._digest,
    )
    self.is_stopped = False
    self.holds = []
    self.make = lambda lease, version: groups.make_group(
      lease.order.group,
      lease.order.min_version,
      range(lease.first, lease.stop),
    )

  def pace(self, **times):
    self.door._times = dataclasses.replace(self.door._times, **times)

  def take(self):
    version = self._world.version
    new, ended = self.door.take(version)
    self.holds = [h for h in self.holds if h not in ended] + new

  def turn(self):
    if self.is_stopped:
      return
    try:
      self.take()
      for lease in self.holds:
        if lease.epoch in self.door._leases:
          self.door.deliver(lease, self.make(lease, self._world.version))
      self.holds = []
      self.door.sync()
    except OSError:
      pass


def expected():
  """What every run must have trained on, whoever sampled it."""
  lag = lambda g: max(0, g // PROMPTS - STALENESS)
  return [
    [
      group_bytes.to_bytes(groups.make_group(g, lag(g)))
      for g in range(step * PROMPTS, (step + 1) * PROMPTS)
    ]
    for step in range(STEPS)
  ]


def check_ledgers(store):
  """Checks the laws that every ledger of a run keeps."""
  holders, last = {}, None
  for data in store.ledgers:
    value = json.loads(data.partition(b'\n')[2])
    ledger = ledgers.from_json(value)
    if last is not None and last.identity == ledger.identity:
      assert ledger.sequence > last.sequence and ledger.epoch >= last.epoch
    for group, entry in ledger.entries.items():
      spans = [(p.first, p.stop) for p in entry.parts]
      assert spans == [(0, 2), (2, 4)]
      for part in entry.parts:
        if part.epoch:
          assert part.epoch <= ledger.epoch
          who = (group, part.first, part.worker)
          key = (ledger.identity, part.epoch)
          assert holders.setdefault(key, who) == who
    last = ledger
  return last


def plain(leases):
  return [dataclasses.asdict(lease) for lease in leases]


def rng_of(seed):
  return np.random.default_rng(seed)
