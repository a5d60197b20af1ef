"""The true pass rates of scripted policies, counted, kept and resumed."""

import dataclasses
import itertools
import json

import pytest

from composer_jax import wiring
from composer_jax.tasks.list_functions import family
from composer_jax.tasks.practice import evaluation
from configs.composer import deletion, tiny
from tests.rl import advantage_test
from tests.tasks import small_package

GOLD = evaluation.EvaluationOptions(
  policy='gold', split='train', tasks=0, samples=1, threads=2
)


def evaluate(spec, options, out):
  systems = wiring.systems_of(spec)
  return evaluation.evaluate(spec, systems, options, out)


@pytest.fixture(scope='module')
def spec(tmp_path_factory):
  root = tmp_path_factory.mktemp('set')
  small_package.task_set(root)
  return wiring.spec_of(deletion.get_config(f'{root},smoke').to_dict())


def test_the_solution_passes_and_doing_nothing_does_not(spec, tmp_path):
  out = tmp_path / 'gold'
  summary = evaluate(spec, GOLD, out)
  assert summary['overall']['passed'] == summary['overall']['tasks'] == 5
  assert set(summary['by_tier']) == set(small_package.repository.TIERS)
  assert not summary['overall']['flags']
  null = dataclasses.replace(GOLD, policy='null')
  null_summary = evaluate(spec, null, tmp_path / 'null')
  assert null_summary['overall']['passed'] == 0
  assert null_summary['overall']['episodes'] == 5
  assert null_summary['overall']['pass_at_k'] == {'1': 0.0}

  with pytest.raises(ValueError, match="policy is 'gold' there and 'null' now"):
    evaluate(spec, null, out)


def test_generated_tasks_are_played_as_well(tmp_path):
  config = tiny.get_config('smoke')
  config.sandbox.level = 'static'
  spec = wiring.spec_of(config.to_dict())
  options = dataclasses.replace(GOLD, tasks=3, samples=2)
  summary = evaluate(spec, options, tmp_path)
  assert summary['overall']['passed'] == summary['overall']['episodes'] == 6
  assert summary['overall']['pass_at_k'] == {'1': 1.0, '2': 1.0}

  # Killed in the middle of its third line, it plays only missing episodes.
  episodes = tmp_path / 'episodes.jsonl'
  lines = episodes.read_text().splitlines(keepends=True)
  episodes.write_text(''.join(lines[:2]) + lines[2][:40])
  assert evaluate(spec, options, tmp_path) == summary
  again = episodes.read_text().splitlines(keepends=True)
  assert again[:2] == lines[:2] and len(again) == 6

  # Episodes whose sandbox failed are played again, and the others stay.
  failed = json.loads(lines[0]) | {'status': 'infrastructure', 'passed': False}
  broken = [json.dumps(failed) + '\n', *lines[1:]]
  episodes.write_text(''.join(broken))
  assert evaluate(spec, options, tmp_path) == summary
  again = episodes.read_text().splitlines(keepends=True)
  assert again[:6] == broken and len(again) == 7

  with pytest.raises(ValueError, match='--tasks=0 takes all tasks of a folder'):
    evaluate(spec, GOLD, tmp_path / 'all')


def row(task, passed, **changes):
  return {
    'task_id': task,
    'tier': 'body',
    'package': 'p',
    'passed': passed,
    'status': 'graded',
    'flags': [],
    'num_turns': 4,
    'num_invalid': 1,
    **changes,
  }


def test_rates_are_counted_by_hand():
  rows = [row('a', True), row('a', False), row('b', False), row('b', False)]
  rows += [row('c', True), row('c', False, status='infrastructure')]
  rows[3]['flags'] = ['network']
  rates = evaluation.summarise(rows, 2)['overall']
  assert (rates['episodes'], rates['passed']) == (5, 2)
  assert rates['infrastructure'] == 1 and rates['tasks'] == 3
  # Task c has an episode without a verdict.
  assert rates['pass_at_k'] == {'1': 0.25, '2': 0.5}
  assert rates['flags'] == {'network': 1}
  assert rates['invalid_rate'] == 0.25 and rates['turns'] == 4


def test_a_flagged_episode_is_played_and_not_passed():
  task = family.generate(0, 'train')
  honest = advantage_test.make_rollout(0, 1.0)
  flagged = dataclasses.replace(honest, flags=('canary_passed',))
  rows = [evaluation.row_of(task, r) for r in (honest, flagged)]
  assert [r['passed'] for r in rows] == [True, False]
  rates = evaluation.summarise(rows, 2)['overall']
  assert (rates['episodes'], rates['passed']) == (2, 1)
  assert rates['flags'] == {'canary_passed': 1}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'policy': 'best'}, "policy must be one of .* got 'best'"),
    ({'samples': 0}, 'samples must be .* got 0'),
    ({'policy': 'chat'}, "--url \\(''\\)"),
    ({'policy': 'tokens', 'url': 'http://x/v1'}, '--policy=tokens needs --tok'),
  ],
)
def test_what_cannot_be_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(GOLD, **changes)


@pytest.mark.parametrize('split', ['', 'train', 'unseen_all'])
def test_the_solution_passes_generated_tasks_of_every_split(tmp_path, split):
  config = tiny.get_config('smoke')
  config.sandbox.level = 'static'
  made = wiring.spec_of(config.to_dict())
  options = dataclasses.replace(GOLD, split=split, tasks=3)
  assert evaluate(made, options, tmp_path)['overall']['passed'] == 3
  rows = evaluation.read(tmp_path)
  assert {task_id.split('/')[1] for task_id, _ in rows} == {
    split or 'unseen_compositions'
  }


def test_a_split_that_the_family_has_not_is_named(spec, tmp_path):
  options = dataclasses.replace(GOLD, split='unseen_names')
  with pytest.raises(
    ValueError, match=r"'train', 'held_out'\) .*'unseen_names'"
  ):
    evaluate(spec, options, tmp_path)


def test_lines_are_json(spec, tmp_path):
  options = dataclasses.replace(GOLD, tasks=1)
  evaluate(spec, options, tmp_path)
  (line,) = (tmp_path / 'episodes.jsonl').read_text().splitlines()
  row = json.loads(line)
  assert row['passed'] and row['reward_terms'] is not None
  assert row['sandbox_level'] in ('bwrap', 'unshare')


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass():
  for samples, passed in ((1, 0), (1, 1), (4, 1), (5, 2), (6, 6), (7, 3)):
    for k in range(1, samples + 1):
      subsets = list(itertools.combinations(range(samples), k))
      hits = sum(min(subset) < passed for subset in subsets)
      assert evaluation.pass_at_k(samples, passed, k) == pytest.approx(
        hits / len(subsets), abs=1e-12
      )
