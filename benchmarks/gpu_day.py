"""Everything that a GPU is needed for, in 35 minutes: results and one page.

  ./run.sh gpu_day --out=DIR [--parts=NAME,...] [--tiny]

Each part is a process of its own with a time limit of its own, the most telling
first; a part that fails or is cut off leaves the others alone. DIR gets
results.jsonl, one line a claim as it is measured, what each part printed
(NAME.out, and NAME.log with its errors), and page.md. `--tiny` runs the same
commands at sizes whose figures mean nothing, on any device.

It needs the extra 'gpu'. torch with CUDA and tokamax are peers where they are
installed.
"""

import argparse
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks import __main__ as runner

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Part(NamedTuple):
  """A part of the day.

  Attributes:
    name: name of the part.
    about: what it tells.
    minutes: time limit of all its commands together.
    commands: arguments of `python -m`, run one after the other.
  """

  name: str
  about: str
  minutes: float
  commands: list[list[str]]


def parts(folder: pathlib.Path, *, is_tiny: bool) -> list[Part]:
  """Returns the parts of a day whose files go to `folder`."""
  size = ['--tiny'] if is_tiny else []
  config = 'configs/composer/gpu.py'
  loop, probed = folder / 'loop', folder / 'probed'
  steps = [f'--config.{k}' for k in ('cpt.steps=300', 'rl.steps=20')]
  steps += ['--config.sft.steps=800', '--config.evaluation.episodes=100']
  whole_loop = [f'--config={config}', *steps, f'--workdir={loop}']
  smoke = [f'--config={config}:smoke']
  probe = [f'--workdir={probed}', '--dtype=bfloat16', f'--out={folder}/gap']
  probe += ['--tokens=200'] if is_tiny else []
  trace = folder / 'trace'
  return [
    Part(
      'train_step',
      'share of the peak of a step that fills the card, and its parts',
      5,
      [['benchmarks.train_step', '--gpu', *size, f'--trace={trace}']],
    ),
    Part(
      'grouped_matmul',
      'grouped products beside tokamax, torch and a dense product, and experts '
      'of few bits, which are emulated, beside bfloat16',
      5,
      [
        ['benchmarks.grouped_matmul', '--gpu', *size],
        ['benchmarks.few_bits', '--gpu', *size],
      ],
    ),
    Part(
      'decode',
      'the engine at batch 1, 64 and 256 beside reading and transformers',
      5,
      [['benchmarks.rollout', '--gpu', *size]],
    ),
    Part(
      'attention',
      'attention beside cuDNN, tokamax and torch',
      3,
      [['benchmarks.attention', '--gpu', *size]],
    ),
    Part(
      'loop',
      'the main job, trainer and engine taking turns on the device',
      6,
      [
        [
          'experiments.composer',
          *([*smoke, f'--workdir={loop}'] if is_tiny else whole_loop),
        ]
      ],
    ),
    Part(
      'mismatch',
      'sampler and trainer in bfloat16, and the zero law in both numerics',
      4,
      [
        ['experiments.composer', *smoke, f'--workdir={probed}'],
        ['experiments.mismatch', *probe, '--numerics=fast'],
        ['experiments.mismatch', *probe, '--numerics=batch_invariant'],
      ],
    ),
    Part(
      'muon',
      'Newton-Schulz of 6.7B parameters beside optax and torch',
      3,
      [['benchmarks.muon', '--gpu', *size, *['--quick'] * is_tiny]],
    ),
    Part(
      'kimi_layer',
      'one layer of Kimi K2 at its real size',
      2,
      [['benchmarks.kimi_layer', *size]],
    ),
    Part(
      'swap',
      'how long decoding stops for new weights',
      2,
      [['benchmarks.delta', '--only=pause', *['--quick'] * is_tiny]],
    ),
  ]


class Outcome(NamedTuple):
  """How a part ended; `failure` is empty if it ended well."""

  part: Part
  seconds: float
  failure: str


def run(part: Part, folder: pathlib.Path, seconds: float) -> Outcome:
  """Runs a part and appends its JSON lines to results.jsonl as they come."""
  start = time.monotonic()
  for command in part.commands:
    left = seconds - (time.monotonic() - start)
    failure = _run_command(part, command, folder, left)
    if failure:
      break
  return Outcome(part, time.monotonic() - start, failure)


def _run_command(
  part: Part, command: list[str], folder: pathlib.Path, seconds: float
) -> str:
  log, out = (folder / f'{part.name}.{end}' for end in ('log', 'out'))
  with log.open('a') as errors, out.open('a') as output:
    print(f'$ python -m {" ".join(command)}', file=errors, flush=True)
    process = subprocess.Popen(
      [sys.executable, '-m', *command],
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
      start_new_session=True,
    )
    is_late = threading.Event()

    def stop() -> None:
      is_late.set()
      os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(seconds, 0), stop)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
      print(line, end='', flush=True)
      output.write(line)
      _keep(part.name, line, folder)
    process.wait()
    timer.cancel()
  if is_late.is_set():
    return f'cut off after {part.minutes:g} minutes'
  if process.returncode:
    last = log.read_text().strip().splitlines()[-1]
    return f'exit status {process.returncode}: {last[:200]}'
  return ''


def _keep(part: str, text: str, folder: pathlib.Path) -> None:
  try:
    line = json.loads(text)
  except ValueError:
    return
  if isinstance(line, dict):
    _append({'of': part} | line, folder)


def _append(line: dict[str, Any], folder: pathlib.Path) -> None:
  with (folder / 'results.jsonl').open('a') as file:
    file.write(json.dumps(line) + '\n')


# What the page shows of the rows that the loop and the probe wrote.
_SHOWN = (
  'pass_rate',
  'staleness',
  'mismatch_kl',
  'mismatch_max',
  'train_s',
  'wait_s',
  'mismatch_kl_replay',
  'mismatch_kl_no_replay',
  'mismatch_max_replay',
)


def keep_rows(part: str, path: pathlib.Path, folder: pathlib.Path) -> None:
  """Appends the last row of each kind in a metrics.jsonl."""
  if not path.exists():
    return
  rows = {}
  for text in path.read_text().splitlines():
    row = json.loads(text)
    kind = (row['stage'], row.get('name', ''), row.get('numerics', ''))
    rows[' '.join(filter(None, kind))] = row
  for kind, row in rows.items():
    shown = {k: row[k] for k in _SHOWN if k in row}
    if shown:
      _append({'of': part, 'case': kind, **shown}, folder)


def page(outcomes: Iterable[Outcome], folder: pathlib.Path, about: str) -> str:
  """Returns the page of a day as Markdown."""
  lines = ['# A day with a GPU', '', about, '']
  lines += ['| part | what it tells | outcome | seconds |', '|---|---|---|---|']
  for part, seconds, failure in outcomes:
    outcome = failure.replace('|', '/') or 'ended well'
    lines.append(f'| {part.name} | {part.about} | {outcome} | {seconds:.0f} |')
  path = folder / 'results.jsonl'
  texts = path.read_text().splitlines() if path.exists() else []
  results = [json.loads(text) for text in texts]
  for name in dict.fromkeys(line['of'] for line in results):
    lines += ['', f'## {name}', '']
    lines += ['| case | peer | goal | ours | met |', '|---|---|---|---|---|']
    lines += [_row(line) for line in results if line['of'] == name]
  return '\n'.join(lines) + '\n'


def _row(line: dict[str, Any]) -> str:
  if 'part' in line:  # of a step
    figure = f'{line["ms"]:g} ms, {line["share"]:.1%}'
    cells = [line['part'], '', '', figure, '']
  elif 'ours' in line:
    figure = f'{line["ours"]:g} {line["unit"]}'
    if line['ratio'] is not None:
      figure += f', {line["ratio"]:g} times the peer'
    if line['limit']:
      figure += f', {line["ours"] / line["limit"]:.2f} of the limit'
    met = '' if line['goal'] == 'none' else 'yes' if line['met'] else 'no'
    cells = [line['case'], line['against'], line['goal'], figure, met]
  else:
    figures = [f'{k} {line[k]:.3g}' for k in _SHOWN if k in line]
    cells = [line.get('case', ''), '', '', ', '.join(figures), '']
  return '| ' + ' | '.join(str(cell).replace('|', '/') for cell in cells) + ' |'


def _device() -> str:
  """Returns the backend and kind of JAX's device, asked in another process."""
  code = 'import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)'
  command = [sys.executable, '-c', code]
  process = subprocess.run(command, capture_output=True, text=True, check=True)
  return process.stdout.strip().splitlines()[-1]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--parts', default='', help='names, comma-separated')
  parser.add_argument('--tiny', action='store_true')
  arguments = parser.parse_args()
  folder = arguments.out.resolve()
  day = parts(folder, is_tiny=arguments.tiny)
  known = [part.name for part in day]
  chosen = arguments.parts.split(',') if arguments.parts else known
  if unknown := sorted({*chosen} - {*known}):
    parser.error(f'--parts: {unknown} are unknown; known are {known}.')
  if folder.exists() and any(folder.iterdir()):
    parser.error(f'--out: {folder} is not empty; name a new folder.')
  device = _device()
  if not arguments.tiny and not device.startswith('gpu'):
    parser.error(
      f'gpu_day needs a GPU, but JAX has {device!r}. Install the extra '
      "(pip install -e '.[gpu]'), or rehearse with --tiny."
    )
  folder.mkdir(parents=True, exist_ok=True)
  date = datetime.datetime.now(datetime.UTC).date()
  about = f'{device}, commit {runner.commit()}, {date}.'
  if arguments.tiny:
    about += ' A rehearsal: its figures mean nothing.'
  outcomes = []
  for part in day:
    if part.name not in chosen:
      continue
    print(f'[gpu_day] {part.name}: {part.about}', flush=True)
    outcomes.append(run(part, folder, 60 * part.minutes))
    if part.name == 'loop':
      keep_rows('loop', folder / 'loop' / 'metrics.jsonl', folder)
    elif part.name == 'mismatch':
      keep_rows('mismatch', folder / 'gap' / 'metrics.jsonl', folder)
    (folder / 'page.md').write_text(page(outcomes, folder, about))
    _, seconds, failure = outcomes[-1]
    print(f'[gpu_day] {failure or "ended well"}, {seconds:.0f} s', flush=True)
  print(f'[gpu_day] {folder / "page.md"}')
  return any(outcome.failure for outcome in outcomes)


if __name__ == '__main__':
  sys.exit(main())
