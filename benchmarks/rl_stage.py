"""Times the RL stage of the smoke job beside that of another commit.

  python -m benchmarks.rl_stage --against=FOLDER

FOLDER is a checkout of that commit, which this environment can run. Trainer and
rollout worker are processes, as a user has them, and everything between them
goes through a folder. The two commits take turns; CPU seconds of all processes
of a job count, since wall time on two cores is that of whatever else runs.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import psutil

from benchmarks import interleaved

# Pretraining that leaves a policy near chance: every episode ends by its limit.
_FLAGS = (
  *('--config=configs/composer/tiny.py:smoke', '--config.cpt.steps=2'),
  *('--config.cpt.warmup_steps=0', '--config.cpt.decay_steps=1'),
  *('--config.sft.steps=2', '--config.sft.warmup_steps=0'),
  *('--config.sft.decay_steps=1', '--config.evaluation.episodes=1'),
  *('--config.telemetry.tensorboard=False', '--config.sandbox.level=static'),
)
_POLL_S = 0.05


def rows_of(workdir: pathlib.Path) -> list[dict]:
  """Returns the metrics of the RL steps so far."""
  with contextlib.suppress(OSError, ValueError):
    lines = (workdir / 'metrics.jsonl').read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row['stage'] == 'rl']
  return []


def cpu_s(pid: int) -> float:
  """Returns CPU seconds of a process and of its children so far."""
  total, main = 0.0, psutil.Process(pid)
  for process in (main, *main.children(recursive=True)):
    with contextlib.suppress(psutil.Error):
      times = process.cpu_times()
      total += times.user + times.system
  return total


def run(
  checkout: pathlib.Path, cache: str, first: int, last: int
) -> tuple[float, float]:
  """Returns CPU seconds and seconds a step, from step `first` to `last`.

  `cache` is a folder for what is compiled.
  """
  env = os.environ | {'JAX_COMPILATION_CACHE_DIR': cache}
  env |= {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  env |= {'PYTHONPATH': str(checkout)}
  with tempfile.TemporaryDirectory() as folder:
    workdir, marks = pathlib.Path(folder) / 'run', {}
    command = [sys.executable, '-m', 'experiments.composer', *_FLAGS]
    command += [f'--workdir={workdir}', f'--config.rl.steps={last + 2}']
    with (pathlib.Path(folder) / 'log').open('w+') as log:
      job = subprocess.Popen(
        command, cwd=checkout, stdout=log, stderr=log, env=env
      )
      try:
        while last not in marks:
          if job.poll() is not None:
            log.seek(0)
            raise SystemExit(f'{checkout}: {log.read()[-3000:]}')
          if (step := len(rows_of(workdir))) in (first, last):
            marks.setdefault(step, cpu_s(job.pid))
          time.sleep(_POLL_S)
      finally:
        job.terminate()
        job.wait()
    rows = rows_of(workdir)
    wall_s = rows[last - 1]['time'] - rows[first - 1]['time']
    steps = last - first
    return (marks[last] - marks[first]) / steps, wall_s / steps


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--against', type=pathlib.Path, required=True)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--first', type=int, default=4)
  parser.add_argument('--last', type=int, default=24)
  given = parser.parse_args()
  trees = (pathlib.Path(__file__).parents[1], given.against.absolute())
  figures: tuple[list, list] = ([], [])
  with tempfile.TemporaryDirectory() as cache:
    for _ in range(given.rounds):
      for tree, into in zip(trees, figures, strict=True):
        into.append(run(tree, cache, given.first, given.last))
        print(tree, into[-1], file=sys.stderr, flush=True)
  ours, peer = ([1 / cpu for cpu, _ in values] for values in figures)
  walls = [statistics.median(w for _, w in values) for values in figures]
  against = subprocess.check_output(
    ['git', '-C', str(trees[1]), 'rev-parse', '--short', 'HEAD'], text=True
  )
  interleaved.report(
    'rl_stage',
    'steps of RL, smoke job, two processes, groups in a folder store',
    (ours, peer),
    against=f'commit {against.strip()}',
    limit=None,
    goal='none',
    met=lambda ours, ratio: True,
    unit='steps per CPU second',
    note=f'{walls[0]:.2f} and {walls[1]:.2f} s of wall time a step',
  )


if __name__ == '__main__':
  main()
