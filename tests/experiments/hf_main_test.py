"""The mains of import and export, as a user starts them."""

import filecmp
import json
import os

from tests import programs
from tests.hf import checkpoints, tiny

QWEN = tiny.MODELS['qwen3_moe']


def test_a_checkpoint_goes_in_and_out(tmp_path):
  arrays = checkpoints.tensors(QWEN)
  source = checkpoints.write(tmp_path / 'hf', QWEN, arrays)
  ours, back = tmp_path / 'ours', tmp_path / 'back'
  run = programs.run_fresh(
    'experiments.hf_import', f'--source={source}', f'--out={ours}'
  )
  assert run.returncode == 0, run.stderr
  assert f'configs/composer/imported.py:{ours}' in run.stdout
  # Told first: the checkpoint has none.
  assert run.stdout.startswith('Warning: a run will refuse this tokenizer: ')
  assert '[import] ' in run.stdout
  run = programs.run_fresh(
    'experiments.export', f'--source={ours}', f'--out={back}'
  )
  assert run.returncode == 0, run.stderr
  names = sorted(os.listdir(source))
  assert sorted(os.listdir(back)) == names
  assert filecmp.cmpfiles(source, back, names, shallow=False)[0] == names


def test_an_error_is_one_line(tmp_path):
  fields = QWEN | {'model_type': 'gpt9'}
  checkpoints.write(tmp_path / 'hf', QWEN, checkpoints.tensors(QWEN))
  (tmp_path / 'hf' / 'config.json').write_text(json.dumps(fields))
  flags = (f'--source={tmp_path / "hf"}', f'--out={tmp_path / "ours"}')
  for main, message in (
    ('hf_import', "config.json: model_type 'gpt9' is not supported"),
    ('export', 'hf is no import directory and needs --stage; finished are []'),
  ):
    run = programs.run(f'experiments.{main}', *flags)
    assert run.returncode == 1
    assert run.stderr.startswith('error: ')
    assert message in run.stderr and run.stderr.count('\n') == 1
  assert os.listdir(tmp_path) == ['hf']
