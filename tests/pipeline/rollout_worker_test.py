"""Which weights the worker serves, and which ones a group names."""

import dataclasses
import itertools
import threading
import types

import pytest

from composer_jax.core import played, seams
from composer_jax.pipeline import rollout_worker
from tests.fleet import groups, saved_turns_test


class Engine(types.SimpleNamespace):
  """The members of an engine that `Served` uses; it samples between looks."""

  is_refreshing, sampled = False, 0
  options = types.SimpleNamespace(num_slots=4)

  def switch(self, weights):
    before, self.weights, self.version = self.weights, weights, weights.version
    return before

  def stats(self):
    self.sampled += 100
    return types.SimpleNamespace(
      swap_s=0.25, sampled_tokens=self.sampled, draft_tokens=self.sampled // 4
    )


def policy(version, target_id):
  return seams.ReceivedPolicy(
    version=version, target_id=target_id, variables=None, received={}
  )


def placed(version, target_id):
  return seams.PlacedPolicy(
    version=version,
    target_id=target_id,
    variables=types.SimpleNamespace(version=version),
    received={},
  )


@pytest.fixture
def make():
  """make(news, times) returns (Served, engine, dropped policies, lines)."""

  def make(news, clock=()):
    dropped, logged = [], []
    engine = Engine(weights='first', version=3)
    receiver = types.SimpleNamespace(
      take=iter(news).__next__,
      drop=dropped.append,
      served=lambda policy, **figures: (
        policy.version,
        policy.target_id,
        figures,
      ),
    )
    times = iter(clock) if clock else itertools.repeat(0.0)
    served = rollout_worker.Served(
      *(engine, policy(3, 'aa'), receiver, logged.append, times.__next__)
    )
    return served, engine, dropped, logged

  return make


def test_each_newer_policy_is_served_and_the_last_kept(make):
  policies = [placed(4, 'bb'), placed(7, 'cc')]
  served, engine, dropped, logged = make(
    [None, policies[0], None, policies[1], None]
  )
  versions = []
  for _ in range(5):
    served()
    versions.append((served.version, engine.version))
  assert versions == [(3, 3), (4, 4), (4, 4), (7, 7), (7, 7)]
  assert dropped == ['first', policies[0].variables]
  assert [line[:2] for line in logged] == [(3, 'aa'), (4, 'bb'), (7, 'cc')]
  assert not logged[0][2] and logged[1][2]['swap_s'] == 0.25
  assert [line[2]['tokens'] for line in logged[1:]] == [100, 100]
  assert [line[2]['drafted'] for line in logged[1:]] == [25, 25]


def test_every_second_between_swaps_has_a_cause_and_every_slot_a_share(make):
  served, _, _, logged = make(
    [None, placed(4, 'bb'), placed(5, 'cc')],
    clock=[0.0, 10.0, 13.0, 20.0, 31.0, 34.0, 36.0, 39.0],
  )
  served()
  served.mark(2)  # 10 s since the start: an engine was made.
  served.mark(0)  # 3 s with two of four slots in use.
  served.mark(0, has_lease=False)  # 7 s waiting for the policy of a lease.
  served()  # 11 s without a lease.
  served.mark(9)  # 3 s until the new policy's first episode: no lease either.
  served.mark(1)  # 2 s with all slots in use; the others' episodes wait.
  served()  # 3 s with one.
  names = ('sample_s', 'wait_s', 'lease_wait_s', 'occupancy')
  figures = [tuple(line[2][name] for name in names) for line in logged[1:]]
  assert figures == [(13.0, 7.0, 11.0, 6 / 124), (5.0, 0.0, 3.0, 11 / 32)]


def test_a_group_is_stamped_with_the_weights_of_its_versions(make):
  served, *_ = make([placed(4, 'bb'), placed(5, 'cc')])
  served()
  served()
  group = dataclasses.replace(groups.make_group(0, 4), policies=None)
  assert group.versions == {4} and group.policies is None
  assert served.stamp(group).policies == {4: 'bb'}
  mixed = dataclasses.replace(
    group,
    rollouts=(
      group.rollouts[0],
      groups.make_group(0, 3, range(1, 2)).rollouts[0],
    ),
  )
  assert served.stamp(mixed).policies == {3: 'aa', 4: 'bb'}


def test_one_version_has_one_identity_in_the_life_of_a_worker(make):
  served, engine, *_ = make([placed(3, 'aa'), placed(3, 'bb')])
  served()
  with pytest.raises(
    ValueError, match='Version 3 .* weights aa .* bb.*rewound'
  ):
    served()
  assert engine.version == 3


class Door:
  """A worker's door to its fleet, which has no lease for it."""

  has_lease = is_started = False

  def __init__(self):
    self.rows, self.is_closed = [], threading.Event()
    self.note, self.close = self.rows.append, self.is_closed.set

  def start(self):
    self.is_started = True

  def take(self, version):
    return [], []


@pytest.mark.parametrize('version, name', [(3, 'bb'), (2, 'bb'), (2, 'aa')])
def test_a_worker_joins_again_by_another_door_after_a_rewind(
  make, version, name
):
  served, engine, dropped, _ = make([placed(version, name), *[None] * 5])
  engine.num_unfinished, engine.step = 1, lambda: []
  engine.room, engine.close = lambda expected: None, lambda session: None
  collector, doors = types.SimpleNamespace(), [Door(), Door()]
  join = iter(doors).__next__
  worker = rollout_worker.RolloutWorker(
    collector, {}, join(), served, join=join
  )
  policy = worker.policy
  is_done = lambda: worker.leases is doors[1]
  assert rollout_worker.run(worker, is_done) == version
  assert doors[0].is_closed.wait(60) and not doors[1].is_closed.is_set()
  assert doors[1].is_started and doors[1].rows == [(version, name, {})]
  assert dropped == ['first'] and worker.policy is not policy
  # Only the weights after the rewind are known.
  group = dataclasses.replace(groups.make_group(0, version), policies=None)
  assert worker.served.stamp(group).policies == {version: name}
  # In the trainer's process no policy comes back.
  served, *_ = make([placed(version, name)])
  worker = rollout_worker.RolloutWorker(collector, {}, Door(), served)
  with pytest.raises(rollout_worker.Rewound, match='was rewound'):
    rollout_worker.run(worker, lambda: False)


def test_weights_that_a_stranger_names_count_for_its_lease_alone(make):
  served, *_ = make([placed(4, 'bb')])

  def saved(name, version=2):
    turns = {0: (saved_turns_test.make_turn(version=version),)}
    return played.SavedTurns(
      group=0, task_id='', turns=turns, policies={version: name}
    )

  false, right = saved('ff'), saved('aa')
  assert served.goes_on(false) is false
  assert served.goes_on(right) is right
  assert (served.num_resumed, served.num_anew) == (2, 0)
  # Of a version that it served itself, other weights are none to go on from.
  assert served.goes_on(saved('ff', 3)) is None
  assert (served.num_resumed, served.num_anew) == (2, 1)
  group = dataclasses.replace(groups.make_group(0, 2), policies=None)
  for known, name in ((false, 'ff'), (right, 'aa')):
    assert served.stamp(group, known).policies == {2: name}
