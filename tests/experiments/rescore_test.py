"""Stored groups get other rewards by a command, and none is played."""

import json
import subprocess
import sys

import pytest

from composer_jax.core import group_bytes
from tests.tasks import scoring_test


@pytest.fixture
def stored(tmp_path):
  group = scoring_test.group_of(
    scoring_test.play('x'), scoring_test.play('list', member=1)
  )
  (tmp_path / 'groups').mkdir()
  path = tmp_path / 'groups' / '3.npz'
  path.write_bytes(group_bytes.to_bytes(group))
  scoring_test.TOKENIZER.save(tmp_path / 'tokenizer.json')
  return tmp_path


def rescore(folder, *words):
  command = [sys.executable, '-m', 'experiments.rescore']
  command += [
    f'--tokenizer={folder}/tokenizer.json', f'--out={folder}/out',
    '--config=configs/composer/tiny.py:smoke', *words,
  ]  # fmt: skip
  return subprocess.run(command, capture_output=True, text=True)


def test_a_command_rescores_what_is_stored(stored):
  process = rescore(
    stored, f'--groups={stored}/groups',
    '--config.rewards.invalid_penalty=0.25',
    '--config.tasks.rubric.file=configs/rubrics/style.toml',
    '--config.rewards.judged_reward=0.3',
  )  # fmt: skip
  assert process.returncode == 0, process.stderr
  assert '2 of 2 rewards changed; 1 of 1 groups' in process.stdout
  lines = (stored / 'out' / 'rescored.jsonl').read_text().splitlines()
  first, second = map(json.loads, lines)
  assert first['terms']['invalid'] == -0.25 and 'invalid' not in second['terms']
  assert second['scores']['looked_first'] == 1
  assert first['scores'] == {'passes': 1, 'tested': 0, 'looked_first': 0}
  made = group_bytes.from_bytes((stored / 'out' / '3.npz').read_bytes())
  assert [r.reward for r in made.rollouts] == [
    first['reward'],
    second['reward'],
  ]


def test_a_folder_without_groups_is_named(stored):
  process = rescore(stored, f'--groups={stored}/none')
  assert process.returncode != 0
  assert 'must be the workdir of a run, a file of a group' in process.stderr
