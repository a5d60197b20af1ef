"""The loop on deletion tasks: solutions shown, episodes judged, records kept.

`tests/e2e` and `sync_equality_test` hold the same code to the bits with
generated tasks; here the tasks are a repository's, in a real sandbox.
"""

import contextlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.agent import rewards
from composer_jax.core import records, trees
from composer_jax.models import decoder
from composer_jax.pipeline import reinforce, stages
from composer_jax.tasks import curriculum
from composer_jax.telemetry import writer as writers
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train.checkpoints import export
from configs.composer import deletion
from tests.fleet import uploaded
from tests.pipeline import runs
from tests.tasks.practice import families_test

pytestmark = pytest.mark.slow

folder = families_test.folder


@pytest.fixture(scope='module')
def spec(folder):
  config = deletion.get_config(f'{folder},smoke')
  config.mesh = dict(replica=1, fsdp=1, context=1)
  config.model.vocab_size = 512
  config.rl.placement = 'colocated'
  config.episode.max_turns = 3
  config.episode.max_call_tokens = 128
  return wiring.spec_of(config.to_dict())


@pytest.fixture(scope='module')
def tokenizer(spec):
  return tokenizers.Tokenizer.train(wiring.systems_of(spec).family.texts(), 512)


def folder_of(spec):
  return spec.systems['tasks'].folder


@contextlib.contextmanager
def opened(workdir, spec, tokenizer):
  with writers.Writer(workdir, tensorboard=False) as writer:
    job = runs.job(spec, workdir, writer)
    vars(job)['tokenizer'] = tokenizer
    yield job


@pytest.fixture(scope='module')
def finished(spec, tokenizer, tmp_path_factory):
  """A workdir after RL from a random policy, and an evaluation of it."""
  workdir = tmp_path_factory.mktemp('deletion')
  rng = np.random.default_rng(5)
  shapes, _ = decoder.abstract(spec.model)
  variables = jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), shapes
  )
  export.save(workdir, 'sft', 1, variables)
  fields = {'version': 4, 'invalid_penalty': 0.25, 'effort_coefficient': 0.0}
  (workdir / rewards.FILE).write_text(json.dumps(fields))
  with opened(workdir, spec, tokenizer) as job:
    reinforce.reinforce(job)
    stages.evaluate(job, 'rl')
  return workdir


def test_every_step_was_trained_on_tasks_of_its_own(spec, tokenizer, finished):
  ledger = curriculum.Ledger(finished / curriculum.LEDGER)
  ids = [row.task_id for step in (0, 1) for row in ledger.get(step)]
  seed = spec.seed + stages.RL_SEED
  tasks = runs.tasks(spec, tokenizer, split='train', seed=seed)
  pool = {c.task_id for c in tasks.pool(0)}
  assert len(set(ids)) == 2 and set(ids) <= pool
  for group in wiring.kept_groups(finished):
    assert group.task_id == ids[group.group]


def test_what_a_random_policy_does_is_judged_priced_and_hinted(spec, finished):
  rows = [r for r in writers.read(finished) if r['stage'] == 'rl']
  assert [r['step'] for r in rows] == [1, 2]
  for row in rows:
    assert row['reward_version'] == 4 and row['pass_rate'] == 0
    assert row['infrastructure'] == row['flags'] == 0
    terms = row['reward_invalid'] + row['reward_unfinished']
    assert row['reward'] == pytest.approx(terms)
    assert row['hints'] > 0 and row['hint_divergence'] > 0
    assert row['grad_norm'] > 0 and row['mismatch_kl'] < 1e-9
  rates = json.loads((finished / 'evaluation_rl.json').read_text())
  assert (rates['passed'], rates['episodes']) == (0, 1)


def test_a_killed_run_draws_samples_and_trains_the_same_again(
  spec, tokenizer, finished, tmp_path
):
  """Removes the checkpoint and the groups of the second step."""
  copy = shutil.copytree(finished, tmp_path / 'copy')
  shutil.rmtree(copy / 'exports' / 'rl')
  shutil.rmtree(copy / 'checkpoints' / 'rl' / '2')
  uploaded.files_of(copy)[1].unlink()
  with opened(copy, spec, tokenizer) as job:
    reinforce.reinforce(job)
    again = trees.flatten_names(stages.load_variables(job, 'rl', job.single))
  with opened(finished, spec, tokenizer) as job:
    first = trees.flatten_names(stages.load_variables(job, 'rl', job.single))
  for name, array in first.items():
    np.testing.assert_array_equal(again[name], array, err_msg=name)
  for step in (0, 1):
    ledgers = [
      curriculum.Ledger(d / curriculum.LEDGER).get(step)
      for d in (finished, copy)
    ]
    assert ledgers[0] == ledgers[1]


def test_solutions_are_shown_as_they_pass(spec, tokenizer, tmp_path):
  """With room for all calls, every solution is a whole window and passes."""
  fields = deletion.get_config(f'{spec.systems["tasks"].folder},smoke')
  fields.episode.max_turns = 30
  fields.episode.max_call_tokens = 1000
  fields.episode.max_tokens = 12_000
  fields.sft.seq_len = fields.rl.seq_len = 12_000
  fields.summary.trigger = 0
  roomy = wiring.spec_of(fields.to_dict())
  with opened(tmp_path, roomy, tokenizer) as job:
    shown = job.systems.family._solutions(job)
    learnt, held_out = job.systems.family.demonstrations(job)
  assert len(shown) == 2 and len(learnt) == len(held_out) == 1
  rates = json.loads((tmp_path / 'demonstrations.json').read_text())
  assert rates['passed'] == 1 and rates['episodes'] == 2
  lines = (tmp_path / 'episodes.jsonl').read_text().splitlines()
  verdicts = [json.loads(line)['verdict'] for line in lines]
  assert {v['status'] for v in verdicts} == {records.GRADED}


def test_a_chain_is_learnt_or_held_out_and_never_both(
  spec, tokenizer, tmp_path
):
  fields = deletion.get_config(f'{spec.systems["tasks"].folder},smoke')
  fields.demonstrations.count = 3
  fields.rl.steps, fields.rl.decay_steps = 1, 0
  fields.episode.max_turns = 30
  fields.episode.max_call_tokens = 700
  fields.episode.max_tokens = fields.summary.trigger = 3000
  fields.sft.seq_len = fields.rl.seq_len = 3000
  chained = wiring.spec_of(fields.to_dict())
  with opened(tmp_path, chained, tokenizer) as job:
    chains = job.systems.family._solutions(job)
    learnt, held_out = job.systems.family.demonstrations(job)
  assert len(chains[-1]) > 1
  sizes = [[len(tokens_T) for tokens_T, _ in chain] for chain in chains]
  assert [len(t) for t, _ in learnt] == [n for s in sizes[:-1] for n in s]
  assert [len(t) for t, _ in held_out] == sizes[-1]
