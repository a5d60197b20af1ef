"""Laws of the study on real code; its README shows the table of its results."""

import dataclasses
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from composer_jax.rl import behaviour
from composer_jax.telemetry import intervals
from configs.tasks import packages as config
from experiments.studies import results
from experiments.studies.real_code import analyze, chances, packages
from tests.tasks.practice import families_test

ROOT = pathlib.Path(__file__).parents[2]

folder = families_test.folder


def rate(passed):
  low, high = intervals.wilson(passed, 40)
  return behaviour.PassRate(
    passed=passed,
    episodes=40,
    infrastructure=0,
    low=low,
    high=high,
    invalid_rate=0.25,
    unfinished_rate=0.0,
    valid_episodes=30,
    passed_valid=passed,
  )


def test_a_seed_is_one_row_with_the_gain_and_its_interval():
  rows = [
    {
      'stage': 'tasks',
      **{'train': {'b': 3, 'a': 4}, 'train_lines': 1.5},
      **{'held_out': {'c': 2}, 'held_out_lines': 2.0},
    },
    {'stage': 'cpt', 'seed': 0, 'step': 1, 'heldout_loss': 4.5},
    {'stage': 'cpt', 'seed': 0, 'step': 2, 'heldout_loss': 3.25},
    *(
      {
        **{'stage': 'chance', 'seed': 0, 'policy': 'sft', 'split': split},
        'logprob': logprob,
      }
      for split, logprob in (
        ('held_out', math.log(0.5)),
        ('held_out', -40.0),
        ('held_out', -90.0),
        ('train', -1.0),
      )
    ),
    *(
      {'stage': 'rl', 'seed': 0, 'step': i, 'pass_rate': 0.01 * i}
      for i in range(20)
    ),
    {
      'stage': 'run',
      'seed': 0,
      'steps': {'cpt': 2, 'sft': 1, 'rl': 20},
      'stages': {'cpt': 90.0, 'rl': 30.0},
      'evaluation_sft': dataclasses.asdict(rate(2)),
      'evaluation_rl': dataclasses.asdict(rate(12)),
      'by_task': {
        'sft': {'x': [2, 20], 'y': [0, 20]},
        'rl': {'y': [2, 20], 'x': [10, 20]},
      },
    },
  ]
  text = analyze.table(rows)
  assert 'Training: 7 tasks of 2 packages, 1.5 lines' in text
  assert '(a 4, b 3)' in text
  cells = [cell.strip() for cell in text.splitlines()[-1].split('|')][1:-1]
  low, high = intervals.difference((2, 40), (12, 40))
  assert low > 0
  assert cells == [
    '0',
    '2, 1, 20',
    '3.25',
    'not run',
    f'2 of 40, 0.050 [{rate(2).low:.3f}, {rate(2).high:.3f}]',
    f'12 of 40, 0.300 [{rate(12).low:.3f}, {rate(12).high:.3f}]',
    # Changes of 0.4 and 0.1: a deviation of 0.3 / sqrt(2), over sqrt(2).
    f'+0.250 [{low:+.3f}, {high:+.3f}], over tasks [-0.044, +0.544]',
    # A sixth of a half, and next to nothing of the others.
    'e^-40, 2e-01',
    'not run',
    '0.25, 0.25',
    '0.005 -> 0.185',
    '2',
  ]


def test_no_package_is_both_seen_and_held_out():
  known = config.get_config().packages
  every = [*packages.TRAINING, *packages.HELD_OUT]
  assert len({*every}) == len(every) and {*every} <= {*known}
  # What the config holds out is never trained on.
  assert not any(known[name].held_out for name in packages.TRAINING)


def test_the_chance_is_that_of_the_first_call():
  mask_T = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], bool)
  batch = chances.row_of(np.arange(10, 19), mask_T, 12)
  assert batch.loss_weights_BT.tolist() == [[0, 0, 1, 1, 1, *[0] * 7]]
  assert batch.tokens_BT.tolist() == [[10, 11, 12, 13, 14, *[0] * 7]]
  assert batch.segment_ids_BT.tolist() == [[*[1] * 5, *[0] * 7]]


@pytest.mark.slow
def test_the_study_runs_in_one_command_and_resumes(folder, tmp_path):
  command = [
    *(sys.executable, '-m', 'experiments.studies.real_code.run', '--smoke'),
    *(f'--workdir={tmp_path / "work"}', f'--tasks={folder}', '--seeds=3'),
    f'--results={tmp_path / "results"}',
  ]
  subprocess.run(command, cwd=ROOT, check=True)
  rows = results.read(tmp_path / 'results')
  table = analyze.table(rows)
  assert 'Held-out: 2 tasks of 1 packages' in table
  assert table.splitlines()[-1].startswith('| 3 | 6, 6, 2 |')
  assert {r['policy'] for r in rows if r['stage'] == 'episode'} == {'sft', 'rl'}
  before = (tmp_path / 'results' / 'metrics.jsonl').read_bytes()
  subprocess.run(command, cwd=ROOT, check=True)
  assert (tmp_path / 'results' / 'metrics.jsonl').read_bytes() == before
