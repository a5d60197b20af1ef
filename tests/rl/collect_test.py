"""Groups leave the stream whole, and whatever goes wrong reaches its reader."""

import time

import pytest

from composer_jax.rl import collect
from tests.rl import advantage_test


def finish(stream, within_s=20):
  """Waits until no episode is open, as the rollout worker does."""
  deadline = time.monotonic() + within_s
  while stream.open_episodes:
    assert time.monotonic() < deadline, 'episodes never end'
    time.sleep(0.002)


@pytest.fixture
def make_stream():
  streams = []
  source = advantage_test.make_group([1.0, 0.0])

  def make(on_group, play=lambda member: None):
    def rollout(task, policy, *, group, member, seed):
      play(member)
      return source.rollouts[member]

    collector = collect.Collector(
      task_of_group=lambda group: None,
      play=rollout,
      rollouts_per_group=2,
      seed=0,
    )
    streams.append(collect.GroupStream(collector, None, 2, on_group))
    return streams[-1]

  yield make
  for stream in streams:
    stream.close()


def test_a_group_is_handed_over_once_and_in_order(make_stream):
  found = []
  # The second member ends first.
  stream = make_stream(
    found.append, lambda member: time.sleep(0.05 * (1 - member))
  )
  stream.admit(0)
  finish(stream)
  assert [[r.member for r in g.rollouts] for g in found] == [[0, 1]]


@pytest.mark.parametrize('error', [OSError, ValueError, KeyError, SystemExit])
def test_an_error_of_whoever_takes_the_group_ends_the_wait(make_stream, error):
  def on_group(group):
    raise error('no room')

  stream = make_stream(on_group)
  stream.admit(0)
  with pytest.raises(error, match='no room'):
    finish(stream)


def test_an_error_of_an_episode_ends_the_wait(make_stream):
  def play(member):
    if member:
      raise KeyError('tool')

  stream = make_stream(lambda group: None, play)
  stream.admit(0)
  with pytest.raises(KeyError, match='tool'):
    finish(stream)
