"""Results of studies: their file, and the tables that are made of them."""

import ast
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments.studies import results
from experiments.studies.deletion import analyze as deletion
from experiments.studies.hint import analyze as hint
from experiments.studies.live import analyze as live
from experiments.studies.low_precision import analyze as low_precision
from experiments.studies.monitors import analyze as monitors
from experiments.studies.real_code import analyze as real_code
from experiments.studies.rubric import analyze as rubric

STUDIES = pathlib.Path(results.__file__).parent
ROOT = STUDIES.parents[1]


def test_rows_come_back_by_their_lines(tmp_path):
  rows = [
    {'stage': 'setup', 'cores': 2},
    {'stage': 'rl', 'seed': 0, 'step': 0, 'reward': 0.5},
    {'stage': 'rl', 'seed': 1, 'step': 0, 'reward': 0.25},
    {'stage': 'rl', 'seed': 0, 'step': 1, 'reward': 0.125, 'load': [1, 2]},
  ]
  results.write(tmp_path, rows, by=('stage', 'seed'))
  results.add(tmp_path, [{'stage': 'end', 'cpu_s': np.float32(1.5)}] * 2, ())
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert len(lines) == 4 and '"reward": [0.5, 0.125]' in lines[1]
  rows_read = results.read(tmp_path)
  assert rows_read == [
    *(rows[i] for i in (0, 1, 3, 2)),
    *[{'stage': 'end', 'cpu_s': 1.5}] * 2,
  ]


def test_every_main_begins_with_the_common_start():
  """Which is what lists flags, exits 0 on --help and refuses other words."""
  examples = ROOT / 'experiments' / 'examples'
  for path in [*STUDIES.glob('*/*.py'), *examples.glob('*.py')]:
    last = ast.parse(path.read_text()).body[-1:]
    if last and isinstance(last[0], ast.If):
      mains = ('start.run(main)', 'launch.main(run)')
      assert ast.unparse(last[0].body) in mains, path


@pytest.mark.parametrize(
  'argument, code, words', [('--help', 0, '--tokens'), ('more', 1, "['more']")]
)
def test_help_ends_well_and_unknown_arguments_do_not(argument, code, words):
  command = [sys.executable, '-m', 'experiments.studies.mismatch.run']
  process = subprocess.run(
    [*command, argument], cwd=ROOT, capture_output=True, text=True
  )
  assert process.returncode == code
  assert words in process.stdout + process.stderr


def test_results_are_one_compact_file_a_study():
  for folder in STUDIES.glob('*/results'):
    (path,) = folder.rglob('*.*')
    assert len(path.read_text().splitlines()) <= 100, path


@pytest.mark.parametrize(
  'analyze', [deletion, hint, live, low_precision, monitors, real_code, rubric]
)
def test_table_and_readme_are_those_of_the_results(analyze):
  table = analyze.table(results.read(analyze.ROOT / 'results'))
  assert (analyze.ROOT / 'table.md').read_text() == table
  assert table.strip() in (analyze.ROOT / 'README.md').read_text()
