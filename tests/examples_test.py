"""Every example runs by the command in its docstring and shows what it says."""

import os
import pathlib
import re
import subprocess
import sys

from tests import conftest

ROOT = pathlib.Path(__file__).parent.parent


def run(name: str, *flags: str) -> str:
  """Runs an example in a new process and returns its output."""
  environment = os.environ | {
    'XLA_FLAGS': ' '.join(f'{k}={v}' for k, v in conftest.COMPILING.items())
  }
  process = subprocess.run(
    [sys.executable, '-m', f'experiments.examples.{name}', *flags],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert process.returncode == 0, process.stderr
  return process.stdout


def test_muon_in_optax():
  text = run('muon_in_optax', '--steps=21')
  assert "'embed': None" in text and "'norm': None" in text
  # Three layers of two matrices: one group, as one is the other's transpose.
  assert (
    'Muon has 6 matrices of 2 parameters, in 1 group over 8 devices' in text
  )
  losses = [float(x) for x in re.findall(r'loss (\S+)', text)]
  assert len(losses) == 3 and losses[-1] < losses[0] / 2
