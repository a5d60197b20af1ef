"""What kills, full disks, returning users and late withdrawals may not do."""

import os
import shutil
import types
from typing import Any

import numpy as np
import pytest

from composer_jax.core import files
from composer_jax.live import episodes, learning, options, plans, trial
from composer_jax.rl import update
from tests.live.conftest import window
from tests.live.plans_test import judge_of


def test_users_stand_in_the_order_of_their_first_rows():
  """Whoever comes again changes nothing of what was there."""
  rows = [{'user': u, 'number': i} for i, u in enumerate('abcab')]
  for count in range(len(rows) + 1):
    firsts = learning._first_of_users(rows[:count])
    assert firsts == rows[: min(count, 3)]


def test_a_killed_withdrawal_is_ended_by_the_next_one(folder):
  class Killed(BaseException):
    pass

  def die(*_, **__):
    raise Killed

  made = folder.episodes
  left = lambda: list(made.folder.glob('withdrawn.*'))
  for end in (
    lambda: made.withdraw('nobody'),
    lambda: episodes.Episodes(made.folder),
  ):
    claim = folder.judged()
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(shutil, 'rmtree', die)
      with pytest.raises(Killed):
        made.withdraw(claim.user)
    assert left() and made.read(claim) is None
    end()
    assert not left()


def test_what_is_withdrawn_while_steps_train_is_in_no_later_one(
  folder, tmp_path, monkeypatch
):
  for i in range(8):
    folder.judged(i < 2, user=f'u{i}')
  folder.now += 200
  live = options.LiveOptions(steps=4)
  claims = {c.episode: c for c in folder.episodes.claims()}
  plan = plans.draw(
    folder.episodes,
    plans.Plans(tmp_path / 'cycles'),
    live,
    cycle=1,
    base=3,
    size=2,
    now=folder.now,
    fault_of=lambda group: '',
  )
  (pair,), emptied, shrunk = plan.steps[0], plan.steps[1], plan.steps[3]
  assert len(pair) == 2
  gone = [*(n for group in emptied for n in group), shrunk[0][0]]
  seen, written, published = [], [], []

  def learn(state, groups, *_, compare, **__):
    if not seen:
      for name in gone:
        folder.episodes.withdraw(claims[name].user)
    seen.append(sum(len(g.rollouts) for g in groups))
    for group in groups:
      if len(group.rollouts) == 1:
        # The mean of the others that are left, of which two were satisfied.
        others = [
          sum(t.values())
          for n, t in plan.terms.items()
          if n not in (*gone, shrunk[0][1])
        ]
        gained = compare(group, np.array([group.rollouts[0].reward]))
        mean = sum(others) / len(others)
        assert gained == pytest.approx(group.rollouts[0].reward - mean)
    return types.SimpleNamespace(step=state.step + 1), {'loss': 0.0}

  monkeypatch.setattr(update, 'update', learn)
  learner = object.__new__(learning.Learner)
  vars(learner).update(
    _episodes=folder.episodes,
    _options=live,
    _functions=None,
    _reference=None,
    _state=types.SimpleNamespace(step=3),
    _job=types.SimpleNamespace(
      spec=types.SimpleNamespace(
        update_options=lambda: None, batch_shape=lambda: None
      )
    ),
    _writer=types.SimpleNamespace(
      truncate=lambda *_: None,
      write=lambda stage, step, **_: written.append(step),
    ),
    _candidates=types.SimpleNamespace(
      publish=lambda state, version: published.append((state.step, version)),
      wait=lambda: None,
    ),
  )
  learner._train(plan)
  assert seen == [2, 2, 1] and written == [4, 5, 6]
  assert published == [(6, 6)] and learner.version == 6


def test_a_cycle_that_was_killed_once_promoted_is_not_trained_again(
  folder, tmp_path
):
  known = plans.Plans(tmp_path / 'cycles')
  plan = plans.CyclePlan(
    cycle=1,
    base=3,
    steps=((('a',),),),
    terms={'a': {'kept': 1.0}},
    left_out={},
    satisfied=1.0,
  )
  known.save(plan)
  learner = object.__new__(learning.Learner)
  vars(learner).update(  # All that it needs: nothing to train or play with.
    _episodes=folder.episodes,
    _plans=known,
    _state=types.SimpleNamespace(step=4),
    _writer=types.SimpleNamespace(write=lambda *_, **__: None),
    _ports=types.SimpleNamespace(say=lambda text: None),
  )
  row = learner.cycle(1)
  assert (row['decision'], row['version']) == (trial.PROMOTE, 4)
  assert row['reason'] == 'resumed' and learner.cycle(1) == row


def test_answers_of_other_weights_say_nothing_of_a_trial(folder):
  def judged(user, version=4, identity='right', name='now'):
    made, of_trial = window(version=version), dict(arm='candidate', trial=name)
    return folder.judged(
      made=made, policies={version: identity}, user=user, **of_trial
    )

  right = judged('a')
  judged('b', version=3)
  judged('c', identity='rolled back')  # Under the same number.
  judged('d', name='before')
  folder.now += 200
  fault_of = lambda group: 'void' * ('rolled back' in group.policies.values())
  learner = object.__new__(learning.Learner)
  vars(learner).update(
    _episodes=folder.episodes,
    _options=options.LiveOptions(),
    _ports=types.SimpleNamespace(now=lambda: folder.now, judge=None),
    _candidates=types.SimpleNamespace(fault_of=fault_of),
  )
  versions = {trial.CONTROL: 3, trial.CANDIDATE: 4}
  rows = learner._outcomes('now', versions, {})
  assert [row['user'] for row in rows] == [right.user]

  # An episode whose judge fails at one look counts at a later one.
  waits = folder.open(user='e', arm='candidate', trial='now')
  folder.answer(waits, window(version=4), {4: 'right'})
  folder.tell(waits, 'follow_up', text='Thanks!')
  folder.now += 200
  known: dict[str, Any] = {}
  for choice, users in (('', [right]), ('satisfied', [right, waits])):
    learner._ports.judge = judge_of(choice)
    rows = learner._outcomes('now', versions, known)
    assert [row['user'] for row in rows] == [claim.user for claim in users]


def test_a_learner_that_starts_leaves_alone_what_servers_write(
  folder, monkeypatch
):
  """It sweeps its workdir, where the folder of episodes may lie."""
  replace = os.replace

  def swept(*paths):
    files.sweep(folder.episodes.folder)
    replace(*paths)

  monkeypatch.setattr(os, 'replace', swept)
  claim = folder.open()
  assert folder.answer(claim)
  assert len(folder.episodes.read(claim).windows) == 1


def test_an_event_that_a_kill_tore_is_as_if_it_never_came(folder):
  claim = folder.open()
  folder.answer(claim)
  (path,) = folder.episodes.folder.rglob('events.jsonl')
  with path.open('a') as file:
    file.write('{"id": "torn", "ki')
  assert len(folder.episodes.read(claim).events) == 1
  assert folder.tell(claim, 'thumb', value=1.0) == 'counted'
  assert [e.kind for e in folder.episodes.read(claim).events][1:] == ['thumb']


def test_two_weights_of_one_version_are_the_identity_of_none(folder):
  claim = folder.open()
  for identity in ('a' * 8, 'b' * 8, 'a' * 8):
    folder.answer(claim, policies={0: identity})
  assert folder.episodes.read(claim).policies == {0: episodes.TWO}


def test_a_folder_of_episodes_has_one_learner(folder):
  nothing: Any = None  # The lock comes first.
  with (
    files.alone(folder.episodes.folder),
    pytest.raises(ValueError, match='Another process'),
  ):
    learning.Learner(nothing, folder.episodes, nothing, nothing)
