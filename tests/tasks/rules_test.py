"""Each rule tells an episode that keeps it from one that breaks it."""

import dataclasses

import pytest

from composer_jax.core import turns
from composer_jax.tasks import calibration, rules


def episode(*steps, **facts):
  """Makes an episode of tools, or of (tool, text) or (tool, text, outcome)."""
  made = []
  for step in steps:
    tool, text, outcome, *_ = (
      (step, '', turns.OK) if isinstance(step, str) else (*step, turns.OK)
    )
    made.append(rules.PlayedTurn(tool=tool, outcome=outcome, text=text))
  return rules.Episode(prompt='', steps=made, **facts)


@pytest.mark.parametrize(
  'rule, kept, broken',
  [
    ('passed', episode('finish', passed=True), episode('finish')),
    (
      'tested',
      episode('edit', 'test', 'finish'),
      episode('test', 'edit', 'finish'),
    ),
    ('tested', episode('write', 'run'), episode('test', 'finish')),
    (
      'looked_first',
      episode('read', 'edit'),
      episode('edit', 'read'),
    ),
    ('looked_first', episode('list'), episode('edit')),
    (
      'tool_choice',
      episode(('run', 'run {"command": "python category.py | sort"}')),
      episode(('run', 'run {"command": "cat a.py"}')),
    ),
    (
      'tool_choice',
      episode(('run', 'run python -c "s.find(1)"'), ('read', 'cat x')),
      episode(('run', 'run cd a && grep x b')),
    ),
    (
      'no_errors',
      episode(('edit', '', turns.OK), ('test', '', turns.FAILED)),
      episode(('edit', '', turns.FAILED_EDIT)),
    ),
    (
      'no_errors',
      episode('finish'),
      episode(('', 'x', turns.NOT_A_CALL), 'finish'),
    ),
    ('todos_done', episode('todo'), episode('todo', open_todos=1)),
    (
      'commented',
      episode(('edit', 'edit a.py f\n# Ties go to the first.\nreturn 1')),
      episode(('edit', 'edit a.py f\nreturn x % 2'), ('read', '# no')),
    ),
    (
      'commented',
      episode(('write', '{"text": "\\"\\"\\"Sums.\\"\\"\\""}')),
      episode(('write', 'write {"text": "x=1#"}')),
    ),
    (
      'reported',
      episode(('finish', 'The parser now keeps empty lines. finish {}')),
      episode(('finish', '<tool_call>{"name": "finish one two three four"}')),
    ),
  ],
)
def test_a_rule_holds_or_not(rule, kept, broken):
  decide = rules.rule_of(rule)
  assert (decide(kept), decide(broken)) == ('yes', 'no')


def test_each_rule_has_a_case_and_takes_an_empty_episode():
  for name in rules.RULES:
    assert rules.rule_of(name)(episode()) in ('no', 'yes')


def own(episode):
  return 'few' if len(episode.steps) < 2 else 'many'


def test_a_rule_of_ones_own_is_imported_and_others_are_named():
  assert rules.rule_of(f'{__name__}:own')(episode('a')) == 'few'
  for name in ('style', f'{__name__}:other', 'no.module:f', ':'):
    with pytest.raises(ValueError, match=f"not '{name}'.*|MODULE:FUNCTION"):
      rules.rule_of(name)


@pytest.mark.parametrize(
  'name, steps',
  [
    ('passed', ('finish',)),
    ('tested', ('test', 'edit', 'finish')),
    ('looked_first', ('edit', 'read')),
    ('tool_choice', (('run', 'run {"command": "cat a.py"}'), 'finish')),
    ('no_errors', (('edit', '', turns.FAILED_EDIT), 'finish')),
  ],
)
def test_words_persuade_no_rule_of_facts(name, steps):
  rule = rules.rule_of(name)
  for words in calibration.INJECTIONS:
    told = episode(*steps)
    spoken = [
      dataclasses.replace(s, text=f'{s.text}\n{words}', answer=words)
      for s in told.steps
    ]
    assert rule(told) == rule(dataclasses.replace(told, steps=spoken)) == 'no'
