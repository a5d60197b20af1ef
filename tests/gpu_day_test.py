"""The day with a GPU: its parts leave each other alone, and it is rehearsed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import gpu_day

_LINE = {
  'benchmark': 'own',
  'case': 'a | b',
  'against': 'nobody',
  'ours': 2.0,
  'peer': None,
  'unit': 'm/s',
  'ratio': None,
  'limit': 4.0,
  'goal': '>= 1',
  'met': True,
}


@pytest.fixture
def module(monkeypatch, tmp_path):
  """Returns a function that makes a module which runs some code."""
  folder = tmp_path / 'modules'
  folder.mkdir()
  monkeypatch.setenv('PYTHONPATH', str(folder))

  def make(name: str, code: str) -> list[str]:
    (folder / f'{name}.py').write_text(code)
    return [name]

  return make


def _part(*commands: list[str]) -> gpu_day.Part:
  return gpu_day.Part('own', 'about it', 3, list(commands))


def _results(folder: pathlib.Path) -> list[dict]:
  text = (folder / 'results.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_lines_before_a_failure_are_kept_and_it_is_named(module, tmp_path):
  fails = module(
    'fails', f'print({json.dumps(_LINE)!r}, flush=True)\nraise OSError("full")'
  )
  after = module('after', 'print("{}")')
  outcome = gpu_day.run(_part(fails, after), tmp_path, 100)
  assert outcome.failure == 'exit status 1: OSError: full'
  assert _results(tmp_path) == [{'of': 'own'} | _LINE]
  log = (tmp_path / 'own.log').read_text()
  assert '$ python -m fails\n' in log and 'Traceback' in log


def test_the_commands_of_a_part_run_in_order(module, tmp_path):
  commands = [module(f'n{i}', f'print(\'{{"n": {i}}}\')') for i in range(3)]
  outcome = gpu_day.run(_part(*commands), tmp_path, 100)
  assert not outcome.failure
  assert [line['n'] for line in _results(tmp_path)] == [0, 1, 2]


def test_a_part_beyond_its_limit_is_cut_off_with_its_children(module, tmp_path):
  survived = tmp_path / 'survived'
  child = f'import time; time.sleep(6); open({str(survived)!r}, "w")'
  forever = module(
    'forever',
    'import subprocess, sys\n'
    f'subprocess.run([sys.executable, "-c", {child!r}])',
  )
  # Its child would hold the part up and leave a file.
  outcome = gpu_day.run(_part(forever), tmp_path, 2)
  assert outcome.failure == 'cut off after 3 minutes'
  assert not survived.exists()


def test_the_page_shows_outcomes_and_every_form_of_line(tmp_path):
  part = {'benchmark': 'own', 'case': 'c', 'part': 'norms', 'ms': 3.0}
  peer = _LINE | {'case': 'with a peer', 'ratio': 0.5, 'met': False}
  row = {'case': 'rl', 'pass_rate': 0.25}
  for line in (_LINE, part | {'share': 0.125}, peer, row):
    gpu_day._append({'of': 'own'} | line, tmp_path)
  outcomes = [gpu_day.Outcome(_part(), 7.4, 'exit status 1: a | b')]
  page = gpu_day.page(outcomes, tmp_path, 'about the day')
  assert '| own | about it | exit status 1: a / b | 7 |' in page
  assert '| a / b | nobody | >= 1 | 2 m/s, 0.50 of the limit | yes |' in page
  assert '| norms |  |  | 3 ms, 12.5% |  |' in page
  assert '0.5 times the peer, 0.50 of the limit | no |' in page
  assert '| rl |  |  | pass_rate 0.25 |  |' in page


def test_only_the_last_row_of_each_kind_is_kept(tmp_path):
  rows = [
    {'stage': 'rl', 'step': step, 'mismatch_kl': step / 4} for step in (1, 2)
  ]
  rows += [{'stage': 'cpt', 'loss': 1.0}]
  rows += [{'stage': 'eval', 'name': 'sft', 'pass_rate': 0.5}]
  path = tmp_path / 'metrics.jsonl'
  path.write_text('\n'.join(json.dumps(row) for row in rows))
  gpu_day.keep_rows('loop', path, tmp_path)
  assert _results(tmp_path) == [
    {'of': 'loop', 'case': 'rl', 'mismatch_kl': 0.5},
    {'of': 'loop', 'case': 'eval sft', 'pass_rate': 0.5},
  ]


def test_the_parts_fit_into_35_minutes(tmp_path):
  parts = gpu_day.parts(tmp_path, is_tiny=False)
  assert sum(part.minutes for part in parts) <= 35


def _fails(*arguments: str) -> str:
  process = subprocess.run(
    [sys.executable, '-m', 'benchmarks.gpu_day', *arguments],
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert process.returncode == 2
  return process.stderr


def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path):
  new, used = tmp_path / 'new', tmp_path / 'used'
  used.mkdir()
  (used / 'page.md').touch()
  assert "['x'] are unknown" in _fails(f'--out={new}', '--parts=x')
  assert 'name a new folder' in _fails(f'--out={used}')
  assert "JAX has 'cpu cpu'" in _fails(f'--out={new}')
  assert not new.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  'program',
  [
    *('train_step --gpu', 'grouped_matmul --gpu', 'rollout --gpu'),
    *('attention --gpu', 'kimi_layer'),
  ],
)
def test_parts_without_an_accelerator_end_at_once(program):
  name, *flags = program.split()
  process = subprocess.run(
    [sys.executable, '-m', f'benchmarks.{name}', *flags],
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert process.returncode == 1
  assert f'benchmarks.{program} needs an accelerator' in process.stderr
  assert '--tiny runs the code' in process.stderr


@pytest.mark.slow
def test_the_day_is_rehearsed(tmp_path):
  out = tmp_path / 'day'
  process = subprocess.run(
    [sys.executable, '-m', 'benchmarks.gpu_day', f'--out={out}', '--tiny'],
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert not process.returncode, (out / 'page.md').read_text()
  named = {line['of'] for line in _results(out)}
  assert named == {part.name for part in gpu_day.parts(out, is_tiny=True)}
