"""A run takes model and tokenizer from its import, and from no other."""

import dataclasses
import json
import shutil

import pytest

from composer_jax.data import tokens
from composer_jax.pipeline import imported, job, stages
from composer_jax.pipeline import spec as specs
from composer_jax.text import hf_tokenizer
from configs.composer import imported as imported_config
from configs.composer import tiny
from tests.text import hf_files

VOCAB_SIZE = 400


def write(folder, **changes):
  """An import as `experiments.hf_import` lays it out, its weights left out."""
  hf_files.qwen(folder)
  model = tiny.get_config('smoke').model.to_dict()
  model |= {'vocab_size': VOCAB_SIZE, 'remat': True, **changes}
  (folder / 'model.json').write_text(json.dumps(model))
  (folder / 'hf.json').write_text('{}')
  hashes = folder / 'weights' / '0' / 'hashes'
  hashes.mkdir(parents=True)
  (hashes / 'metadata').write_text('{"params/embedding": "12ab"}')
  return folder


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return write(tmp_path_factory.mktemp('import') / 'model')


def spec_of(folder, **cpt):
  c = imported_config.get_config(f'{folder},smoke')
  c.sandbox.level = 'static'
  c.telemetry.tensorboard = False
  for name, value in cpt.items():
    c.cpt[name] = value
  return specs.from_dict(c.to_dict())


def silent(workdir, writer):
  """Writes no report."""


def test_the_config_takes_the_model_of_the_import(folder):
  spec = spec_of(folder)
  assert spec.initial == str(folder)
  there = json.loads((folder / 'model.json').read_text())
  whole = imported_config.get_config(str(folder))
  assert whole.model.to_dict() == there
  assert whole.rl.steps > spec.rl.steps
  cpu = {'compute_dtype': 'float32', 'remat': False}
  assert spec.model.to_dict() == there | cpu
  own = specs.from_dict(tiny.get_config('smoke').to_dict())
  assert spec.cpt.learning_rate < own.cpt.learning_rate / 10
  assert spec.cpt.steps == own.cpt.steps
  with pytest.raises(ValueError, match="'nowhere' is not an import.*hf_import"):
    imported_config.get_config('nowhere')
  with pytest.raises(ValueError, match="no variant 'small'"):
    imported_config.get_config(f'{folder},small')


def test_a_run_uses_the_tokenizer_of_the_import(folder, tmp_path):
  spec = spec_of(folder)
  expected = hf_tokenizer.Tokenizer.from_folder(folder, VOCAB_SIZE)
  with job.open_run(spec, tmp_path, [], silent) as run:
    assert run.tokenizer.fingerprint() == expected.fingerprint()
    ids = tokens.tokenise(run.corpus, run.tokenizer)['heldout'][0]
    assert (ids[0], ids[-1]) == (expected.BOS, expected.EOD)
    text = run.corpus.texts('heldout')[0]
    assert expected.decode(ids[1:-1]) == text
    transcripts = stages.demonstrations_of(run, 8)
  # What a rollout worker loads.
  saved = hf_tokenizer.load_any(tmp_path / 'tokenizer.json')
  assert saved.fingerprint() == expected.fingerprint()
  assert not any((t == expected.PAD).any() for t, _ in transcripts)
  for tokens_T, mask_T in transcripts:
    assert tokens_T[0] == expected.USER and tokens_T.max() < VOCAB_SIZE
    assert expected.END in tokens_T[mask_T]


def test_only_what_is_not_in_the_weights_may_differ(folder, tmp_path):
  spec = spec_of(folder)
  moe = dataclasses.replace(
    spec.model.moe, aux_loss_weight=0.5, z_loss_weight=0.25
  )
  free = dataclasses.replace(
    spec.model, compute_dtype='bfloat16', remat=True, moe=moe
  )
  imported.check_model(folder, free)
  other = dataclasses.replace(
    spec.model,
    norm_eps=0.5,
    rope=dataclasses.replace(spec.model.rope, theta=5.0),
  )
  told = (
    r'model is not that.*norm_eps is 1e-06 there and 0\.5 in --config\.model; '
    r'rope\.theta is 10000\.0 there and 5\.0 .*Only compute_dtype, remat'
  )
  with pytest.raises(ValueError, match=told):
    with job.open_run(
      dataclasses.replace(spec, model=other), tmp_path / 'run', [], silent
    ):
      pass
  assert not (tmp_path / 'run').exists()


def test_what_is_no_import_is_told_before_anything_is_made(folder, tmp_path):
  for path in (tmp_path / 'nothing', shutil.copytree(folder, tmp_path / 'x')):
    shutil.rmtree(path / 'weights', ignore_errors=True)
    spec = dataclasses.replace(spec_of(folder), initial=str(path))
    with pytest.raises(
      ValueError, match=f'{path}.*not a finished import.*hf_import.*imported.py'
    ):
      with job.open_run(spec, tmp_path / 'run', [], silent):
        pass
  unnamed = specs.from_dict(imported_config.get_config().to_dict())
  with pytest.raises(ValueError, match="'DIR' is not a finished import"):
    with job.open_run(unnamed, tmp_path / 'run', [], silent):
      pass
  assert not (tmp_path / 'run').exists()


def test_sft_learns_conversations_beside_transcripts(folder, tmp_path):
  template = '{% generation %}{{ messages[0].content }}{% endgeneration %}.'
  (folder / 'chat_template.jinja').write_text(template)
  talks = tmp_path / 'talks.jsonl'
  talks.write_text('{"messages": [{"role": "user", "content": "said"}]}\n')
  spec = spec_of(folder)
  asked = dataclasses.replace(spec.demonstrations, conversations=str(talks))
  spec = dataclasses.replace(spec, demonstrations=asked)
  with job.open_run(spec, tmp_path / 'run', [], silent) as run:
    learnt, held_out = stages.sft_documents(run)
    tokenizer = run.tokenizer
  (folder / 'chat_template.jinja').unlink()
  assert len(learnt) == spec.demonstrations.count + 1
  assert len(held_out) == 32
  tokens_T, mask_T = learnt[-1]
  assert tokenizer.decode(tokens_T) == 'said.'
  assert tokenizer.decode(tokens_T[mask_T]) == 'said'
  for tokens_T, _ in [*learnt[:-1], *held_out]:
    assert tokens_T[0] == tokenizer.USER


def test_conversations_that_are_not_there_are_told_first(folder, tmp_path):
  spec = spec_of(folder)
  asked = dataclasses.replace(spec.demonstrations, conversations='/no/talks')
  spec = dataclasses.replace(spec, demonstrations=asked)
  with pytest.raises(FileNotFoundError, match='/no/talks'):
    with job.open_run(spec, tmp_path / 'run', [], silent):
      pass
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'name',
  [
    *('weights/0/hashes/metadata', 'tokenizer.json', 'model.json'),
    'chat_template.jinja',
  ],
)
def test_a_workdir_remembers_which_import_it_is_of(folder, tmp_path, name):
  workdir = tmp_path / 'run'
  with job.open_run(spec_of(folder), workdir, [], silent):
    pass
  moved = shutil.copytree(folder, tmp_path / 'moved')
  with job.open_run(spec_of(moved), workdir, [], silent):
    pass
  path = moved / name
  path.write_text((path.read_text() if path.exists() else '') + ' ')
  with pytest.raises(ValueError, match='another configuration: imported is'):
    with job.open_run(spec_of(moved), workdir, [], silent):
      pass
  own = dataclasses.replace(spec_of(folder), initial='')
  with pytest.raises(ValueError, match="imported is '[0-9a-f]+' there and ''"):
    with job.open_run(own, workdir, [], silent):
      pass


def test_pretraining_can_be_left_out_of_an_import_alone(folder, tmp_path):
  spec = spec_of(folder, steps=0)
  with job.open_run(spec, tmp_path, [], silent) as run:
    stages.pretrain(run)
  assert not (tmp_path / 'exports').exists()
  assert not (tmp_path / 'corpus').exists()
  told = r'cpt\.steps must be at least 1, not 0; .*--config\.initial'
  with pytest.raises(ValueError, match=told):
    dataclasses.replace(spec, initial='')
  with pytest.raises(ValueError, match=r'sft\.steps must be at least 1'):
    dataclasses.replace(spec, sft=dataclasses.replace(spec.sft, steps=0))


def test_a_tokenizer_without_room_is_told_first(folder, tmp_path):
  full = write(tmp_path / 'full', vocab_size=VOCAB_SIZE - 1)
  vocab = hf_tokenizer.Tokenizer.from_folder(folder, VOCAB_SIZE).vocab_size - 1
  fields = json.loads((full / 'model.json').read_text())
  fields['vocab_size'] = vocab
  (full / 'model.json').write_text(json.dumps(fields))
  with job.open_run(spec_of(full), tmp_path / 'run', [], silent) as run:
    with pytest.raises(ValueError, match='no token for USER .* 1 too few'):
      run.documents  # noqa: B018
  assert not (tmp_path / 'run' / 'corpus').exists()
