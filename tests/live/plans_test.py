"""Rewards, baselines, and plans in which nothing stands twice."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from composer_jax.live import grouping, options, plans, pricing
from composer_jax.rl import advantage
from composer_jax.tasks import judges, rubrics, scoring
from tests.live.conftest import window

PRICES = pricing.PriceOptions()
OPTIONS = options.LiveOptions(steps=2, least_steps=1, max_age=2)


class Model:
  """Gives one answer, or that of a function of the question; '' for none."""

  def __init__(self, choice, calls):
    self.choice, self.calls = choice, calls

  def answer(self, instructions, questions, record):
    self.calls.append(questions[0].choices)
    if not self.choice:
      raise judges.JudgeError('no answer')
    (question,) = questions
    is_text = isinstance(self.choice, str)
    choice = self.choice if is_text else self.choice(question)
    return {'mood': judges.Answer(choice=choice, reason='undo')}


def judge_of(choice='', calls=None):
  """Returns a judge of follow-ups that asks such a model."""
  rubric = rubrics.load(OPTIONS.judge.file)
  model = Model(choice, [] if calls is None else calls)
  return scoring.Scorer(rubric, model, name='m')


def said(folder, *events, **opened):
  claim = folder.open(**opened)
  folder.answer(claim)
  folder.now += 70
  start = folder.now
  for i, (kind, fields) in enumerate(events):
    # A tool says at once what it thinks.
    folder.now = (
      start - 65 if kind in ('tool_call', 'thumb', 'follow_up') else start
    )
    assert folder.tell(claim, kind, name=f'e{i}', **fields) == 'counted'
  folder.now = start
  return pricing.judged(folder.episodes.read(claim), PRICES).rollout


def test_the_reward_is_the_sum_of_its_terms(folder):
  rollout = said(
    folder,
    ('tool_call', dict(tool='edit')),
    ('tool_call', dict(outcome='invalid')),
    ('tool_call', dict(tool='run', outcome='failed')),
    ('follow_up', dict(value=-1.0)),
    ('thumb', dict(value=1.0)),
    ('edit_kept', dict(value=0.75, after_s=65)),
  )
  assert rollout.reward_terms == {
    'kept': 0.5, 'follow_up': -0.5, 'thumb': 0.5, 'invalid': -1.0,
    'failed': -0.1,
  }  # fmt: skip
  assert rollout.reward == pytest.approx(-0.6)
  assert rollout.tools == ('edit', '', 'run') and rollout.num_invalid == 1


def test_silence_is_a_status_and_no_reward(folder):
  silent = said(folder)
  used = said(folder, ('tool_call', dict(tool='edit')))
  for rollout in (silent, used):
    assert not rollout.is_judged and rollout.not_judged == 'no word of the user'
  # A broken call is a word, whatever the user says: it cannot be a way out.
  broken = said(folder, ('tool_call', dict(outcome='invalid')))
  assert broken.is_judged and broken.reward == -PRICES.invalid
  asked = said(folder, ('tool_call', dict(tool='ask')))
  assert asked.is_judged and asked.reward == -PRICES.asked

  # A refused edit beside the question is no way around its price.
  sham = dict(tool='edit', outcome='failed')
  both = said(folder, ('tool_call', sham), ('tool_call', dict(tool='ask')))
  assert both.reward_terms == {'failed': -0.1, 'asked': -PRICES.asked}


def test_only_seconds_beyond_the_free_ones_cost(folder):
  slow = dataclasses.replace(PRICES, slow=0.25, free_s=10.0)
  for seconds, cost in ((10.0, {}), (14.0, {'slow': -1.0})):
    claim = folder.open()
    folder.answer(claim, seconds=seconds)
    folder.tell(claim, 'thumb', value=1.0)
    known = folder.episodes.read(claim).events
    assert pricing.terms_of(known, slow) == {'thumb': 0.5, **cost}


def test_one_episode_does_not_own_a_batch(folder):
  """However many calls break, they cost what a few do."""
  broken = [('tool_call', dict(outcome='invalid'))] * 50
  refused = [('tool_call', dict(tool='run', outcome='failed'))] * 50
  rollout = said(folder, *broken, *refused)
  assert rollout.num_invalid == 50
  assert rollout.reward == pytest.approx(-3 * (PRICES.invalid + PRICES.failed))


def test_a_model_judges_follow_ups_and_its_failure_is_a_status(folder):
  claim = folder.open()
  folder.answer(claim)
  folder.tell(claim, 'follow_up', text='No! Undo that.')
  episode = folder.episodes.read(claim)

  judge = judge_of('dissatisfied')
  rollout = pricing.judged(episode, PRICES, judge).rollout
  assert rollout.reward == -0.5 and rollout.rubric == judge.identity

  for judge, reason in ((None, 'no model'), (judge_of(), 'no answer')):
    rollout = pricing.judged(episode, PRICES, judge).rollout
    assert not rollout.is_judged and reason in rollout.not_judged


def first(question):
  return question.choices[0]


def test_a_judge_of_follow_ups_is_asked_once_in_two_orders(folder, tmp_path):
  """Who goes by position alone says nothing; verdicts outlive a restart."""
  claim = folder.open()
  folder.answer(claim)
  folder.tell(claim, 'follow_up', text='No! Undo that.')
  folder.now += 200
  known, calls = plans.Plans(tmp_path / 'cycles'), []
  for _ in range(2):
    judge = judge_of(first, calls)
    judge.remember(tmp_path, reasons=False)
    for _ in range(3):
      assert draw(folder, known, 1, size=9, judge=judge) is None
  assert len(calls) == 2 and calls[0] == calls[1][::-1]
  kept = (tmp_path / scoring.JUDGEMENTS).read_text()
  assert judge.identity in kept and 'undo' not in kept.lower()
  plan = draw(folder, known, 1, size=1, judge=judge)
  assert plan.judge == judge.identity
  assert abs(plan.terms[claim.episode]['follow_up']) < PRICES.follow_up
  known.save(plan)
  plan = known.load(1)
  (group,), _ = plans.read_step(folder.episodes, plan, 0, OPTIONS)
  assert group.rollouts[0].rubric == judge.identity


def test_a_judge_of_follow_ups_is_calibrated_before_it_pays(
  tmp_path, monkeypatch
):
  made, texts = options.LiveOptions(), []
  assert made.open_judge(tmp_path) == (None, '')
  judge = dataclasses.replace(made.judge, url='http://x/v1', model='m')
  made = dataclasses.replace(made, judge=judge)
  lines = pathlib.Path(judge.calibration).read_text().splitlines()
  known = [json.loads(line) for line in lines]
  right = {row['turns'][0]: row['answers']['mood'] for row in known}
  praise = lambda question: question.choices[-1]

  class Sound:
    def answer(self, instructions, questions, record):
      texts.append(record)
      (choice,) = (c for text, c in right.items() if text in record)
      return {'mood': judges.Answer(choice=choice, reason='')}

  for model, message in (
    (Sound(), ''),
    (Model(praise, []), 'gives . of 10 known answers'),
    (Model('', []), 'does not answer'),
  ):
    monkeypatch.setattr(judges, 'open_judge', lambda *_, m=model: m)
    if message:
      with pytest.raises(ValueError, match=message):
        made.open_judge(tmp_path)
      continue
    scorer, line = made.open_judge(tmp_path)
    assert '10 of 10' in line and scorer.identity.endswith('x2')
    assert len(texts) > 2 * len(known)


def test_baselines_leave_the_episode_itself_out():
  """n / (n - 1) times the distance from the mean of the domain."""
  rewards = np.array([1.0, 0.0, 0.0, 4.0, 2.0, 7.0])
  domains = ['a', 'a', 'a', 'b', 'b', 'c']
  gained_N = rewards - grouping.baselines(domains, rewards)
  np.testing.assert_allclose(
    gained_N, [1.0, -0.5, -0.5, 2.0, -2.0, 7.0 - 7 / 5]
  )
  alone = rewards[:3]
  np.testing.assert_allclose(
    alone - grouping.baselines(['a'] * 3, alone), 1.5 * (alone - alone.mean())
  )
  assert grouping.baselines(['a'], [3.0]) == [3.0]  # It teaches nothing.
  # An unbiased baseline: it does not move with the episode's own reward.
  other = rewards.copy()
  other[0] = 100.0
  assert grouping.baselines(domains, other)[0] == 0.0


def made(folder, prompt, kept, user, domain='web'):
  claim = folder.judged(kept, made=window(prompt), user=user, domain=domain)
  episode = folder.episodes.read(claim)
  return pricing.judged(episode, PRICES)


def test_similar_prompts_of_different_users_make_a_group(folder):
  base = tuple(range(100, 120))
  near = (*base[:-1], 5)  # 16 of 18 runs of four tokens are in both.
  episodes = [
    made(folder, base, True, 'a'),
    made(folder, near, False, 'b'),
    made(folder, base, True, 'a'),  # The same user has one place.
    made(folder, base, True, 'c', domain='data'),
    made(folder, base[::-1], True, 'd'),
    made(folder, base, True, 'e'),
  ]
  groups = grouping.similar(episodes, 0.8, 8)
  assert groups == [[0, 1, 5], [2], [3], [4]]
  assert grouping.similar(episodes, 0.95, 8)[0] == [0, 5]
  assert max(map(len, grouping.similar(episodes, 0.8, 2))) == 2


def test_groups_have_their_mean_and_single_episodes_their_baseline(folder):
  base = tuple(range(100, 120))
  pair = [made(folder, base, k, u) for k, u in ((True, 'a'), (False, 'b'))]
  group = grouping.group_of(0, pair, 'live/x')
  single = grouping.group_of(1, pair[:1], 'live/y')
  compare = grouping.advantages({1: 0.25})
  of = lambda g: np.array([r.reward for r in g.rollouts])
  np.testing.assert_array_equal(
    compare(group, of(group)), advantage.group_advantages(group, of(group))
  )
  np.testing.assert_array_equal(compare(single, of(single)), [0.75])
  assert group.policies == {0: 'a' * 8}


def draw(
  folder, known, cycle, base=0, size=2, fault_of=lambda group: '', judge=None
):
  return plans.draw(
    folder.episodes,
    known,
    OPTIONS,
    cycle=cycle,
    base=base,
    size=size,
    now=folder.now,
    fault_of=fault_of,
    judge=judge,
  )


def test_no_episode_is_in_two_plans(folder, tmp_path):
  known = plans.Plans(tmp_path / 'cycles')
  all_claims = [folder.judged(i % 2 == 0, user=f'u{i}') for i in range(11)]
  folder.now += 200
  seen = []
  for cycle in range(1, 5):
    plan = draw(folder, known, cycle)
    if plan is None:
      break
    known.save(plan)
    assert known.load(cycle) == plan
    assert all(sum(map(len, step)) == 2 for step in plan.steps)
    seen += [name for step in plan.steps for group in step for name in group]
  # Two cycles of two steps of two, and one of a step: one episode waits.
  assert cycle == 4 and len(seen) == len(set(seen)) == 10
  assert seen == [c.episode for c in all_claims[:10]]
  again = dataclasses.replace(known.load(1), cycle=9)
  with pytest.raises(ValueError, match='nothing is trained twice'):
    known.save(again)


def test_withdrawn_episodes_are_in_no_later_batch(folder, tmp_path):
  known = plans.Plans(tmp_path / 'cycles')
  for i in range(4):
    folder.judged(i == 0, user=f'u{i}', domain='web' if i < 3 else 'data')
  folder.now += 200
  plan = draw(folder, known, 1)
  known.save(plan)
  folder.open()  # Others come meanwhile.
  whole, baselines = plans.read_step(folder.episodes, plan, 0, OPTIONS)
  assert len(whole) == 1 and len(whole[0].rollouts) == 2
  withdrawn = folder.episodes.tokens.pseudonym('u0')
  folder.episodes.withdraw(withdrawn)
  left, baselines = plans.read_step(folder.episodes, plan, 0, OPTIONS)
  assert len(left[0].rollouts) == 1
  # Its reward is in no baseline either: all others were undone.
  assert baselines == {0: -1.0}
  assert draw(folder, known, 2) is None
  for i in range(1, 4):
    folder.episodes.withdraw(folder.episodes.tokens.pseudonym(f'u{i}'))
  assert plans.read_step(folder.episodes, plan, 0, OPTIONS)[0] == []


def test_what_teaches_nothing_is_left_out_with_its_reason(folder, tmp_path):
  known = plans.Plans(tmp_path / 'cycles')
  good = [
    folder.judged(made=window(version=5), policies={5: 'x'}) for _ in range(2)
  ]
  old = folder.judged(made=window(version=2), policies={2: 'x'})
  void = folder.judged(made=window(version=5), policies={5: 'rejected'})
  # As old as may be.
  good.append(folder.judged(made=window(version=3), policies={3: 'x'}))
  silent = folder.open()
  folder.answer(silent, window(version=5), {5: 'x'})
  folder.now += 200
  fault_of = lambda group: 'void' * ('rejected' in group.policies.values())
  plan = draw(folder, known, 1, base=5, size=3, fault_of=fault_of)
  assert set(plan.terms) == {c.episode for c in good}
  assert plan.left_out == {
    plans.OLD: (old.episode,),
    plans.VOID: (void.episode,),
    plans.UNJUDGED: (silent.episode,),
  }
  assert plan.satisfied == 1.0
  known.save(plan)
  assert known.spent() == {c.episode for c in (*good, old, void, silent)}


def test_an_episode_whose_judge_is_away_waits_for_it(folder, tmp_path):
  known = plans.Plans(tmp_path / 'cycles')
  waiting = folder.open()
  folder.answer(waiting)
  folder.tell(waiting, 'follow_up', text='Thanks!')
  others = [folder.judged(user=f'u{i}') for i in range(2)]
  folder.now += 200

  first = draw(folder, known, 1, judge=judge_of())
  known.save(first)
  assert first.spent == {c.episode for c in others}
  for i in range(2, 4):
    folder.judged(user=f'u{i}')
  folder.now += 200
  assert (
    waiting.episode in draw(folder, known, 2, judge=judge_of('satisfied')).spent
  )


def test_settled_rewards_do_not_change_with_prices(folder, tmp_path):
  known = plans.Plans(tmp_path / 'cycles')
  folder.judged(True, user='a')
  folder.judged(False, user='b')
  folder.now += 200
  plan = draw(folder, known, 1)
  dearer = dataclasses.replace(
    OPTIONS, prices=pricing.PriceOptions(version=1, kept=9.0)
  )
  (group,), _ = plans.read_step(folder.episodes, plan, 0, dearer)
  assert sorted(r.reward for r in group.rollouts) == [-1.0, 1.0]


def test_options_name_what_is_wrong():
  with pytest.raises(ValueError, match=r'least_steps must be at most steps'):
    options.LiveOptions(steps=1, least_steps=2)
  with pytest.raises(ValueError, match='set both, or neither'):
    options.LiveOptions(judge=scoring.RubricOptions(file='x', url='y'))
  with pytest.raises(ValueError, match='invalid'):
    pricing.PriceOptions(invalid=-1.0)
