"""The sandbox level is chosen before training, printed, and kept."""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import sys
import types

import pytest

from composer_jax import wiring
from composer_jax.sandbox import base
from composer_jax.tasks import judging
from composer_jax.tasks.list_functions import runners
from configs.composer import tiny
from tests.pipeline import runs


@pytest.fixture(scope='module')
def smoke():
  return wiring.spec_of(tiny.get_config('smoke').to_dict())


def settle(spec, workdir, open_level, needs_execution=False):
  return judging.settle(
    workdir,
    spec.systems['sandbox'],
    open_level,
    needs_execution=needs_execution,
  )


@contextlib.contextmanager
def refused(level):
  assert level == 'auto'
  raise base.NoSandbox('no sandbox works here (unshare: refused here: EPERM).')
  yield


@contextlib.contextmanager
def allowed(level):
  assert level == 'auto'
  yield types.SimpleNamespace(level='unshare')


def test_without_namespaces_nothing_is_executed(smoke, tmp_path, capsys):
  level = settle(smoke, tmp_path, refused)
  assert level == 'static'
  printed = capsys.readouterr().out
  assert 'unshare: refused here: EPERM' in printed
  assert 'No generated code is executed' in printed
  assert 'user namespaces' in printed
  # The cure differs: Debian's kernel switch, and Ubuntu's since 23.10.
  assert 'kernel.unprivileged_userns_clone=1' in printed
  assert 'kernel.apparmor_restrict_unprivileged_userns=0' in printed
  with wiring.systems_of(smoke).open_runner(level) as runner:
    assert isinstance(runner, runners.StaticRunner)


def test_a_resumed_run_keeps_its_judge(smoke, tmp_path):
  settle(smoke, tmp_path, refused)
  assert settle(smoke, tmp_path, allowed) == 'static'


def test_the_level_that_works_is_kept(smoke, tmp_path):
  assert settle(smoke, tmp_path, allowed) == 'unshare'
  assert json.loads((tmp_path / 'sandbox.json').read_text()) == {
    'level': 'unshare'
  }


def test_tasks_that_need_execution_do_not_go_without(smoke, tmp_path):
  with pytest.raises(ValueError, match=r'execute code.*unshare: refused here'):
    settle(smoke, tmp_path, refused, needs_execution=True)
  assert not (tmp_path / 'sandbox.json').exists()


def test_rlimits_is_refused_unless_it_is_forced(smoke):
  with (
    pytest.raises(ValueError, match='refused for untrusted code'),
    wiring.systems_of(smoke).open_runner('rlimits'),
  ):
    pass
  forced = runs.changed(smoke, 'sandbox', allow_unsafe=True)
  with wiring.systems_of(forced).open_runner('rlimits') as runner:
    assert runner.level == 'rlimits'


def test_rlimits_is_never_chosen_by_itself(smoke, monkeypatch):
  monkeypatch.setenv('PATH', '')
  monkeypatch.setattr(sys, 'platform', 'darwin')
  forced = runs.changed(smoke, 'sandbox', allow_unsafe=True)
  with (
    pytest.raises(base.NoSandbox, match='rlimits: .* refused'),
    wiring.systems_of(forced).open_runner('auto'),
  ):
    pass


def test_an_unknown_level_is_named(smoke):
  with pytest.raises(ValueError, match="sandbox.level must be one of.*'jail'"):
    runs.changed(smoke, 'sandbox', level='jail')


@pytest.fixture(scope='module')
def static(smoke):
  """A spec whose runs start no sandbox and no TensorBoard."""
  quiet = dataclasses.replace(smoke.telemetry, tensorboard=False)
  return dataclasses.replace(
    runs.changed(smoke, 'sandbox', level='static'), telemetry=quiet
  )


def test_what_judges_is_said_whenever_judging_starts(static, tmp_path, capsys):
  for _ in range(2):
    with runs.open_run(static, tmp_path) as run, run.runner():
      assert '[sandbox] judging in static' in capsys.readouterr().out


def test_one_process_at_a_time_runs_in_a_workdir(static, tmp_path):
  with runs.open_run(static, tmp_path):
    message = rf'process \({os.getpid()} on .*runs in workdir {tmp_path}'
    with pytest.raises(ValueError, match=message):
      with runs.open_run(static, tmp_path):
        pass
  with runs.open_run(static, tmp_path):
    pass
  assert (tmp_path / 'lock').read_text() == ''


def test_a_workdir_that_cannot_be_is_named(static, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='lock the workdir.*another --workdir.*run'):
    with runs.open_run(static, tmp_path / 'file' / 'run'):
      pass


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'sources': ('stdlib', 'nowhere')}, "'nowhere' does not exist"),
    ({'sources': ('stdlib,nowhere.sources',)}, "'nowhere.sources' does not"),
    ({'sources': ('pypi:nowhere==1',)}, 'nowhere==1 is not installed'),
    ({'sources': ('pypi:numpy==0.0.1',)}, 'is installed in version'),
    ({'weights': (1.0, 2.0)}, '2 mixture weights for 1 sources'),
  ],
)
def test_a_mistyped_source_does_not_bind_the_workdir(
  static, tmp_path, fields, message
):
  mistyped = runs.changed(static, 'data', **fields)
  with pytest.raises(ValueError, match=message):
    with runs.open_run(mistyped, tmp_path):
      pass
  with runs.open_run(static, tmp_path):
    pass


def test_a_bound_workdir_opens_without_its_sources(static, tmp_path):
  source = tmp_path / 'code.py'
  source.write_text('x = 1\n')
  spec = runs.changed(static, 'data', sources=(str(source),))
  for _ in range(2):
    with runs.open_run(spec, tmp_path / 'run'):
      source.unlink(missing_ok=True)


def test_opening_a_run_sweeps_what_a_killed_write_left(static, tmp_path):
  torn = tmp_path / 'groups' / '.00000003.npz.0123456789abcdef.tmp'
  foreign = tmp_path / 'groups' / '.notes.tmp'
  torn.parent.mkdir()
  for path in (torn, foreign):
    path.write_text('torn')
  # Nothing is swept while another process runs there, as it may be writing.
  with (tmp_path / 'lock').open('w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match='just started'):
      with runs.open_run(static, tmp_path):
        pass
    assert torn.exists()
  with runs.open_run(static, tmp_path):
    assert not torn.exists() and foreign.exists()


def test_sigterm_ends_a_run_with_a_report(static, tmp_path, capsys):
  before = signal.getsignal(signal.SIGTERM)
  closed = []
  with pytest.raises(SystemExit) as ended:
    with runs.open_run(static, tmp_path):
      try:
        signal.raise_signal(signal.SIGTERM)
      finally:
        signal.raise_signal(signal.SIGTERM)  # interrupts nothing
        closed.append('checkpoints')
  assert ended.value.code == 128 + signal.SIGTERM
  assert closed and (tmp_path / 'report.html').exists()
  assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
  'error, message',
  [
    (OSError(28, 'No space'), '[report] not written: [Errno 28] No space'),
    (KeyError('stage'), "KeyError: 'stage'"),
  ],
)
def test_a_report_that_fails_does_not_hide_why_the_run_ended(
  static, tmp_path, capsys, caplog, error, message
):
  def write_report(workdir):
    raise error

  with pytest.raises(ZeroDivisionError, match='why it ended'):
    with runs.open_run(static, tmp_path, write_report=write_report):
      raise ZeroDivisionError('why it ended')
  printed = capsys.readouterr().out + caplog.text
  assert (
    message in printed
    and 'ZeroDivisionError' not in printed.partition(message)[2]
  )
