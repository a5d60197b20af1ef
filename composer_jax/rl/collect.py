"""Rolls out groups of episodes on an engine.

Guided path, 4 of 10: it plays `agent.episode` many times, for `rl.advantage`.
Episodes are plain blocking functions in threads; the engine batches whatever
they ask for. Which task, which random numbers and which group an episode
belongs to depend on its (group, member) alone, never on timing.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

from composer_jax.agent import environment, episode, rewards
from composer_jax.core import records
from composer_jax.rollout import engine as engines
from composer_jax.rollout import server


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collector:
  """What every episode of a run shares.

  Attributes:
    task_of_group: group id -> task, as `play` takes it.
    play: (task, policy, group, member, seed) -> Rollout, one whole episode.
    seed: decides random numbers, with group, member and position.
  """

  task_of_group: Callable[[int], Any]
  play: Callable[..., records.Rollout]
  rollouts_per_group: int
  seed: int

  def rollout(
    self, policy: environment.Policy, group: int, member: int
  ) -> records.Rollout:
    task = self.task_of_group(group)
    return self.play(task, policy, group=group, member=member, seed=self.seed)


def episode_player(
  tokenizer: Any,
  make_environment: Callable[[Any], environment.Environment],
  options: episode.EpisodeOptions,
  *,
  reward_of_group: Callable[[int], rewards.RewardOptions] = (
    lambda group: rewards.UNPRICED
  ),
  **fixed: Any,
) -> Callable[..., records.Rollout]:
  """Binds `agent.episode.run` to what does not change between episodes.

  Args:
    make_environment: task -> a new environment for one episode of it.
    reward_of_group: group id -> prices, asked when an episode begins; a group
      has one answer, or its mean would be no baseline.
    **fixed: `hints` and `summary` of `episode.run`.
  """

  def play(task, policy, *, group, member, seed):
    return episode.run(
      make_environment(task),
      policy,
      tokenizer,
      options,
      group=group,
      member=member,
      seed=seed,
      reward=reward_of_group(group),
      **fixed,
    )

  return play


class GroupStream:
  """Feeds admitted groups to episode threads and hands back finished ones.

  Consumes: group ids, as `admit` names them, in increasing order.
  Waits for: a free episode thread; there are as many as engine slots, so the
    engine never has to queue a session.
  Woken by: an episode that ends.
  Produces: a Group as soon as its last member ends, through `on_group`, called
    from the episode's thread.
  """

  def __init__(
    self,
    collector: Collector,
    policy: environment.Policy,
    num_threads: int,
    on_group: Callable[[records.Group], None],
  ):
    self._collector = collector
    self._policy = policy
    self._on_group = on_group
    self._lock = threading.Lock()
    self._members = collections.defaultdict[int, list[records.Rollout]](list)
    self._failure: BaseException | None = None
    self._pool = futures.ThreadPoolExecutor(num_threads, 'episode')
    self._open = 0

  def admit(self, group: int) -> None:
    with self._lock:
      self._open += self._collector.rollouts_per_group
    for member in range(self._collector.rollouts_per_group):
      # Hands over as well, so that the future carries whatever went wrong.
      future = self._pool.submit(self._play, group, member)
      future.add_done_callback(self._finished)

  def _play(self, group: int, member: int) -> None:
    """Plays an episode, and hands over the group if it was the last member."""
    rollout = self._collector.rollout(self._policy, group, member)
    with self._lock:
      members = self._members[rollout.group]
      members.append(rollout)
      if len(members) < self._collector.rollouts_per_group:
        return
      del self._members[rollout.group]
    members.sort(key=lambda r: r.member)
    self._on_group(
      records.Group(
        group=rollout.group, task_id=rollout.task_id, rollouts=tuple(members)
      )
    )

  def _finished(self, future: futures.Future) -> None:
    failure = None if future.cancelled() else future.exception()
    with self._lock:
      self._failure = self._failure or failure
      # Last: who sees no open episode must find every group handed over.
      self._open -= 1

  @property
  def open_episodes(self) -> int:
    """Episodes admitted and not yet ended; raises what made one fail."""
    with self._lock:
      if self._failure is not None:
        raise self._failure
      return self._open

  def close(self) -> None:
    self._pool.shutdown(wait=False, cancel_futures=True)


def groups(
  collector: Collector,
  engine: engines.Engine,
  ids: Iterable[int],
  on_progress: Callable[[int], None] = lambda done: None,
) -> list[records.Group]:
  """Rolls out groups, sorted by id; tells `on_progress` how many are done."""
  finished: list[records.Group] = []
  policy = server.EnginePolicy(engine)
  num_threads = engine.options.num_slots
  stream = GroupStream(collector, policy, num_threads, finished.append)
  try:
    for group in ids:
      stream.admit(group)
    policy.serve(
      lambda: stream.open_episodes == 0, lambda: on_progress(len(finished))
    )
    _ = stream.open_episodes  # Raises what made the last episode fail.
  finally:
    stream.close()
    policy.close()
  return sorted(finished, key=lambda g: g.group)
