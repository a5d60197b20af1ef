"""Runs RL with and without a reward for style, judged by rules.

  python -m experiments.studies.rubric.run --workdir=runs/rubric --seeds=14,15

Both arms of a seed begin with the same SFT and score every rollout by
configs/rubrics/style.toml; in `style` a full score earns 0.3. The main job's
own means are in the arm `plain`. A finished arm is not run again.
"""

import pathlib
import shutil
import subprocess
import sys

from absl import flags

from composer_jax.core import files
from composer_jax.telemetry import writer
from experiments import start
from experiments.studies import results

_WORKDIR = flags.DEFINE_string('workdir', 'runs/rubric', 'Folder of arms.')
_SEEDS = flags.DEFINE_list('seeds', ['14', '15'], 'Seeds; each has every arm.')
_STEPS = flags.DEFINE_integer('steps', 25, 'Steps of RL.')
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder for the rows of each arm.',
)
ARMS = {'plain': 0.0, 'style': 0.3}
_KEPT = ('step', 'pass_rate', 'reward', 'turns', 'invalid_rate', 'scores')


def _called(program: str, workdir: pathlib.Path, *fields: str) -> None:
  words = [f'--workdir={workdir}', *(f'--config.{f}' for f in fields)]
  command = [sys.executable, '-m', f'experiments.{program}', *words]
  print('[study]', program, *words, flush=True)
  subprocess.run(command, check=True)


def _arm(root: pathlib.Path, seed: str, arm: str) -> list[results.Row]:
  start_of, workdir = root / f'{seed}_start', root / f'{seed}_{arm}'
  if not (start_of / 'evaluation_sft.json').exists():
    for program in ('pretrain', 'sft'):  # A finished stage does nothing.
      _called(program, start_of, f'seed={seed}')
  if not workdir.exists():
    partial = workdir.with_suffix('.partial')
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in ('corpus', 'tokenizer.json', 'sandbox.json', 'exports'):
      copy = shutil.copytree if (start_of / name).is_dir() else shutil.copyfile
      copy(start_of / name, partial / name)
    partial.rename(workdir)
  steps = _STEPS.value
  _called(
    'rl',
    workdir,
    f'seed={seed}',
    f'rl.steps={steps}',
    f'rl.decay_steps={steps // 2}',
    f'rl.warmup_steps={min(3, steps // 4)}',
    'tasks.rubric.file=configs/rubrics/style.toml',
    f'rewards.judged_reward={ARMS[arm]}',
  )
  evaluations = {
    f'{stage}{part}': files.read_json(path)
    for stage, folder in (('sft', start_of), ('rl', workdir))
    for path in sorted(folder.glob(f'evaluation_{stage}*.json'))
    for part in [path.stem.removeprefix(f'evaluation_{stage}')]
  }
  about = {
    'stage': 'arm',
    'passed': {n: e['passed'] / e['episodes'] for n, e in evaluations.items()},
    'episodes': {n: e['episodes'] for n, e in evaluations.items()},
  }
  trained = [
    {k: row[k] for k in _KEPT} | {'stage': 'rl'}
    for row in writer.read(workdir)
    if row['stage'] == 'rl'
  ]
  return [{'arm': arm, 'seed': int(seed), **row} for row in [about, *trained]]


def main() -> None:
  for seed in _SEEDS.value:
    for arm in ARMS:
      rows = results.read(_RESULTS.value)
      if any((r['arm'], r['seed']) == (arm, int(seed)) for r in rows):
        continue
      rows += _arm(pathlib.Path(_WORKDIR.value), seed, arm)
      results.write(_RESULTS.value, rows, by=('arm', 'seed', 'stage'))


if __name__ == '__main__':
  start.run(main)
