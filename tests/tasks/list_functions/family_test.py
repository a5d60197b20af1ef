"""Laws of the list_functions family: the splits, the examples, the ids."""

import ast
import collections
import hashlib
import keyword
import os
import random
import re
import subprocess
import sys

import pytest

from composer_jax.tasks import source
from composer_jax.tasks.list_functions import (
  compositions,
  environment,
  family,
  names,
  runners,
)

NUM = 150


@pytest.fixture(scope='module')
def tasks():
  return {
    split: [family.generate(i, split) for i in range(NUM)]
    for split in family.SPLITS
  }


def _text(task):
  return task.files[f'{task.package}/{task.path}']


def _bodies_in(task):
  """Returns the normal forms of all functions in the task's files."""
  tree = source.parse(_text(task))
  return {source.normal_form(node) for node in tree.body}


def test_a_task_is_the_same_for_the_same_arguments(tasks):
  for split, generated in tasks.items():
    for index in (0, 17, NUM - 1):
      assert family.generate(index, split) == generated[index]
      task_id = generated[index].task_id
      assert family.from_id(task_id) == generated[index]
  assert family.generate(0, 'train', 1) != tasks['train'][0]


_DIGEST = """
import hashlib
from composer_jax.tasks.list_functions import family
tasks = [family.generate(i, s) for s in family.SPLITS for i in range(12)]
print(hashlib.sha256(repr(tasks).encode()).hexdigest())
"""


def test_splits_are_the_same_in_every_process_and_on_every_machine(tasks):
  chosen = [t for s in family.SPLITS for t in tasks[s][:12]]
  here = hashlib.sha256(repr(chosen).encode()).hexdigest()
  for seed in ('1', '2'):
    printed = subprocess.run(
      [sys.executable, '-c', _DIGEST],
      env={**os.environ, 'PYTHONHASHSEED': seed},
      capture_output=True,
      text=True,
      check=True,
    )
    assert printed.stdout.strip() == here
  # What every machine has; it changes with the tasks.
  assert here[:16] == 'a8e29cea1132d34e'


def _docstrings(task):
  return [node.body[0].value.value for node in source.parse(_text(task)).body]


def test_the_prompt_and_the_docstring_say_what_to_do(tasks):
  for task in sum(tasks.values(), []):
    # After a space, where a tokenizer gives a name the pieces of code.
    for name in (task.function, task.path):
      assert f' {name}' in task.prompt
    composition = family.composition_of(task)
    argument, variable = family.names_of(task)
    assert task.reference == composition.body(argument, variable)
    function = source.find(source.parse(_text(task)), task.function)
    assert function is not None
    # That a description fits no other function is a law of compositions.
    constants = {composition.map_constant, composition.filter_constant}
    words = function.body[0].value.value
    assert set(map(int, re.findall(r'\b\d\b', words))) == constants - {None}
    assert re.search(rf'\b{argument}\b', words)


def stems_of(name):
  """Returns the stems of a name, in lower case."""
  return [s.lower() for s in re.findall('[A-Z]?[a-z]+', name)]


def _names(task):
  """Returns every name of a task."""
  found = set(task.module.split('.'))
  for node in ast.walk(source.parse(_text(task))):
    if isinstance(node, ast.FunctionDef):
      found |= {node.name, *(a.arg for a in node.args.args)}
    elif isinstance(node, ast.comprehension):
      found.add(node.target.id)
  return found | {family.names_of(task)[1]}


def _stems(task):
  return {stem for name in _names(task) for stem in stems_of(name)}


def _unseen_wordings(task):
  """Returns the held-out wordings in a task's prompt and docstrings."""
  last = [family.PROMPTS[-1].format(function='F', path='P')]
  last += [compositions.NOUN_SENTENCES[-1], compositions.ORDER_SENTENCES[-1]]
  for table in (
    compositions.AGGREGATES, compositions.MAPS, compositions.FILTERS
  ):  # fmt: skip
    for component in table.values():
      last += [component.nouns[-1], *component.orders[-1:]]
  prompt = re.sub(rf'\b{task.function}\b', 'F', task.prompt)
  texts = [*_docstrings(task), prompt.replace(task.path, 'P')]
  return {
    wording
    for wording in last
    for text in texts
    if re.search(
      r'\b.+'.join(
        re.escape(piece.strip())
        for piece in re.split(r'\{\w\}|\b[FP]\b', wording)
        if piece.strip(' .')
      )
      + r'(?=\W|$)',
      text,
    )
  }


def test_each_axis_has_what_training_lacks_and_nothing_else(tasks):
  seen = set().union(*map(_stems, tasks['train']))
  assert len(seen) > 900
  for split, generated in tasks.items():
    unseen = family.unseen_of(split)
    for task in generated:
      composition = family.composition_of(task)
      assert composition.held_out == ('compositions' in unseen)
      stems = _stems(task)
      if 'names' in unseen:
        assert all(map(names.is_unseen, stems)) and not stems & seen
      else:
        assert not any(map(names.is_unseen, stems))
      assert bool(_unseen_wordings(task)) == ('wordings' in unseen), task
      assert task.held_out == bool(unseen) == (split != 'train')
      assert task.task_id.startswith(f'list_functions/{split}/')


def test_names_come_from_large_sets_and_differ_within_a_task(tasks):
  for kind in ('package', 'module', 'function', 'argument', 'variable'):
    draw = random.Random(0)
    drawn = [
      names.draw_name(kind, draw, unseen=unseen, taken=set())
      for unseen in (False, True)
      for _ in range(2000)
    ]
    # Of variables, half have a single letter.
    assert len(set(drawn)) > (1200 if kind == 'variable' else 2000), kind
    assert all(name.isidentifier() for name in drawn)
    stems = {s for n in drawn for s in stems_of(n)}
    assert not names.RESERVED & stems
  for task in tasks['train']:
    functions = source.parse(_text(task)).body
    assert 1 <= len(functions) <= 3
    assert len(_names(task)) == 3 + 2 * len(functions)


def test_names_have_the_forms_of_names_in_code(tasks):
  drawn = {name for task in tasks['train'] for name in _names(task)}
  for form in (
    '[a-z]+', '[a-z]+_[a-z]+', '[a-z]+_[a-z]+_[a-z]+', '[a-z]+([A-Z][a-z]+)+',
    r'\w*[A-Za-z]\d+',
  ):  # fmt: skip
    assert any(re.fullmatch(form, name) for name in drawn), form


def test_a_finished_function_has_nothing_unseen():
  for index in range(200):
    text = family.finished_function(index, 0)
    assert text == family.finished_function(index, 0)
    (function,) = source.parse(text).body
    description, body = function.body
    argument, variable = function.args.args[0].arg, body_variable(text)
    # Its constants are of a wider range than those of tasks.
    known = re.sub(r'(?<=[<>+] )[1-9]\d*', '2', ast.unparse(body))
    form = source.normal_body(known, argument)
    assert not compositions.recognise(form).held_out
    for name in (function.name, argument, variable):
      assert not any(map(names.is_unseen, stems_of(name))), name
    # As the held-out sentences begin.
    assert not description.value.value.startswith('Give')


def test_no_name_is_a_keyword_of_python():
  assert set(keyword.kwlist) <= names.RESERVED
  # Its argument was `while`.
  task = family.from_id('list_functions/unseen_compositions/3000017/304')
  assert source.parse(_text(task))


def test_constants_of_finished_functions_are_copied_not_guessed():
  seen = collections.Counter()
  for index in range(2000):
    described, body = family.finished_function(index, 0).split('    return ')
    numbers = re.findall(r'(?<=[<>+] )[1-9]\d*', body)
    assert all(re.search(rf'\b{n}\b', described) for n in numbers)
    seen.update(numbers)
  assert len(seen) > 15 and max(seen.values()) < 0.1 * seen.total()


def body_variable(text):
  return re.search(r'for (\w+) in', text)[1]


def test_most_neighbours_only_filter_and_aggregate(tasks):
  simple = []
  for task in tasks['train']:
    for node in source.parse(_text(task)).body:
      if node.name == task.function:
        continue
      composition = compositions.recognise(source.normal_form(node))
      assert composition is not None and not composition.held_out
      is_simple = composition.map == 'itself' and composition.filter != 'all'
      simple.append(is_simple)
  # 0.6, and a seventh of the others; within four standard deviations.
  spread = (0.66 * 0.34 / len(simple)) ** 0.5
  assert abs(sum(simple) / len(simple) - 0.66) < 4 * spread


def test_no_word_of_a_description_can_be_a_name():
  words = set()
  for table in (
    compositions.AGGREGATES, compositions.MAPS, compositions.FILTERS
  ):  # fmt: skip
    for component in table.values():
      words.update(*(w.split() for w in component.nouns + component.orders))
  for text in compositions.NOUN_SENTENCES + compositions.ORDER_SENTENCES:
    words |= set(text.lower().split())
  words = {w for w in words if re.fullmatch('[a-z]{2,}', w)}
  drawable = re.compile('[a-z]{2,4}|([bdfgklmnprstvz][aeiou]){2,4}')
  assert not words & set(names.WORDS)
  assert {w for w in words if drawable.fullmatch(w)} <= names.RESERVED


@pytest.mark.parametrize('split', family.SPLITS)
def test_the_best_answer_to_an_unseen_prompt_passes_one_in_twenty(split):
  """One body for all tasks, even if it had the right names."""
  for seed in (0, 3_000_017):
    answers = collections.Counter(
      family.composition_of(family.generate(i, split, seed)) for i in range(200)
    )
    # No composition passes the hidden examples of another.
    assert max(answers.values()) / 200 <= 0.05


def test_no_held_out_body_is_in_any_train_task_or_wrong_edit(tasks):
  held_out = {
    source.normal_body(c.body('a', 'v'), 'a')
    for c in compositions.everything()
    if c.held_out
  }
  draw = random.Random(0)
  for task in tasks['train'] + tasks['unseen_all']:
    # Neighbours, in held-out tasks too, are train compositions.
    assert not held_out & _bodies_in(task)
  for task in tasks['train']:
    form = source.normal_body(task.reference, family.names_of(task)[0])
    assert form not in held_out
    right = family.composition_of(task)
    near = family.draw_composition(draw, like=right)
    assert not near.held_out
    differing = [a != b for a, b in zip(near.kinds, right.kinds, strict=True)]
    assert sum(differing) == 1


def test_no_other_composition_passes_the_hidden_examples(tasks):
  for task in tasks['train'][:60] + tasks['unseen_all'][:60]:
    passing = [
      c
      for c in compositions.everything()
      if all(c.evaluate(*args) == expected for args, expected in task.hidden)
    ]
    assert passing == [family.composition_of(task)]
    assert len({repr(expected) for _, expected in task.hidden}) >= 3


def test_hidden_and_visible_examples_share_no_input(tasks):
  for task in tasks['train'] + tasks['unseen_all']:
    inputs = [repr(args) for args, _ in task.visible + task.hidden]
    assert len(task.visible) == 2
    assert len(inputs) == len(set(inputs)) >= 10


def test_a_table_of_the_visible_examples_fails_the_hidden_ones(tasks):
  runner = runners.TrustedRunner()
  for task in tasks['unseen_all'][:40]:
    argument, _ = family.names_of(task)
    lines = [
      f'if {argument} == {args[0]!r}: return {expected!r}'
      for args, expected in task.visible
    ]
    # For other inputs the best guess is the commonest answer.
    answers = [expected for _, expected in task.hidden]
    lines.append(f'return {max(answers, key=answers.count)!r}')
    path = f'{task.package}/{task.path}'
    body = '\n'.join(lines)
    text = source.replace_body(_text(task), task.function, body)
    files = {**task.files, path: text}
    result = runner.call(
      files, task.module, task.function, [list(a) for a, _ in task.visible]
    )
    assert all(environment.outcomes(result, task.visible))
    assert not environment.verify(task, files, runner, True).passed


def test_holdout_lists_every_held_out_composition_and_no_other():
  forms = {
    source.normal_body(body, re.search(r' in (\w+)', body)[1])
    for body in family.holdout()
  }
  assert {compositions.recognise(form) for form in forms} == {
    c for c in compositions.everything() if c.held_out
  }


@pytest.mark.parametrize(
  'task_id', ['other/train/0/1', 'list_functions/test/0/1', 'list_functions/1']
)
def test_an_unknown_task_id_is_refused(task_id):
  with pytest.raises(ValueError, match='is not list_functions/<split>'):
    family.from_id(task_id)


def test_an_unknown_split_is_refused():
  with pytest.raises(ValueError, match=r"split must be one of .* got 'test'"):
    family.generate(0, 'test')


def test_no_held_out_body_stands_inside_a_training_body(tasks):
  shown = [
    c.body('a', 'v') for c in compositions.everything() if not c.held_out
  ]
  shown = '\n'.join(shown)
  for task in tasks['unseen_compositions']:
    assert family.composition_of(task).body('a', 'v') not in shown
