"""Rewards stored groups by other prices or another rubric; plays nothing.

  ./run.sh rescore --groups=runs/tiny \\
      --tokenizer=runs/tiny/tokenizer.json \\
      --config=configs/composer/tiny.py --config.rewards.invalid_penalty=0.3 \\
      --config.tasks.rubric.file=configs/rubrics/style.toml \\
      --config.rewards.judged_reward=0.3 --out=runs/rescored

Reads the groups that the store of a run still has, or files of groups such as
stopped.npz, and writes each with its new rewards to --out, beside
rescored.jsonl: a line a rollout, with its rewards before and now, its terms and
its scores. A model of the rubric is asked for what it has not answered in --out
yet.
"""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
from absl import flags, logging

from experiments import start

_CONFIG = start.define_config(
  'configs/composer/tiny.py', 'Config file of a run: rewards, rubric, tasks.'
)
_GROUPS = flags.DEFINE_string(
  'groups', '', 'Workdir of a run, or a file or folder of groups (.npz).'
)
_TOKENIZER = flags.DEFINE_string('tokenizer', '', 'tokenizer.json of the run.')
_OUT = flags.DEFINE_string('out', 'runs/rescored', 'Folder of the results.')


def _stored() -> list[Any]:
  from composer_jax import wiring
  from composer_jax.core import files, group_bytes

  place = pathlib.Path(_GROUPS.value)
  if (place / 'config.json').is_file():
    store = files.read_json(place / 'config.json')['delta']['store']
    return wiring.kept_groups(place, store)
  paths = sorted(place.glob('*.npz')) if place.is_dir() else [place]
  if not _GROUPS.value or not paths or not all(p.is_file() for p in paths):
    raise ValueError(
      f'--groups={_GROUPS.value!r} must be the workdir of a run, a file of a '
      'group, or a folder of such files (*.npz).'
    )
  return [group_bytes.from_bytes(path.read_bytes()) for path in paths]


def run() -> None:
  logging.set_verbosity(logging.WARNING)
  fields = start.config_fields(_CONFIG)
  start.emulate_devices(1)
  # After the flags: these imports load jax.
  from composer_jax import wiring
  from composer_jax.agent import rewards
  from composer_jax.core import files, group_bytes
  from composer_jax.rl import advantage
  from composer_jax.tasks import calibration

  stored = _stored()
  spec = wiring.spec_of(fields)
  systems = wiring.systems_of(spec)
  tokenizer = systems.load_tokenizer(pathlib.Path(_TOKENIZER.value))
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  pays = spec.rewards.judged_reward > 0  # by the same rules as in a run
  if pays and (line := calibration.try_judge(spec.systems['tasks'].rubric)):
    print(line)
  judge: Any = systems.judge and systems.judge(tokenizer, out)
  rows, told = [], []
  for group in stored:
    if judge is not None:
      made = judge(group, spec.rewards)
    else:
      rollouts = (rewards.rescored(r, spec.rewards) for r in group.rollouts)
      made = dataclasses.replace(group, rollouts=tuple(rollouts))
    path = out / f'{group.group}.npz'
    files.write_atomic(path, group_bytes.to_bytes(made))
    pairs = list(zip(group.rollouts, made.rollouts, strict=True))
    for g in (group, made):
      rewards_R = np.array([r.reward for r in g.rollouts])
      told.append(bool(advantage.group_advantages(g, rewards_R).any()))
    rows += [
      {
        'group': group.group,
        'member': new.member,
        'before': old.reward,
        'reward': new.reward,
        'terms': dict(new.reward_terms),
        'scores': dict(new.scores),
        'not_judged': new.not_judged,
      }
      for old, new in pairs
    ]
  text = ''.join(f'{json.dumps(row)}\n' for row in rows)
  files.write_atomic(out / 'rescored.jsonl', text.encode())
  changed = sum(row['before'] != row['reward'] for row in rows)
  print(
    f'{changed} of {len(rows)} rewards changed; {sum(told[::2])} of '
    f'{len(stored)} groups had an advantage before, {sum(told[1::2])} have now'
  )
  if failed := sum(bool(row['not_judged']) for row in rows):
    print(f'{failed} rollouts were not judged; the same command asks again')
  print(out / 'rescored.jsonl')


if __name__ == '__main__':
  start.run(run, errors=(ValueError, OSError, RuntimeError))
