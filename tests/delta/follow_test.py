"""The thread that polls: newest wins, failures are said and survived."""

import threading

import pytest

from composer_jax.core import seams
from composer_jax.delta import follower as followers
from composer_jax.delta import transport
from tests.delta import bundles


class Receiving:
  """Finds what a function of no arguments does."""

  store, problem = 'here', None

  def __init__(self, find):
    self._find = find

  def poll(self):
    found = self._find()
    return found and seams.ReceivedPolicy(
      version=found[0], target_id='', variables=found[1], received={}
    )


class Engine:
  def place(self, variables, version):
    if variables == 'misfit':
      raise ValueError('it does not fit')
    return variables


def start(find, notify=lambda: None):
  follower = transport.Placing(Receiving(find), 0.001, notify)
  follower.follow(Engine())
  return follower


def end(follower):
  follower.close()
  follower.thread.join()


def test_only_the_newest_is_kept_and_taken_once():
  found = iter([(1, 'a'), None, (2, 'b')])
  done = threading.Event()

  def find():
    try:
      return next(found)
    except StopIteration:
      done.set()

  follower = start(find)
  assert done.wait()
  end(follower)
  assert follower.newest().variables == 'b' and follower.newest() is None
  assert follower.problem == ''


def test_what_fails_is_said_once_and_tried_again(caplog):
  errors = iter([ValueError('damaged'), OSError('away'), OSError('away')])
  notified = threading.Event()

  def find():
    error = next(errors, None)
    if error is not None:
      raise error
    return 3, 'weights'

  follower = start(find, notified.set)
  assert notified.wait()
  end(follower)
  assert follower.problem == '' and follower.newest().version == 3
  assert caplog.text.count('Nothing newer can be served') == 2


def test_a_policy_that_does_not_fit_is_a_problem_until_one_does():
  found = iter([(1, 'misfit'), None, 'wait', (2, 'fits'), None, None])
  looked, fits, done = (threading.Event() for _ in range(3))

  def find():
    policy = next(found, 'end')
    if policy == 'wait':
      looked.set()
      assert fits.wait()
    if policy == 'end':
      done.set()
    return policy if isinstance(policy, tuple) else None

  follower = start(find)
  assert looked.wait() and follower.problem == 'it does not fit'
  fits.set()
  assert done.wait()
  end(follower)
  assert follower.problem == '' and follower.newest().variables == 'fits'


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_bug_ends_the_thread_and_is_named():
  def find():
    raise KeyError('bug')

  follower = start(find)
  follower.thread.join()
  assert follower.problem == "nothing is followed any more: KeyError('bug')"


def test_it_follows_a_subscriber_while_another_thread_reads(tmp_path):
  run = bundles.Run(tmp_path)
  run.add(0)
  run.point(0)
  receiver = followers.Follower(run.store, 'run', bundles.SIGNER)
  news = threading.Event()

  def find():
    held = receiver.poll()
    return held and (held.version, held)

  follower = start(find, news.set)
  for version in range(1, 5):
    run.add(version, base=version - 1)
    run.point(version)
    while receiver.held is None or receiver.held.version < version:
      held = receiver.held
      if held is not None:
        # Whatever is held is whole at any moment.
        bundles.assert_same_bits(held, bundles.weights(held.version))
      news.wait(0.01)
  end(follower)
  assert receiver.held.version == 4 and receiver.problem is None
