"""One flow of few bits keeps the bands of the gate; a mixed one does not."""

import dataclasses

import pytest

from composer_jax.models import config as model_config
from composer_jax.pipeline import reinforce
from composer_jax.rl import mismatch
from tests.pipeline import sync_equality_test
from tests.pipeline.sync_equality_test import lines_of_rl, opened

spec, tokenizer = sync_equality_test.spec, sync_equality_test.tokenizer

pytestmark = pytest.mark.slow

NVFP4 = model_config.PrecisionConfig(
  experts='nvfp4', backward='mxfp8', codes=True
)
KL = 'mismatch_kl_exact'


def _changed(spec, precision=None, action='stop', **rollout):
  """Returns the spec with other formats."""
  model = spec.model
  if precision is not None:
    model = dataclasses.replace(model, precision=precision)
  band = spec.rl.gate.max_kl_exact if precision is None else 1e-4
  gate = dataclasses.replace(spec.rl.gate, action=action, max_kl_exact=band)
  return dataclasses.replace(
    spec,
    model=model,
    rl=dataclasses.replace(spec.rl, gate=gate, mismatch_every=1),
    rollout=dataclasses.replace(spec.rollout, **rollout),
  )


def _lines(spec, tokenizer, workdir):
  with opened(workdir, spec, tokenizer) as job:
    reinforce.reinforce(job)
  return lines_of_rl(workdir)


def test_rollouts_of_few_bits_need_a_trainer_of_the_same(
  spec, tokenizer, tmp_path
):
  plain = _lines(_changed(spec), tokenizer, tmp_path / 'plain')[1]
  # Bundles carry codes, and the engine holds these.
  both = _changed(spec, NVFP4, experts='nvfp4')
  unified = _lines(both, tokenizer, tmp_path / 'unified')[1]
  assert unified[KL] <= 3 * plain[KL] < 1e-9
  mixed = _changed(spec, experts='nvfp4')
  with (
    opened(tmp_path / 'mixed', mixed, tokenizer) as job,
    pytest.raises(mismatch.OutOfBand, match=f'rl step 1: {KL} is .*1e-09'),
  ):
    reinforce.reinforce(job)
  gap = lines_of_rl(tmp_path / 'mixed')[1]
  assert gap[KL] > 1e4 * plain[KL]


def test_a_cache_of_few_bits_shows_in_the_mismatch(spec, tokenizer, tmp_path):
  rough = _changed(spec, action='flag', cache_dtype='float8_e4m3fn')
  line = _lines(rough, tokenizer, tmp_path)[1]
  assert 1e-9 < line[KL] < 0.1
