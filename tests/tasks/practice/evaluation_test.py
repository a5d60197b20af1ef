"""The true pass rates of scripted policies, counted, kept and resumed."""

import dataclasses
import itertools
import json
import subprocess
import sys
import threading

import pytest

from composer_jax import wiring
from composer_jax.core import files
from composer_jax.report import evaluation as document_of_evaluation
from composer_jax.serve import chat, client, endpoint
from composer_jax.tasks.list_functions import family
from composer_jax.tasks.practice import conversation, evaluation
from composer_jax.tasks.repository import scripts
from composer_jax.text import tokenizer as tokenizers
from configs.composer import deletion, tiny
from tests.rl import advantage_test
from tests.serve import faulty
from tests.tasks import small_package

GOLD = evaluation.EvaluationOptions(
  policy='gold', split='train', tasks=0, samples=1, threads=2
)


def evaluate(spec, options, out):
  systems = wiring.systems_of(spec)
  return evaluation.evaluate(spec, systems, options, out)


@pytest.fixture(scope='module')
def spec(tmp_path_factory):
  root = tmp_path_factory.mktemp('set')
  small_package.task_set(root)
  return wiring.spec_of(deletion.get_config(f'{root},smoke').to_dict())


def test_the_solution_passes_and_doing_nothing_does_not(spec, tmp_path):
  out = tmp_path / 'gold'
  summary = evaluate(spec, GOLD, out)
  assert summary['overall']['passed'] == summary['overall']['tasks'] == 5
  assert set(summary['by_tier']) == set(small_package.repository.TIERS)
  assert not summary['overall']['flags']
  null = dataclasses.replace(GOLD, policy='null')
  null_summary = evaluate(spec, null, tmp_path / 'null')
  assert null_summary['overall']['passed'] == 0
  assert null_summary['overall']['episodes'] == 5
  assert null_summary['overall']['pass_at_k'] == {'1': 0.0}

  with pytest.raises(ValueError, match="policy is 'gold' there and 'null' now"):
    evaluate(spec, null, out)


def test_generated_tasks_are_played_as_well(tmp_path):
  config = tiny.get_config('smoke')
  config.sandbox.level = 'static'
  spec = wiring.spec_of(config.to_dict())
  options = dataclasses.replace(GOLD, tasks=3, samples=2)
  summary = evaluate(spec, options, tmp_path)
  assert summary['overall']['passed'] == summary['overall']['episodes'] == 6
  assert summary['overall']['pass_at_k'] == {'1': 1.0, '2': 1.0}

  # Killed in the middle of its third line, it plays only missing episodes.
  episodes = tmp_path / 'episodes.jsonl'
  lines = episodes.read_text().splitlines(keepends=True)
  episodes.write_text(''.join(lines[:2]) + lines[2][:40])
  assert evaluate(spec, options, tmp_path) == summary
  again = episodes.read_text().splitlines(keepends=True)
  assert again[:2] == lines[:2] and len(again) == 6

  # Episodes whose sandbox failed are played again, and the others stay.
  failed = json.loads(lines[0]) | {'status': 'infrastructure', 'passed': False}
  broken = [json.dumps(failed) + '\n', *lines[1:]]
  episodes.write_text(''.join(broken))
  assert evaluate(spec, options, tmp_path) == summary
  again = episodes.read_text().splitlines(keepends=True)
  assert again[:6] == broken and len(again) == 7

  with pytest.raises(ValueError, match='--tasks=0 takes all tasks of a folder'):
    evaluate(spec, GOLD, tmp_path / 'all')


def row(task, passed, **changes):
  return {
    'task_id': task,
    'tier': 'body',
    'package': 'p',
    'passed': passed,
    'status': 'graded',
    'flags': [],
    'num_turns': 4,
    'num_invalid': 1,
    **changes,
  }


def test_rates_are_counted_by_hand():
  rows = [row('a', True), row('a', False), row('b', False), row('b', False)]
  rows += [row('c', True), row('c', False, status='infrastructure')]
  rows[3]['flags'] = ['network']
  rates = evaluation.summarise(rows, 2)['overall']
  assert (rates['episodes'], rates['passed']) == (5, 2)
  assert rates['infrastructure'] == 1 and rates['tasks'] == 3
  # Task c has an episode without a verdict.
  assert rates['pass_at_k'] == {'1': 0.25, '2': 0.5}
  assert rates['flags'] == {'network': 1}
  assert rates['invalid_rate'] == 0.25 and rates['turns'] == 4


def test_a_flagged_episode_is_played_and_not_passed():
  task = family.generate(0, 'train')
  honest = advantage_test.make_rollout(0, 1.0)
  flagged = dataclasses.replace(honest, flags=('canary_passed',))
  rows = [evaluation.row_of(task, r) for r in (honest, flagged)]
  assert [r['passed'] for r in rows] == [True, False]
  rates = evaluation.summarise(rows, 2)['overall']
  assert (rates['episodes'], rates['passed']) == (2, 1)
  assert rates['flags'] == {'canary_passed': 1}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'policy': 'best'}, "policy must be one of .* got 'best'"),
    ({'samples': 0}, 'samples must be .* got 0'),
    ({'policy': 'chat'}, "--url \\(''\\)"),
    ({'policy': 'tokens', 'url': 'http://x/v1'}, '--policy=tokens needs --tok'),
    (
      {'chat': conversation.ChatOptions(native_tools=True, max_turns=3)},
      "--native_tools, --max_turns can be set for --policy=chat .*'gold'",
    ),
  ],
)
def test_what_cannot_be_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(GOLD, **changes)


@pytest.mark.parametrize('split', ['', 'train', 'unseen_all'])
def test_the_solution_passes_generated_tasks_of_every_split(tmp_path, split):
  config = tiny.get_config('smoke')
  config.sandbox.level = 'static'
  made = wiring.spec_of(config.to_dict())
  options = dataclasses.replace(GOLD, split=split, tasks=3)
  assert evaluate(made, options, tmp_path)['overall']['passed'] == 3
  rows = evaluation.read(tmp_path)
  assert {task_id.split('/')[1] for task_id, _ in rows} == {
    split or 'unseen_compositions'
  }


def test_a_split_that_the_family_has_not_is_named(spec, tmp_path):
  options = dataclasses.replace(GOLD, split='unseen_names')
  with pytest.raises(
    ValueError, match=r"'train', 'held_out'\) .*'unseen_names'"
  ):
    evaluate(spec, options, tmp_path)


def test_lines_are_json(spec, tmp_path):
  options = dataclasses.replace(GOLD, tasks=1)
  evaluate(spec, options, tmp_path)
  (line,) = (tmp_path / 'episodes.jsonl').read_text().splitlines()
  row = json.loads(line)
  assert row['passed'] and row['reward_terms'] is not None
  assert row['sandbox_level'] == 'unshare'


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass():
  for samples, passed in ((1, 0), (1, 1), (4, 1), (5, 2), (6, 6), (7, 3)):
    for k in range(1, samples + 1):
      subsets = list(itertools.combinations(range(samples), k))
      hits = sum(min(subset) < passed for subset in subsets)
      assert evaluation.pass_at_k(samples, passed, k) == pytest.approx(
        hits / len(subsets), abs=1e-12
      )


class Model:
  """Gives the scripted calls of the task that a conversation begins with."""

  def __init__(self, spec, native, faults=()):
    self.native, self.faults = native, list(faults)
    self._lock = threading.Lock()
    family_ = wiring.systems_of(spec).family
    self._calls = {
      task.prompt: list(scripts.gold_calls(task))
      for task in family_.of_split('train')
    }

  def __call__(self, body):
    with self._lock:
      if self.faults:
        return self.faults.pop()
    first, *rest = body['messages']
    (prompt,) = (p for p in self._calls if first['content'].startswith(p))
    told = 'Each of your messages is one call' in first['content']
    assert told == (not self.native) == ('tools' not in body)
    calls = self._calls[prompt][sum(m['role'] == 'assistant' for m in rest) :]
    usage = {'prompt_tokens': 100 + len(rest), 'completion_tokens': 10}
    if not self.native:
      made = faulty.said(calls[0], usage=usage)
    else:
      call = json.loads(calls[0])
      one = ('1', call['tool'], json.dumps(call['arguments']))
      made = faulty.said('<u>So.</u>', 'tool_calls', [one], usage)
    if body.get('stream'):
      return faulty.Reply(events=faulty.streamed(made))
    return faulty.Reply(made)


FAULTS = [
  faulty.Reply({'error': {}}, 529),
  faulty.Reply({'error': {}}, 429, {'retry-after': '1'}),
  faulty.Reply(breaks=True),
  faulty.Reply(b'<html>', 502),
]


def chat_options(url, **fields):
  return dataclasses.replace(
    GOLD, policy='chat', url=url, chat=conversation.ChatOptions(**fields)
  )


class Ticking(faulty.Clock):
  """Each look at it takes a moment."""

  def monotonic(self):
    self.now += 0.01
    return self.now


def remote_of(options, patience_s=600.0):
  address = endpoint.Endpoint(
    url=options.url, clock=Ticking(), patience_s=patience_s
  )
  return lambda: chat.ChatClient(address, stream=options.chat.stream)


@pytest.mark.parametrize(
  'native, stream',
  [(True, True), pytest.param(False, False, marks=pytest.mark.slow)],
)
def test_a_chat_model_passes_through_the_faults_of_its_endpoint(
  spec, tmp_path, native, stream
):
  model = Model(spec, native, FAULTS)
  with faulty.serving(model) as (url, _):
    options = chat_options(
      url, native_tools=native, stream=stream, price_in=1.0
    )
    summary = evaluation.evaluate(
      spec, wiring.systems_of(spec), options, tmp_path, remote_of(options)
    )
  overall = summary['overall']
  assert overall['passed'] == 5 and overall['ended'] == {'finish': 5}
  assert overall['attempts'] == overall['answers'] + len(FAULTS)
  assert overall['tokens_out'] == 10 * overall['answers']
  assert overall['cost_usd'] == pytest.approx(overall['tokens_in'] / 1e6)
  assert 0 < overall['answer_s_p50'] <= overall['answer_s_p95']
  assert overall['cut'] == 0
  rows = evaluation.read(tmp_path).values()
  for row in rows:
    kept = json.loads((tmp_path / row['transcript']).read_text())
    said = [m for m in kept['transcript'] if m['role'] == 'assistant']
    calls = [m for m in kept['transcript'] if m['role'] == 'tool']
    assert len(said) == len(calls) == row['num_turns']
    assert [c['tool'] for c in calls] == row['tools']
    assert all(m['usage'] and m['seconds'] > 0 for m in said)
  # A call's arguments may have escaped halves of surrogate pairs.
  kept['transcript'].append({'role': 'tool', 'call': 'a \ud800', 'content': ''})
  files.write_json(tmp_path / row['transcript'], kept)
  page = document_of_evaluation.write(tmp_path).read_text()
  assert 'a ?' in page
  for row in rows:
    assert row['task_id'] in page and row['transcript'] in page
  assert 'USD an episode' in page and 'completion_tokens' in page
  # A model's text is no part of the page's own.
  assert '<u>' not in page and ('&lt;u&gt;So.' in page) == native


def test_a_dead_endpoint_gives_episodes_that_are_played_again(spec, tmp_path):
  model = Model(spec, False)
  with faulty.serving(lambda body: faulty.Reply({}, 503)) as (url, _):
    options = chat_options(url)
    summary = evaluation.evaluate(
      spec, wiring.systems_of(spec), options, tmp_path, remote_of(options, 5.0)
    )
    assert summary['overall']['infrastructure'] == 5
    assert summary['overall']['ended'] == {'endpoint': 5}
    assert summary['overall']['episodes'] == 0
    assert document_of_evaluation.write(tmp_path).exists()
  with faulty.serving(model) as (url, _):
    remote = remote_of(dataclasses.replace(options, url=url))
    again = dataclasses.replace(
      options, chat=dataclasses.replace(options.chat, price_in=2.0)
    )
    summary = evaluation.evaluate(
      spec, wiring.systems_of(spec), again, tmp_path, remote
    )
  assert summary['overall']['passed'] == 5
  assert summary['overall']['infrastructure'] == 0


def test_tokens_of_a_dead_endpoint_do_not_end_an_evaluation(tmp_path):
  config = tiny.get_config('smoke')
  config.sandbox.level = 'static'
  made = wiring.spec_of(config.to_dict())
  tokenizer = tmp_path / 'tokenizer.json'
  tokenizers.Tokenizer.train(['bytes'], tokenizers.MIN_VOCAB_SIZE).save(
    tokenizer
  )
  with faulty.serving(lambda body: faulty.Reply({}, 500)) as (url, _):
    options = dataclasses.replace(
      GOLD, policy='tokens', url=url, tokenizer=str(tokenizer), tasks=2
    )
    address = endpoint.Endpoint(url=url, clock=faulty.Clock(), patience_s=1)
    summary = evaluation.evaluate(
      made,
      wiring.systems_of(made),
      options,
      tmp_path / 'out',
      lambda: client.TokenPolicy(address),
    )
  assert summary['overall']['infrastructure'] == 2


def test_tools_that_take_no_json_cannot_be_native(tmp_path):
  config = tiny.get_config('smoke')
  config.sandbox.level = 'static'
  made = wiring.spec_of(config.to_dict())
  options = dataclasses.replace(
    chat_options('http://x/v1', native_tools=True), tasks=1
  )
  with pytest.raises(ValueError, match="native_tools .*'list_functions'"):
    evaluation.evaluate(
      made, wiring.systems_of(made), options, tmp_path, remote_of(options)
    )


def test_every_task_has_a_file_that_a_file_system_takes(tmp_path):
  ids = ['a/b:c+d', 'a b c d', '../../x', 'ä' * 300, 'x/' * 400, 'x/' * 401]
  paths = {evaluation.transcript_of(i, n) for i in ids for n in (0, 1)}
  assert len(paths) == 12
  (tmp_path / evaluation.TRANSCRIPTS).mkdir()
  for path in paths:
    (tmp_path / path).touch()
  assert len(list((tmp_path / evaluation.TRANSCRIPTS).iterdir())) == 12


@pytest.mark.slow
def test_the_command_asks_the_endpoint_as_its_flags_say(tmp_path):
  made = faulty.said('finish', usage={'prompt_tokens': 9})
  answer = lambda body: faulty.Reply(events=faulty.streamed(made))
  with faulty.serving(answer) as (url, seen):
    flags = ('--policy=chat', f'--url={url}', '--model=m', '--stream')
    flags += ('--tasks=2', '--body={"seed": null, "top_p": 0.5}')
    flags += ('--config=configs/composer/tiny.py', f'--out={tmp_path}')
    subprocess.run(
      [sys.executable, '-m', 'experiments.evaluate', *flags]
      + ['--config.sandbox.level=static'],
      check=True,
    )
  assert len(seen) == 2
  _, body = seen[0]
  assert (body['model'], body['top_p']) == ('m', 0.5)
  assert body['stream'] and 'seed' not in body
  assert (tmp_path / 'report.html').exists()
