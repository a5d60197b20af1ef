"""Makes the tasks, runs the main job on them with each seed, keeps the results.

  python -m experiments.studies.real_code.run --workdir=runs/real_code \
      --seeds=0,1

The same command resumes at any point. Fewer steps for a smaller budget:
--cpt_steps, --sft_steps and --rl_steps; --tasks takes a set that exists.
"""

import collections
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from absl import flags

from composer_jax.core import files
from composer_jax.tasks.deletion import candidates
from composer_jax.tasks.repository import task_set
from composer_jax.telemetry import machine, writer
from configs.composer import real_code
from experiments import start
from experiments.studies import results
from experiments.studies.real_code import chances, packages

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/real_code', 'Folder of the tasks and of a run for each seed.'
)
_SEEDS = flags.DEFINE_list('seeds', ['0', '1'], 'Seeds of the job.')
_TASKS = flags.DEFINE_string(
  'tasks', '', 'Folder of a set of tasks; made in the workdir if empty.'
)
_ARCHIVES = flags.DEFINE_string(
  'archives', 'runs/sdists', 'Folder of sdists; missing ones are downloaded.'
)
_SMOKE = flags.DEFINE_bool('smoke', False, 'Runs every stage at a tiny size.')
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder for the rows of each seed.',
)
_STEPS = {
  stage: flags.DEFINE_integer(
    f'{stage}_steps', 0, f'Steps of {stage}; those of the config for 0.'
  )
  for stage in ('cpt', 'sft', 'rl')
}

_CONFIG = 'configs/composer/real_code.py'
# What the study does not show, or what takes much space.
_LEFT = ('time', 'expert_load')
_EPISODES, _MAX_TEXT = 4, 1500


def _call(*arguments: str) -> None:
  print('[study]', ' '.join(arguments), flush=True)
  subprocess.run([sys.executable, '-m', *arguments], check=True)


def _make_tasks(folder: pathlib.Path) -> None:
  _call(
    'experiments.make_tasks',
    '--config=configs/tasks/packages.py',
    f'--out={folder}',
    f'--archives={_ARCHIVES.value}',
    f'--only={",".join((*packages.TRAINING, *packages.HELD_OUT))}',
    *(f'--config.packages.{name}.held_out=True' for name in packages.HELD_OUT),
    *('--config.options.min_lines=1', '--config.options.max_lines=3'),
    '--config.options.body=60',
    *('--config.options.symbol=0', '--config.options.class_=0'),
    *('--config.options.file=0', '--config.options.closure=0'),
  )  # fmt: skip


def _steps() -> list[str]:
  """Flags of the stages' steps; rates fall over the last half of them."""
  changed = []
  for stage, flag in _STEPS.items():
    if flag.value:
      changed += [
        f'--config.{stage}.steps={flag.value}',
        f'--config.{stage}.decay_steps={flag.value // 2}',
        f'--config.{stage}.warmup_steps={min(20, flag.value // 4)}',
      ]
  return changed


def _of_tasks(folder: pathlib.Path) -> results.Row:
  known = task_set.load(folder)
  row: results.Row = {'stage': 'tasks', 'machine': machine.describe()}
  for split, is_held_out in (('train', False), ('held_out', True)):
    tasks = list(known.split(is_held_out))
    row[split] = dict(collections.Counter(t.package for t in tasks))
    lines = [
      sum(d.num_lines for d in candidates.definitions(t.deleted, t.solution))
      for t in tasks
    ]
    row[f'{split}_lines'] = statistics.mean(lines) if lines else 0.0
  return row


def _episodes(workdir: pathlib.Path) -> list[results.Row]:
  """Passed episodes of the policies first; each text without its end."""
  rows = []
  for policy in ('sft', 'rl'):
    played = [
      row
      for row in writer.read(workdir / 'episodes.jsonl')
      if row['stage'] == f'eval_{policy}'
    ]
    played.sort(key=lambda row: not row['verdict']['passed'])
    rows += [
      {
        'stage': 'episode',
        'policy': policy,
        'task_id': row['task_id'],
        'passed': row['verdict']['passed'],
        'turns': [
          {'role': t['role'], 'text': t['text'][:_MAX_TEXT]}
          for t in row['turns']
        ],
      }
      for row in played[:_EPISODES]
    ]
  return rows


def _by_task(workdir: pathlib.Path, policy: str) -> dict[str, list[int]]:
  """Episodes passed, and of all, of each held-out task."""
  counts: dict[str, list[int]] = {}
  for row in writer.read(workdir / f'evaluation_{policy}_episodes.jsonl'):
    each = counts.setdefault(row['task_id'], [0, 0])
    each[0] += row['passed']
    each[1] += 1
  return counts


def _chances(workdir: pathlib.Path, argument: str) -> list[results.Row]:
  """Log-probabilities of the deleted bodies under each policy."""
  fields = real_code.get_config(argument).to_dict()
  return [
    {'stage': 'chance', 'policy': policy, 'split': split, **chance}
    for policy in ('sft', 'rl')
    if (workdir / f'evaluation_{policy}.json').exists()
    for split, found in chances.of_policy(fields, workdir, policy).items()
    for chance in found
  ]


def collect(workdir: pathlib.Path, argument: str) -> list[results.Row]:
  """Rows of a seed's run: one that describes it, then what it measured."""
  config = files.read_json(workdir / 'config.json')
  about: dict[str, Any] = {
    'stage': 'run',
    'steps': {stage: config[stage]['steps'] for stage in _STEPS},
  }
  for name in ('demonstrations', 'stages', 'evaluation_sft', 'evaluation_rl'):
    if (workdir / f'{name}.json').exists():
      about[name] = files.read_json(workdir / f'{name}.json')
  about['by_task'] = {p: _by_task(workdir, p) for p in ('sft', 'rl')}
  measured = [
    {k: v for k, v in row.items() if k not in _LEFT}
    for row in writer.read(workdir)
    if row['stage'] in _STEPS
  ]
  rows = [about, *measured, *_chances(workdir, argument), *_episodes(workdir)]
  return [{'seed': int(workdir.name), **row} for row in rows]


def main() -> None:
  root = pathlib.Path(_WORKDIR.value)
  tasks = pathlib.Path(_TASKS.value or root / 'tasks')
  if not _TASKS.value:
    _make_tasks(tasks)
  rows = [_of_tasks(tasks)]
  variant = ',smoke' if _SMOKE.value else ''
  for seed in _SEEDS.value:
    _call(
      'experiments.composer',
      f'--config={_CONFIG}:{tasks}{variant}',
      f'--workdir={root / seed}',
      f'--config.seed={seed}',
      *_steps(),
    )
    rows += collect(root / seed, f'{tasks}{variant}')
    results.write(
      _RESULTS.value, json.loads(json.dumps(rows)), by=('seed', 'stage')
    )


if __name__ == '__main__':
  start.run(main)
