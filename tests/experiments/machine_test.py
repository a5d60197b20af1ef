"""A run fits the machine it is on, or asks; what would not work is told."""

import os

import pytest

from configs import hardware
from tests import programs
from tests.hf import imported_test

FIT = """
import sys, types
import jax
from composer_jax.core import processes
from experiments import launch
def devices(kind, count):
  jax.devices = lambda: [types.SimpleNamespace(platform=kind)] * count
def fitted(module='experiments.composer', **config):
  launch._fit(config, module)
  return config.get('rl')
devices('gpu', 1)
assert fitted(rl={}) == {'placement': 'colocated'}
assert fitted(rl={'placement': 'colocated'}) == {'placement': 'colocated'}
assert fitted(rl={}, accelerator=True) == {'placement': 'colocated'}
devices('gpu', 2)
assert fitted(rl={}, fleet={'workers': 1}) == {}
assert fitted(rl={'placement': 'colocated'}, fleet={'workers': 2})
for count in (1, 2):
  devices('gpu', count)
  try:
    fitted(rl={}, fleet={'workers': 3})
  except ValueError as error:
    print(error)
processes._self.count = 2
try:
  fitted(rl={})
except ValueError as error:
  print(error)
assert fitted(rl={'placement': 'colocated'}) == {'placement': 'colocated'}
assert fitted('experiments.pretrain', rl={}) == {}
devices('cpu', 1)
assert fitted(rl={}, fleet={'workers': 3}) == {}
sys.stdin = types.SimpleNamespace(isatty=lambda: True, readline=lambda: 'y\\n')
assert fitted(rl={}, accelerator=True) == {}
sys.stdin = types.SimpleNamespace(isatty=lambda: True, readline=lambda: '\\n')
fitted(rl={}, accelerator=True)
"""


def test_one_device_is_taken_in_turns_and_a_cpu_is_asked_about():
  done = programs._run(['-c', FIT])
  assert done.returncode == 1, done.stderr
  assert done.stderr.startswith('error: This config is for a GPU or TPU')
  assert done.stdout.count('take turns') == 2
  few = '--config.fleet.workers must be at most 1 on a machine with an acc'
  assert done.stdout.count(few) == 2 and ', not 3: every' in done.stdout
  assert (
    "--config.rl.placement must be 'colocated' where several processes "
    "(--launch) share accelerators; got 'processes', on 2 devices of 2 "
  ) in done.stdout
  assert done.stdout.endswith('Go on? [y/N] ')


def test_a_config_for_a_gpu_does_not_begin_on_a_cpu(tmp_path):
  flags = ['--config=configs/composer/gpu.py', f'--workdir={tmp_path / "run"}']
  done = programs.run('experiments.composer', *flags)
  assert done.returncode == 1
  assert '--config.accelerator=False' in done.stderr
  assert not (tmp_path / 'run').exists()
  # What is wrong with the config comes first.
  done = programs.run('experiments.composer', *flags, '--config.rl.steps=-1')
  assert 'steps' in done.stderr


@pytest.mark.slow
def test_the_doctor_tells_what_works(tmp_path):
  done = programs.run_fresh('experiments.doctor', f'--workdir={tmp_path / "w"}')
  assert done.returncode == 0, done.stderr
  for words in (
    'jax ',
    'GiB free',
    'extras here',
    'rlimits',
    'corpus',
    'store',
  ):
    assert words in done.stdout, words
  assert done.stdout.endswith('This config runs here.\n')
  assert not (tmp_path / 'w').exists()


@pytest.mark.slow
def test_the_doctor_names_what_does_not(tmp_path):
  done = programs.run(
    'experiments.doctor',
    '--config=configs/composer/gpu.py',
    '--config.delta.store=https://127.0.0.1:1/run',
    '--config.data.sources=("none",)',
    f'--workdir={tmp_path}',
  )
  assert done.returncode == 1
  assert 'not run here: devices, files, store' in done.stderr
  assert 'jax sees no accelerator: none is here' in done.stdout
  assert '127.0.0.1:1/run can only be read' in done.stdout


@pytest.mark.slow
def test_the_doctor_asks_what_the_run_would_ask(tmp_path):
  folder = imported_test.write(tmp_path / 'import')
  done = programs.run(
    'experiments.doctor',
    f'--config=configs/composer/imported.py:{folder},smoke',
    '--config.demonstrations.conversations=absent.jsonl',
    f'--workdir={tmp_path / "run"}',
  )
  assert done.returncode == 1
  assert 'not run here: beginning.' in done.stderr
  assert "conversations names 'absent.jsonl', which cannot" in done.stdout
  # As many devices as the run emulates.
  assert 'sft: ' in done.stdout and ' on each of 2 devices' in done.stdout


KEEP = """
import pathlib, sys
from composer_jax.core import files
from experiments import launch
workdir = pathlib.Path(sys.argv[1])
(workdir / 'config.json').write_text('{}')
with files.alone(workdir):
  assert launch._keep_traceback(workdir) == ''
  assert not (workdir / 'error.txt').exists()
assert 'error.txt' in launch._keep_traceback(workdir)
"""


def test_a_run_that_another_one_keeps_out_leaves_its_workdir(tmp_path):
  done = programs._run(['-c', KEEP, str(tmp_path)])
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'error.txt').exists()


def on_bus(folder, *row):
  folder.mkdir()
  for name, value in zip(('vendor', 'device', 'class'), row, strict=True):
    (folder / name).write_text(f'{value}\n')


def test_a_card_whose_driver_does_not_answer_is_named(tmp_path, monkeypatch):
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  monkeypatch.setenv('PATH', f'{tmp_path}:/bin')
  on_bus(tmp_path / '0', '0x10de', '0x2330', '0x030200')
  on_bus(tmp_path / '1', '0x10de', '0x22a3', '0x068000')  # a switch
  lines, extras, reason = hardware.look(tmp_path)
  assert (lines, extras) == (('NVIDIA card 0x2330',), ())
  assert 'nvidia-smi' in reason
  tool = tmp_path / 'nvidia-smi'
  tool.write_text('#!/bin/sh\necho "version mismatch"\nexit 18\n')
  tool.chmod(0o755)
  reason = hardware.look(tmp_path).reason
  assert reason == 'its driver does not answer (version mismatch)'


def test_cards_that_are_hidden_do_not_count(tmp_path, monkeypatch):
  rows = ['A, 8 GiB, 580.1, 9.0', 'B, 8 GiB, 580.1, 5.0']
  lines = ''.join(f'echo "{row}"\n' for row in rows)
  (tmp_path / 'nvidia-smi').write_text(f'#!/bin/sh\n{lines}')
  (tmp_path / 'nvidia-smi').chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  monkeypatch.setenv('JAX_PLATFORMS', '')
  assert 'hide that card' in hardware.look().reason
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
  found = hardware.look()
  assert (len(found.lines), found.extras[0]) == (1, 'gpu')
  # As CUDA: those before the first bad place.
  for visible, count in (('', 0), ('-1', 0), ('0,7,1', 1), ('GPU-3f2a', 1)):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    assert len(hardware.look(tmp_path / 'none').lines) == count, visible
  on_bus(tmp_path / 'card', '0x10de', '0x2330', '0x030200')
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
  reason = hardware.look(tmp_path).reason
  assert reason == 'CUDA_VISIBLE_DEVICES= shows no card'


def test_chips_of_the_bus(tmp_path, monkeypatch):
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  monkeypatch.setenv('PATH', os.fspath(tmp_path))  # No nvidia-smi.
  # A network card of the same vendor is no TPU.
  for i, row in enumerate(
    (
      ('0x1ae0', '0x0062', '0x120000'),
      ('0x1ae0', '0x0042', '0x020000'),
      ('0x8086', '0x0062', '0x120000'),
    )
  ):
    on_bus(tmp_path / f'{i}', *row)
  assert hardware.look(tmp_path) == hardware.Found(('TPU v5p',), ('tpu',))
  assert hardware.look(tmp_path / 'none') == hardware.Found((), ())
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  assert hardware.look(tmp_path) == hardware.Found((), ())


@pytest.mark.parametrize('text, number', [('580.65.06', 580.65), ('x', 0.0)])
def test_versions_are_read(text, number):
  assert hardware._number(text) == number
