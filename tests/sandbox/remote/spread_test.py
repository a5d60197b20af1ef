"""Places come with the boxes that need them, and go when nobody does."""

import threading
import time

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox.remote import spread
from tests.sandbox import conftest


class Box:
  def __init__(self, place):
    self.place, self.is_closed = place, False

  def read(self, path, most):
    return b'%d' % self.place.number

  def close(self):
    self.is_closed = True


class Place(base.Sandbox):
  level, limits, about = 'ray', conftest.LIMITS, {}

  def __init__(self, number):
    self.number, self.is_closed = number, False

  def open(self, image, changes=None):
    if image == 'none':
      raise base.SandboxLost('no place')
    return Box(self)

  def close(self):
    self.is_closed = True


class Places:
  """Makes places; holds back those to come until `go` is set."""

  def __init__(self):
    self.made, self.go = [], threading.Event()
    self.fails = False

  def __call__(self):
    if self.made:
      assert self.go.wait(20)
    if self.fails:
      raise base.SandboxLost('no room')
    self.made.append(Place(len(self.made)))
    return self.made[-1]


@pytest.fixture
def places():
  return Places()


def settle(sandbox, count):
  deadline = time.monotonic() + 20
  while len(sandbox._places) != count or sandbox._num_coming:
    assert time.monotonic() < deadline
    time.sleep(0.002)


def test_places_come_by_demand_up_to_the_most_and_share_the_boxes(places):
  sandbox = spread.SpreadSandbox(places, 3)
  boxes = [sandbox.open('') for _ in range(8)]
  # Nobody waits for a place that is still to come, and each is asked for once.
  assert len(places.made) == 1 and sandbox._num_coming == 2
  places.go.set()
  settle(sandbox, 3)
  boxes += [sandbox.open('') for _ in range(13)]
  found = [box.read('a', 9) for box in boxes]
  assert sorted(found.count(b'%d' % n) for n in range(3)) == [6, 7, 8]
  assert len(places.made) == 3
  sandbox.close()
  assert all(place.is_closed for place in places.made)


def test_idle_places_are_given_back_but_for_the_first(places):
  now = [0.0]
  places.go.set()
  sandbox = spread.SpreadSandbox(places, 2, idle_s=60, clock=lambda: now[0])
  boxes = [sandbox.open('') for _ in range(3)]
  settle(sandbox, 2)
  boxes += [sandbox.open('') for _ in range(3)]
  for box in boxes:
    box.close()
    box.close()
  now[0] = 59.0
  with sandbox.open(''):
    assert len(sandbox._places) == 2
  now[0] = 130.0
  with sandbox.open('') as box:
    assert len(sandbox._places) == 1 and box.read('a', 9) == b'0'
  assert [p.is_closed for p in places.made] == [False, True]


def test_a_place_for_which_there_is_no_room_is_asked_for_again(places):
  sandbox = spread.SpreadSandbox(places, 2)
  places.fails = True
  places.go.set()
  for _ in range(3):
    sandbox.open('')
  settle(sandbox, 1)
  places.fails = False
  sandbox.open('')
  settle(sandbox, 2)


def test_a_box_that_cannot_be_had_is_not_counted(places):
  sandbox = spread.SpreadSandbox(places, 2)
  for _ in range(5):
    with pytest.raises(base.SandboxLost):
      sandbox.open('none')
  assert sandbox._places[0].count == 0
  sandbox.close()
  with pytest.raises(ValueError, match='is closed'):
    sandbox.open('')


def test_what_comes_after_the_end_is_closed(places):
  sandbox = spread.SpreadSandbox(places, 2)
  for _ in range(3):
    sandbox.open('')
  sandbox.close()
  places.go.set()
  deadline = time.monotonic() + 20
  while len(places.made) < 2 or not places.made[1].is_closed:
    assert time.monotonic() < deadline
    time.sleep(0.002)
