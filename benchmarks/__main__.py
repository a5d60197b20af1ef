"""Runs benchmarks, keeps their results and renders the table of README.md.

  python -m benchmarks [NAME ...] [--quick]
  python -m benchmarks --render

Each benchmark is a process of its own, `python -m benchmarks.NAME`. If it ends
well, its JSON lines replace benchmarks/results/NAME.jsonl, with the commit and
the date; if it fails, its results stay as they were and the next one runs. With
--quick nothing is kept. The table has a row for each claim that has a goal.
"""

import argparse
import contextlib
import datetime
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from composer_jax.core import files

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
README = ROOT / 'benchmarks' / 'README.md'
# Benchmarks that run on a CPU with what `./run.sh bench` installs.
NAMES = (
  *('train_step', 'grouped_matmul', 'expert_growth', 'expert_parallel'),
  *('attention', 'decode', 'rollout', 'delta', 'hf_import', 'muon'),
  *('few_bits', 'route_codec', 'sandbox', 'speculation', 'transfer'),
)
# Files that decide the results. The results themselves change meanwhile.
_CODE = ('composer_jax', 'configs', 'benchmarks/*.py')
_HEAD = ('claim', 'peer', 'goal', 'ours', 'met', 'commit', 'machine')
_START, _END = '<!-- table -->\n', '<!-- end of table -->\n'
# Words of a processor's name that tell it from no other.
_IDLE = re.compile(
  r'\((R|TM)\)|\b(AMD|Intel|CPU|Processor|\d+-Core)\b|@.*', re.I
)

Line = dict[str, Any]


def commit() -> str:
  """Returns the code's commit, with '-dirty' if it differs, or 'unknown'."""

  def git(*arguments: str) -> str:
    command = ['git', '-C', str(ROOT), *arguments]
    return subprocess.check_output(
      command, text=True, stderr=subprocess.DEVNULL
    ).strip()

  try:
    dirty = '-dirty' if git('status', '--porcelain', '--', *_CODE) else ''
    return git('rev-parse', '--short', 'HEAD') + dirty
  except (OSError, subprocess.CalledProcessError):
    return 'unknown'  # There is no git or no repository.


def measure(command: Sequence[str], path: pathlib.Path | None) -> bool:
  """Runs a program, shows its output and replaces the results in `path`.

  Returns false, and keeps nothing, if it fails or prints no results.
  """
  date = str(datetime.datetime.now(datetime.UTC).date())
  about = {'commit': commit(), 'date': date}
  results = ''
  with subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout is not None
    for text in process.stdout:
      print(text, end='', flush=True)
      with contextlib.suppress(ValueError):  # It prints other lines, too.
        line = json.loads(text)
        if isinstance(line, dict) and 'benchmark' in line:
          results += json.dumps(line | about) + '\n'
  if process.returncode or not results:
    return False
  if path:
    path.parent.mkdir(exist_ok=True)
    files.write_atomic(path, results.encode())
  return True


def _place(name: str) -> tuple[int, str]:
  """Returns what sorts results as NAMES; `delta_x` stands after `delta`."""
  place = [i for i, n in enumerate(NAMES) if f'{name}_'.startswith(f'{n}_')]
  return min(place, default=len(NAMES)), name


def read(folder: pathlib.Path) -> dict[str, list[Line]]:
  """Returns the lines of each file of results."""
  texts = {path.stem: path.read_text() for path in folder.glob('*.jsonl')}
  return {
    name: [json.loads(line) for line in texts[name].splitlines()]
    for name in sorted(texts, key=_place)
  }


def _figure(value: float) -> str:
  rounded = float(f'{value:.4g}')
  return f'{rounded:,.0f}' if rounded >= 1000 else f'{rounded:g}'


def _range(values: Iterable[float | None], unit: str) -> list[str]:
  known = sorted(v for v in values if v is not None)
  ends = dict.fromkeys(map(_figure, known[:1] + known[-1:]))
  return [f'{" to ".join(ends)} {unit}'] if ends else []


def _row(name: str, lines: Sequence[Line]) -> str:
  """Returns the row of a claim, which has a line for each of its cases."""
  first, count = lines[0], len(lines)
  claim, spread = first['case'], max(max(x['spread'], default=0) for x in lines)
  if count > 1:
    claim = f'{claim.split(": ")[0]}: {count} cases'
  ours = _range((line['ours'] for line in lines), first['unit'])
  ours += _range((line['ratio'] for line in lines), 'x')
  if spread >= 0.005:
    ours.append(f'spread {100 * spread:.0f} %')
  num_met = sum(line['met'] for line in lines)
  met = {0: 'no', count: 'yes'}.get(num_met, f'{num_met} of {count}')
  parts = [p for p in first['machine'].split(', ') if not p.startswith('jax ')]
  machine = ', '.join(' '.join(_IDLE.sub('', part).split()) for part in parts)
  cells = [f'`{name}` {claim}', first['against'], first['goal']]
  cells += [', '.join(ours), met, first['commit'], machine]
  return f'| {" | ".join(cell.replace("|", "/") for cell in cells)} |\n'


def table(results: dict[str, list[Line]]) -> str:
  """Returns the claims that have a goal as a Markdown table."""
  text = f'| {" | ".join(_HEAD)} |\n{"|---" * len(_HEAD)}|\n'
  for name, lines in results.items():
    claims: dict[tuple, list[Line]] = {}
    for line in lines:
      if line.get('goal', 'none') != 'none':
        same = ('against', 'goal', 'unit', 'commit', 'machine')
        claim = (line['case'].split(': ')[0], *(line[key] for key in same))
        claims.setdefault(claim, []).append(line)
    text += ''.join(_row(name, of_claim) for of_claim in claims.values())
  return text


def rendered(text: str, results: dict[str, list[Line]]) -> str:
  """Returns a page whose table is that of the results."""
  before, rest = text.split(_START)
  return before + _START + table(results) + _END + rest.split(_END)[1]


def main() -> None:
  parser = argparse.ArgumentParser(
    prog='python -m benchmarks', description=__doc__.splitlines()[0]
  )
  parser.add_argument('names', nargs='*', metavar='NAME', help=', '.join(NAMES))
  parser.add_argument('--quick', action='store_true', help='keeps nothing')
  parser.add_argument('--render', action='store_true', help='runs nothing')
  args = parser.parse_args()
  if unknown := [name for name in args.names if name not in NAMES]:
    parser.error(f'{unknown} are unknown; known are {[*NAMES]}.')
  if args.render and (args.names or args.quick):
    parser.error('--render runs nothing; it takes no names and no --quick.')
  failed = []
  for name in () if args.render else args.names or NAMES:
    command = [sys.executable, '-m', f'benchmarks.{name}']
    path = None if args.quick else RESULTS / f'{name}.jsonl'
    if not measure(command + ['--quick'] * args.quick, path):
      failed.append(name)
  README.write_text(rendered(README.read_text(), read(RESULTS)))
  if failed:
    sys.exit(f'Failed: {", ".join(failed)}. Their results stay as they were.')


if __name__ == '__main__':
  main()
