"""The server as a user starts it, and as a cluster ends it."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import openai
import pytest

from composer_jax.core import files
from composer_jax.models import config as config_lib
from composer_jax.models import decoder
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train.checkpoints import export
from configs.composer import tiny

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def _start(*flags):
  return subprocess.Popen(
    [sys.executable, '-m', 'experiments.serve', '--port=0', *flags],
    cwd=REPOSITORY,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )


def _workdir(folder):
  fields = tiny.get_config('smoke').model.to_dict()
  fields |= {'embed_dim': 32, 'num_layers': 2, 'vocab_size': 300}
  model = config_lib.ModelConfig.from_dict(fields)
  run = {'model': fields, 'initial': '', 'episode': {'max_tokens': 256}}
  files.write_json(folder / 'config.json', run)
  tokenizers.Tokenizer.train(['hello world'], 300).save(
    folder / 'tokenizer.json'
  )
  shapes, _ = decoder.abstract(model)
  rng = np.random.default_rng(0)
  masters = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), shapes
  )
  export.save(folder, 'sft', 5, jax.device_put(masters))


def test_it_serves_and_drains_at_sigterm(tmp_path):
  _workdir(tmp_path / 'mine')
  (tmp_path / 'token').write_text('geheim\n')
  process = _start(
    f'--source={tmp_path / "mine"}',
    f'--token_file={tmp_path / "token"}',
    '--config.engine.num_slots=1',
    '--config.engine.prefill_rows=1',
    '--config.engine.num_top=0',
  )
  watch = threading.Timer(100, process.kill)
  watch.start()
  try:
    lines = []
    for line in process.stdout:
      lines.append(line)
      if found := re.search(r'http://127\.0\.0\.1:\d+/v1', line):
        break
    else:
      raise AssertionError((lines, process.stderr.read()))
    assert 'Serving mine-sft, policy version 0' in line
    assert 'A window of 256 tokens: that of the run' in ''.join(lines)
    with openai.OpenAI(
      base_url=found[0], api_key='geheim', max_retries=0
    ) as client:
      stream = client.completions.create(
        model='mine-sft',
        prompt='hello',
        max_tokens=200,
        stream=True,
        # Of no end but the limit.
        temperature=0.0,
      )
      first = next(iter(stream))
      process.send_signal(signal.SIGTERM)
      *_, last = [first, *stream]
      # If it was still running it was let to end.
      assert last.choices[0].finish_reason in ('length', 'stop')
    assert process.wait(30) == 0
    assert process.stderr.read() == ''
  finally:
    watch.cancel()
    process.kill()
    process.wait()


# tests/e2e/bad_input_test.py proves it of the other mains.
@pytest.mark.slow
def test_an_error_is_one_line(tmp_path):
  process = _start(f'--source={tmp_path}')
  out, err = process.communicate(timeout=100)
  assert process.returncode == 1
  assert err.startswith('error: ') and err.count('\n') == 1
  assert 'neither the workdir' in err and json.dumps(out) == '""'
