"""Which weights the worker serves, and which ones a group names."""

import dataclasses
import types

import pytest

from composer_jax.core import seams
from composer_jax.pipeline import rollout_worker
from tests.pipeline import buffer_test


class Engine(types.SimpleNamespace):
  """The three members of an engine that `Served` uses."""

  def switch(self, weights):
    before, self.weights, self.version = self.weights, weights, weights.version
    return before

  def stats(self):
    return types.SimpleNamespace(swap_s=0.25)


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
  """make(news) returns (Served, engine, dropped policies, logged lines)."""

  def make(news):
    dropped, logged = [], []
    engine = Engine(weights='first', version=3)
    receiver = types.SimpleNamespace(
      take=iter(news).__next__,
      drop=dropped.append,
      served=lambda policy, swap_s: logged.append(
        (policy.version, policy.target_id, swap_s)
      ),
    )
    served = rollout_worker.Served(engine, policy(3, 'aa'), receiver)
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
  assert logged == [(3, 'aa', None), (4, 'bb', 0.25), (7, 'cc', 0.25)]


def test_a_group_is_stamped_with_the_weights_of_its_versions(make):
  served, *_ = make([placed(4, 'bb'), placed(5, 'cc')])
  served()
  served()
  group = buffer_test.make_group(0, 4)
  assert group.versions == {4} and group.policies is None
  assert served.stamp(group).policies == {4: 'bb'}
  mixed = dataclasses.replace(
    group,
    rollouts=(
      group.rollouts[0],
      dataclasses.replace(buffer_test.make_group(0, 3).rollouts[0], member=1),
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
