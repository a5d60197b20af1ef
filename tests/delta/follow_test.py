"""The thread that polls: newest wins, failures are said and survived."""

import threading

import pytest

from composer_jax.delta import follower as followers
from composer_jax.delta import subscriber
from tests.delta import bundles


def start(poll, notify=lambda: None):
  follower = subscriber.Poller(poll, 0.001, notify)
  follower.thread.start()
  return follower


def test_only_the_newest_is_kept_and_taken_once():
  found = iter([(1, 'a'), None, (2, 'b')])
  done = threading.Event()

  def poll():
    update = next(found, None)
    if update is None and follower.seen == 2:
      done.set()
    follower.seen += update is not None
    return update

  follower = subscriber.Poller(poll, 0.001, lambda: None)
  follower.seen = 0
  follower.thread.start()
  assert done.wait(10)
  follower.stop()
  follower.thread.join(10)
  assert follower.take() == (2, 'b') and follower.take() is None
  assert follower.problem == ''


def test_what_fails_is_said_once_and_tried_again(caplog):
  errors = iter([ValueError('damaged'), OSError('away'), OSError('away')])
  notified = threading.Event()

  def poll():
    error = next(errors, None)
    if error is not None:
      raise error
    return 3, 'weights'

  follower = start(poll, notified.set)
  assert notified.wait(10)
  follower.stop()
  follower.thread.join(10)
  assert follower.problem == '' and follower.take() == (3, 'weights')
  assert caplog.text.count('Nothing newer can be served') == 2


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_bug_ends_the_thread_and_is_named():
  def poll():
    raise KeyError('bug')

  follower = start(poll)
  follower.thread.join(10)
  assert follower.problem == "nothing is followed any more: KeyError('bug')"


def test_it_follows_a_subscriber_while_another_thread_reads(tmp_path):
  run = bundles.Run(tmp_path)
  run.add(0)
  run.point(0)
  receiver = followers.Follower(run.store, 'run', bundles.SIGNER)
  news = threading.Event()
  follower = start(receiver.poll, news.set)
  for version in range(1, 5):
    run.add(version, base=version - 1)
    run.point(version)
    while receiver.held is None or receiver.held.version < version:
      held = receiver.held
      if held is not None:
        # Whatever is held is whole at any moment.
        bundles.assert_same_bits(held, bundles.weights(held.version))
      news.wait(0.01)
  follower.stop()
  follower.thread.join(10)
  assert receiver.held.version == 4 and receiver.problem is None
