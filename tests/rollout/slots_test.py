"""Slots: which sessions work, wait or hold pages, and what is refused."""

import numpy as np
import pytest

from composer_jax.rollout import sessions
from tests.rollout import tables


def test_requests_wait_for_a_slot_first_come_first_served():
  table = tables.make_table()
  for name in 'abcd':
    table.submit(tables.request(name, context=[ord(name)]))
  table.admit()
  assert [s.name for s in table.decoding()] == ['a', 'b']
  assert len(table.queue) == 2 and table.num_unfinished == 4
  tables.decode(table, table.decoding()[:1], (9,))
  table.close('c')
  table.admit()
  assert [s.name for s in table.decoding()] == ['b', 'd']
  assert sorted(table.sessions) == ['a', 'b', 'd']


def test_the_last_sampled_token_leads_the_next_context():
  table = tables.make_table()
  table.submit(tables.request('a'))
  first = tables.finish(table, (5, 6))['a']
  assert first.tokens_T.tolist() == [5, 6] and not first.stopped
  assert first.consumed_expert_ids_TMA[:, 0, 0].tolist() == [0, 1, 2, 3]
  assert first.logprobs_T.tolist() == [-2, -3]
  table.submit(tables.request('a', context=0))
  second = tables.finish(table)['a']
  assert second.routes_start == 4
  assert second.consumed_expert_ids_TMA[:, 0, 0].tolist() == [4, 5]


def test_chunks_end_at_multiples_wherever_they_begin():
  table = tables.make_table(max_len=32, num_pages=16)
  table.submit(tables.request('a', context=9))
  table.admit()
  (session,) = table.prefilling()
  assert [tables.extend(table, session) for _ in range(3)] == [3, 3, 2]
  assert not session.needs_context
  tables.finish(table)
  # Ten tokens are consumed; of nine more the first chunk ends at twelve.
  table.submit(tables.request('a', context=9))
  table.admit()
  assert [tables.extend(table, session) for _ in range(4)] == [2, 3, 3, 1]


def test_a_long_request_holds_few_reports():
  """A report holds every row's samples, so keeping many would waste memory."""
  table = tables.make_table(max_len=101, num_pages=25)
  table.submit(tables.request('a', context=1, new=100))
  table.admit()
  reports = [
    tables.decode(table, table.decoding(), (i,)) for i in range(10, 110)
  ]
  assert sum(r() is not None for r in reports) == 0
  (outcome,) = table.take_finished()
  assert outcome.tokens_T.tolist() == list(range(10, 110))
  np.testing.assert_array_equal(outcome.logprobs_T, -np.arange(100.0))
  table.submit(tables.request('b', context=1, new=99))
  table.admit()
  reports = [tables.decode(table, table.decoding(), (5,)) for _ in range(98)]
  assert sum(r() is not None for r in reports) == 98 % sessions.MAX_PIECES


def test_sampling_is_cut_where_max_len_ends():
  table = tables.make_table(max_len=6)
  table.submit(tables.request('a', context=4, new=10))
  assert len(tables.finish(table, (5,) * 4)['a'].tokens_T) == 2


def test_a_prompt_is_consumed_once_for_all_sessions_that_share_it():
  table = tables.make_table(num_slots=4, max_len=24, num_pages=20)
  for name in 'abcd':
    table.submit(tables.request(name, context=11))
  table.submit(tables.request('e', context=[7, 7]))
  table.admit()
  # Three wait for the first one's prompt; the session after them does not wait.
  assert [s.name for s in table.prefilling()] == ['a', 'e']
  consumed = 0
  while pending := table.prefilling():
    consumed += sum(tables.extend(table, session) for session in pending)
    table.admit()
    tables.check_books(table)
  assert consumed == 10 + 1
  first, *others = [s for s in table.decoding() if s.name != 'e']
  for session in others:
    # Two full pages are shared, the third is a copy.
    assert session.pages[:2] == first.pages[:2]
    assert session.pages[2] != first.pages[2]
  sources, targets, counts = zip(*table.holdings.to_copy, strict=True)
  assert set(sources) == {first.pages[2]} and set(counts) == {2}
  assert list(targets) == [s.pages[2] for s in others]
  outcomes = tables.finish(table)
  for name in 'bcd':
    assert outcomes[name].num_cached == 10 and outcomes[name].routes_start == 0
    np.testing.assert_array_equal(
      outcomes[name].consumed_expert_ids_TMA,
      outcomes['a'].consumed_expert_ids_TMA,
    )
  assert outcomes['a'].num_cached == 0
  assert table.stats.prefix_hit_tokens == 30


def test_a_session_waiting_for_a_prompt_consumes_it_if_its_reader_closes():
  table = tables.make_table(max_len=24)
  for name in 'ab':
    table.submit(tables.request(name, context=11))
  table.admit()
  tables.extend(table, table.prefilling()[0])
  table.close('a')
  table.admit()
  assert [s.name for s in table.prefilling()] == ['b']
  assert tables.finish(table)['b'].num_cached == 0


def test_what_was_sampled_is_shared_only_where_bits_allow():
  for share_sampled, cached in ((False, 2), (True, 8)):
    table = tables.make_table(max_len=24, share_sampled=share_sampled)
    table.submit(tables.request('a', context=3, new=6))
    tables.finish(table, (5,) * 6)
    table.submit(tables.request('b', context=[0, 1, 2, *[5] * 6]))
    assert tables.finish(table)['b'].num_cached == cached


def test_idle_sessions_lose_their_pages_longest_idle_first():
  table = tables.make_table(num_pages=4, share_prefixes=False)
  for name in 'abc':
    table.submit(tables.request(name))
    tables.finish(table)
  # Two pages are needed, and one of four is free.
  table.submit(tables.request('d', context=6))
  table.admit()
  held = {name: len(s.pages) for name, s in table.sessions.items()}
  assert held == {'a': 0, 'b': 1, 'c': 1, 'd': 2}
  table.close('d')
  table.submit(tables.request('a', context=1))
  outcome = tables.finish(table)['a']
  assert outcome.routes_start == 0
  # All tokens but the last: 3 of context, 2 sampled, 1 of context, 1 sampled.
  assert outcome.consumed_expert_ids_TMA[:, 0, 0].tolist() == list(range(7))
  tables.check_books(table)


def test_a_cache_that_is_full_makes_requests_wait_in_order():
  table = tables.make_table(num_slots=3, num_pages=4, share_prefixes=False)
  table.submit(tables.request('a', context=9))
  table.submit(tables.request('b', context=7))
  table.submit(tables.request('c', context=1))
  table.admit()
  # The third request would fit, but the second came before it.
  assert [s.name for s in table.prefilling()] == ['a']
  assert set(tables.finish(table)) == set('abc')


def test_a_page_to_copy_from_is_given_up_if_there_is_no_room_for_both():
  table = tables.make_table(max_len=13, num_pages=3, share_sampled=True)
  table.submit(tables.request('a', context=[0]))
  tables.finish(table)
  table.close('a')
  table.submit(tables.request('b', context=[0] * 6, new=4))
  assert tables.finish(table)['b'].num_cached == 0


def test_after_a_swap_no_prefix_of_before_is_found():
  for refresh in (False, True):
    table = tables.make_table(max_len=24)
    table.submit(tables.request('a', context=11))
    tables.finish(table)
    table.swap(1, refresh=refresh)
    table.submit(tables.request('b', context=11))
    assert tables.finish(table)['b'].num_cached == 0
    table.submit(tables.request('c', context=11))
    assert tables.finish(table)['c'].num_cached == 10


def test_a_session_of_two_versions_is_not_shared():
  for share_sampled in (False, True):
    table = tables.make_table(max_len=24, share_sampled=share_sampled)
    table.submit(tables.request('a', context=11))
    table.admit()
    tables.extend(table, table.prefilling()[0])
    table.swap(1, refresh=False)
    outcome = tables.finish(table)['a']
    assert set(outcome.context_version_T.tolist()) == {0}
    table.submit(tables.request('b', context=11))
    assert tables.finish(table)['b'].num_cached == 0


def test_refresh_consumes_anew_and_replaces_the_routes():
  table = tables.make_table(max_len=24)
  table.submit(tables.request('a', context=4, new=4))
  table.admit()
  (session,) = table.prefilling()
  tables.extend(table, session)
  tables.decode(table, [session], (5, 6))
  table.swap(1, refresh=True)
  assert session.consumed == 0 and session.pages == []
  outcome = tables.finish(table)['a']
  assert outcome.tokens_T.tolist() == [5, 6, 5, 5]
  assert outcome.routes_start == 0
  assert outcome.context_version_T.tolist() == [0, 0, 1, 1]
  assert outcome.consumed_version_T[:5].tolist() == [1] * 5
  assert outcome.consumed_expert_ids_TMA[:, 0, 0].tolist() == list(range(7))
  assert session.tokens_T[:8].tolist() == [0, 1, 2, 3, 5, 6, 5, 5]


def test_a_session_is_refreshed_once_between_two_tokens():
  table = tables.make_table(max_len=24)
  table.submit(tables.request('a', context=8, new=2))
  table.submit(tables.request('b', context=1, new=2))
  seen = []
  for version in range(1, 20):
    table.admit()
    session = table.sessions['a']
    if session.needs_context:
      tables.extend(table, session)
    elif session.work:
      tables.decode(table, [session], (5,), version - 1)
    seen.append((session.consumed, session.length))
    if session.work:
      table.swap(version, refresh=True)
    tables.check_books(table)
  # Chunks of three consume seven of eight tokens. Consumption starts anew after
  # the first swap, and after the first swap that follows a sampled token.
  consumed = [3, 3, 6, 7, 8, 3, 6, 8, 9]
  lengths = [8, 8, 8, 8, 9, 9, 9, 9, 10]
  assert seen[:9] == list(zip(consumed, lengths, strict=True))
  (outcome,) = table.take_finished()
  assert outcome.policy_version_T.tolist() == [4, 8]
  # Three versions consumed the context of the first token, four of the second.
  assert outcome.context_version_T.tolist() == [1, 5]
  assert outcome.consumed_version_T.tolist() == [5, 5, 5, 6, 6, 6, 7, 7, 8]
  assert outcome.routes_start == 0
  # Pages that several weights computed are not shared.
  table.submit(tables.request('c', context=8))
  assert tables.finish(table)['c'].num_cached == 0


def test_a_failure_closes_its_session_and_its_pages_are_cleared():
  table = tables.make_table(max_len=24)
  table.submit(tables.request('a', context=11))
  table.submit(tables.request('b', context=[0, 1, 2, 3, 8, 8]))
  table.admit()
  for session in table.prefilling() * 2:
    tables.extend(table, session)
  bad = table.sessions['a']
  pages = list(bad.pages)
  tables.extend(table, bad, finite=False)
  (failure,) = table.take_finished()
  assert (failure.session, failure.position) == ('a', 6)
  assert '3 tokens from 6 on of session' in failure.reason
  assert 'a' not in table.sessions and table.stats.failures == 1
  tables.check_books(table)
  table.admit()
  assert set(table.holdings.pages.to_clear) == set(pages)
  tables.check_books(table)
  # The same holds for a failure while tokens are sampled.
  table.admit()
  tables.finish(table)
  table.submit(tables.request('b', context=1))
  table.admit()
  tables.extend(table, table.sessions['b'])
  tables.decode(table, table.decoding(), (5, sessions.NOT_FINITE))
  (failure,) = table.take_finished()
  assert (failure.session, failure.position) == ('b', 9)
  assert not table.sessions


def test_bad_pages_that_others_hold_are_cleared_where_room_is_made():
  table = tables.make_table(
    num_slots=2, max_len=13, num_pages=4, share_sampled=True
  )
  for name, context in (('a', [0] * 5), ('b', [0] * 4 + [1])):
    table.submit(tables.request(name, context=context, new=2))
  table.admit()
  while pending := table.prefilling():
    for session in pending:
      tables.extend(table, session)
    table.admit()
  table.fail(table.sessions['a'], 4, 1, 0)
  # Another session holds its first page, and later only the prefix store does.
  tables.finish(table)
  table.close('b')
  table.holdings.pages.to_clear.clear()
  table.submit(tables.request('c', context=[1] * 9, new=4))
  table.submit(tables.request('d', context=[1] * 2))
  table.admit()
  tables.check_books(table)
  assert len(tables.finish(table)) == 2


def test_what_cannot_be_served_is_refused_by_numbers():
  table = tables.make_table(max_len=6)
  with pytest.raises(ValueError, match=r'hold 6 tokens.*max_len \(6\)'):
    table.submit(tables.request('a', context=6))
  with pytest.raises(ValueError, match='empty context'):
    table.submit(tables.request('a', context=0))
  table.submit(tables.request('a', context=2))
  with pytest.raises(ValueError, match="'a' already has a request under way"):
    table.submit(tables.request('a'))
  tables.finish(table)
  with pytest.raises(ValueError, match=r'hold 7 tokens \(3 of them new'):
    table.submit(tables.request('a', context=3))


def test_who_is_first_gets_the_next_slot_and_lets_nobody_pass():
  table = tables.make_table()
  for name in 'abcd':
    table.submit(tables.request(name, context=[ord(name)]))
  table.admit()
  for name in 'xy':
    table.submit(tables.request(name, context=[ord(name)]), is_first=True)
  assert [s.name for s in table.queue] == ['x', 'y', 'c', 'd']
  tables.decode(table, table.decoding()[:1], (9,))
  table.admit()
  assert [s.name for s in table.decoding()] == ['b', 'x']
  # It waits for a prompt that another consumes: the others wait for it.
  table = tables.make_table(num_slots=3)
  prompt = [*range(8)]
  table.submit(tables.request('a', context=prompt), is_first=True)
  table.admit()
  table.submit(tables.request('c', context=[1]))
  table.submit(tables.request('b', context=prompt), is_first=True)
  table.admit()
  assert [*table.running] == ['a']
  tables.finish(table)
