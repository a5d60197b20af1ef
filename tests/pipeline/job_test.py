"""What judges code is decided before training, said aloud, and kept."""

import dataclasses
import fcntl
import json
import os
import signal

import pytest

from composer_jax.pipeline import job, spec
from composer_jax.tasks.list_functions import runners
from configs.composer import tiny


@pytest.fixture(scope='module')
def smoke():
  return spec.from_dict(tiny.get_config('smoke').to_dict())


def refused():
  return [
    ('bwrap', False, 'no program `bwrap` on PATH'),
    ('unshare', False, 'refused here: EPERM'),
    ('rlimits', True, 'NO namespaces: trusted code only'),
  ]


def test_without_namespaces_nothing_is_executed(smoke, tmp_path, capsys):
  settled = job.settle_sandbox(smoke, tmp_path, refused)
  assert settled.sandbox.level == 'static'
  said = capsys.readouterr().out
  assert 'unshare: not here: refused here: EPERM' in said
  assert 'no generated code is executed' in said
  assert 'user namespaces allowed' in said
  # The cure differs: Debian's kernel switch, and Ubuntu's since 23.10.
  assert 'kernel.unprivileged_userns_clone=1' in said
  assert 'kernel.apparmor_restrict_unprivileged_userns=0' in said
  with job.open_runner(settled.sandbox) as runner:
    assert isinstance(runner, runners.StaticRunner)


def test_a_resumed_run_keeps_its_judge(smoke, tmp_path):
  job.settle_sandbox(smoke, tmp_path, refused)
  now_allowed = [('bwrap', True, ''), ('unshare', True, '')]
  settled = job.settle_sandbox(smoke, tmp_path, lambda: now_allowed)
  assert settled.sandbox.level == 'static'


def test_the_strongest_level_wins(smoke, tmp_path):
  found = [('bwrap', False, ''), ('unshare', True, ''), ('rlimits', True, '')]
  settled = job.settle_sandbox(smoke, tmp_path, lambda: found)
  assert settled.sandbox.level == 'unshare'
  assert json.loads((tmp_path / 'sandbox.json').read_text()) == {
    'level': 'unshare'
  }


def test_rlimits_is_refused_unless_it_is_forced(smoke):
  options = dataclasses.replace(smoke.sandbox, level='rlimits')
  with (
    pytest.raises(ValueError, match='refused for untrusted code'),
    job.open_runner(options),
  ):
    pass
  forced = dataclasses.replace(options, allow_unsafe=True)
  with job.open_runner(forced) as runner:
    assert runner.level == 'rlimits'


def test_an_unknown_level_is_named(smoke):
  with pytest.raises(ValueError, match="sandbox.level must be one of.*'jail'"):
    dataclasses.replace(smoke.sandbox, level='jail')


@pytest.fixture(scope='module')
def static(smoke):
  """A spec whose runs start no sandbox and no TensorBoard."""
  return dataclasses.replace(
    smoke,
    sandbox=dataclasses.replace(smoke.sandbox, level='static'),
    telemetry=dataclasses.replace(smoke.telemetry, tensorboard=False),
  )


def test_what_judges_is_said_whenever_judging_starts(static, tmp_path, capsys):
  for _ in range(2):
    with job.open_run(static, tmp_path, []) as run, run.runner():
      assert '[sandbox] judging in static' in capsys.readouterr().out


def test_one_process_at_a_time_runs_in_a_workdir(static, tmp_path):
  with job.open_run(static, tmp_path, []):
    found = rf'process \({os.getpid()} on .*runs in workdir {tmp_path}'
    with pytest.raises(ValueError, match=found):
      with job.open_run(static, tmp_path, []):
        pass
  with job.open_run(static, tmp_path, []):
    pass
  assert (tmp_path / 'lock').read_text() == ''


def test_a_workdir_that_cannot_be_is_named(static, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='lock the workdir.*another --workdir.*run'):
    with job.open_run(static, tmp_path / 'file' / 'run', []):
      pass


def test_opening_a_run_sweeps_what_a_killed_write_left(static, tmp_path):
  torn = tmp_path / 'groups' / '.00000003.npz.0123456789abcdef.tmp'
  other = tmp_path / 'groups' / '.notes.tmp'
  torn.parent.mkdir()
  for path in (torn, other):
    path.write_text('torn')
  # Not while another process, which may be writing, runs there.
  with (tmp_path / 'lock').open('w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match='just started'):
      with job.open_run(static, tmp_path, []):
        pass
    assert torn.exists()
  with job.open_run(static, tmp_path, []):
    assert not torn.exists() and other.exists()


def test_sigterm_ends_a_run_with_a_report(static, tmp_path, capsys):
  before = signal.getsignal(signal.SIGTERM)
  closed = []
  with pytest.raises(SystemExit) as ended:
    with job.open_run(static, tmp_path, []):
      try:
        signal.raise_signal(signal.SIGTERM)
      finally:
        signal.raise_signal(signal.SIGTERM)  # interrupts nothing
        closed.append('checkpoints')
  assert ended.value.code == 128 + signal.SIGTERM
  assert closed and (tmp_path / 'report.html').exists()
  assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
  'error, said',
  [
    (OSError(28, 'No space'), '[report] not written: [Errno 28] No space'),
    (KeyError('stage'), "KeyError: 'stage'"),
  ],
)
def test_a_report_that_fails_does_not_hide_why_the_run_ended(
  static, tmp_path, capsys, caplog, error, said
):
  def write_report(workdir, writer):
    raise error

  with pytest.raises(ZeroDivisionError, match='why it ended'):
    with job.open_run(static, tmp_path, [], write_report):
      raise ZeroDivisionError('why it ended')
  found = capsys.readouterr().out + caplog.text
  assert said in found and 'ZeroDivisionError' not in found.partition(said)[2]
