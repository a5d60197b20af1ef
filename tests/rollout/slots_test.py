"""Slots: who gets one, who waits, and what is refused."""

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.rollout import slots


def _request(session, length=3, new=2):
  return records.SampleRequest(
    session=session,
    context_T=np.arange(length, dtype=np.int32),
    max_new_tokens=new,
    stop_tokens=(9,),
    seed=(0,),
  )


def _finish(table, session, tokens=(5,)):
  entry = table.sessions[session]
  work = entry.work
  work.offset = len(work.pending_T)
  work.routes.append(np.zeros((len(work.pending_T), 1, 2), np.uint16))
  entry.consumed += len(work.pending_T)
  for token in tokens:
    work.record(token, -1.0, 0)
    entry.last_token = token
  work.remaining = 0
  return table.take_finished()


def test_requests_wait_for_a_slot_first_come_first_served():
  table = slots.Slots(2, 16)
  for name in 'abcd':
    table.submit(_request(name))
  assert set(table.sessions) == {'a', 'b'}
  assert table.num_waiting == 2 and table.num_unfinished == 4
  _finish(table, 'a')
  assert table.num_waiting == 2, 'a session keeps its slot between requests'
  slot = table.sessions['a'].slot
  table.close('a')
  assert table.sessions['c'].slot == slot
  table.close('d')
  assert table.num_waiting == 0 and not table.is_open('d')


def test_the_last_sampled_token_leads_the_next_context():
  table = slots.Slots(1, 16)
  table.submit(_request('a'))
  (completion,) = _finish(table, 'a', tokens=(5, 6))
  assert completion.tokens_T.tolist() == [5, 6] and not completion.stopped
  table.submit(_request('a', length=0))
  assert table.sessions['a'].work.pending_T.tolist() == [6]


def test_sampling_is_cut_where_max_len_ends():
  table = slots.Slots(1, 6)
  table.submit(_request('a', length=4, new=10))
  assert table.sessions['a'].work.remaining == 2


def test_what_cannot_be_served_is_refused_by_numbers():
  table = slots.Slots(1, 6)
  with pytest.raises(ValueError, match=r'hold 6 tokens.*max_len \(6\)'):
    table.submit(_request('a', length=6))
  with pytest.raises(ValueError, match='empty context'):
    table.submit(_request('a', length=0))
  table.submit(_request('a', length=2))
  with pytest.raises(ValueError, match="'a' already has a request under way"):
    table.submit(_request('a'))
  table.submit(_request('b'))
  with pytest.raises(ValueError, match="'b' already has a request waiting"):
    table.submit(_request('b'))
  _finish(table, 'a')
  with pytest.raises(ValueError, match=r'hold 6 tokens \(3 of them new'):
    table.submit(_request('a', length=3))
  with pytest.raises(ValueError, match="'z' is not open"):
    table.close('z')
