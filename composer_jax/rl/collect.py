"""Rolls out groups of episodes on an engine.

Guided path, 4 of 10: it plays `agent.episode` many times, for `rl.advantage`.
Episodes are plain blocking functions in threads; the engine batches their
requests. An episode's task and random numbers depend on its (group, member)
alone, never on timing.
"""

import contextlib
import dataclasses
import math
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from typing import Any

from composer_jax.agent import environment, episode, resuming, rewards
from composer_jax.core import played, records
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


class _Revoked(Exception):
  """The members are no longer wanted: another worker has their lease."""


@dataclasses.dataclass(eq=False)
class Share:
  """Members of a group that are played here; `policy` of the agent protocol.

  Attributes:
    number: number of the share in its stream.
    resumed: turns that another worker played of these members, by member.
    is_revoked: true to end all episodes at their next turn.
    num_anew: number of episodes that did not go on as `resumed` tells.
  """

  group: int
  size: int
  policy: environment.Policy
  done: Callable[[records.Group], None]
  number: int
  resumed: Mapping[int, tuple[played.FinishedTurn, ...]]
  rollouts: list[records.Rollout] = dataclasses.field(default_factory=list)
  is_revoked: bool = False
  num_anew: int = 0
  _replays: dict[int, resuming.ResumedPolicy] = dataclasses.field(
    default_factory=dict
  )

  def complete(self, request: records.SampleRequest) -> records.Completion:
    if self.is_revoked:
      raise _Revoked
    # Members that are played once more may meet what is left of the first time.
    session = f'{self.number}/{request.session}'
    return self.policy.complete(dataclasses.replace(request, session=session))

  def close(self, session: str) -> None:
    self.policy.close(f'{self.number}/{session}')

  def turns(self) -> dict[int, tuple[played.FinishedTurn, ...]]:
    """Returns the finished turns so far by member; from any thread."""
    replays = {m: r.record() for m, r in self._replays.copy().items()}
    turns = {**self.resumed, **replays}
    return {member: turns for member, turns in turns.items() if turns}

  def play(
    self, member: int, play: Callable[[environment.Policy], records.Rollout]
  ) -> records.Rollout:
    """Plays an episode on from saved turns, or anew if it goes otherwise."""
    saved = self.resumed.get(member, ())
    if saved:
      policy = self._replays[member] = resuming.ResumedPolicy(self, saved)
      # A record that is wrong may break any rule of an episode.
      with contextlib.suppress(resuming.Diverged, ValueError):
        rollout = play(policy)
        if not policy.is_replaying:
          return rollout
      self.num_anew += 1
    self._replays[member] = resuming.ResumedPolicy(self)
    return play(self._replays[member])


class GroupStream:
  """Feeds admitted groups to episode threads and hands back finished ones.

  Consumes: group ids passed to `admit`, in increasing order.
  Waits for: a free episode thread; there are as many as engine slots, so that
    the engine never queues a session. And for memory: see `make_room`.
  Woken by: an episode that ends; `make_room`.
  Produces: a Group as soon as the last of its members here ends, passed to
    `done` in that episode's thread.

  Attributes:
    num_playing: number of episodes that have begun and not ended.
  """

  def __init__(
    self, collector: Collector, policy: environment.Policy, num_threads: int
  ):
    self._collector = collector
    self._policy = policy
    self._lock = threading.Lock()
    self._is_closed = False
    self._failure: BaseException | None = None
    self._pool = futures.ThreadPoolExecutor(num_threads, 'episode')
    self._open = self._num_shares = 0
    self._may_begin = threading.Condition(self._lock)
    self._room = math.inf
    self.num_playing = 0

  def admit(
    self,
    group: int,
    done: Callable[[records.Group], None],
    members: range | None = None,
    resumed: Mapping[
      int, tuple[played.FinishedTurn, ...]
    ] = types.MappingProxyType({}),
  ) -> Share:
    """Plays members of a group, None for all, on from turns that were saved."""
    if members is None:
      members = range(self._collector.rollouts_per_group)
    number, size = self._num_shares, len(members)
    share = Share(group, size, self._policy, done, number, resumed)
    with self._lock:
      self._open += size
      self._num_shares += 1
    for member in members:
      # `_play` also calls `done`, whose errors the future then carries.
      future = self._pool.submit(self._play, share, member)
      future.add_done_callback(self._finished)
    return share

  def make_room(self, room: Callable[[int], int | None]) -> None:
    """Lets further episodes begin; before any call, all may.

    One plays in any case, so that the memory it has is some day free.

    Args:
      room: number of episodes that play -> number of further ones, None for
        all. None begins while it counts.
    """
    with self._may_begin:
      further = room(self.num_playing)
      self._room = math.inf if further is None else further
      self._may_begin.notify_all()

  def _play(self, share: Share, member: int) -> None:
    with self._may_begin:
      is_over = lambda: self._is_closed or share.is_revoked
      self._may_begin.wait_for(
        lambda: is_over() or self._room > 0 or not self.num_playing
      )
      if is_over():
        return
      self._room -= 1
      self.num_playing += 1
    try:
      self._play_one(share, member)
    finally:
      with self._may_begin:
        self.num_playing -= 1
        self._may_begin.notify_all()

  def _play_one(self, share: Share, member: int) -> None:
    """Plays an episode, and hands over the group if it was the last member."""
    collector = self._collector
    task = collector.task_of_group(share.group)
    try:
      rollout = share.play(
        member,
        lambda policy: collector.play(
          task, policy, group=share.group, member=member, seed=collector.seed
        ),
      )
    except _Revoked:
      return
    with self._lock:
      share.rollouts.append(rollout)
      if len(share.rollouts) < share.size:
        return
    rollouts = tuple(sorted(share.rollouts, key=lambda r: r.member))
    group = records.Group(
      group=rollout.group, task_id=rollout.task_id, rollouts=rollouts
    )
    share.done(collector.judge(group))

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
    with self._may_begin:
      self._is_closed = True
      self._may_begin.notify_all()
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
  stream = GroupStream(collector, policy, num_threads)
  try:
    stream.make_room(engine.room)
    for group in ids:
      stream.admit(group, finished.append)

    def before_step():
      stream.make_room(engine.room)
      on_progress(len(finished))

    policy.serve(lambda: stream.open_episodes == 0, before_step)
    _ = stream.open_episodes  # Raises the error of the last episode.
    on_progress(len(finished))
  finally:
    stream.close()
    policy.close()
  return sorted(finished, key=lambda g: g.group)
