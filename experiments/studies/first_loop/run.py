"""Runs the arms of the study, each through the main job, and keeps the results.

  python -m experiments.studies.first_loop.run --workdir=runs/first_loop \
      --seeds=0,1,2,3,4

Arms of a seed share their pretraining; `no_hints` and `shuffled` the SFT, too.

  main       pretraining, SFT on flawed demonstrations, RL: what ./run.sh does
  no_hints   as main, without hints in RL
  flawless   SFT on flawless demonstrations of as many tokens, no RL
  shuffled   as no_hints, with rewards permuted within each group

A finished arm is not run again. Field `run` of an arm's row holds its command,
with paths relative to the repository, and the seconds of all its processes by
commit.
"""

import pathlib
import shutil
import subprocess
import sys
from typing import Any

from absl import flags

from composer_jax.core import files
from composer_jax.telemetry import stage_times
from experiments import start
from experiments.studies import results
from experiments.studies.first_loop import collect

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/first_loop', 'Folder for all arms.'
)
_SEEDS = flags.DEFINE_list(
  'seeds', ['0', '1', '2', '3', '4'], 'Seeds, each of which gets every arm.'
)
ARMS = ('main', 'no_hints', 'flawless', 'shuffled')
_ARMS = results.define_arms(ARMS)
_CONFIG = flags.DEFINE_string(
  'config', 'configs/composer/tiny.py', 'Config of all arms.'
)
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder for the rows of each arm.',
)

_REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
# Files that decide the results. The results themselves change meanwhile.
_CODE = ('composer_jax', 'configs', 'experiments/*.py', 'constraints.txt')

_SHARED = ('corpus', 'tokenizer.json', 'sandbox.json', 'exports/cpt')
_SFT = ('exports/sft', 'demonstrations.json', 'sft_transcripts.txt')

_NOISE = ('wrong_tool', 'wrong_edit', 'broken_edit', 'skip_test', 'give_up')
_NOISE += ('cut_short',)


def _share(source: pathlib.Path, target: pathlib.Path, names) -> None:
  """Copies finished stages of one arm to another, all or none."""
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


def _portable(path: str) -> str:
  """Returns a path relative to the repository, else its last part."""
  absolute = pathlib.Path(path)
  if not absolute.is_absolute():
    return path
  inside = absolute.is_relative_to(_REPOSITORY)
  return str(absolute.relative_to(_REPOSITORY)) if inside else absolute.name


def _commit() -> str:
  """Returns the code's commit, with '-dirty' if it differs, or 'unknown'."""

  def git(*arguments: str) -> str:
    command = ['git', '-C', str(_REPOSITORY), *arguments]
    return subprocess.run(
      command, check=True, capture_output=True, text=True
    ).stdout.strip()

  try:
    dirty = '-dirty' if git('status', '--porcelain', '--', *_CODE) else ''
    return git('rev-parse', 'HEAD') + dirty
  except (OSError, subprocess.CalledProcessError):
    return 'unknown'  # There is no git or no repository.


def record(
  old: dict[str, Any] | None, command: list[str], times: pathlib.Path
) -> dict[str, Any]:
  """Returns field `run`: the command, and the seconds measured in `times`.

  An arm whose seconds were measured elsewhere keeps its old record.
  """
  if not (times / stage_times.STAGES).exists():
    return old or {'command': command}
  commits = files.read_json(times / stage_times.STAGES)
  seconds = round(sum(commits.values()), 1)
  return {'command': command, 'commits': commits, 'wall_seconds': seconds}


def _arm(seed: int, arm: str) -> None:
  root = pathlib.Path(_WORKDIR.value)
  name = f'{seed}_{arm}'
  main, workdir = root / f'{seed}_main', root / name
  program, final_stage = 'experiments.composer', 'rl'
  overrides = [f'--config.seed={seed}']
  if arm != 'main':
    _share(main, workdir, _SHARED)
  if arm in ('no_hints', 'shuffled'):
    evaluations = [path.name for path in main.glob('evaluation_sft*')]
    _share(main, workdir, [*_SFT, *sorted(evaluations)])
    # Hints would also teach the shuffled control.
    overrides.append('--config.hints.loss.weight=0.0')
    if arm == 'shuffled':
      overrides.append('--config.rl.reward=shuffled')
  elif arm == 'flawless':
    program, final_stage = 'experiments.sft', 'sft'
    overrides += [f'--config.demonstrations.{n}=0.0' for n in _NOISE]

  def command(config: str, folder: str) -> list[str]:
    paths = [f'--config={config}', f'--workdir={folder}/{name}']
    return ['-m', program, *paths, *overrides]

  # Beside the workdir, because the run deletes foreign files in it.
  times = root / 'times' / name
  if (workdir / f'evaluation_{final_stage}.json').exists():
    print(f'[study] {name} is finished', flush=True)
  else:
    called = [sys.executable, *command(_CONFIG.value, _WORKDIR.value)]
    print('[study]', ' '.join(called), flush=True)
    with stage_times.StageTimes(times).stage(_commit()):
      subprocess.run(called, check=True)
  about, *measured = collect.collect(workdir)
  old_rows = results.read(_RESULTS.value)
  old = [
    r.get('run') for r in old_rows if (r['arm'], r['stage']) == (name, 'arm')
  ]
  written = command(_portable(_CONFIG.value), _portable(_WORKDIR.value))
  about['run'] = record(next(iter(old), None), written, times)
  other_rows = [r for r in old_rows if r['arm'] != name]
  rows = [*other_rows, about, *measured]
  results.write(_RESULTS.value, rows, by=('arm', 'stage'))


def main() -> None:
  # The others share stages of main.
  for arms in (('main',), ('no_hints', 'flawless', 'shuffled')):
    for seed in _SEEDS.value:
      for arm in arms:
        if arm in _ARMS.value:
          _arm(int(seed), arm)


if __name__ == '__main__':
  start.run(main)
