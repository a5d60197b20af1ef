"""A job that trains adapters beside an import's frozen weights."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import jax
import pytest

from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.train.checkpoints import manager
from tests import programs
from tests.e2e import imported_test, jobs

checkpoint, imported = imported_test.checkpoint, imported_test.imported
FLAGS = (
  '--config.cpt.steps=0',
  '--config.model.numerics=batch_invariant',
  '--config.model.adapters.attention=3',
  '--config.model.adapters.routed=2',
  '--config.model.adapters.router=1',
  '--config.sft.learning_rate=0.05',
  '--config.sft.warmup_steps=1',
  '--config.rl.learning_rate=0.001',
  '--config.rl.max_staleness=0',
  '--config.evaluation.episodes=2',
  # On a busy machine every limit in seconds may pass.
  '--config.sandbox.level=static',  # no policy here gets as far as a sandbox
  '--config.rl.wait_timeout_s=36000.0',
  '--config.rl.max_restarts=99',
)


def test_adapters_need_frozen_weights_and_adam(imported):
  ranks = model_config.AdapterConfig(attention=2)
  spec = imported_test.spec_of(imported, model__adapters=vars(ranks))
  with pytest.raises(ValueError, match=r'adapters train .* set --config.init'):
    dataclasses.replace(spec, initial='')
  with pytest.raises(ValueError, match=r'sft.optimizer must be "adam".*muon'):
    imported_test.spec_of(
      imported, model__adapters=vars(ranks), sft__optimizer='muon'
    )


def _command(imported, workdir):
  return [
    sys.executable,
    '-m',
    'experiments.composer',
    f'--config=configs/composer/imported.py:{imported},smoke',
    f'--workdir={workdir}',
    *FLAGS,
  ]


def _kill_at(imported, workdir, stage, step):
  """Starts a job, or goes on with it, and kills it after a step."""
  with (workdir.parent / 'log').open('a') as log:
    process = subprocess.Popen(
      _command(imported, workdir),
      cwd=programs.ROOT,
      env=jobs.environment(),
      stdout=log,
      stderr=log,
    )
    while max(jobs.steps(workdir, stage), default=0) < step:
      assert process.poll() is None, (workdir.parent / 'log').read_text()
      time.sleep(0.05)
    family = jobs.descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
  jobs.assert_gone(family)


def _finish(imported, workdir):
  done = programs.run_fresh(
    *_command(imported, workdir)[2:], env=jobs.environment(), timeout_s=36000
  )
  assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
  return jobs.metrics(workdir)


@pytest.mark.slow
def test_a_job_of_adapters_resumes_after_kills(checkpoint, imported, tmp_path):
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  want = _finish(imported, whole)
  for stage, step in (('sft', 2), ('rl', 2)):
    _kill_at(imported, killed, stage, step)
  have = _finish(imported, killed)
  assert have == want
  # Sampler and trainer compute one function of frozen weights and adapters.
  rows = [row for row in want if row['stage'] == 'rl']
  assert rows and all(row['mismatch_kl'] == 0 for row in rows)
  model = model_config.ModelConfig.from_dict(
    json.loads((whole / 'config.json').read_text())['model']
  )
  shapes, _ = decoder.abstract(model)
  count = sum(x.size for x in jax.tree.leaves(decoder.without_base(shapes)))
  published = [row for row in want if row['stage'] == 'delta']
  assert {row['full_bytes'] for row in published} == {2 * count}
  for folder in ('checkpoints/sft', 'checkpoints/rl', 'exports/rl'):
    stored = manager.Checkpoints(whole / folder, keep=None)
    names = stored.record(stored.latest_step())['arrays']
    stored.close()
    assert not any('embedding' in name for name in names), names
  back = imported_test.exported(whole, 'rl', tmp_path / 'back')
  arrays = imported_test.tensors(back)
  original = imported_test.tensors(checkpoint)
  moved = {n for n, x in arrays.items() if (x != original[n]).any()}
  assert {n.split('.')[3] for n in moved if 'layers' in n} == {
    'self_attn',
    'mlp',
  }
  assert not any('embed' in n or 'lm_head' in n for n in moved)
