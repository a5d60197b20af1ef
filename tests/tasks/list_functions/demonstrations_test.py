"""Laws of the scripted policy: flawless is perfect, each knob works."""

import dataclasses
import random
import re

import numpy as np
import pytest

from composer_jax.agent import episode
from composer_jax.tasks import source
from composer_jax.tasks.list_functions import (
  compositions,
  demonstrations,
  environment,
  family,
  runners,
)
from composer_jax.text import tokenizer as tokenizer_lib
from composer_jax.text import tool_calls

COUNT = 60
OPTIONS = episode.EpisodeOptions(
  max_tokens=4096, max_turns=16, max_call_tokens=256
)


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train(['return sum(v for v in values)'], 280)


def _rollouts(tokenizer, count=COUNT, seed=0, **knobs):
  noise = demonstrations.Noise(**knobs)
  return list(
    demonstrations.transcripts(
      tokenizer, seed=seed, count=count, noise=noise, options=OPTIONS
    )
  )


def test_flawless_transcripts_are_perfect(tokenizer):
  assert demonstrations.Noise() == demonstrations.FLAWLESS
  rollouts = _rollouts(tokenizer)
  for rollout in rollouts:
    assert rollout.tools == ('read', 'edit', 'test', 'finish')
    assert rollout.reward == 1.0
  described = demonstrations.describe(rollouts, tokenizer)
  tokens = described.pop('tokens')
  assert tokens == np.mean([len(r.trajectories[0]) for r in rollouts])
  assert described == {
    'turns': 4.0,
    'invalid_calls': 0.0,
    'wrong_edits': 0.0,
    'tested': 1.0,
    'finished': 1.0,
    'passed': 1.0,
  }


NEVER_RIGHT = {'wrong_edits': 1.0, 'passed': 0.0}


@pytest.mark.parametrize(
  'knobs, expected',
  [
    ({'wrong_tool': 1.0}, {'invalid_calls': 1.0, 'finished': 0.0}),
    ({'wrong_edit': 1.0, 'give_up': 1.0}, NEVER_RIGHT | {'finished': 1.0}),
    ({'broken_edit': 1.0}, NEVER_RIGHT | {'tested': 0.0}),
    # The calls are read, an edit that does not parse, finish.
    ({'broken_edit': 1.0, 'give_up': 1.0}, {'turns': 3.0, 'finished': 1.0}),
    ({'skip_test': 1.0}, {'tested': 0.0, 'passed': 1.0, 'turns': 3.0}),
    ({'cut_short': 1.0}, {'invalid_calls': 0.0, 'finished': 1.0}),
    ({'cut_short': 1.0, 'broken_edit': 1.0}, {'finished': 1.0}),
  ],
)
def test_each_knob_has_its_effect(tokenizer, knobs, expected):
  described = demonstrations.describe(_rollouts(tokenizer, **knobs), tokenizer)
  assert {k: described[k] for k in expected} == expected


def test_an_episode_that_is_cut_short_has_two_to_five_calls(tokenizer):
  rollouts = _rollouts(tokenizer, cut_short=1.0, broken_edit=1.0)
  assert {r.num_turns for r in rollouts} == {2, 3, 4, 5}


def test_a_failed_test_leads_to_a_repair_unless_given_up(tokenizer):
  repaired = _rollouts(tokenizer, wrong_edit=0.5, give_up=0.0)
  given_up = _rollouts(tokenizer, wrong_edit=0.5, give_up=1.0)
  rates = [
    demonstrations.describe(r, tokenizer)['passed']
    for r in (repaired, given_up)
  ]
  assert rates[0] > 0.85
  assert 0.3 < rates[1] < 0.7
  assert any(r.tools.count('edit') > 1 for r in repaired)
  assert all(r.tools.count('edit') == 1 for r in given_up)


def test_rates_follow_the_knobs(tokenizer):
  rollouts = _rollouts(tokenizer, count=200, wrong_tool=0.2)
  described = demonstrations.describe(rollouts, tokenizer)
  calls = described['turns'] * len(rollouts)
  # Three standard deviations of a share of that many independent calls.
  assert abs(described['invalid_calls'] - 0.2) < 3 * np.sqrt(0.16 / calls)
  assert described['wrong_edits'] == 0.0


def test_transcripts_are_those_of_their_seed(tokenizer):
  knobs = {'wrong_tool': 0.2, 'wrong_edit': 0.3}
  once, again, other = (
    _rollouts(tokenizer, count=8, seed=s, **knobs) for s in (1, 1, 2)
  )
  tokens = [
    [r.trajectories[0].tokens_T.tolist() for r in rollouts]
    for rollouts in (once, again, other)
  ]
  assert tokens[0] == tokens[1]
  assert tokens[0] != tokens[2]
  fewer = _rollouts(tokenizer, count=3, seed=1, **knobs)
  assert [r.trajectories[0].tokens_T.tolist() for r in fewer] == tokens[0][:3]


def test_no_demonstration_writes_or_shows_a_held_out_body(tokenizer):
  held_out = {
    source.normal_body(c.body('a', 'v'), 'a')
    for c in compositions.everything()
    if c.held_out
  }
  seen = 0
  for rollout in _rollouts(tokenizer, count=100, wrong_edit=0.7):
    task = family.from_id(rollout.task_id)
    assert not task.held_out
    argument, _ = family.names_of(task)
    for turn in episode.turns(rollout, tokenizer):
      if turn['role'] == 'call' and turn['text'].startswith('edit'):
        body = tool_calls.parse(turn['text']).payload
        assert source.normal_body(body, argument) not in held_out
        seen += 1
      for line in turn['text'].split('\n'):
        if names := re.search(r'return .* in (\w+)', line):
          assert source.normal_body(line, names[1]) not in held_out
  assert seen >= 100


def test_loss_is_on_the_calls_and_nothing_else(tokenizer):
  for rollout in _rollouts(tokenizer, count=5, wrong_tool=0.3):
    (trajectory,) = rollout.trajectories
    written = trajectory.tokens_T[trajectory.loss_mask_T]
    calls = [
      np.append(tokenizer.encode(turn['text']), tokenizer.END)
      for turn in episode.turns(rollout, tokenizer)
      if turn['role'] == 'call'
    ]
    np.testing.assert_array_equal(written, np.concatenate(calls))


@pytest.mark.parametrize('split', family.SPLITS)
def test_a_flawless_policy_solves_the_tasks_of_every_split(tokenizer, split):
  for index in range(5):
    task = family.generate(index, split)
    rollout = episode.run(
      environment.FunctionEnvironment(task, runners.TrustedRunner()),
      demonstrations.ScriptedPolicy(
        task, tokenizer, demonstrations.FLAWLESS, random.Random(0)
      ),
      tokenizer,
      OPTIONS,
      group=0,
      member=0,
      seed=0,
    )
    assert rollout.verdict.passed


def test_an_edit_is_right_if_function_and_body_are():
  task = family.generate(0, 'train')
  argument, variable = family.names_of(task)
  edit = f'edit {task.path} {task.function}\n'
  other = re.sub(rf'\b{variable}\b', 'other', task.reference)
  for call, is_right in (
    (edit + task.reference, True),
    (edit + other, True),
    (edit + re.sub(rf'\b{argument}\b', 'other', task.reference), False),
    (edit + 'return 0', False),
    (edit + 'return (', False),
    (f'edit {task.path} other\n{task.reference}', False),
    (f'edit other.py {task.function}\n{task.reference}', False),
    ('test', False),
    ('', False),
  ):
    assert demonstrations.is_right_edit(task, call) == is_right, call


def test_a_knob_that_is_no_probability_is_refused():
  with pytest.raises(ValueError, match=r'Noise\.wrong_edit must .* got 1\.5'):
    dataclasses.replace(demonstrations.FLAWLESS, wrong_edit=1.5)
