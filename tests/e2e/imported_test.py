"""A Hugging Face checkpoint goes through every stage and is exported again."""

import contextlib
import dataclasses
import functools
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from composer_jax import wiring
from composer_jax.core import files
from composer_jax.hf import exporting, importing
from composer_jax.models import decoder, head
from composer_jax.pipeline import job as jobs_of_runs
from composer_jax.pipeline import reinforce, stages
from composer_jax.telemetry import writer as writers
from configs.composer import imported as imported_config
from tests.e2e import jobs
from tests.hf.text import chat_template_test, tokenizer_files
from tests.pipeline import runs

VOCAB_SIZE = 384

# By default tests/experiments/hf_main_test.py takes one in and out.
pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A random checkpoint by transformers, with 37 more rows than tokens."""
  torch.set_num_threads(1)
  torch.manual_seed(0)
  folder = tmp_path_factory.mktemp('hf') / 'tiny'
  config = transformers.Qwen3MoeConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    tie_word_embeddings=False,
  )
  transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
  for name in ('chat_template', 'additional_chat_templates/tool_use'):
    path = folder / f'{name}.jinja'
    path.parent.mkdir(exist_ok=True)
    path.write_text(chat_template_test.QWEN)
  return tokenizer_files.qwen(folder)


@pytest.fixture(scope='module')
def imported(checkpoint, tmp_path_factory):
  folder = tmp_path_factory.mktemp('import') / 'tiny'
  importing.convert(checkpoint, folder)
  return folder


def spec_of(imported, **changes):
  c = imported_config.get_config(f'{imported},smoke')
  c.sandbox.level = 'static'
  c.telemetry.tensorboard = False
  c.rl.placement = 'colocated'
  for stage in (c.cpt, c.sft, c.rl):
    stage.warmup_steps = stage.decay_steps = 0
  for name, value in changes.items():
    section, field = name.split('__')
    c[section][field] = value
  return wiring.spec_of(c.to_dict())


class OneDevice(jobs_of_runs.Job):
  """A run on one of the tests' eight devices."""

  @functools.cached_property
  def placement(self):
    return self.single


@contextlib.contextmanager
def opened(spec, workdir):
  """A run without a report."""
  with runs.open_run(spec, workdir, write_report=lambda _: None) as job:
    yield OneDevice(**vars(job))


def exported(workdir, stage, folder):
  """Exports a stage to a Hugging Face checkpoint."""
  origin = exporting.of_run(workdir, stage, family=None)
  exporting.write(origin, folder, dtype='float32')
  return folder


def tensors(folder):
  arrays = {}
  for path in folder.glob('*.safetensors'):
    arrays |= safetensors.numpy.load_file(path)
  return arrays


@pytest.fixture(scope='module')
def pretrained(imported, tmp_path_factory):
  """A workdir with a step of pretraining that changes nothing."""
  workdir = tmp_path_factory.mktemp('runs') / 'pretrained'
  spec = spec_of(imported, cpt__steps=1, cpt__learning_rate=1e-30)
  with opened(spec, workdir) as job:
    stages.pretrain(job)
    return workdir, spec, stages.load_variables(job, 'cpt', job.single)


def test_a_run_that_learns_nothing_gives_the_checkpoint_back(
  checkpoint, pretrained, tmp_path
):
  workdir, _, _ = pretrained
  abandoned = tmp_path / 'back.exporting' / 'composer_jax_export'
  killed = abandoned / 'additional_chat_templates'
  killed.mkdir(parents=True)
  (killed / 'stray.jinja').touch()
  folder = exported(workdir, 'cpt', tmp_path / 'back')
  back, original = tensors(folder), tensors(checkpoint)
  assert back.keys() == original.keys() and len(original) > 20
  for name, array in original.items():
    np.testing.assert_array_equal(back[name], array, err_msg=name)
  texts = ('tokenizer.json', 'additional_chat_templates')
  for name in (*texts, 'chat_template.jinja'):
    assert (folder / name).exists()
  (extra,) = (folder / 'additional_chat_templates').iterdir()
  assert extra.read_text() == chat_template_test.QWEN
  # Some of the rows belong to no token of the tokenizer.
  roles = files.read_json(folder / 'composer_jax_roles.json')
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  assert tokenizer.convert_ids_to_tokens(roles['END']) == '<|im_end|>'
  assert tokenizer.convert_ids_to_tokens(roles['USER']) is None


def test_an_export_knows_its_import_wherever_that_lies(
  imported, pretrained, tmp_path
):
  workdir, spec, _ = pretrained
  workdir = shutil.copytree(workdir, tmp_path / 'run')
  moved = shutil.copytree(imported, tmp_path / 'moved')
  with opened(dataclasses.replace(spec, initial=str(moved)), workdir):
    pass
  origin = exporting.of_run(workdir, 'cpt', family=None)
  assert origin.imported == moved
  with (moved / 'tokenizer_config.json').open('a') as file:
    file.write(' ')
  message = r'run began from .*moved, which is another one or has changed'
  with pytest.raises(ValueError, match=message):
    exporting.of_run(workdir, 'cpt', family=None)
  shutil.rmtree(moved)
  message = r'moved, which is not there\. Put it back, or.*imported\.py:DIR'
  with pytest.raises(ValueError, match=message):
    exporting.of_run(workdir, 'cpt', family=None)
  with opened(spec, workdir):
    pass
  origin = exporting.of_run(workdir, 'cpt', family=None)
  assert str(origin.imported) == str(imported)


def test_without_steps_rl_begins_with_the_checkpoint(
  checkpoint, imported, tmp_path
):
  spec = spec_of(imported, cpt__steps=0, sft__steps=0)
  with opened(spec, tmp_path / 'run') as job:
    stages.pretrain(job)
    stages.finetune(job)
  back = tensors(exported(tmp_path / 'run', 'sft', tmp_path / 'back'))
  for name, array in tensors(checkpoint).items():
    np.testing.assert_array_equal(back[name], array, err_msg=name)


def check_logits(folder, spec, variables):
  """Checks that transformers computes the same logits with an export."""
  reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  ids = tokenizer('def total(values):\n  return sum(values)')['input_ids']
  with torch.no_grad():
    expected_BTV = reference(torch.tensor([ids])).logits.numpy()
  tokens_BT = jnp.asarray([ids])
  positions_BT = jnp.arange(len(ids))[None]

  @jax.jit
  def ours(variables):
    out = decoder.Decoder(spec.model).apply(
      variables, tokens_BT, jnp.ones_like(tokens_BT), positions_BT
    )
    return head.logits(variables, out.hidden_BTD, spec.model)

  logits_BTV = ours(variables)
  np.testing.assert_allclose(logits_BTV, expected_BTV, atol=2e-5)
  assert np.abs(expected_BTV).max() > 0.1


def test_transformers_computes_what_a_pretrained_import_does(
  pretrained, tmp_path
):
  workdir, spec, variables = pretrained
  check_logits(exported(workdir, 'cpt', tmp_path / 'out'), spec, variables)


@pytest.fixture(scope='module')
def trained(imported, tmp_path_factory):
  """A workdir with every stage run to its end, without pretraining."""
  workdir = tmp_path_factory.mktemp('runs') / 'imported'
  talks = workdir.with_name('talks.jsonl')
  messages = chat_template_test.CALLS[1:]
  talks.write_text(json.dumps({'messages': messages}))
  spec = spec_of(
    imported,
    cpt__steps=0,
    demonstrations__conversations=str(talks),
    sft__steps=3,
    sft__learning_rate=1e-2,
    rl__steps=2,
    rl__learning_rate=1e-3,
    evaluation__episodes=4,
  )
  with opened(spec, workdir) as job:
    stages.pretrain(job)
    stages.finetune(job)
    stages.evaluate(job, 'sft')
    reinforce.reinforce(job)
    stages.evaluate(job, 'rl')
  return workdir, spec


def test_every_stage_runs_with_the_foreign_tokenizer(trained):
  workdir, _ = trained
  rows = writers.read(workdir)
  assert [r['step'] for r in rows if r['stage'] == 'rl'] == [1, 2]
  assert {r['stage'] for r in rows} == {'sft', 'rl', 'eval'}
  episodes = [
    json.loads(line)
    for line in (workdir / 'episodes.jsonl').read_text().splitlines()
  ]
  shown = [e['turns'][0] for e in episodes if e['stage'] == 'sft']
  assert shown and all(turn['role'] == 'user' for turn in shown)
  assert 'def ' in (workdir / 'sft_transcripts.txt').read_text()


def test_transformers_computes_what_the_trained_policy_does(trained, tmp_path):
  workdir, spec = trained
  with opened(spec, workdir) as job:
    variables = stages.load_variables(job, 'rl', job.single)
  check_logits(exported(workdir, 'rl', tmp_path / 'out'), spec, variables)


def test_the_commands_of_the_readme(tmp_path):
  """Runs them as typed, including a rollout process."""
  checkpoint, folder = tmp_path / 'hf_tiny', tmp_path / 'import'
  workdir, out = tmp_path / 'run', tmp_path / 'out'
  config = f'configs/composer/imported.py:{folder},smoke'
  for name, *flags in (
    ('hf_tiny', '--family=deepseek_v3', f'--out={checkpoint}'),
    ('hf_import', f'--source={checkpoint}', f'--out={folder}'),
    ('composer', f'--config={config}', f'--workdir={workdir}'),
    ('export', f'--source={workdir}', '--stage=rl', f'--out={out}'),
  ):
    process = subprocess.run(
      [sys.executable, '-m', f'experiments.{name}', *flags],
      cwd=jobs.ROOT,
      env=jobs.environment(),
      capture_output=True,
      text=True,
      timeout=jobs.TIMEOUT_S,
    )
    assert process.returncode == 0, (
      process.stderr[-3000:] + process.stdout[-3000:]
    )
  assert (workdir / 'report.html').exists()
  reference = transformers.AutoModelForCausalLM.from_pretrained(out)
  assert reference.dtype == torch.bfloat16
  assert reference.config.model_type == 'deepseek_v3'
  before, after = tensors(checkpoint), tensors(out)
  assert before.keys() == after.keys()
  assert any((before[name] != after[name]).any() for name in before)
