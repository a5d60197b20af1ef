"""Records policies of real training, step by step, for benchmarks/delta.py.

  python -m experiments.studies.delta.record --workdir=runs/delta \
      --out=runs/delta/recordings

A MoE of 11 million parameters learns the corpus with Muon, then the tool
protocol (SFT), in --workdir and by the same stages as configs/composer/tiny.py.
From there each case of `training.CASES` starts anew: pretraining goes on with
Muon, or RL (GRPO, episodes played by the engine) starts with Adam, at one small
learning rate. The last policies of each are kept. A finished case is not
recorded again.
"""

import dataclasses
import os
import pathlib
import sys

from absl import flags, logging

from experiments import start

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/delta', 'Workdir of the training.'
)
_OUT = flags.DEFINE_string(
  'out', 'runs/delta/recordings', 'Folder to make, with one folder a case.'
)
_QUICK = flags.DEFINE_bool('quick', False, 'The shortest run, for tests.')


def main() -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  # One core, so that CPU seconds are comparable between machines.
  xla_flags = os.environ.get('XLA_FLAGS', '')
  os.environ['XLA_FLAGS'] = f'{xla_flags} --xla_cpu_multi_thread_eigen=false'
  from benchmarks import delta_recordings
  from composer_jax import wiring
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import stages
  from experiments.studies.delta import training

  spec = training.spec(quick=_QUICK.value)
  workdir = pathlib.Path(_WORKDIR.value).absolute()
  # The recordings are the result, so write no report.
  systems = dataclasses.replace(
    wiring.systems_of(spec), write_report=lambda workdir: workdir
  )
  with jobs.open_run(spec, systems, workdir, sys.argv) as job:
    stages.pretrain(job)
    stages.finetune(job)
    for case in training.CASES:
      folder = pathlib.Path(_OUT.value) / case.name
      if not delta_recordings.finished(folder):
        training.record(job, case, folder, quick=_QUICK.value)


if __name__ == '__main__':
  start.run(main)
