"""Work in threads keeps its order, its bound, and its errors."""

import threading

import pytest

from composer_jax.delta import rebuild


def alive():
  return [t for t in threading.enumerate() if t.name.startswith('delta_')]


@pytest.mark.parametrize('count', [1, 2, 5])
def test_threads_are_fed_a_few_items_at_a_time_and_keep_the_order(count):
  taken = []

  def items():
    for item in range(50):
      taken.append(item)
      yield item

  found = rebuild.in_order(lambda item: item * 2, items(), count)
  assert next(found) == 0
  assert len(taken) <= 4 * count
  assert list(found) == [2 * item for item in range(1, 50)]
  assert not alive()


def test_errors_reach_the_caller_and_leave_no_thread():
  done = []

  def work(item):
    done.append(item)
    return 1 / item

  with pytest.raises(ZeroDivisionError):
    list(rebuild.in_order(work, [1, 0, *range(1, 100)], 2))
  assert not alive()
  # Of what came after it, no more than was in flight.
  assert len(done) <= 2 + 8

  def items():
    yield 1
    raise OSError('the items end here')

  with pytest.raises(OSError, match='the items end here'):
    list(rebuild.in_order(work, items(), 2))
  assert not alive()
  with pytest.raises(ValueError, match='max_workers'):
    list(rebuild.in_order(work, [1], 0))


def test_who_stops_early_leaves_no_thread():
  found = rebuild.in_order(lambda item: item, range(100), 2)
  assert next(found) == 0 and alive()
  found.close()
  assert not alive()
