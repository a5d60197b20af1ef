"""What judges code is decided before training, said aloud, and kept."""

import dataclasses
import json

import pytest

from composer_jax.pipeline import job, spec
from composer_jax.tasks import runners
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
