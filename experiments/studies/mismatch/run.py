"""Measures a finished run's SFT and RL policies in both dtypes and numerics.

  python -m experiments.studies.mismatch.run --workdir=runs/tiny

Each arm is one call of `experiments.mismatch` in a process of its own, which
appends a line to results/metrics.jsonl. A finished arm is not measured again.
"""

import itertools
import pathlib
import subprocess
import sys

from absl import flags

from composer_jax.telemetry import writer
from experiments import start

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/tiny', 'Workdir of a finished run.'
)
_TOKENS = flags.DEFINE_integer(
  'tokens', 10_000, 'Tokens to sample for each arm.'
)
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder to append to.',
)

_STAGES = ('sft', 'rl')
_DTYPES = ('float32', 'bfloat16')
_NUMERICS = ('fast', 'batch_invariant')


def main() -> None:
  rows = writer.read(_RESULTS.value)
  finished = {(r['name'], r['compute_dtype'], r['numerics']) for r in rows}
  for arm in itertools.product(_STAGES, _DTYPES, _NUMERICS):
    if arm in finished:
      continue
    stage, dtype, numerics = arm
    command = [sys.executable, '-m', 'experiments.mismatch']
    command += [f'--workdir={_WORKDIR.value}', f'--stage={stage}']
    command += [f'--dtype={dtype}', f'--numerics={numerics}']
    command += [f'--tokens={_TOKENS.value}', f'--out={_RESULTS.value}']
    print(*arm, flush=True)
    subprocess.run(command, check=True)


if __name__ == '__main__':
  start.run(main)
