"""The rollout side: follows the bundle store and samples admitted groups.

It exchanges no messages with the trainer. Which groups it may start follows
from the version it serves (`buffer.admitted`); which are missing, from disk.
"""

import dataclasses
import time
from collections.abc import Callable

from composer_jax.core import processes, records, seams
from composer_jax.pipeline import buffer as buffers
from composer_jax.pipeline import spec as specs
from composer_jax.rl import collect
from composer_jax.rollout import engine as engines
from composer_jax.rollout import server


class Served:
  """Keeps an engine on the newest policy and records the policies it served.

  Consumes: received policies, newest first.
  Waits for: nothing; it polls between decode steps.
  Woken by: the loop of the engine.
  Produces: swaps of the engine's weights, the policy identities stamped on
    groups, and the seconds spent sampling and waiting before each swap.

  Attributes:
    engine: sampling engine, whose weights only this object swaps.
  """

  def __init__(
    self,
    engine: engines.Engine,
    first: seams.ReceivedPolicy,
    receiver: seams.WeightReceiver,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts with `first`, the policy that the engine was made with."""
    self.engine = engine
    self._receiver = receiver
    self._identities = {first.version: first.target_id}
    receiver.served(first)
    self._clock, self._since = clock, clock()
    self._is_waiting = False
    self._seconds = [0.0, 0.0]  # Of sampling and of waiting.

  @property
  def version(self) -> int:
    return self.engine.version

  def __call__(self) -> None:
    newer = None if self.engine.is_refreshing else self._receiver.take()
    if newer is None:
      return
    known_id = self._identities.setdefault(newer.version, newer.target_id)
    if known_id != newer.target_id:
      raise ValueError(
        f'Version {newer.version} was served with weights {known_id} and now '
        f'comes with {newer.target_id}: the run was rewound. Start this worker '
        'again.'
      )
    self._receiver.drop(self.engine.switch(newer.variables))
    self.mark(self._is_waiting)
    swap_s, (sample_s, wait_s) = self.engine.stats().swap_s, self._seconds
    self._receiver.served(
      newer, swap_s=swap_s, sample_s=sample_s, wait_s=wait_s
    )
    self._seconds = [0.0, 0.0]

  def mark(self, is_waiting: bool) -> None:
    """Counts the time since the last call as what that call announced.

    Args:
      is_waiting: true if no episode is open from now on, until a newer policy
        admits more groups.
    """
    now = self._clock()
    self._seconds[self._is_waiting] += now - self._since
    self._since, self._is_waiting = now, is_waiting

  def stamp(self, group: records.Group) -> records.Group:
    """Adds to a group the ids of the weights that sampled it; thread-safe."""
    return dataclasses.replace(
      group, policies={v: self._identities[v] for v in sorted(group.versions)}
    )


def run(
  collector: collect.Collector,
  buffer: buffers.GroupBuffer,
  served: Served,
  rl: specs.RLSection,
  *,
  until_version: int,
) -> int:
  """Samples every group that may be started, until the run is over.

  Consumes: policies, newest first, through `served`.
  Waits for: a version that admits the next group.
  Woken by: the publisher advancing the version.
  Produces: finished Groups into `buffer`, each written whole and stamped.
    Groups already on disk are not sampled again.

  Args:
    served: the engine and its receiver, at the version to begin with.
    rl: groups of a step, steps of the run, and the bound on staleness.
    until_version: version at which to return, once it is served and all groups
      it admits are finished.

  Returns:
    The version served at the end.
  """
  engine = served.engine
  policy = server.EnginePolicy(engine)
  stream = collect.GroupStream(
    collector,
    policy,
    engine.options.num_slots,
    lambda group: buffer.put(served.stamp(group)),
  )
  next_group = served.version * rl.prompts

  def limit():
    return buffers.admitted(
      served.version,
      prompts=rl.prompts,
      max_staleness=rl.max_staleness,
      steps=rl.steps,
    )

  def before_step():
    nonlocal next_group
    processes.beat()  # Colocated, this is the trainer's process.
    served()
    while next_group < limit():
      if not buffer.path(next_group).exists():
        stream.admit(next_group)
      next_group += 1
    served.mark(stream.open_episodes == 0)

  def done():
    return (
      stream.open_episodes == 0
      and next_group >= limit()
      and served.version >= until_version
    )

  try:
    policy.serve(done, before_step)
    served.mark(True)  # Colocated: the trainer's turn.
  finally:
    stream.close()
    policy.close()
  return served.version
