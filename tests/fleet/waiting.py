"""A worker whose turns wait instead of computing, so that many fit a machine.

  python -m tests.fleet.waiting NAME STORE KEY FOLDER SHAPE FACTOR

It joins, follows policies, takes leases and uploads as a worker does, in a
process of its own. Tokens and routes are drawn at random; how long its turns
last depends on group and member alone.
"""

import heapq
import json
import pathlib
import sys
import time

import numpy as np

from composer_jax.core import records
from composer_jax.delta import follower as followers
from composer_jax.delta.store import objects
from composer_jax.fleet import joining

# The main job's steps took 3.3 s (median of the 50 steps of a run in
# experiments/studies/first_loop), in which its engine played 64 episodes at
# once, of 4.1 turns: at most 0.8 s a turn.
STEP_S, TURN_S, TURNS = 3.3, 0.8, 4.1
_SPREAD = 0.5


def seconds_of_turns(group, member, factor):
  """Returns seconds of each turn of an episode."""
  rng = np.random.default_rng((group, member))
  count = min(10, 1 + rng.poisson(TURNS - 1))
  # Of mean 1.
  times = np.exp(rng.normal(-(_SPREAD**2) / 2, _SPREAD, count))
  return factor * TURN_S * times


class _Episode:
  """A member that is played: the versions of its turns so far."""

  def __init__(self, lease, member, factor):
    self.lease, self.member, self.versions = lease, member, []
    self.left = list(seconds_of_turns(lease.order.group, member, factor))


def trajectory_of(shape, group, member, versions):
  """Returns a window of two tokens of context and two of each turn."""
  rng = np.random.default_rng((group, member, 1))
  length = 2 + 2 * len(versions)
  routes = (length, shape['layers'], shape['num_experts'])
  ids_TMA = np.argsort(rng.random(routes), axis=-1)[..., : shape['num_active']]
  ids_TMA[-1] = records.NO_ROUTE
  sampled_T = np.arange(length) > 1
  version_T = np.repeat([versions[0], *versions], 2).astype(np.int32)
  return records.Trajectory(
    tokens_T=rng.integers(0, shape['vocab_size'], length).astype(np.int32),
    loss_mask_T=sampled_T,
    logprobs_T=np.where(sampled_T, -5.0, 0.0).astype(np.float32),
    expert_ids_TMA=ids_TMA.astype(np.uint16),
    temperature=1.0,
    **dict.fromkeys(records.VERSIONS, version_T),
  )


class WaitingWorker:
  """Plays all its leases at once."""

  def __init__(self, leases, follower, shape, factor):
    self._leases, self._follower = leases, follower
    self._shape, self._factor = shape, factor
    self._identities, self._heap, self._done = {}, [], {}

  def run(self):
    while not self._leases.is_over:
      if (held := self._follower.poll()) is not None:
        self._identities[held.version] = held.target_id
      if self._identities:
        self._take(max(self._identities))
      time.sleep(0.05)

  def _take(self, version):
    new, ended = self._leases.take(version)
    for lease in ended:
      self._done.pop(lease.epoch, None)
    for lease in new:
      self._done[lease.epoch] = []
      for member in range(lease.first, lease.stop):
        self._turn(_Episode(lease, member, self._factor), version)
    now = time.monotonic()
    while self._heap and self._heap[0][0] < now:
      episode = heapq.heappop(self._heap)[-1]
      if episode.left:
        self._turn(episode, version)
      elif episode.lease.epoch in self._done:
        self._end(episode)

  def _turn(self, episode, version):
    episode.versions.append(version)
    until = time.monotonic() + episode.left.pop()
    key = (until, episode.lease.epoch, episode.member)
    heapq.heappush(self._heap, (*key, episode))

  def _end(self, episode):
    lease, ended = episode.lease, self._done[episode.lease.epoch]
    ended.append(episode)
    if len(ended) == lease.stop - lease.first:
      rollouts = [self._rollout(e) for e in sorted(ended, key=_member)]
      group = records.Group(
        group=lease.order.group,
        task_id=lease.order.task_id,
        rollouts=tuple(rollouts),
        policies={
          v: self._identities[v] for e in ended for v in sorted({*e.versions})
        },
      )
      self._leases.deliver(lease, group)

  def _rollout(self, episode):
    order, member = episode.lease.order, episode.member
    passed = member % 2 == 0
    window = trajectory_of(self._shape, order.group, member, episode.versions)
    return records.Rollout(
      task_id=order.task_id,
      group=order.group,
      member=member,
      trajectories=(window,),
      verdict=records.Verdict(
        passed=passed,
        num_passed=int(passed),
        num_tests=1,
        status=records.GRADED,
        sandbox_level='static',
      ),
      reward=float(passed),
      reward_version=order.rewards['version'],
      num_turns=len(episode.versions),
      num_invalid=0,
    )


def _member(episode):
  return episode.member


def main(name, store, key, folder, shape, factor):
  key, shape = pathlib.Path(key), json.loads(shape)
  while not key.exists():  # Of a run that has hardly begun.
    time.sleep(0.05)
  docs = joining.open_documents(store, key, 'policy')
  joined = joining.join(docs, key, pathlib.Path(folder), within_s=600.0)
  leases = joined.leases(name, 0.0, shape['capacity'], None)
  follower = followers.Follower(objects.Store(store), 'policy', key)
  leases.start()
  WaitingWorker(leases, follower, shape, float(factor)).run()
  leases.close()
  assert 'jax' not in sys.modules


if __name__ == '__main__':
  main(*sys.argv[1:])
