"""Learns from live use: cycles of training on what users say of answers.

  ./run.sh live                         # simulated users of known taste
  ./run.sh live --users=real --config=configs/composer/tiny.py \
      --workdir=runs/tiny --record=runs/tiny/live/record \
      --suites=configs/suites/tiny.toml

With real users, servers that record run beside it, one for each arm:

  ./run.sh serve --source=runs/tiny --follow --store=runs/tiny/live/promoted \
      --record=runs/tiny/live/record
  ./run.sh serve --source=runs/tiny --follow --port=8001 --arm=candidate \
      --store=runs/tiny/live/candidates --record=runs/tiny/live/record

The workdir is that of a run whose SFT or RL is finished; that of simulated
users is pretrained first. The same command goes on after a kill. See
docs/how_to/live.md.
"""

import pathlib
import time

from absl import flags

from composer_jax.telemetry import progress
from experiments import launch

# Of fields that the command line overrides; the next line defines them anew.
for _name in [name for name in flags.FLAGS if name.startswith('config.')]:
  delattr(flags.FLAGS, _name)
flags.FLAGS.set_default('config', 'configs/composer/live.py')
flags.FLAGS.set_default('workdir', 'runs/live')
_USERS = flags.DEFINE_enum(
  'users', 'simulated', ['simulated', 'real'], 'Who uses the servers.'
)
_CYCLES = flags.DEFINE_integer(
  'cycles', 5, 'Cycles; 0 for no end, with real users.'
)
_RECORD = flags.DEFINE_string(
  'record', '', "Folder of recorded episodes; '' for live/record in --workdir."
)
_SUITES = flags.DEFINE_string(
  'suites',
  'configs/suites/live.toml',
  'File of the pinned suites of the gate.',
)
_PATIENCE = flags.DEFINE_float(
  'patience',
  1.0,
  'Factor on the chance that simulated users keep an edit; see the study.',
)
_LOOK_S = 10.0


def run(spec, systems, workdir, *, command):
  from composer_jax.live import episodes, learning
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import stages
  from experiments import following

  say, options = progress.teller('live'), spec.systems['live']
  folder = pathlib.Path(_RECORD.value or workdir / 'live' / 'record').absolute()
  suites = following.PinnedSuites(_SUITES.value, workdir, spec)
  if _USERS.value == 'simulated':
    from experiments.studies.live import simulated

    simulated.run(
      spec,
      systems,
      workdir,
      command,
      folder,
      suites,
      _CYCLES.value,
      _PATIENCE.value,
    )
    return
  recorded = episodes.Episodes(folder)

  def wait() -> bool:
    time.sleep(_LOOK_S)
    return True

  with jobs.open_run(spec, systems, workdir, command) as job:
    stages.finetune(job)  # Does nothing to a finished run.
    judge, line = options.open_judge(workdir / 'live')
    if line:
      say(line)
    ports = learning.LivePorts(
      play=suites.play, wait=wait, say=say, judge=judge
    )
    learner = learning.Learner(job, recorded, options, ports)
    try:
      number = 1
      while not _CYCLES.value or number <= _CYCLES.value:
        learner.cycle(number)
        number += 1
    finally:
      learner.close()


if __name__ == '__main__':
  launch.main(run)
