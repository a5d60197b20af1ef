"""The rollout side: follows the bundle store and samples what it has leases of.

It exchanges no messages with the trainer: leases and groups go through the
store, too.
"""

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from composer_jax.core import played, processes, records, seams
from composer_jax.rl import collect
from composer_jax.rollout import engine as engines
from composer_jax.rollout import server

_log = logging.getLogger(__name__)


class Rewound(ValueError):
  """The run went back, so that what was served is void.

  Attributes:
    policy: weights that the run has now, placed for the engine.
  """

  def __init__(self, found: str, policy: seams.PlacedPolicy):
    super().__init__(f'{found}: the run was rewound.')
    self.policy = policy


class Served:
  """Keeps an engine on the newest policy and records the policies it served.

  Consumes: received policies, newest first.
  Waits for: nothing; it polls between decode steps.
  Woken by: the loop of the engine.
  Produces: swaps of the engine's weights, the policy identities stamped on
    groups, and what the engine did before each swap: its tokens, the seconds
    spent sampling and waiting, and the share of its slots that were in use.

  Attributes:
    engine: sampling engine, whose weights only this object swaps.
    num_resumed, num_anew: number of episodes that went on from turns of another
      worker, and of those that had to begin anew, since the last swap.
  """

  def __init__(
    self,
    engine: engines.Engine,
    first: seams.ReceivedPolicy,
    receiver: seams.WeightReceiver,
    note: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts with `first`, the policy that the engine was made with.

    Args:
      note: takes a line of metrics at the first use of each policy.
    """
    self.engine = engine
    self._receiver, self._note = receiver, note
    self._identities = {first.version: first.target_id}
    note(receiver.served(first))
    self._clock, self._since = clock, clock()
    # What the time since then is spent on, and the slots in use meanwhile.
    self._cause, self._used = 'sample_s', 0
    self._begin()

  def _begin(self) -> None:
    self._seconds = dict(sample_s=0.0, wait_s=0.0, lease_wait_s=0.0)
    self.num_resumed = self.num_anew = 0
    stats, self._slot_s = self.engine.stats(), 0.0
    self._tokens, self._drafted = stats.sampled_tokens, stats.draft_tokens

  @property
  def version(self) -> int:
    return self.engine.version

  def __call__(self) -> None:
    newer = None if self.engine.is_refreshing else self._receiver.take()
    if newer is None:
      return
    number, before = newer.version, self.version
    if number < before:
      raise Rewound(f'Version {number} comes after version {before}', newer)
    known_id = self._identities.setdefault(number, newer.target_id)
    if known_id != newer.target_id:
      found = f'Version {number} was served with weights {known_id} and now '
      raise Rewound(f'{found}comes with {newer.target_id}', newer)
    self._receiver.drop(self.engine.switch(newer.variables))
    self._count()
    stats, slots = self.engine.stats(), self.engine.options.num_slots
    figures = self._seconds | dict(
      swap_s=stats.swap_s,
      tokens=stats.sampled_tokens - self._tokens,
      drafted=stats.draft_tokens - self._drafted,
      resumed=self.num_resumed,
      anew=self.num_anew,
      occupancy=self._slot_s / max(slots * sum(self._seconds.values()), 1e-9),
    )
    self._note(self._receiver.served(newer, **figures))
    self._begin()

  def again(
    self, policy: seams.PlacedPolicy, note: Callable[[dict[str, Any]], None]
  ) -> 'Served':
    """Returns one that serves a policy and knows of none before."""
    self._receiver.drop(self.engine.switch(policy.variables))
    return Served(self.engine, policy, self._receiver, note, self._clock)

  def mark(self, num_open: int, *, has_lease: bool = True) -> None:
    """Tells what the time from now on is spent on.

    Args:
      num_open: number of open episodes; without any, the engine waits.
      has_lease: whether it waits for the policy of a lease, not for a lease.
    """
    self._count()
    waits_for = 'wait_s' if has_lease else 'lease_wait_s'
    self._cause = 'sample_s' if num_open else waits_for
    self._used = min(num_open, self.engine.options.num_slots)

  def _count(self) -> None:
    now = self._clock()
    self._seconds[self._cause] += now - self._since
    self._slot_s += self._used * (now - self._since)
    self._since = now

  def stamp(
    self, group: records.Group, saved: played.SavedTurns | None = None
  ) -> records.Group:
    """Adds to a group the ids of the weights that sampled it; thread-safe.

    Args:
      saved: turns that its lease went on from, whose weights others name.
    """
    policies = self._policies(group.versions, saved)
    return dataclasses.replace(group, policies=policies)

  def _policies(
    self, versions: set[int], saved: played.SavedTurns | None
  ) -> dict[int, str]:
    # What others say holds for this lease alone: if it is false, the lease's
    # result is refused, and no other.
    known = {**self._identities, **(saved.policies if saved else {})}
    return {version: known[version] for version in sorted(versions)}

  def goes_on(self, saved: played.SavedTurns) -> played.SavedTurns | None:
    """Returns turns to go on from: None if other weights sampled them."""
    known = self._identities
    if any(known.get(v, name) != name for v, name in saved.policies.items()):
      self.num_anew += len(saved.turns)
      return None
    self.num_resumed += len(saved.turns)
    return saved

  def record(
    self,
    lease: seams.Lease,
    share: collect.Share,
    saved: played.SavedTurns | None = None,
  ) -> played.SavedTurns:
    """Returns the finished turns of a lease so far; thread-safe."""
    turns = share.turns()
    return played.SavedTurns(
      group=lease.order.group,
      task_id=lease.order.task_id,
      turns=turns,
      policies=self._policies(played.versions_of(turns), saved),
    )


class RolloutWorker:
  """Samples the members of every lease.

  Consumes: policies, newest first, through `served`; leases.
  Waits for: a lease, and the version that may begin it.
  Woken by: the publisher advancing the version; the reconciler.
  Produces: the members of each lease, stamped, all at once. Episodes whose
    lease has gone to another worker end at their next turn.

  Attributes:
    policy: policy of the episodes, whose engine someone has to step.
    leases: the worker's door to the fleet.
    served: the engine and its receiver.
  """

  def __init__(
    self,
    collector: collect.Collector,
    orders: dict[int, seams.GroupOrder],
    leases: seams.LeaseHolder,
    served: Served,
    *,
    join: Callable[[], seams.LeaseHolder] | None = None,
    is_lent: bool = False,
  ):
    """Begins nothing yet.

    Args:
      orders: orders of the groups under lease, which `collector` reads.
      join: makes another door, by another name, after the run was rewound; None
        where that cannot be.
      is_lent: true if the engine serves others first: episodes leave a quarter
        of its slots free, and wait without end.
    """
    self._collector, self._orders = collector, orders
    self._join, self._is_lent = join, is_lent
    self._begin(leases, served)

  def _begin(self, leases: seams.LeaseHolder, served: Served) -> None:
    self.leases, self.served = leases, served
    num_slots = served.engine.options.num_slots
    wait = dict(timeout_s=threading.TIMEOUT_MAX) if self._is_lent else {}
    self.policy = server.EnginePolicy(served.engine, **wait)
    num = max(1, num_slots * 3 // 4) if self._is_lent else num_slots
    self._stream = collect.GroupStream(self._collector, self.policy, num)
    self._shares: dict[int, collect.Share] = {}

  @property
  def open_episodes(self) -> int:
    return self._stream.open_episodes

  def before_step(self) -> None:
    """Takes newer weights, begins leases and ends those of others."""
    processes.beat()  # Colocated, this is the trainer's process.
    served, leases = self.served, self.leases
    served()
    # Before anything is admitted, which would begin at once.
    self._stream.make_room(served.engine.room)
    new, ended = leases.take(served.version)
    for lease in ended:
      share = self._shares.pop(lease.epoch)
      share.is_revoked = True
      served.num_anew += share.num_anew
    for lease in new:
      self._orders[lease.order.group] = lease.order
      saved = leases.saved(lease)
      if lease.saved and saved is None:  # It was refused.
        served.num_anew += lease.size
      saved = served.goes_on(saved) if saved else None
      self._shares[lease.epoch] = share = self._stream.admit(
        lease.order.group,
        functools.partial(_deliver, leases, served, lease, saved),
        range(lease.first, lease.stop),
        saved.turns if saved else {},
      )
      leases.keep(lease, functools.partial(served.record, lease, share, saved))
    served.mark(self.open_episodes, has_lease=leases.has_lease)

  def rejoin(self, rewound: Rewound) -> None:
    """Takes part again after `give_up`, with the engine that it has.

    No session may be open in it, since versions never decrease within one.
    """
    if self._join is None:
      raise rewound
    _log.warning('%s Joining again.', rewound)
    leases, wake = self._join(), self.policy.wake
    self._begin(leases, self.served.again(rewound.policy, leases.note))
    self.policy.wake = wake
    leases.start()

  def give_up(self) -> None:
    """Ends all episodes and gives all leases back, at once."""
    self.close()
    # Not in the engine's thread: the last turns are saved, and threads end.
    give_back = self.leases.close
    threading.Thread(target=give_back, name='give back', daemon=True).start()

  def close(self) -> None:
    """Ends all episodes; once nobody steps the engine any more."""
    self._stream.close()
    self.policy.close()


def _deliver(
  leases: seams.LeaseHolder,
  served: Served,
  lease: seams.Lease,
  saved: played.SavedTurns | None,
  group: records.Group,
) -> None:
  leases.deliver(lease, served.stamp(group, saved))


def run(worker: RolloutWorker, is_done: Callable[[], bool]) -> int:
  """Steps a worker's engine until it is done.

  Args:
    is_done: asked when no episode is open.

  Returns:
    The version served at the end.
  """
  done = lambda: worker.open_episodes == 0 and is_done()
  try:
    while True:
      try:
        worker.policy.serve(done, worker.before_step)
        break
      except Rewound as rewound:
        worker.give_up()
        worker.rejoin(rewound)
    worker.served.mark(0)  # Colocated: the trainer's turn.
  finally:
    worker.close()
  return worker.served.version
