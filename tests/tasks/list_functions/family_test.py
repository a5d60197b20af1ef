"""Laws of the list_functions family: the split, the examples, the ids."""

import random

import pytest

from composer_jax.tasks import source
from composer_jax.tasks.list_functions import (
  compositions,
  environment,
  family,
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


def test_the_prompt_and_the_docstring_say_what_to_do(tasks):
  for task in tasks['train'] + tasks['held_out']:
    assert task.prompt == f'Restore `{task.function}` in `{task.path}`.'
    composition = family.composition_of(task)
    argument, variable = family.names_of(task)
    assert task.reference == composition.body(argument, variable)
    phrasings = range(compositions.NUM_PHRASINGS)
    words = [composition.docstring(argument, p) for p in phrasings]
    function = source.find(source.parse(_text(task)), task.function)
    assert function is not None
    docstring = function.body[0].value.value
    assert docstring in words


def test_the_split_is_by_kinds(tasks):
  for split, generated in tasks.items():
    for task in generated:
      held_out = family.composition_of(task).held_out
      assert task.held_out == held_out == (split == 'held_out')
      assert f'/{split}/' in task.task_id


def test_no_held_out_body_is_in_any_train_task_or_wrong_edit(tasks):
  held_out = {
    source.normal_body(c.body('a', 'v'), 'a')
    for c in compositions.everything()
    if c.held_out
  }
  draw = random.Random(0)
  for task in tasks['train'] + tasks['held_out']:
    # Neighbours, in held-out tasks too, are train compositions.
    assert not held_out & _bodies_in(task)
  for task in tasks['train']:
    form = source.normal_body(task.reference, family.names_of(task)[0])
    assert form not in held_out
    right = family.composition_of(task)
    near = family.draw_composition('train', draw, like=right)
    assert not near.held_out
    differing = [a != b for a, b in zip(near.kinds, right.kinds, strict=True)]
    assert sum(differing) == 1


def test_no_other_composition_passes_the_hidden_examples(tasks):
  for task in tasks['train'][:60] + tasks['held_out'][:60]:
    passing = [
      c
      for c in compositions.everything()
      if all(c.evaluate(*args) == expected for args, expected in task.hidden)
    ]
    assert passing == [family.composition_of(task)]
    assert len({repr(expected) for _, expected in task.hidden}) >= 3


def test_hidden_and_visible_examples_share_no_input(tasks):
  for task in tasks['train'] + tasks['held_out']:
    inputs = [repr(args) for args, _ in task.visible + task.hidden]
    assert len(task.visible) == 2
    assert len(inputs) == len(set(inputs)) >= 10


def test_a_table_of_the_visible_examples_fails_the_hidden_ones(tasks):
  runner = runners.TrustedRunner()
  for task in tasks['held_out'][:40]:
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


def test_holdout_lists_every_held_out_body_that_a_task_can_have(tasks):
  packages, functions, bodies = family.holdout()
  assert {t.reference for t in tasks['held_out']} <= set(bodies)
  assert not {t.reference for t in tasks['train']} & set(bodies)
  for task in tasks['held_out']:
    assert task.package in packages
    assert task.function in functions


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
  shown = '\n'.join(family.bodies('train'))
  assert not [t.task_id for t in tasks['held_out'] if t.reference in shown]
