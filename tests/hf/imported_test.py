"""A run takes model and tokenizer from its import, and from no other."""

import dataclasses
import itertools
import json
import pathlib
import re
import shutil

import jax.numpy as jnp
import pytest

from composer_jax import wiring
from composer_jax.core import files
from composer_jax.hf import imported
from composer_jax.hf.text import conversations
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.models import config as model_config
from composer_jax.pipeline import stages
from composer_jax.tasks.practice import list_functions as practice
from composer_jax.train.checkpoints import manager
from configs.composer import imported as imported_config
from configs.composer import tiny
from tests.hf import published
from tests.hf.text import tokenizer_files
from tests.pipeline import runs

VOCAB_SIZE = 400


HOW_TO = (
  pathlib.Path(__file__).resolve().parents[2]
  / 'docs'
  / 'how_to'
  / 'own_model.md'
)


def write(folder, *, weight=0.5, **changes):
  """An import as `experiments.hf_import` lays it out, of a single weight."""
  tokenizer_files.qwen(folder)
  model = tiny.get_config('smoke').model.to_dict()
  model |= {'vocab_size': VOCAB_SIZE, 'remat': True, **changes}
  model = model_config.ModelConfig.from_dict(model).to_dict()
  (folder / 'model.json').write_text(json.dumps(model))
  (folder / 'hf.json').write_text('{}')
  weights = manager.Checkpoints(folder / 'weights', keep=1)
  weights.save(0, {'params/embedding': jnp.array([weight])})
  weights.close()
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
  return wiring.spec_of(c.to_dict())


def silent(workdir):
  """Writes no report."""


def test_the_config_takes_the_model_of_the_import(folder):
  spec = spec_of(folder)
  assert spec.initial == str(folder)
  there = json.loads((folder / 'model.json').read_text())
  # Flags take tuples, and JSON turns them into lists.
  there['remat_saves'] = tuple(there['remat_saves'])
  whole = imported_config.get_config(str(folder))
  # A command line can set what is in a section.
  assert whole.model.to_dict() == there | {'mtp': {}}
  assert whole.rl.steps > spec.rl.steps
  cpu = {'compute_dtype': 'float32', 'remat': False}
  assert spec.model.to_dict() == there | cpu
  own = wiring.spec_of(tiny.get_config('smoke').to_dict())
  assert spec.cpt.learning_rate < own.cpt.learning_rate / 10
  assert spec.cpt.steps == own.cpt.steps
  with pytest.raises(ValueError, match="'nowhere' is not an import.*hf_import"):
    imported_config.get_config('nowhere')
  with pytest.raises(ValueError, match="no variant 'small'"):
    imported_config.get_config(f'{folder},small')


def test_the_documented_command_pretrains_on_all_devices_of_its_mesh(folder):
  text = HOW_TO.read_text().replace('\\\n', ' ')
  command = re.search(r'\./run\.sh pretrain .*imported\.py.*', text)
  assert command is not None
  changes = {
    name: int(value) if value.isdigit() else value
    for name, value in re.findall(r'--config\.(\S+)=(\S+)', command[0])
  }
  assert len(changes) > 2
  c = imported_config.get_config(str(folder))
  c.update_from_flattened_dict(changes)
  spec = wiring.spec_of(c.to_dict())
  assert spec.mesh.size == 8 and spec.cpt.seq_len == changes['cpt.seq_len']


def test_a_run_uses_the_tokenizer_of_the_import(folder, tmp_path):
  spec = spec_of(folder)
  spec = runs.changed(spec, 'data', fim_rate=1.0)
  expected = hf_tokenizer.ImportedTokenizer.from_folder(folder, VOCAB_SIZE)
  with runs.open_run(spec, tmp_path, write_report=silent) as run:
    assert run.tokenizer.fingerprint() == expected.fingerprint()
    ids = run.documents[1][0]
    assert (ids[0], ids[-1]) == (expected.BOS, expected.EOD)
    text = run.corpus.built.texts('heldout')[0]
    assert expected.decode(ids[1:-1]) == text
    tokens_BT = next(stages.pretraining_stream(run)).tokens_BT
    played, advised = practice._play(run, 8)
  marks = (expected.FIM_PREFIX, expected.FIM_MIDDLE, expected.FIM_SUFFIX)
  counts = {int((tokens_BT == mark).sum()) for mark in marks}
  assert len(counts) == 1 and counts.pop() > 0
  # A rollout worker loads this file.
  saved = hf_tokenizer.load_any(tmp_path / 'tokenizer.json')
  assert saved.fingerprint() == expected.fingerprint()
  assert not any((t == expected.PAD).any() for t, _ in played)
  # Advised episodes come from the same harness.
  assert len(played) == len(advised) == 8
  for tokens_T, mask_T in [*played, *itertools.chain(*advised)]:
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
  message = (
    r'model .* is not that .*imported\.py:\S+; other '
    r'configs, such as deletion\.py, have .* own\. Only adapters\.attention, '
    r'.*compute_dtype, remat.*norm_eps is 1e-06 there and 0\.5 in '
    r'--config\.model; rope\.theta is 10000\.0 there and 5\.0 in '
    r'--config\.model\.$'
  )
  with pytest.raises(ValueError, match=message):
    with runs.open_run(
      dataclasses.replace(spec, model=other),
      tmp_path / 'run',
      write_report=silent,
    ):
      pass
  assert not (tmp_path / 'run').exists()
  own = tiny.get_config().model.to_dict()
  with pytest.raises(ValueError, match=r'; and \d+ more\.$') as told_at_once:
    imported.check_model(folder, type(spec.model).from_dict(own))
  assert str(told_at_once.value).count(' there and ') == 4


def test_what_is_no_import_is_told_before_anything_is_made(folder, tmp_path):
  for path in (tmp_path / 'nothing', shutil.copytree(folder, tmp_path / 'x')):
    shutil.rmtree(path / 'weights', ignore_errors=True)
    spec = dataclasses.replace(spec_of(folder), initial=str(path))
    with pytest.raises(
      ValueError, match=f'{path}.*not a finished import.*hf_import.*imported.py'
    ):
      with runs.open_run(spec, tmp_path / 'run', write_report=silent):
        pass
  unnamed = wiring.spec_of(imported_config.get_config().to_dict())
  with pytest.raises(ValueError, match="'DIR' is not a finished import"):
    with runs.open_run(unnamed, tmp_path / 'run', write_report=silent):
      pass
  assert not (tmp_path / 'run').exists()


# Each message, and the opening of another for a generation prompt.
TALKING = (
  '{% for m in messages %}> {{ m.content }}<|im_end|>{% endfor %}'
  '{% if add_generation_prompt %}> {% endif %}'
)


def learning(spec, talks):
  return runs.changed(spec, 'demonstrations', conversations=str(talks))


@pytest.fixture
def talks(tmp_path):
  path = tmp_path / 'talks.jsonl'
  messages = [
    {'role': 'user', 'content': 'asked'},
    {'role': 'assistant', 'content': 'said'},
  ]
  path.write_text(json.dumps({'messages': messages}) + '\n')
  return path


def templated(folder, path, template):
  """A copy of an import that has a chat template."""
  folder = shutil.copytree(folder, path)
  (folder / 'chat_template.jinja').write_text(template)
  return folder


def test_sft_learns_conversations_beside_transcripts(folder, talks, tmp_path):
  spec = spec_of(templated(folder, tmp_path / 'import', TALKING))
  with runs.open_run(
    learning(spec, talks), tmp_path / 'run', write_report=silent
  ) as run:
    learnt, held_out = stages.sft_documents(run)
    tokenizer = run.tokenizer
  assert len(learnt) >= spec.systems['demonstrations'].count + 1
  assert len(held_out) == 32
  tokens_T, mask_T = learnt[-1]
  assert tokenizer.decode(tokens_T) == '> asked<|im_end|>> said<|im_end|>'
  assert tokenizer.decode(tokens_T[mask_T]) == 'said<|im_end|>'
  transcripts = [d for d in learnt[:-1] if isinstance(d, tuple)]
  for tokens_T, _ in [*transcripts, *held_out]:
    assert tokenizer.decode(tokens_T).startswith('> ')


def test_conversations_stay_what_they_were_at_the_start(
  folder, talks, tmp_path
):
  dated = "{{ strftime_now('%f') }}" + TALKING
  spec = spec_of(templated(folder, tmp_path / 'import', dated))
  spec, workdir, loaded = learning(spec, talks), tmp_path / 'run', []
  for _ in range(2):
    with runs.open_run(spec, workdir, write_report=silent):
      loaded += conversations.load(workdir / conversations.FILE)
  (first_T, _), (again_T, _) = loaded
  assert first_T.tobytes() == again_T.tobytes()
  talks.write_text(talks.read_text() * 2)
  message = 'another configuration: conversations is'
  with pytest.raises(ValueError, match=message):
    with runs.open_run(spec, workdir, write_report=silent):
      pass


def test_what_is_wrong_with_the_import_does_not_bind_a_workdir(
  folder, talks, tmp_path
):
  """Curing it changes the import, which a workdir is bound to."""
  silence = '{{ messages[0].content }}'
  moved = templated(folder, tmp_path / 'import', silence)
  spec, workdir = learning(spec_of(moved), talks), tmp_path / 'run'
  with pytest.raises(ValueError, match='leaves out .* assistant .*roles'):
    with runs.open_run(spec, workdir, write_report=silent):
      pass
  (moved / 'chat_template.jinja').write_text(TALKING)
  with runs.open_run(spec, workdir, write_report=silent):
    pass


def test_conversations_that_are_not_there_are_told_first(folder, tmp_path):
  message = (
    r"--config\.demonstrations\.conversations names '/no/talks', which .*No"
  )
  with pytest.raises(ValueError, match=message):
    with runs.open_run(
      learning(spec_of(folder), '/no/talks'),
      tmp_path / 'run',
      write_report=silent,
    ):
      pass
  assert not (tmp_path / 'run').exists()


def test_windows_are_no_longer_than_the_positions(folder, tmp_path):
  short = tmp_path / 'short'
  shutil.copytree(folder, short)
  fields = published.QWEN3_30B_A3B | {'max_position_embeddings': 100}
  (short / 'config.json').write_text(json.dumps(fields))
  spec = spec_of(short)
  with (
    pytest.raises(
      ValueError, match=r'episode\.max_tokens \(\d+\) must be at most 100'
    ),
    runs.open_run(spec, tmp_path / 'run'),
  ):
    pass
  assert not (tmp_path / 'run').exists()
  fields['max_position_embeddings'] = max(
    spec.episode.max_tokens, spec.cpt.seq_len
  )
  (short / 'config.json').write_text(json.dumps(fields))
  wiring.systems_of(spec).initial.claim()
  spec = spec_of(short, seq_len=2 * spec.cpt.seq_len)
  with pytest.raises(ValueError, match=r'cpt\.seq_len'):
    wiring.systems_of(spec).initial.claim()


def test_an_import_is_what_it_holds_and_not_where_it_lies(folder, tmp_path):
  again = write(tmp_path / 'again')
  assert imported.identity(again) == imported.identity(folder)
  other = write(tmp_path / 'other', weight=0.25)
  assert imported.identity(other) != imported.identity(folder)


def test_a_workdir_remembers_which_import_it_is_of(folder, tmp_path):
  workdir = tmp_path / 'run'
  with runs.open_run(spec_of(folder), workdir, write_report=silent):
    pass
  moved = shutil.copytree(folder, tmp_path / 'moved')
  with runs.open_run(spec_of(moved), workdir, write_report=silent):
    pass
  # Exports read the place from here.
  assert files.read_json(workdir / 'config.json')['initial'] == str(moved)
  for name in (
    *('tokenizer.json', 'tokenizer_config.json', 'model.json'),
    *('chat_template.jinja', 'additional_chat_templates/tool_use.jinja'),
  ):
    path = moved / name
    before = path.read_text() if path.exists() else ''
    path.parent.mkdir(exist_ok=True)
    path.write_text(before + ' ')
    with pytest.raises(ValueError, match='another configuration: imported is'):
      with runs.open_run(spec_of(moved), workdir, write_report=silent):
        pass
    path.write_text(before) if before else path.unlink()
  with runs.open_run(spec_of(moved), workdir, write_report=silent):
    pass
  own = dataclasses.replace(spec_of(folder), initial='')
  with pytest.raises(ValueError, match="imported is '[0-9a-f]+' there and ''"):
    with runs.open_run(own, workdir, write_report=silent):
      pass


def test_pretraining_can_be_left_out_of_an_import_alone(folder, tmp_path):
  spec = spec_of(folder, steps=0)
  with runs.open_run(spec, tmp_path, write_report=silent) as run:
    stages.pretrain(run)
  assert not (tmp_path / 'exports').exists()
  assert not (tmp_path / 'corpus').exists()
  message = r'cpt\.steps must be at least 1, not 0\. .*--config\.initial'
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(spec, initial='')
  with pytest.raises(ValueError, match=r'steps'):
    dataclasses.replace(spec, sft=dataclasses.replace(spec.sft, steps=-1))


def test_a_tokenizer_without_room_is_told_first(folder, tmp_path):
  full = shutil.copytree(folder, tmp_path / 'full')
  vocab = (
    hf_tokenizer.ImportedTokenizer.from_folder(folder, VOCAB_SIZE).vocab_size
    - 1
  )
  fields = json.loads((full / 'model.json').read_text())
  fields['vocab_size'] = vocab
  (full / 'model.json').write_text(json.dumps(fields))
  with pytest.raises(ValueError, match='no token for USER .* 1 too few'):
    with runs.open_run(spec_of(full), tmp_path / 'run', write_report=silent):
      pass
  # An import with rows for the roles is accepted by the same workdir.
  with runs.open_run(spec_of(folder), tmp_path / 'run', write_report=silent):
    pass
