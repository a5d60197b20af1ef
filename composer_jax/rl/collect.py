"""Rolls out groups of episodes on an engine.

Guided path, 4 of 10: it plays `agent.episode` many times, for `rl.advantage`.
Episodes are plain blocking functions in threads; the engine batches their
requests. An episode's task and random numbers depend on its (group, member)
alone, never on timing.
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
  """Plays the episodes of a run.

  Attributes:
    task_of_group: group id -> task, as `play` takes it.
    play: (task, policy, group, member, seed) -> Rollout of one whole episode.
    seed: seed of random numbers, together with group, member and position.
    judge: adds to a whole group what a rubric says of it.
  """

  task_of_group: Callable[[int], Any]
  play: Callable[..., records.Rollout]
  rollouts_per_group: int
  seed: int
  judge: Callable[[records.Group], records.Group] = lambda group: group


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
  """Binds the arguments of `agent.episode.run` that all episodes share.

  Args:
    make_environment: task -> a new environment for one episode.
    reward_of_group: group id -> reward options, called when an episode begins;
      the same for a whole group, whose mean reward is the baseline.
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

  Consumes: group ids passed to `admit`, in increasing order.
  Waits for: a free episode thread; there are as many as engine slots, so that
    the engine never queues a session.
  Woken by: an episode that ends.
  Produces: a Group as soon as its last member ends, passed to `on_group` in
    that episode's thread.
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
      # `_play` also calls `on_group`, whose errors the future then carries.
      future = self._pool.submit(self._play, group, member)
      future.add_done_callback(self._finished)

  def _play(self, index: int, member: int) -> None:
    """Plays an episode, and hands over the group if it was the last member."""
    collector = self._collector
    task = collector.task_of_group(index)
    rollout = collector.play(
      task, self._policy, group=index, member=member, seed=collector.seed
    )
    with self._lock:
      members = self._members[rollout.group]
      members.append(rollout)
      if len(members) < collector.rollouts_per_group:
        return
      del self._members[rollout.group]
    members.sort(key=lambda r: r.member)
    group = records.Group(
      group=rollout.group, task_id=rollout.task_id, rollouts=tuple(members)
    )
    self._on_group(collector.judge(group))

  def _finished(self, future: futures.Future) -> None:
    failure = None if future.cancelled() else future.exception()
    with self._lock:
      self._failure = self._failure or failure
      # Last: once no episode is open, every group must be handed over.
      self._open -= 1

  @property
  def open_episodes(self) -> int:
    """Number of episodes not yet ended; raises the error of a failed one."""
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
  """Rolls out groups, sorted by id; `on_progress` gets the number finished."""
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
    _ = stream.open_episodes  # Raises the error of the last episode.
    on_progress(len(finished))
  finally:
    stream.close()
    policy.close()
  return sorted(finished, key=lambda g: g.group)
