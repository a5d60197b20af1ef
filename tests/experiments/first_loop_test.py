"""Laws of the first study: what it audits, and what it writes down."""

import json
import re
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from composer_jax import wiring
from composer_jax.core import files
from composer_jax.pipeline import stages
from composer_jax.tasks.list_functions import family
from composer_jax.tasks.practice import list_functions as practice
from configs.composer import tiny
from experiments.studies import results
from experiments.studies.first_loop import analyze, collect, run
from tests.pipeline import runs

# At this seed an RL task shows a body that no other text has.
SEED, STEPS, PROMPTS = 4, 3, 8
UNSEEN = 'return sum(v ** 7 for v in values)'


def bodies(text):
  return re.findall(r'^    (return .+)$', text, re.M)


def renamed(body):
  variable, argument = re.search(r'for (\w+) in (\w+)', body).groups()
  body = re.sub(rf'\b{variable}\b', 'nobody', body)
  return re.sub(rf'\b{argument}\b', 'saw_this', body)


def rl_tasks():
  seed = SEED + stages.RL_SEED
  return [family.generate(g, 'train', seed) for g in range(STEPS * PROMPTS)]


@pytest.fixture
def workdir(tmp_path):
  folder = tmp_path / 'study' / '0_main'
  config = {
    'seed': SEED,
    'rl': {'steps': STEPS, 'prompts': PROMPTS},
    'demonstrations': {'functions': 2},
  }
  files.write_json(folder / 'config.json', config)
  for name, text in {
    'corpus/texts.bin': 'def f(a):\n  return in_the_corpus\n',
    'sft_transcripts.txt': 'edit x f\nreturn in_the_transcripts\n',
    'rl_edits/000001.txt': 'edit x f\nreturn in_own_edits',
    'evaluation_rl_episodes.jsonl': '',
  }.items():
    files.write_atomic(folder / name, text.encode())
  return folder


def solve(folder, stage, solutions):
  lines = [
    json.dumps({'passed': True, 'edits': ['edit x f\nno', f'edit x f\n{body}']})
    for body in solutions
  ]
  path = folder / f'evaluation_{stage}_episodes.jsonl'
  files.write_atomic(path, '\n'.join(lines).encode())


@pytest.mark.slow
def test_a_solved_body_is_found_wherever_it_was_shown(workdir):
  protocol = '\n'.join(practice.protocol_texts())
  neighbours = [
    body
    for task in rl_tasks()
    for text in task.files.values()
    for body in bodies(text)
    if not re.search(collect._form(body), protocol.encode())
  ]
  seed = practice._PROTOCOL_SEED
  reference = family.generate(0, 'train', seed).reference
  solutions = [
    'return in_the_corpus',
    'return in_the_transcripts',
    'return in_own_edits',
    renamed(neighbours[0]),
    renamed(reference),
    UNSEEN,
    renamed(UNSEEN),
  ]
  for stage in ('sft', 'rl'):
    solve(workdir, stage, solutions)
  found = collect.audit(workdir, 'rl')
  assert found['found_in'] == {
    'corpus': 1,
    'tokenizer_texts': 1,
    'sft_transcripts': 1,
    'sft_functions': 0,
    'rl_tasks': 1,
  }
  assert found['found_in_shown'] == 4
  assert found['found_in_own_edits'] == 1
  assert (found['solved'], found['distinct']) == (7, 6)
  # RL came after this evaluation.
  before = collect.audit(workdir, 'sft')
  assert 'rl_tasks' not in before['found_in']
  assert before['found_in_shown'] == 3


def test_the_audited_tasks_are_those_that_rl_trains_on(workdir):
  config = tiny.get_config('smoke').to_dict()
  config['seed'] = SEED
  collector = runs.collector(wiring.spec_of(config), None, None, split='train')
  shown = collect.shown(workdir, 'rl')['rl_tasks'].decode()
  for group in range(STEPS * PROMPTS):
    task = collector.task_of_group(group)
    assert task.prompt in shown
    assert all(text in shown for text in task.files.values())


def test_a_fall_of_the_probe_is_from_an_earlier_rate():
  rates = (0.5, 0.8, 0.75, 0.9, 0.7)
  probe = [{'pass_rate': r, 'low': r - 0.1} for r in rates]
  assert analyze._fall(probe) == '0.20, outside'
  assert analyze._fall(probe[:4]) == '0.05, inside'
  assert analyze._fall(probe[:2]) == '0.00, inside'
  assert analyze._fall(None) == 'not run'


def test_means_are_of_every_seed():
  rows = results.read(analyze.ROOT / 'results')
  mains = [r for r in rows if r['stage'] == 'arm' and 'main' in r['arm']]
  assert len(mains) >= 5
  rates = [r['evaluation_rl_unseen_all']['passed'] / 200 for r in mains]
  mean = sum(rates) / len(rates)
  row = analyze.table(rows).splitlines()[-1]
  assert row.startswith('| all three |')
  assert f'| {mean:.3f} [{min(rates):.3f}, {max(rates):.3f}] |' in row


@pytest.mark.slow
def test_seconds_of_all_pieces_add_up_and_no_path_is_of_the_machine(
  workdir, tmp_path, monkeypatch
):
  """An arm fails, is run to its end, and is started again for nothing."""
  program = tmp_path / 'program'
  program.write_text(
    '#!/bin/sh\n'
    f'echo "$@" >> {tmp_path}/calls\n'
    'sleep 0.3\n'
    f'[ "$(wc -l < {tmp_path}/calls)" = 1 ] && exit 1\n'
    f'echo "{{}}" > {workdir}/evaluation_rl.json\n'
  )
  program.chmod(0o755)
  monkeypatch.setattr(sys, 'executable', str(program))
  kept = tmp_path / 'results'
  flags.FLAGS.mark_as_parsed()
  written = []
  with flagsaver.flagsaver(
    (run._WORKDIR, str(workdir.parent)),
    (run._RESULTS, str(kept)),
    (run._CONFIG, str(run._REPOSITORY / 'configs/composer/tiny.py')),
    (run._SEEDS, ['0']),
    (run._ARMS, ['main']),
  ):
    with pytest.raises(run.subprocess.CalledProcessError):
      run.main()
    for _ in range(2):
      run.main()
      (about,) = results.read(kept)
      written.append(about['run'])
  assert len((tmp_path / 'calls').read_text().splitlines()) == 2
  assert written[0] == written[1]
  (commit,) = written[0]['commits']
  assert re.fullmatch('([0-9a-f]{40}(-dirty)?|unknown)', commit)
  assert 0.6 <= written[0]['wall_seconds'] < 60
  assert written[0]['command'] == [
    '-m',
    'experiments.composer',
    '--config=configs/composer/tiny.py',
    '--workdir=study/0_main',
    '--config.seed=0',
  ]


def test_an_arm_that_was_measured_elsewhere_keeps_its_seconds(tmp_path):
  old = {'command': ['-m', 'x'], 'wall_seconds': 805.2}
  assert run.record(old, ['-m', 'x'], tmp_path / 'times') == old
  assert run.record(None, ['-m', 'x'], tmp_path) == {'command': ['-m', 'x']}


def test_table_and_readme_are_those_of_the_results():
  table = analyze.table(results.read(analyze.ROOT / 'results'))
  assert (analyze.ROOT / 'table.md').read_text() == table
  assert table in (analyze.ROOT / 'README.md').read_text()
