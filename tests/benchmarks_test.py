"""Results of benchmarks are kept if a program ended well; a claim is a row."""

import json
import sys

import pytest

from benchmarks import __main__ as bench
from benchmarks import interleaved

KEYS = {'benchmark', 'case', 'against', 'ours', 'unit', 'ratio', 'spread'}
KEYS |= {'goal', 'met', 'command', 'machine', 'commit'}
LINE = {
  'benchmark': 'own',
  'case': 'speed: small',
  'against': 'a peer',
  'ours': 1234.5,
  'peer': 2000.0,
  'unit': 'rows/s',
  'ratio': 0.61725,
  'spread': [0.02, 0.08],
  'goal': 'ratio >= 0.5',
  'met': True,
  'command': 'python -m benchmarks.own',
  'machine': 'AMD EPYC 9B14 96-Core Processor, one core, jax 0.10.2',
  'commit': 'abc1234',
}


@pytest.fixture
def program(tmp_path):
  """Returns a function that makes the command of a program."""

  def make(code: str) -> list[str]:
    path = tmp_path / 'program.py'
    path.write_text(f'import json\nline = {LINE}\n{code}')
    return [sys.executable, str(path)]

  return make


def rows(*lines: dict) -> list[str]:
  return bench.table({'own': list(lines)}).splitlines()[2:]


def test_the_page_has_the_table_of_the_results():
  text = bench.README.read_text()
  assert bench.rendered(text, bench.read(bench.RESULTS)) == text


def test_every_claim_has_the_keys_of_a_claim():
  for lines in bench.read(bench.RESULTS).values():
    for line in lines:
      assert 'part' in line or line.keys() >= KEYS, line


def test_a_report_has_the_keys_of_a_claim(capsys):
  rates = [[2.0, 4.0, 3.0], [6.0]]
  line = interleaved.report(
    'own',
    'speed: small',
    (rates[0], rates[1]),
    against='a peer',
    limit=None,
    goal='ratio >= 0.4',
    met=lambda _, ratio: ratio >= 0.4,
    note='of three rounds',
  )
  assert json.loads(capsys.readouterr().out) == line
  assert line.keys() >= KEYS - {'commit'}
  about = [line[k] for k in ('ours', 'peer', 'ratio', 'spread', 'met', 'note')]
  assert about == [3.0, 6.0, 0.5, [0.667, 0.0], True, 'of three rounds']


def test_results_are_replaced_when_a_program_ended_well(
  program, tmp_path, capfd
):
  path = tmp_path / 'results' / 'own.jsonl'
  shows = 'print("{words}")\nprint(json.dumps(line))\nprint(7)\n'
  assert bench.measure(program(shows), path)
  (line,) = bench.read(path.parent)['own']
  assert line.items() >= (LINE | {'commit': bench.commit()}).items()
  assert line['date'].startswith('20')
  assert '{words}' in capfd.readouterr().out

  before = path.read_bytes()
  assert not bench.measure(program(shows + 'raise SystemExit(1)'), path)
  assert not bench.measure(program('print("nothing")'), path)
  assert bench.measure(program(shows), None)
  assert path.read_bytes() == before


def test_a_row_has_figure_ratio_and_spread():
  (row,) = rows(LINE)
  cells = '`own` speed: small | a peer | ratio >= 0.5'
  figures = '1,234 rows/s, 0.6172 x, spread 8 %'
  assert row == f'| {cells} | {figures} | yes | abc1234 | EPYC 9B14, one core |'


def test_cases_of_a_claim_are_one_row():
  large = LINE | {'case': 'speed: large', 'ours': 9.5, 'met': False}
  hard = large | {'goal': 'ratio >= 0.9', 'ratio': None, 'spread': []}
  untold = LINE | {'goal': 'none'}
  part = {'benchmark': 'own', 'case': 'speed', 'part': 'norms', 'ms': 3.0}
  both, alone = rows(LINE, hard, large, untold, part)
  assert '| `own` speed: 2 cases |' in both and '| 1 of 2 |' in both
  assert '| 9.5 to 1,234 rows/s, 0.6172 x, spread 8 % |' in both
  assert '| ratio >= 0.9 | 9.5 rows/s | no |' in alone


def test_results_that_need_more_stand_beside_their_benchmark():
  names = ['train_compile', 'sandbox', 'delta_x', 'delta', 'muon']
  order = ['delta', 'delta_x', 'muon', 'sandbox', 'train_compile']
  assert sorted(names, key=bench._place) == order


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['delta', 'decod'], ["['decod'] are unknown", "'decode'"]),
    (['--render', 'delta'], ['--render runs nothing']),
  ],
)
def test_wrong_arguments_are_refused(arguments, words, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['benchmarks', *arguments])
  with pytest.raises(SystemExit) as refused:
    bench.main()
  assert refused.value.code == 2
  error = capsys.readouterr().err
  assert all(word in error for word in words)


def test_a_failure_is_named_and_the_others_run(monkeypatch, tmp_path):
  monkeypatch.setattr(bench, 'RESULTS', tmp_path / 'results')
  monkeypatch.setattr(bench, 'README', tmp_path / 'README.md')
  bench.README.write_text(f'a\n{bench._START}old\n{bench._END}z\n')
  started = []

  def measure(command, path):
    started.append((command[-1], path.name))
    return command[-1] != 'benchmarks.decode'

  monkeypatch.setattr(bench, 'measure', measure)
  monkeypatch.setattr(sys, 'argv', ['benchmarks', 'decode', 'delta'])
  with pytest.raises(SystemExit, match='Failed: decode.'):
    bench.main()
  names = ['decode', 'delta']
  assert started == [(f'benchmarks.{n}', f'{n}.jsonl') for n in names]
  assert bench.README.read_text().startswith(f'a\n{bench._START}| claim |')
