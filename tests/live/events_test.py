"""Every event has one fate: counted, double, early, late, unknown or forged."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.live import episodes, events, tokens
from tests.live.conftest import WINDOWS, window


@pytest.mark.parametrize(
  'kind, seconds, fate',
  [
    ('thumb', 50.0, events.COUNTED),
    ('thumb', 50.1, events.LATE),
    ('tool_call', 10.0, events.COUNTED),
    ('tool_call', 11.0, events.LATE),
    ('edit_kept', 59.0, events.EARLY),
    ('edit_kept', 70.0, events.COUNTED),
    ('edit_kept', 101.0, events.LATE),
  ],
)
def test_an_event_counts_within_its_window(folder, kind, seconds, fate):
  claim = folder.open()
  folder.answer(claim)
  folder.now += seconds
  fields = {'value': 1.0} if kind != 'tool_call' else {'tool': 'edit'}
  if kind == 'edit_kept':
    fields['after_s'] = 60.0
  assert folder.tell(claim, kind, **fields) == fate
  kept = folder.episodes.read(claim).events
  assert (kept[-1].kind == kind) == (fate == events.COUNTED)
  assert folder.episodes.fates() == {fate: 1}


def test_an_edit_cannot_be_older_than_its_answer(folder):
  claim = folder.open()
  folder.answer(claim)
  folder.now += 5
  told = folder.tell(claim, 'edit_kept', value=1.0, after_s=3600.0)
  assert told == events.EARLY


def test_the_same_event_counts_once_in_any_order_and_number(folder):
  """Whatever is sent again: the episode is as if each had come once."""
  said = [
    dict(kind='thumb', name='a', value=1.0),
    dict(kind='tool_call', name='b', tool='edit'),
    dict(kind='tool_call', name='c', outcome='invalid'),
  ]
  seen = set()
  for order in itertools.product(said, repeat=4):
    if len({s['name'] for s in order}) < 3:
      continue
    claim = folder.open()
    folder.answer(claim)
    fates = collections.Counter(folder.tell(claim, **s) for s in order)
    assert fates == {events.COUNTED: 3, events.DOUBLE: 1}
    known = folder.episodes.read(claim).events
    seen.add(tuple(sorted((e.id, e.kind, e.value) for e in known)))
  assert len(seen) == 1


def test_another_event_of_a_known_id_is_refused(folder):
  claim = folder.open()
  folder.answer(claim)
  folder.tell(claim, 'thumb', name='x', value=1.0)
  with pytest.raises(ValueError, match=r"'x' is known with other fields"):
    folder.tell(claim, 'thumb', name='x', value=-1.0)


def test_an_episode_has_at_most_a_thousand_events():
  known = [
    events.Event(id=f'e{i}', kind=events.ANSWERED, at=0.0) for i in range(999)
  ]
  event = events.Event(id='one more', kind='thumb', at=1.0)
  assert events.fate_of(event, known, WINDOWS) == events.COUNTED
  known.append(dataclasses.replace(known[0], id='e999'))
  with pytest.raises(ValueError, match='at most 1000 events'):
    events.fate_of(event, known, WINDOWS)


def test_an_episode_without_an_answer_has_no_events(folder):
  assert folder.tell(folder.open(), 'thumb', value=1.0) == events.UNKNOWN


@pytest.mark.parametrize(
  'body, message',
  [
    ({'id': 'a', 'kind': 'thumbs', 'value': 1}, 'kind must be one of'),
    ({'id': 7, 'kind': 'thumb', 'value': 1}, r'id \(7\) must be a text'),
    ({'id': 'a b', 'kind': 'thumb', 'value': 1}, 'id .*a b'),
    ({'id': 'a', 'kind': 'thumb', 'value': 2}, 'from -1 to 1'),
    ({'id': 'a', 'kind': 'thumb', 'value': float('nan')}, 'from -1 to 1'),
    ({'id': 'a', 'kind': 'thumb', 'value': True}, 'from -1 to 1'),
    ({'id': 'a', 'kind': 'edit_kept', 'value': -1, 'after_s': 1}, 'from 0 to'),
    ({'id': 'a', 'kind': 'edit_kept', 'value': 1}, 'after_s must be a number'),
    ({'id': 'a', 'kind': 'tool_call', 'outcome': 'bad'}, 'outcome one of'),
    ({'id': 'a', 'kind': 'thumb', 'text': 'so'}, "goes with kind 'follow_up'"),
    ({'id': 'a', 'kind': 'thumb', 'valeu': 1}, 'valeu'),
  ],
)
def test_a_bad_event_is_refused_by_name(body, message):
  with pytest.raises(ValueError, match=message):
    events.parse(body, 0.0)


def test_a_token_is_of_its_secret_and_claim_alone(tmp_path):
  own = tokens.Tokens(tmp_path / 'a')
  other = tokens.Tokens(tmp_path / 'b')
  claim = tokens.Claim(episode='e', user='u', domain='d', arm='control')
  token = own.sign(claim)
  assert own.claim(token) == claim
  assert tokens.Tokens(tmp_path / 'a').claim(token) == claim
  richer = own.sign(dataclasses.replace(claim, arm='candidate'))
  mixed = f'{richer.rpartition(".")[0]}.{token.rpartition(".")[2]}'
  for forged in (other.sign(claim), mixed, token[:-1], 'x', '', 'é.é'):
    with pytest.raises(tokens.Forged):
      own.claim(forged)
  # A token of one purpose is none of another.
  with pytest.raises(tokens.Forged):
    own.withdrawing(token)
  # Nor is a pseudonym, which users get for any name they choose.
  named = own.pseudonym('u'), own.pseudonym(token.rpartition('.')[0])
  for check, forged in (
    (own.withdrawing, f'u.{named[0]}'),
    (own.claim, f'{token.rpartition(".")[0]}.{named[1]}'),
  ):
    with pytest.raises(tokens.Forged):
      check(forged)
  assert own.withdrawing(own.withdrawal('u')) == 'u'
  assert (tmp_path / 'a' / tokens.SECRET).stat().st_mode & 0o77 == 0


def test_a_damaged_secret_is_refused(tmp_path):
  (tmp_path / tokens.SECRET).write_bytes(b'short')
  with pytest.raises(ValueError, match='secret: not a key file'):
    tokens.Tokens(tmp_path)


def test_no_file_holds_the_name_of_a_user(folder):
  folder.answer(folder.open(user='ann.of.example'))
  paths = list(folder.episodes.folder.rglob('*'))
  assert paths and not any('ann.of' in str(p) for p in paths)
  whole = b''.join(p.read_bytes() for p in paths if p.is_file())
  assert b'ann.of' not in whole


def test_withdrawal_deletes_all_of_a_user_and_nothing_else(folder):
  gone = [folder.judged(user='ann') for _ in range(3)]
  kept = folder.judged(user='bob')
  user = folder.episodes.tokens.pseudonym('ann')
  assert folder.episodes.withdraw(user) == 3
  assert folder.episodes.withdraw(user) == 0
  assert folder.episodes.claims() == [kept]
  assert folder.episodes.read(gone[0]) is None
  names = {p.name for p in folder.episodes.folder.rglob('*')}
  assert not names & {user, *(c.episode for c in gone)}
  # What is still on its way finds nothing to write to.
  assert not folder.answer(gone[0])
  folder.now += 1
  assert folder.tell(gone[0], 'thumb', value=1.0) == events.UNKNOWN
  assert {p.name for p in folder.episodes.folder.rglob('*')} == names
  # The user may agree again.
  again = folder.judged(user='ann')
  assert folder.episodes.read(again) is not None


def test_an_answer_after_the_last_window_is_not_kept(folder):
  claim = folder.open()
  folder.answer(claim)
  folder.now += 101
  assert folder.episodes.ripe(folder.now) == [claim]
  assert not folder.answer(claim)
  assert len(folder.episodes.read(claim).windows) == 1


def test_ripe_episodes_come_oldest_first_and_old_ones_expire(folder):
  claims = []
  for _ in range(3):
    claims.append(folder.open())
    folder.answer(claims[-1])
    folder.now += 10
  folder.open()  # Never answered.
  folder.now += 75  # Of the third the windows are open.
  assert folder.episodes.ripe(folder.now) == claims[:1]
  folder.now += 100
  assert folder.episodes.ripe(folder.now) == claims
  assert folder.episodes.expire(1015.0) == 2
  assert folder.episodes.ripe(folder.now) == claims[2:]


def test_an_answer_that_extends_another_makes_one_window(folder):
  claim = folder.open()
  first = window((1, 2), (3, 4), version=3, logprob=-0.25)
  second = window((1, 2, 3, 4, 5), (6,), version=4, logprob=-0.75)
  folder.answer(claim, first)
  folder.answer(claim, second)
  (whole,) = folder.episodes.read(claim).windows
  np.testing.assert_array_equal(whole.tokens_T, [1, 2, 3, 4, 5, 6])
  np.testing.assert_array_equal(whole.loss_mask_T, [0, 0, 1, 1, 0, 1])
  np.testing.assert_array_equal(
    whole.logprobs_T, [0, 0, -0.25, -0.25, 0, -0.75]
  )
  np.testing.assert_array_equal(whole.policy_version_T, [3, 3, 3, 3, 4, 4])
  # Routes are of the pass that consumed a token last.
  np.testing.assert_array_equal(whole.consumed_version_T, [4] * 6)
  np.testing.assert_array_equal(whole.expert_ids_TMA, second.expert_ids_TMA)


@pytest.mark.parametrize(
  'second',
  [
    window((1, 9, 3, 4, 5), (6,)),  # other tokens
    window((1, 2), (3,)),  # no longer
    window((1, 2, 3, 4, 5), (6,), version=-1),  # older weights
    dataclasses.replace(window((1, 2, 3, 4, 5), (6,)), temperature=0.5),
  ],
)
def test_other_answers_are_windows_of_their_own(folder, second):
  claim = folder.open()
  folder.answer(claim, window((1, 2), (3, 4)))
  folder.answer(claim, second)
  assert len(folder.episodes.read(claim).windows) == 2


def test_what_is_read_is_what_was_recorded(folder):
  made = window(logprob=-1.25, version=2)
  claim = folder.open()
  folder.answer(claim, made, {2: 'weights'})
  read = folder.episodes.read(claim)
  assert read.policies == {2: 'weights'}
  for field in dataclasses.fields(records.Trajectory):
    np.testing.assert_array_equal(
      getattr(read.windows[0], field.name), getattr(made, field.name)
    )


def test_a_folder_keeps_its_windows(folder):
  again = episodes.Episodes(folder.episodes.folder)
  assert again.windows == WINDOWS
  with pytest.raises(ValueError, match='Name another folder'):
    episodes.Episodes(folder.episodes.folder, events.WindowOptions())
  with pytest.raises(ValueError, match='holds no recorded episodes'):
    episodes.Episodes(folder.episodes.folder / 'none')
