"""An imported model on a task set: lengths and counts fit, the job runs."""

import json
import shutil

import pytest
import transformers

from composer_jax import wiring
from composer_jax.hf import exporting, importing
from composer_jax.hf.text import call_formats, language
from composer_jax.tasks.repository import task_set
from configs import hardware
from configs.composer import agent
from experiments import tiny_checkpoint
from tests import programs
from tests.e2e import imported_test, jobs
from tests.pipeline import runs
from tests.tasks.practice import families_test

checkpoint, imported = imported_test.checkpoint, imported_test.imported
folder = families_test.folder


def test_lengths_counts_and_meshes_fit(imported, folder, monkeypatch, capsys):
  train, held_out = (
    len(list(task_set.load(folder).split(x))) for x in (False, True)
  )
  cards = ('H100, 80 GiB, driver 580.1',) * 5
  for lines in ((), cards[:1], cards):
    extras = ('gpu',) if lines else ()
    found = hardware.Found(lines, extras)
    monkeypatch.setattr(hardware, 'look', lambda found=found: found)
    c = agent.get_config(f'{imported},{folder}')
    spec = wiring.spec_of(c.to_dict())
    wiring.systems_of(spec).family.check_files()
    count = max(1, len(lines))
    assert spec.mesh.fsdp == spec.rl.mesh.fsdp == spec.rollout.devices == count
    assert (spec.rl.placement == 'colocated') == bool(lines)
    assert spec.rl.rows % count == spec.sft.batch_size % count == 0
  assert spec.initial == str(imported) and spec.sft.optimizer == 'adam'
  played = spec.rl.steps * spec.rl.prompts
  shown = spec.systems['demonstrations'].count
  assert 0 < played <= train - shown < played + spec.rl.prompts
  assert spec.evaluation.episodes == held_out
  window = spec.episode.max_tokens
  assert window == spec.sft.seq_len == spec.rl.seq_len
  text = capsys.readouterr().out
  assert f'window of {window} tokens' in text
  assert '5 devices (5 x H100, 80 GiB, driver 580.1)' in text
  for words in (
    'tokens a call',
    'episodes at once',
    'sandbox',
    'adam at 2e-05',
  ):
    assert words in text, words


def test_windows_have_at_most_the_positions_of_the_model(
  imported, folder, tmp_path, capsys
):
  short = tmp_path / 'short'
  shutil.copytree(imported, short)
  fields = json.loads((short / 'config.json').read_text())
  fields['max_position_embeddings'] = 1500
  (short / 'config.json').write_text(json.dumps(fields))
  c = agent.get_config(f'{short},{folder},smoke')
  for length in (c.episode.max_tokens, c.summary.trigger, c.rl.seq_len):
    assert length == 1500
  assert 'all positions of the model' in capsys.readouterr().out
  wiring.systems_of(wiring.spec_of(c.to_dict())).initial.claim()


def test_prompts_too_long_for_the_window_leave_nothing(
  imported, folder, tmp_path
):
  c = agent.get_config(f'{imported},{folder},smoke')
  c.episode.max_tokens = c.summary.trigger = 256
  with (
    pytest.raises(ValueError, match='before those whose prompts do not fit'),
    runs.open_run(wiring.spec_of(c.to_dict()), tmp_path / 'run'),
  ):
    pass
  assert not (tmp_path / 'run').exists()


def test_other_arguments_are_refused():
  for argument in ('a', 'a,b,c', 'a,b,smoke,d'):
    with pytest.raises(ValueError, match=f"IMPORT,TASKS.*'{argument}'"):
      agent.get_config(argument)
  with pytest.raises(ValueError, match='is no set of tasks'):
    agent.get_config('a,b')


@pytest.mark.slow
@pytest.mark.parametrize('is_full', [False, True], ids=['tiny', 'full'])
@pytest.mark.parametrize('family', tiny_checkpoint.MODELS)
def test_the_command_trains_a_model_in_its_own_language(
  folder, family, is_full, tmp_path
):
  """From a checkpoint to an export, in two processes, with conversations.

  Once with vocabularies of the published sizes: 151,936 and 129,280.
  """
  checkpoint, imported = tmp_path / 'checkpoint', tmp_path / 'import'
  workdir, out = tmp_path / 'run', tmp_path / 'out'
  tiny_checkpoint.write(checkpoint, family, seed=0, is_full=is_full)
  importing.convert(checkpoint, imported)
  talks = tmp_path / 'talks.jsonl'
  asked = {'role': 'user', 'content': 'What does total do?'}
  said = {'role': 'assistant', 'content': 'It adds up the values.'}
  talks.write_text(json.dumps({'messages': [asked, said]}))
  done = programs.run_fresh(
    'experiments.composer',
    f'--config=configs/composer/agent.py:{imported},{folder},smoke',
    f'--workdir={workdir}',
    f'--config.demonstrations.conversations={talks}',
    '--config.sft.steps=4',
    '--config.hints.loss.weight=0.0',  # One program less to compile.
    '--config.rl.wait_timeout_s=3000.0',
    '--config.episode.max_turns=2',
    '--config.episode.max_call_tokens=96',
    *(
      f'--config.{name}=3072'
      for name in (
        *('episode.max_tokens', 'summary.trigger', 'cpt.seq_len'),
        *('sft.seq_len', 'rl.seq_len'),
      )
    ),
    env=jobs.environment(),
    timeout_s=jobs.TIMEOUT_S,
  )
  assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
  form = {'qwen3_moe': 'hermes', 'deepseek_v3': 'deepseek'}[family]
  assert f"form '{form}'" in done.stdout
  rows = [json.loads(x) for x in (workdir / 'metrics.jsonl').open()]
  assert {r['stage'] for r in rows} >= {'sft', 'rl', 'eval'}
  assert all(r['mismatch_kl'] < 1e-3 for r in rows if r['stage'] == 'rl')
  names = {r['name'] for r in rows if r['stage'] == 'eval'}
  assert names == {'import', 'sft', 'rl'}
  episodes = [json.loads(x) for x in (workdir / 'episodes.jsonl').open()]
  tokenizer = language.load_any(workdir / 'tokenizer.json')
  marks = call_formats.FORMATS[form].marks
  shown = (workdir / 'sft_transcripts.txt').read_text()
  assert all(mark in shown for mark in (marks[0], marks[-1]))
  assert all(turn['role'] != 'text' for e in episodes for turn in e['turns'])
  # RL and the evaluations open windows as SFT does: with the template's words.
  prompt = tokenizer.language.encode([asked], add_generation_prompt=True)
  opening = tokenizer.decode(prompt).split(asked['content'])[0][:20]
  for stage in ('sft', 'rl', 'eval_import', 'eval_rl'):
    (first, *_) = [e['turns'][0] for e in episodes if e['stage'] == stage]
    assert first['role'] == 'user' and first['text'].startswith(opening[:10])
  exporting.write(exporting.of_run(workdir, 'rl', family=None), out)
  model = transformers.AutoModelForCausalLM.from_pretrained(out)
  assert model.config.model_type == family
  num_rows = tiny_checkpoint.FULL[family][0] if is_full else 1024
  assert model.config.vocab_size == num_rows == len(model.lm_head.weight)
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  ids = theirs.apply_chat_template([asked], add_generation_prompt=True)
  assert ids['input_ids'] == prompt.tolist()
