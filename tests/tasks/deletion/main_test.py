"""The command that makes sets of tasks, its config, and the study of one."""

import pathlib
import subprocess
import sys

import pytest

from composer_jax.corpus import licences
from composer_jax.tasks.deletion import sdists, workspace
from composer_jax.tasks.repository import task_set
from configs.tasks import packages
from experiments.studies import results
from experiments.studies.deletion import analyze
from tests import programs
from tests.tasks import small_package

ROOT = pathlib.Path(__file__).parents[3]


def test_the_config_is_of_pinned_packages():
  config = packages.get_config().to_dict()
  pins = sdists.pins_of(config['packages'], ())
  assert len(pins) >= 10
  assert all(len(pin.sha256) == 64 and not pin.folder for pin in pins)
  assert 0 < sum(pin.held_out for pin in pins) < len(pins) / 2
  options = workspace.Options(**config['options'])
  assert sum(map(options.wanted, task_set.TIERS)) * len(pins) > 300
  small = packages.get_config('small').packages
  assert set(small) < set(config['packages'])
  with pytest.raises(ValueError, match="no argument or 'small', not 'x'"):
    packages.get_config('x')


def test_wrong_options_are_named():
  with pytest.raises(ValueError, match=r'Options.body must be .* got -1'):
    workspace.Options(body=-1)
  with pytest.raises(ValueError, match='Options.max_share must be a number'):
    workspace.Options(max_share=float('nan'))


def test_licences_come_from_metadata_or_the_text():
  mit = b'Permission is hereby granted, free of charge, to any person'
  assert licences.of_sdist({'LICENSE.txt': mit}) == 'MIT'
  declared = {'PKG-INFO': b'License-Expression: ISC\n', 'LICENSE': mit}
  assert licences.of_sdist(declared) == 'ISC'
  assert licences.of_sdist({'a.py': mit}) == 'unknown'


def test_the_study_shows_its_results():
  rows = results.read(analyze.ROOT / 'results')
  text = analyze.table(rows)
  assert (analyze.ROOT / 'table.md').read_text() == text
  assert text in (analyze.ROOT / 'README.md').read_text()
  made = analyze.of(rows, 'task')
  assert len(made) == sum(
    counts.get('valid', 0)
    for row in analyze.of(rows, 'package')
    for counts in row.get('candidates', {}).values()
  )
  assert all(0 < row['hidden'] < row['fail_to_pass'] for row in made)


@pytest.mark.slow
def test_the_command_makes_a_set_of_a_folder(tmp_path):
  small_package.write(tmp_path / 'larder')
  command = [
    *(sys.executable, '-m', 'experiments.make_tasks'),
    *(f'--out={tmp_path / "set"}', f'--folders={tmp_path / "larder"}'),
    *('--config.options.body=1', '--config.options.symbol=1'),
  ]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert 'larder: symbol: 1 of 1 tried' in done.stdout
  assert ' tasks of 1 packages, 0 refused, in ' in done.stdout
  assert task_set.load(tmp_path / 'set').packages['larder'].licence == 'MIT'
  command[-1] = '--config.options.symbol=2'
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 1
  assert "was begun with other values of ['options']" in done.stderr


def test_a_set_of_no_task_is_an_error_and_leaves_nothing(tmp_path):
  (tmp_path / 'bare').mkdir()
  (tmp_path / 'bare' / 'bare.py').write_text('x = 1\n')
  done = programs.run(
    'experiments.make_tasks',
    *(f'--out={tmp_path / "set"}', f'--folders={tmp_path / "bare"}'),
  )
  assert done.returncode == 1
  assert done.stderr.startswith('error: No task could be made (bare: no_tests')
  assert '--config.options.min_lines=1' in done.stderr
  assert not (tmp_path / 'set').exists()
