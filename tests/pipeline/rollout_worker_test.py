"""When the worker looks for a policy, and what it then serves."""

import types

from composer_jax.pipeline import rollout_worker


class Engine(types.SimpleNamespace):
  """The two members that a Follower uses."""

  def swap(self, values, version):
    self.values, self.version = values, version


def test_a_follower_serves_each_newer_policy_and_keeps_the_last():
  engine = Engine(values='a', version=3)
  news = iter([None, (4, 'b'), None, (7, 'c'), None])
  follow = rollout_worker.Follower(lambda: next(news), engine, interval_s=0.0)
  seen = []
  for _ in range(5):
    follow()
    seen.append((follow.version, engine.version, engine.values))
  assert seen == [
    (3, 3, 'a'),
    (4, 4, 'b'),
    (4, 4, 'b'),
    (7, 7, 'c'),
    (7, 7, 'c'),
  ]


def test_a_follower_looks_once_an_interval():
  looks = []
  follow = rollout_worker.Follower(
    lambda: looks.append(1), Engine(version=0), interval_s=1000.0
  )
  for _ in range(50):
    follow()
  assert len(looks) == 1
