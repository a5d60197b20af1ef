"""A task family outside of the library is played like one of its own."""

import pytest

from composer_jax import wiring
from composer_jax.tasks.practice import evaluation
from configs.composer import tiny
from experiments.examples import own_family
from tests.pipeline import runs

NAME = 'experiments.examples.own_family:Words'


def config_of(name=NAME):
  config = tiny.get_config('smoke')
  config.tasks.family = name
  config.sandbox.level = 'static'
  return config


@pytest.fixture(scope='module')
def spec():
  return wiring.spec_of(config_of().to_dict())


@pytest.mark.parametrize('policy, passed', [('gold', 6), ('null', 0)])
def test_it_is_evaluated(spec, tmp_path, policy, passed):
  options = evaluation.EvaluationOptions(
    policy=policy, split='', tasks=3, samples=2, threads=2
  )
  systems = wiring.systems_of(spec)
  summary = evaluation.evaluate(spec, systems, options, tmp_path)
  assert summary['overall']['passed'] == passed
  assert summary['overall']['episodes'] == 6


def test_a_task_is_its_id_and_splits_share_none(spec):
  family = wiring.systems_of(spec).family
  words = {}
  for split in ('train', *family.axes):
    source = runs.tasks(spec, None, split=split, seed=1)
    tasks = [source.of_group(i) for i in range(200)]
    assert tasks == [source.of_id(t.task_id) for t in tasks]
    words[split] = {t.text for t in tasks}
  assert not words['train'] & words['vowels']


@pytest.mark.parametrize('name, reason', [
    ('deletions', "one of .'list_functions', 'deletion'.*'deletions'"),
    ('nowhere:Words', "'nowhere:Words': No module named 'nowhere'"),
    ('experiments.examples.own_family:Word5', "no attribute 'Word5'"),
    (':Words', "':Words'"),
])  # fmt: skip
def test_a_family_that_cannot_be_imported_is_named(name, reason):
  with pytest.raises(ValueError, match=f'config.tasks.family must .*{reason}'):
    wiring.spec_of(config_of(name).to_dict())


def test_an_example_is_short():
  with open(own_family.__file__) as lines:
    assert sum(1 for _ in lines) < 150
