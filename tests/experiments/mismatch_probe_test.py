"""A probe of a random policy, and what its main prints and keeps."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.core import files
from composer_jax.models import decoder
from composer_jax.tasks.list_functions import family
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train.checkpoints import export
from configs.composer import tiny
from experiments.studies.mismatch import analyze, probe

OPTIONS = probe.ProbeOptions(
  tokens=100, rollouts=2, num_slots=4, rows=2, seed=1
)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run with finished SFT and random weights."""
  folder = tmp_path_factory.mktemp('run')
  texts = family.generate(0, 'train').files.values()
  tokenizer = tokenizers.Tokenizer.train(list(texts), 280)
  tokenizer.save(folder / 'tokenizer.json')
  config = tiny.get_config('smoke')
  config.model.vocab_size = tokenizer.vocab_size
  config.episode.max_tokens = 224
  config.rl.seq_len = config.sft.seq_len = 224
  spec = wiring.spec_of(config.to_dict())
  files.write_json(folder / 'config.json', dataclasses.asdict(spec))
  rng = np.random.default_rng(0)
  shapes, _ = decoder.abstract(spec.model)
  variables = jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes
  )
  export.save(folder, 'sft', 1, variables)
  return folder


@pytest.fixture(scope='module')
def measured(workdir):
  return probe.of_run(
    workdir, OPTIONS, stage='sft', overrides={'compute_dtype': 'float32'}
  )


@pytest.mark.slow
def test_equal_weights_differ_by_rounding_alone(measured):
  assert measured['sampled_tokens'] >= OPTIONS.tokens
  assert measured['trajectories'] % 4 == 0
  assert 0 <= measured['mismatch_kl_replay'] < 1e-11
  assert measured['mismatch_large_replay'] == 0
  assert min(measured['route_agreement_layers']) > 0.99


@pytest.mark.slow
def test_a_tape_that_is_a_token_off_does_not(measured):
  assert measured['mismatch_kl_shifted'] > 1e4 * measured['mismatch_kl_replay']


@pytest.mark.slow
def test_the_table_has_three_lines_an_arm(measured):
  rows = [json.loads(json.dumps(measured))]
  lines = analyze.table(rows).splitlines()
  assert len(lines) == 2 + 3
  assert len({line.count('|') for line in lines}) == 1
  assert lines[2].startswith('| sft | float32 | fast | ')


def test_a_stage_that_is_not_finished_is_named(workdir):
  with pytest.raises(ValueError, match="'rl'.*not finished"):
    probe.of_run(workdir, OPTIONS, stage='rl', overrides={})


def test_options_are_checked_by_name():
  with pytest.raises(
    ValueError, match='tokens must be an integer of at least 1; got 0'
  ):
    dataclasses.replace(OPTIONS, tokens=0)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_batch_invariant_numerics_leave_no_mismatch_at_all(workdir, dtype):
  overrides = {'numerics': 'batch_invariant', 'compute_dtype': dtype}
  measured = probe.of_run(workdir, OPTIONS, stage='sft', overrides=overrides)
  for way in ('replay', 'no_replay'):
    assert measured[f'mismatch_max_{way}'] == 0
  assert measured['routed_differently'] == 0
  assert measured['mismatch_kl_shifted'] > 0
