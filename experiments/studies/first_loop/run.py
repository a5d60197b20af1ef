"""Runs the arms of the study, each through the main job, and keeps the results.

  python -m experiments.studies.first_loop.run --workdir=runs/first_loop \
      --seeds=0,1,2

Arms of a seed share their pretraining; `shuffled` shares the SFT too.

  main       pretraining, SFT on flawed demonstrations, RL
  flawless   SFT on flawless demonstrations of as many tokens, no RL
  shuffled   as main, with rewards permuted within each group

An arm that is finished is not run again.
"""

import pathlib
import shutil
import subprocess
import sys
import time

from absl import app, flags

from composer_jax.core import files
from experiments.studies.first_loop import collect

_WORKDIR = flags.DEFINE_string('workdir', 'runs/first_loop', 'For all arms.')
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'One main job each.')
_ARMS = flags.DEFINE_list('arms', ['main', 'flawless', 'shuffled'], 'Which.')
_CONFIG = flags.DEFINE_string(
  'config', 'configs/composer/first_loop.py', 'Of all.'
)

_SHARED = ('corpus', 'tokenizer.json', 'sandbox.json', 'exports/cpt')
_SFT = ('exports/sft', 'evaluation_sft.json', 'evaluation_sft_episodes.jsonl')
_SFT += ('demonstrations.json', 'sft_transcripts.txt')

_NOISE = ('wrong_tool', 'wrong_arguments', 'detour', 'skip_read')
_NOISE += ('wrong_edit', 'broken_edit', 'skip_test', 'give_up')


def _share(source: pathlib.Path, target: pathlib.Path, names) -> None:
  """Hands finished stages of one arm to another, whole or not at all."""
  for name in names:
    if (target / name).exists():
      continue
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    partial = target / f'{name}.partial'
    if (source / name).is_dir():
      shutil.rmtree(partial, ignore_errors=True)
      shutil.copytree(source / name, partial)
    else:
      shutil.copyfile(source / name, partial)
    partial.rename(target / name)


def _arm(seed: int, arm: str) -> None:
  root = pathlib.Path(_WORKDIR.value)
  main, workdir = root / f'{seed}_main', root / f'{seed}_{arm}'
  program = 'experiments.composer'
  overrides = [f'--config.seed={seed}']
  if arm != 'main':
    _share(main, workdir, _SHARED)
  if arm == 'shuffled':
    _share(main, workdir, _SFT)
    overrides.append('--config.rl.reward=shuffled')
  elif arm == 'flawless':
    program = 'experiments.sft'
    overrides += [f'--config.demonstrations.{n}=0.0' for n in _NOISE]
  command = [
    sys.executable,
    '-m',
    program,
    f'--config={_CONFIG.value}',
    f'--workdir={workdir}',
    *overrides,
  ]
  print('[study]', ' '.join(command), flush=True)
  began = time.monotonic()
  subprocess.run(command, check=True)
  results = pathlib.Path(__file__).parent / 'results'
  collect.collect(workdir, results / f'{seed}_{arm}')
  seconds = time.monotonic() - began
  files.write_json(
    results / f'{seed}_{arm}' / 'run.json',
    {'command': command[1:], 'wall_seconds': round(seconds, 1)},
  )


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments {argv[1:]}.')
  # The control comes last: what it is compared with is there first.
  for arms in (('main', 'flawless'), ('shuffled',)):
    for seed in _SEEDS.value:
      for arm in arms:
        if arm in _ARMS.value:
          _arm(int(seed), arm)


if __name__ == '__main__':
  app.run(main)
