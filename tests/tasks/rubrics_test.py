"""Rubrics are read, refused by name and summed by hand."""

import importlib
import json
import shutil
import sys

import pytest

from composer_jax.tasks import rubrics

TOML = """
[[criteria]]
name = "passes"
text = "Do the tests pass?"
rule = "passed"
gate = true
weight = 0

[[criteria]]
name = "style"
text = "Is it tidy?"
choices = ["no", "some", "all"]
weight = 3

[[criteria]]
name = "brief"
text = "Is it short?"
"""
# A file of verifiers' own form.
PLAIN = {'criteria': [{'name': 'a', 'text': 'Is it?', 'weight': 2.0}]}


@pytest.fixture
def write(tmp_path):
  def write(content, name='rubric.toml'):
    path = tmp_path / name
    path.write_text(content)
    return str(path)

  return write


def test_a_score_is_the_weighted_mean_behind_gates(write):
  rubric = rubrics.load(write(TOML))
  _, style, _ = rubric.criteria
  assert [style.score(c) for c in style.choices] == [0, 0.5, 1]
  scores = {'passes': 1.0, 'style': 0.5, 'brief': 1.0}
  assert rubric.score(scores) == (3 * 0.5 + 1) / 4
  assert rubric.score({**scores, 'passes': 0.0}) == 0
  # Without its ranking, a single episode is scored by the rest.
  assert rubric.score({'passes': 1.0, 'style': 0.5}) == 0.5
  assert rubric.score({'passes': 1.0}) == 0
  assert [c.name for c in rubric.asked(relative=False)] == ['style', 'brief']


def test_the_identity_has_the_code_of_own_rules(write, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  toml = '[[criteria]]\nname = "a"\ntext = "A?"\nrule = "NAME:judge"\n'
  seen = set()
  for choice in ('yes', 'no', 'yes'):
    write(f'def judge(episode):\n  return {choice!r}\n', 'my_own_rule.py')
    monkeypatch.delitem(sys.modules, 'my_own_rule', raising=False)
    shutil.rmtree(tmp_path / '__pycache__', ignore_errors=True)
    importlib.invalidate_caches()
    seen.add(rubrics.load(write(toml.replace('NAME', 'my_own_rule'))).identity)
  assert len(seen) == 2
  with pytest.raises(ValueError, match='cannot be used: A rule must be one of'):
    rubrics.load(write(toml.replace('NAME', 'no_such_module')))


def test_the_identity_is_that_of_the_criteria(write):
  rubric = rubrics.load(write(TOML))
  assert rubrics.load(write('# seen\n' + TOML)).identity == rubric.identity
  other = rubrics.load(write(TOML.replace('weight = 3', 'weight = 4')))
  assert other.identity != rubric.identity
  plain = rubrics.load(write(json.dumps(PLAIN), 'rubric.json'))
  alone = rubrics.load(write(json.dumps(PLAIN['criteria']), 'list.json'))
  assert plain == alone and plain.criteria[0].choices == ('no', 'yes')


@pytest.mark.parametrize(
  'entry, message',
  [
    ({'name': 'A b'}, "name must be like no_dead_code; got 'A b'"),
    ({'text': ' '}, "text must be a question; got ' '"),
    ({'weight': -1}, 'weight must be a number of at least 0'),
    ({'weight': float('nan')}, 'weight must be a number'),
    ({'weight': 0}, r'the sum of its weights \(0\) must be positive'),
    ({'choices': ['yes']}, 'choices must list 2 or more different texts'),
    ({'choices': ['yes', 'yes']}, 'different texts'),
    ({'choices': 'no'}, 'different texts'),
    ({'choices': 3}, 'different texts'),
    ({'gates': True}, 'no .*gates.*gate'),
    ({'relative': True, 'gate': True}, 'can have no rule and be no gate'),
  ],
)
def test_an_impossible_criterion_is_refused(write, entry, message):
  row = {'name': 'a', 'text': 'Is it?', **entry}
  with pytest.raises(ValueError, match=message):
    rubrics.load(write(json.dumps([row]), 'rubric.json'))


@pytest.mark.parametrize(
  'content, message',
  [
    ('', 'must list criteria'),
    ('criteria = 3', 'must list criteria'),
    ('criteria = [3]', 'must be a table, not 3'),
    ('x =', 'cannot be used'),
    ('[[criteria]]\nname = "a"', "missing.*'text'"),
    (TOML + TOML, 'share a name'),
  ],
)
def test_a_file_that_is_no_rubric_is_refused(write, content, message):
  with pytest.raises(ValueError, match=message):
    rubrics.load(write(content))
  with pytest.raises(ValueError, match="'none.toml' cannot be used"):
    rubrics.load('none.toml')
  with pytest.raises(ValueError, match='more than 1048576 bytes'):
    rubrics.load(write('#' * (1 << 20 | 1)))
