"""Runs RL at several staleness bounds, with and without replay.

  python -m experiments.studies.staleness.run --workdir=runs/staleness

Arms of a seed share pretraining and SFT (`start`), and differ in RL alone,
which has half the steps of the main job. The gate marks steps and stops none,
so that an arm without replay can show what becomes of it. A finished arm is not
run again, a stopped one goes on from its last checkpoint; `analyze` names the
arms without results.
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
from experiments.studies.staleness import probe

_WORKDIR = flags.DEFINE_string('workdir', 'runs/staleness', 'Folder of arms.')
_SEEDS = flags.DEFINE_list('seeds', ['14', '15'], 'Seeds; each has every arm.')
_STEPS = flags.DEFINE_integer('steps', 25, 'Steps of RL.')
_CONFIG = flags.DEFINE_string(
  'config', 'configs/composer/tiny.py', 'Config of all arms.'
)
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder for the rows of each arm.',
)

# Fields of the config by arm; the number is rl.max_staleness.
ARMS = {
  f'{staleness}_{name}': [f'rl.max_staleness={staleness}', f'rl.replay={value}']
  for staleness in (0, 1, 4)
  for name, value in (('replay', True), ('afresh', False))
}
_STALE = ['rl.max_staleness=4', 'rl.replay=True']
ARMS |= {
  # The ratio still corrects, without its cap.
  '4_untruncated': [*_STALE, 'rl.loss.ratio_cap=1e9'],
  '4_bfloat16': [*_STALE, 'rollout.compute_dtype=bfloat16'],
  '4_bfloat16_afresh': [
    'rl.max_staleness=4',
    'rl.replay=False',
    'rollout.compute_dtype=bfloat16',
  ],
  '4_alpha_0.1': [*_STALE, 'model.moe.replay_alpha=0.1'],
  '4_alpha_0.5': [*_STALE, 'model.moe.replay_alpha=0.5'],
}
_ARMS = results.define_arms(ARMS)

# What the arms of a seed share.
_SHARED = ('corpus', 'tokenizer.json', 'sandbox.json', 'exports')


def _called(program: str, workdir: pathlib.Path, fields: list[str]) -> None:
  words = [f'--config={_CONFIG.value}', f'--workdir={workdir}']
  words += [f'--config.{field}' for field in fields]
  print('[study]', program, *words, flush=True)
  command = [sys.executable, '-m', f'experiments.{program}', *words]
  subprocess.run(command, check=True)


def _begun(root: pathlib.Path, seed: str) -> pathlib.Path:
  """Returns a workdir whose SFT is finished."""
  workdir = root / f'{seed}_start'
  if not (workdir / 'evaluation_sft.json').exists():
    for program in ('pretrain', 'sft'):  # A finished stage does nothing.
      _called(program, workdir, [f'seed={seed}'])
  return workdir


def _share(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies finished stages to an arm, all or none."""
  if target.exists():
    return
  partial = target.with_suffix('.partial')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  for name in _SHARED:
    if (source / name).is_dir():
      shutil.copytree(source / name, partial / name)
    else:
      shutil.copyfile(source / name, partial / name)
  partial.rename(target)


def _arm(root: pathlib.Path, seed: str, arm: str) -> None:
  workdir = root / f'{seed}_{arm}'
  if not (workdir / 'evaluation_rl.json').exists():
    _share(_begun(root, seed), workdir)
    steps = [f'rl.steps={_STEPS.value}', f'rl.decay_steps={_STEPS.value // 2}']
    steps += [f'rl.warmup_steps={min(3, _STEPS.value // 4)}']
    always = ['rl.gate.action=flag', 'rl.mismatch_every=5', f'seed={seed}']
    _called('rl', workdir, [*always, *steps, *ARMS[arm]])
  about = {
    'arm': arm,
    'seed': int(seed),
    'stage': 'arm',
    'evaluation': files.read_json(workdir / 'evaluation_rl.json'),
    'start': files.read_json(root / f'{seed}_start' / 'evaluation_sft.json'),
    **probe.gradient_error(workdir),
  }
  left = ('time', 'expert_load', 'gate', 'flag_kinds', 'groups')
  steps = [
    {k: v for k, v in row.items() if k not in left}
    | {'arm': arm, 'seed': int(seed)}
    for row in writer.read(workdir)
    if row['stage'] == 'rl'
  ]
  rows = results.read(_RESULTS.value)
  others = [r for r in rows if (r['arm'], r['seed']) != (arm, int(seed))]
  results.write(
    _RESULTS.value, [*others, about, *steps], by=('arm', 'seed', 'stage')
  )


def main() -> None:
  finished = {
    (r['arm'], r['seed'])
    for r in results.read(_RESULTS.value)
    if r['stage'] == 'arm'
  }
  for seed in _SEEDS.value:
    for arm in _ARMS.value:
      if (arm, int(seed)) not in finished:
        _arm(pathlib.Path(_WORKDIR.value), seed, arm)


if __name__ == '__main__':
  start.run(main)
