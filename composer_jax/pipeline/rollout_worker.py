"""The rollout side: follows the bundle store and samples admitted groups.

It talks to nobody. What it may start follows from the version it serves
(`buffer.admitted`), what it must still do from the groups that are on disk.
"""

import time
from collections.abc import Callable
from typing import Any

from composer_jax.pipeline import buffer as buffers
from composer_jax.rl import collect
from composer_jax.rollout import engine as engines
from composer_jax.rollout import server


class Follower:
  """Keeps an engine on the newest policy of a bundle store.

  Called between decode steps; looks at the store at most every `interval_s`,
  so that a look costs nothing beside a step.
  """

  def __init__(
    self,
    poll: Callable[[], tuple[int, Any] | None],
    engine: engines.Engine,
    interval_s: float = 0.05,
  ):
    self._poll = poll
    self._engine = engine
    self._interval_s = interval_s
    self._next_look = 0.0
    self.version = engine.version

  def __call__(self) -> None:
    now = time.monotonic()
    if now < self._next_look:
      return
    self._next_look = now + self._interval_s
    update = self._poll()
    if update is not None:
      version, values = update
      self._engine.swap(values, version)
      self.version = version


def run(
  collector: collect.Collector,
  engine: engines.Engine,
  buffer: buffers.GroupBuffer,
  poll: Callable[[], tuple[int, Any] | None],
  *,
  prompts: int,
  max_staleness: int,
  num_steps: int,
  until_version: int,
) -> int:
  """Samples every group that may be started, until the run is over.

  Consumes: policies, newest first, through `poll`.
  Waits for: a version that admits the next group.
  Woken by: the publisher advancing the version.
  Produces: finished Groups into `buffer`, each written whole.

  Args:
    collector: plays episodes.
    engine: serving the version to begin with.
    buffer: groups already there are not sampled again.
    poll: () -> (version, values) once there is a newer policy, else None.
    prompts: P, groups per optimizer step.
    max_staleness: bound on trainer version minus sampled version.
    num_steps: of the whole run.
    until_version: returns once this version is served and all it admits is
      there.

  Returns:
    The version served at the end.
  """
  follow = Follower(poll, engine)
  policy = server.EnginePolicy(engine)
  stream = collect.GroupStream(collector, policy, engine.num_slots, buffer.put)
  next_group = follow.version * prompts

  def limit():
    return buffers.admitted(
      follow.version,
      prompts=prompts,
      max_staleness=max_staleness,
      steps=num_steps,
    )

  def before_step():
    nonlocal next_group
    follow()
    while next_group < limit():
      if not buffer.path(next_group).exists():
        stream.admit(next_group)
      next_group += 1

  def done():
    return (
      stream.open_episodes == 0
      and next_group >= limit()
      and follow.version >= until_version
    )

  try:
    policy.serve(done, before_step)
  finally:
    stream.close()
    policy.close()
  return follow.version
