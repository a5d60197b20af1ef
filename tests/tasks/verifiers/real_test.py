"""The real env server of verifiers, its harnesses, and a run that trains on it.

verifiers wants other versions of packages than this project: the test makes an
environment for it (`tests.environments`).
"""

import contextlib
import json

import pytest

from composer_jax.core import records
from composer_jax.hf import importing
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.tasks.verifiers import process
from experiments import tiny_checkpoint
from tests import environments, programs
from tests.e2e import jobs
from tests.tasks.verifiers import episodes_test, record

pytestmark = pytest.mark.slow

PACKAGES = ('verifiers==0.4.0', 'reasoning-gym==0.1.25', 'uv')


@pytest.fixture(scope='module')
def python(tmp_path_factory):
  return environments.python(PACKAGES, tmp_path_factory)


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
  root = tmp_path_factory.mktemp('import')
  tiny_checkpoint.write(root / 'tiny', 'qwen3_moe', seed=0)
  importing.convert(root / 'tiny', root / 'import')
  return root / 'import'


@pytest.fixture(scope='module')
def tokenizer(imported):
  return hf_tokenizer.ImportedTokenizer.from_folder(imported, 1024)


def tasks_of(python, name):
  path = record.EXAMPLES / f'{name}.toml'
  return process.listed(python, str(path), path.read_text())


@pytest.mark.parametrize('name', record.EPISODES)
def test_a_harness_plays_as_it_was_recorded(python, imported, tokenizer, name):
  example, renderer, texts = record.EPISODES[name]
  turns = [record.tokens_of(tokenizer, text) for text in texts]
  service = record.service_of(python, imported, example, renderer)
  with contextlib.closing(service):
    task = tasks_of(python, example)[0]
    chain, verdict = record.play(service, task, turns)
  recorded = episodes_test.recorded(name)
  assert recorded['turns'] == turns
  last = recorded['bodies'][-1]['token_ids']
  assert chain.tokens_T.tolist() == [*last, *turns[-1]]
  assert verdict.passed == (name != 'rewritten')
  assert verdict.status == records.GRADED


def test_reasoning_gym_pays_what_its_scorer_gives(python, imported, tokenizer):
  service = record.service_of(python, imported, 'puzzles', '')
  task = tasks_of(python, 'puzzles')[0]
  answer = task.data['entry']['answer']
  scores = []
  with contextlib.closing(service):
    for text in (answer, f'{answer}x', ''):
      turns = [record.tokens_of(tokenizer, text)]
      scores.append(record.play(service, task, turns)[1].score)
  right, close, nothing = scores
  assert right == 1.0
  assert 1.0 > close >= nothing >= 0.0


def test_an_env_server_that_dies_ends_the_episode_by_name(
  python, imported, tokenizer
):
  service = record.service_of(python, imported, 'addition', '')
  service.program.process.kill()
  task = tasks_of(python, 'addition')[0]
  with (
    contextlib.closing(service),
    pytest.raises(ValueError, match='The environment of verifiers.*ended'),
  ):
    record.play(service, task, [[1]])


def test_twenty_steps_train_with_the_mismatch_at_its_floor(
  python, imported, tmp_path
):
  workdir = tmp_path / 'run'
  place = record.EXAMPLES / 'addition.toml'
  done = programs.run_fresh(
    'experiments.composer',
    f'--config=configs/composer/verifiers.py:{imported},{place},{python},smoke',
    f'--workdir={workdir}',
    '--config.rl.placement=colocated',
    '--config.rl.wait_timeout_s=3000.0',
    env=jobs.environment(),
    timeout_s=jobs.TIMEOUT_S,
  )
  assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
  rows = [json.loads(x) for x in (workdir / 'metrics.jsonl').open()]
  steps = [r for r in rows if r['stage'] == 'rl']
  assert [r['step'] for r in steps] == list(range(1, 21))
  for row in steps:
    # In float32 a probability that is recomputed differs by its last bits.
    assert row['mismatch_kl'] < 1e-11
    assert (
      row['staleness'] == row['gate_breaches'] == row['infrastructure'] == 0
    )
    assert row['tokens_exact'] == row['sampled_tokens']
  means = [sum(r['reward'] for r in part) for part in (steps[:5], steps[-5:])]
  assert means[1] > means[0]
