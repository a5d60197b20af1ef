"""Wrong launches are refused at once, and leave nothing."""

import pytest

from composer_jax.core import processes
from tests import programs
from tests.e2e import jobs


@pytest.mark.parametrize(
  'module, flags, message',
  [
    (
      'composer',
      ['--launch=local:2x1'],
      '--config.rl.mesh has 1 devices, which do not divide over 2 processes '
      '(--launch): each must hold as many. Make its product a multiple of 2, '
      'or run pretrain and sft with --launch and rl without.',
    ),
    (
      'pretrain',
      ['--launch=local:4x1'],
      '--config.mesh has 2 devices, which do not divide over 4 processes',
    ),
    (
      'pretrain',
      ['--launch=local:2x1', '--config.mesh.replica=4'],
      '--config.mesh has 4 devices, and 2 processes emulate 1 each',
    ),
    ('pretrain', ['--launch=slurm'], '--launch must be local:'),
    ('pretrain', ['--launch=env'], 'finds no number of this host'),
    ('pretrain', ['--launch=local:2x1', '--stall_s=0'], 'stall_s must be'),
  ],
)
def test_a_wrong_launch_is_told(module, flags, message, tmp_path):
  workdir = tmp_path / 'run'
  done = programs.run(
    f'experiments.{module}',
    f'--config={jobs.CONFIG}',
    f'--workdir={workdir}',
    *flags,
    env=jobs.environment(),
  )
  assert done.returncode == 1
  assert message in done.stderr
  assert not workdir.exists()


@pytest.mark.parametrize(
  'error, code',
  [
    ("ValueError('a bad value')", processes.REFUSED),
    ("OSError(28, 'No space left on device')", processes.REFUSED),
    # A rollout worker or a peer that hangs.
    ("TimeoutError('No group finished in 300 s')", processes.LOST),
    ("RuntimeError('UNKNOWN: Gloo all-reduce failed')", processes.LOST),
  ],
)
def test_only_what_another_process_did_is_worth_a_restart(error, code):
  text = f'from experiments import launch; launch._end_member({error})'
  assert programs.run_code(text).returncode == code
