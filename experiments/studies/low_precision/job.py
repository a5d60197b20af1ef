"""Keeps the pass rates of a finished run of the main job in NVFP4.

  ./run.sh --config=configs/composer/nvfp4.py --config.seed=14 \\
      --workdir=runs/nvfp4
  python -m experiments.studies.low_precision.job --workdir=runs/nvfp4
"""

import pathlib

from absl import flags

from composer_jax.core import files
from experiments import start
from experiments.studies import results
from experiments.studies.low_precision import analyze

_WORKDIR = flags.DEFINE_string('workdir', 'runs/nvfp4', 'Workdir of the run.')


def main() -> None:
  workdir = pathlib.Path(_WORKDIR.value)
  seed, rows = files.read_json(workdir / 'config.json')['seed'], []
  for stage in ('sft', 'rl'):
    of_axis = {
      axis: files.read_json(workdir / f'evaluation_{stage}{axis}.json')
      for axis in analyze.AXES
    }
    passed = {f'passed{axis}': one['passed'] for axis, one in of_axis.items()}
    row = {'stage': 'job', 'seed': seed, 'after': stage}
    rows.append(row | {'episodes': of_axis['']['episodes'], **passed})
  results.add(analyze.ROOT / 'results', rows, by=('stage', 'seed'))


if __name__ == '__main__':
  start.run(main)
