"""Pass rates of a run's policies, every ten RL steps, on the same 100 tasks.

  python -m experiments.studies.first_loop.probe --watch --workdir=runs/tiny &
  ./run.sh
  python -m experiments.studies.first_loop.probe --workdir=runs/tiny

A run keeps its last two checkpoints. The first command, started beside it,
copies every tenth to WORKDIR.probe; the last plays the tasks with each, and
writes WORKDIR.probe/probe.json. The tasks are of the training split, and far
beyond those that the run trains on. All policies sample with the same seeds.
"""

import dataclasses
import pathlib
import shutil
import tempfile
import time

from absl import flags

from composer_jax.core import files
from experiments import launch

_WATCH = flags.DEFINE_bool('watch', False, 'Copies checkpoints; see above.')
_TASKS, _FIRST = 100, 1_000_000


def watch(workdir: pathlib.Path, kept: pathlib.Path) -> None:
  """Copies checkpoints until the run has evaluated its last policy."""
  kept.mkdir(parents=True, exist_ok=True)
  while not (workdir / 'evaluation_rl.json').exists():
    time.sleep(2)
    for path in (workdir / 'checkpoints' / 'rl').glob('*0'):
      target = kept / path.name
      if path.name.isdigit() and not target.exists():
        shutil.rmtree(kept / 'partial', ignore_errors=True)
        shutil.copytree(path, kept / 'partial')
        (kept / 'partial').rename(target)


def run(spec, systems, workdir, *, command):
  kept = workdir.with_name(f'{workdir.name}.probe')
  if _WATCH.value:
    watch(workdir, kept)
    return
  # After the flags: these import jax.
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import reinforce, stages
  from composer_jax.rl import behaviour, collect
  from composer_jax.train.checkpoints import manager

  rows = []
  # In a copy, so that the run keeps its record of how it was made.
  copy = kept / 'run'
  shutil.rmtree(copy, ignore_errors=True)
  copy.mkdir(parents=True)
  for path in workdir.iterdir():
    if path.is_file():
      shutil.copy(path, copy)
    else:
      (copy / path.name).symlink_to(path.resolve())
  with jobs.open_run(spec, systems, copy, command) as job:
    with job.runner() as runner:
      with tempfile.TemporaryDirectory() as none:
        nothing = manager.Checkpoints(pathlib.Path(none), keep=1)
        start = reinforce.prepare(job, nothing)
      checkpoints = manager.Checkpoints(kept, keep=1000)
      collector = stages.collector_of(
        spec, systems, job.tokenizer, runner, split='train'
      )
      collector = dataclasses.replace(collector, rollouts_per_group=1)
      engine = None
      for step in (0, *checkpoints.steps()):
        state = start.state
        if step:
          state, _ = checkpoints.restore(step, state)
        values = start.functions.policy(state)
        if engine is None:
          engine = stages.make_engine(spec, values, 0)
        else:
          engine.swap(values, step)
        groups = collect.groups(
          collector, engine, range(_FIRST, _FIRST + _TASKS)
        )
        rate = behaviour.pass_rate([r for g in groups for r in g.rollouts])
        row = {'step': step, 'pass_rate': rate.rate, 'low': rate.low}
        rows.append(row | {'high': rate.high})
        print(rows[-1], flush=True)
  files.write_json(kept / 'probe.json', rows)


if __name__ == '__main__':
  launch.main(run)
