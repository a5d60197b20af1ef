"""Laws of the compositions: code, words and meaning agree."""

import random

from composer_jax.tasks import source
from composer_jax.tasks.list_functions import compositions

COUNT = 8 * (5 + 4) * (5 + 2 * 4)


def test_there_are_as_many_as_the_parts_allow():
  everything = compositions.everything()
  assert len(compositions.KINDS) == 8 * 6 * 7 == 336
  assert len(everything) == len(set(everything)) == COUNT


def test_one_composition_literally():
  composition = compositions.Composition('largest', 'plus', 'above', 3, 2)
  assert composition.body('items', 'x') == (
    'return max((x + 3 for x in items if x > 2), default=0)'
  )
  words = descriptions(composition, unseen=False, count=4000)
  assert 'Return the largest of the items above 2, each plus 3.' in words
  assert 'Take the items above 2, add 3 to each, return the largest.' in words
  words = descriptions(composition, unseen=True)
  assert words == {
    'Give the largest one of items that are above 2 raised by 3 each.',
    'Given items that are above 2, raise these by 3 and keep only the maximum.',
  }
  assert composition.evaluate([1, 2, 3, 7, 5]) == 10
  assert composition.evaluate([1, 2]) == 0


def test_code_computes_the_meaning():
  draw = random.Random(0)
  inputs = [[], [0], [-1]]
  inputs += [[draw.randint(-9, 9) for _ in range(5)] for _ in range(5)]
  for composition in compositions.everything():
    scope: dict = {}
    body = composition.body('a', 'v')
    exec(f'def f(a):\n  {body}\n', scope)
    for values in inputs:
      assert scope['f'](list(values)) == composition.evaluate(values), body


def descriptions(composition, unseen, count=400):
  draw = random.Random(0)
  return {
    composition.docstring('items', draw, unseen=unseen) for _ in range(count)
  }


def test_a_description_fits_one_function_only():
  meant = {}
  for composition in compositions.everything():
    for unseen in (False, True):
      for words in descriptions(composition, unseen, count=40):
        assert meant.setdefault(words, composition) == composition, words
  assert len(meant) > 20 * COUNT


def test_every_kind_of_words_has_a_wording_that_training_lacks():
  parts = [
    part
    for table in (compositions.AGGREGATES, compositions.MAPS)
    for component in table.values()
    for part in (component.nouns, component.orders)
  ]
  parts += [component.nouns for component in compositions.FILTERS.values()]
  parts += [compositions.NOUN_SENTENCES, compositions.ORDER_SENTENCES]
  for wordings in parts:
    assert len(wordings) >= 4 and wordings[-1] not in wordings[:-1]
    assert wordings[-1], 'nothing is no unseen wording'


def test_a_body_is_recognised_under_any_names_and_no_other_body_is():
  for composition in compositions.everything()[::7]:
    form = source.normal_body(composition.body('counts', 'i'), 'counts')
    assert compositions.recognise(form) == composition
  form = source.normal_body('return sum(v for v in values) + 1', 'values')
  assert compositions.recognise(form) is None


def test_a_fifth_is_held_out_and_every_pair_of_parts_is_in_train():
  train = [k for k in compositions.KINDS if not compositions.is_held_out(k)]
  assert 0.78 < len(train) / len(compositions.KINDS) < 0.82
  for i, j in ((0, 1), (0, 2), (1, 2)):
    pairs = {(k[i], k[j]) for k in compositions.KINDS}
    assert {(k[i], k[j]) for k in train} == pairs
