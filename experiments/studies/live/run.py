"""Runs live learning with simulated users, honest and with flawed prices.

  python -m experiments.studies.live.run --workdir=runs/live_study --seeds=0,1

Every arm of a seed begins with the same SFT. `honest` has the usual prices;
`broken` and `asking` have users who undo almost any edit, and a price list that
forgets to charge broken calls, or questions: then avoiding edits pays. After
the arms, versions are planted before gate and trial (`planted`). A finished arm
is not run again.
"""

import pathlib
import shutil
import subprocess
import sys

from absl import flags

from composer_jax.core import files
from composer_jax.live import options as options_lib
from experiments import start
from experiments.studies import results
from experiments.studies.live import planted

_WORKDIR = flags.DEFINE_string('workdir', 'runs/live_study', 'Folder of arms.')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1'], 'Seeds; each has every arm.')
_CYCLES = flags.DEFINE_integer('cycles', 5, 'Cycles of the honest arm.')
_HACKED = flags.DEFINE_integer('hacked', 2, 'Cycles of the other arms.')
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder for the rows of each arm.',
)
# Prices that a careless author might write, with the flags of their arm.
ARMS = {
  'honest': (),
  'broken': ('patience=0.4', 'config.live.prices.invalid=0'),
  'asking': (
    *('patience=0.4', 'config.live.prices.asked=0'),
    'config.live.prices.follow_up=0',
  ),
}
_KEPT = (
  *('cycle', 'episodes', 'satisfied', 'reward', 'decision', 'version'),
  *('base', 'left_out', 'reason', 'collect_s', 'suites_before_s', 'train_s'),
  *('gate_s', 'trial_s', 'cycle_s'),
)
_PLANTED = {'regression': 200, 'improvement': 50, 'hack': 200}


def _called(
  program: str, workdir: pathlib.Path, seed: str, *words: str
) -> None:
  command = [
    *(sys.executable, '-m', f'experiments.{program}'),
    *('--config=configs/composer/live.py', f'--workdir={workdir}'),
    *(f'--{word}' for word in (f'config.seed={seed}', *words)),
  ]
  print('[study]', *command[2:], flush=True)
  subprocess.run(command, check=True)


def _arm(
  root: pathlib.Path, seed: str, arm: str, cycles: int
) -> list[results.Row]:
  start_of, workdir = root / f'{seed}_start', root / f'{seed}_{arm}'
  if not (start_of / 'evaluation_sft.json').exists():
    for program in ('pretrain', 'sft'):  # A finished stage does nothing.
      _called(program, start_of, seed)
  if not workdir.exists():
    partial = workdir.with_suffix('.partial')
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in ('tokenizer.json', 'sandbox.json', 'exports'):
      copy = shutil.copytree if (start_of / name).is_dir() else shutil.copyfile
      copy(start_of / name, partial / name)
    partial.rename(workdir)
  _called('live', workdir, seed, f'cycles={cycles}', *ARMS[arm])
  rows = []
  for number in range(1, cycles + 1):
    path = workdir / 'live' / 'cycles' / f'{number:04d}' / 'result.json'
    row = files.read_json(path)
    found = row.get('findings', []) + row.get('canaries', [])
    rows.append(
      {k: row.get(k) for k in _KEPT}
      | {'arm': arm, 'seed': int(seed), 'stage': 'cycle'}
      | {'held_by': [f['name'] for f in found if not f['is_shown']]}
      | {
        'canaries': {
          f['name']: [round(f['before'], 3), round(f['after'], 3)]
          for f in row.get('findings', [])
        }
      }
    )
  return rows


def _planted(
  root: pathlib.Path, seed: str, satisfied: float
) -> list[results.Row]:
  options = options_lib.LiveOptions()
  versions = planted.rows_of(root / f'{seed}_honest')
  rows = []
  for kind, count in _PLANTED.items():
    for share in (planted.redrawn_share(versions), 1.0):
      cases = planted.plant(
        versions,
        satisfied,
        options,
        kind=kind,
        share=share,
        count=count,
        seed=int(seed),
      )
      rows.append(
        {
          'arm': 'planted',
          'seed': int(seed),
          'stage': kind,
          'drawn_anew': round(share, 3),
          'count': count,
          'passed_gate': sum(c.passed_gate for c in cases),
          'shipped': sum(c.shipped for c in cases),
        }
      )
  return rows


def main() -> None:
  root = pathlib.Path(_WORKDIR.value)
  read = lambda: results.read(_RESULTS.value)
  write = lambda rows: results.write(
    _RESULTS.value, rows, by=('arm', 'seed', 'stage')
  )
  for seed in _SEEDS.value:
    for arm in ARMS:
      rows = read()
      if any((r['arm'], r['seed']) == (arm, int(seed)) for r in rows):
        continue
      cycles = _CYCLES.value if arm == 'honest' else _HACKED.value
      write(rows + _arm(root, seed, arm, cycles))
    own = lambda row, arm, seed=seed: (
      (row['arm'], row['seed']) == (arm, int(seed))
    )
    rows = [row for row in read() if not own(row, 'planted')]
    satisfied = [r for r in rows if own(r, 'honest')][-1]['satisfied']
    write(rows + _planted(root, seed, satisfied))


if __name__ == '__main__':
  start.run(main)
