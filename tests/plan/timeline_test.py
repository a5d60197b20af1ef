"""Laws of the modelled time of schedules."""

import dataclasses

import pytest

from composer_jax.optim.muon import cost
from composer_jax.plan import network, timeline
from composer_jax.plan.hlo import events as hlo_events

# 1 FLOP and 1 byte take a second within 4 devices.
MACHINE = timeline.Speeds(
  rates=cost.Rates('unit', 1.0, 1.0, 1.0, 0.5, 4, 0.0),
  wires=network.Nodes(4, within=1.0, across=0.5),
  rows=100,
  used=0.25,
)


def begin(key, num_bytes, *, is_async=True, devices=4, kind='all-gather'):
  members = devices if isinstance(devices, tuple) else range(devices)
  return hlo_events.Begin(
    key,
    hlo_events.Collective(
      kind=kind,
      dtype='f32',
      bytes=num_bytes,
      result_bytes=num_bytes,
      count=1.0,
      loops=(),
      groups=frozenset({frozenset(members)}),
      is_async=is_async,
      hidden=0.0,
      scope='',
    ),
  )


def work(flops):
  return hlo_events.Multiply(flops, '')


def run(*events):
  return timeline.run(events, MACHINE)


END = hlo_events.End


@pytest.mark.parametrize(
  ('beside', 'waited', 'why'),
  [
    (0, 6, 'no product before its result is used'),
    (2, 4, 'products beside it are shorter'),
    (6, 0, ''),
    (9, 0, ''),
  ],
)
def test_products_hide_as_long_as_they_run(beside, waited, why):
  line = run(begin('a', 6), work(beside), END('a'), work(1))
  (transfer,) = line.transfers
  assert (transfer.seconds, transfer.waited) == (6, waited)
  assert line.seconds == beside + waited + 1
  assert line.busy == beside + 1
  assert line.hidden_share == pytest.approx((6 - waited) / 6)
  assert transfer.why == why


def test_a_synchronous_collective_stops_everything():
  line = run(work(5), begin('a', 3, is_async=False), END('a'), work(5))
  assert line.seconds == 13
  assert line.hidden_share == 0
  assert line.transfers[0].why == 'synchronous'


def test_transfers_wait_for_each_other():
  line = run(begin('a', 3), begin('b', 3), work(4), END('a'), END('b'))
  assert [t.waited for t in line.transfers] == [0, 2]
  assert line.seconds == 6


def test_who_occupies_the_wire_is_waited_for():
  # Products need the short transfer, which stands behind the long one.
  line = run(begin('a', 5), begin('b', 1), work(2), END('b'), work(9), END('a'))
  assert [t.waited for t in line.transfers] == [3, 1]
  assert line.seconds == 15 and line.hidden_share == pytest.approx(2 / 6)
  assert line.transfers[0].why == 'others wait behind it'


def test_loops_take_their_trips():
  body = (begin('a', 3), work(1), END('a'))
  once = run(*body)
  many = run(hlo_events.Repeat('loop', 7, body), work(2))
  assert many.seconds == 7 * once.seconds + 2
  assert many.wire == 7 * once.wire
  assert many.hidden_share == once.hidden_share
  (transfer,) = many.transfers
  assert transfer.collective.count == 7
  assert transfer.collective.loops == ('loop',)


def test_what_flies_over_a_loop_is_hidden_by_it():
  body = (work(2),)
  line = run(begin('a', 5), hlo_events.Repeat('l', 3, body), END('a'))
  assert line.seconds == 6
  assert line.hidden_share == 1


def test_wires_work_at_once_and_serve_one_transfer_after_another():
  # Of the 4 others 3 are in the node; the fifth is behind the network.
  some = begin('b', 4, devices=5, kind='all-to-all')
  line = run(begin('a', 5), some, END('b'), END('a'))
  assert [t.seconds for t in line.transfers] == [5, 3]
  # The last wire counts, on which the first transfer has its turn before.
  assert [t.waited for t in line.transfers] == [5, 3]
  assert line.seconds == 8
  far = begin('b', 4, devices=(0, 4), kind='all-to-all')
  line = run(begin('a', 8), far, END('b'), END('a'))
  assert [t.waited for t in line.transfers] == [8, 0]
  assert line.seconds == 8


def test_kernels_skip_rows_that_are_not_in_use():
  kernel = hlo_events.Multiply(8.0, 'k', frozenset({100, 7}))
  other = hlo_events.Multiply(8.0, 'k', frozenset({99, 7}))
  assert (run(kernel).busy, run(other).busy) == (2.0, 8.0)


def test_ragged_transfers_take_what_travels_and_no_others_less():
  machine = dataclasses.replace(MACHINE, sent=0.5)
  for kind, seconds in (('ragged-all-to-all', 3), ('all-to-all', 6)):
    events = begin('a', 6, kind=kind), END('a')
    (transfer,) = timeline.run(events, machine).transfers
    assert transfer.seconds == seconds


def test_a_program_without_transfers_hides_all_of_them():
  assert run(work(1)).hidden_share == 1
