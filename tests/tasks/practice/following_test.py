"""Versions are compared in pairs, played once, and their losses named."""

import contextlib
import dataclasses
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.core import files
from composer_jax.delta import publisher, transport
from composer_jax.delta.format import keys
from composer_jax.models import decoder
from composer_jax.report import versions as page
from composer_jax.tasks.practice import evaluation, following
from composer_jax.text import tokenizer as tokenizers
from configs.composer import tiny
from experiments import following as mains

SUITE = '[[suites]]\nname = "a"\nconfig = "configs/composer/tiny.py"\n'


def row(task, passed, sample=0, **fields):
  fixed = {
    'status': 'graded',
    'num_tests': 2,
    'num_passed': 2 if passed else 1,
    'flags': [],
    'num_turns': 3,
    'num_invalid': 0,
    'tier': '',
    'package': '',
  }
  return {
    'task_id': str(task), 'sample': sample, 'passed': passed, **fixed, **fields
  }  # fmt: skip


def test_pairs_are_compared_task_by_task():
  before = [row(i, False) for i in range(40)]
  after = [row(i, i < 10) for i in range(40)]
  found = following.compare('s', before, after)
  assert (found.change, found.pairs, found.missing) == (0.25, 40, 0)
  assert 0.1 < found.low < 0.25 < found.high < 0.4
  assert found.verdict == 'better'
  same = following.compare('s', before, before)
  assert (same.change, same.low, same.high, same.verdict) == (0, 0, 0, '')
  other = following.compare('s', before, [row(99, True)])
  assert (other.pairs, other.missing, other.verdict) == (0, 41, '')
  # An episode whose sandbox failed is in no pair.
  broken = [row(0, True) | {'status': 'infrastructure'}, *after[1:]]
  found = following.compare('s', before, broken)
  assert (found.pairs, found.missing) == (39, 1)
  # Ten samples of one task are one task: nothing is known of others.
  one = [row(0, False, sample=i) for i in range(10)]
  alike = following.compare('s', one, [r | {'passed': True} for r in one])
  assert (alike.change, alike.pairs, alike.verdict) == (1, 10, '')


@pytest.mark.parametrize('tasks, samples', [(1, 4), (3, 4), (5, 1), (60, 1)])
def test_luck_alone_is_rarely_told_as_a_change(tasks, samples):
  """Of 200 changes by luck alone at most one in twenty is told, also of few."""
  rng, told = np.random.default_rng(tasks), 0
  for _ in range(200):
    pair = [
      [
        row(i, bool(rng.random() < 0.5), sample=k)
        for i in range(tasks)
        for k in range(samples)
      ]
      for _ in range(2)
    ]
    (change,) = following.changes('a', *pair)
    told += change.verdict != ''
  assert told <= 20


def test_a_loss_in_one_domain_is_named():
  rng = np.random.default_rng(1)
  before = [
    row(i, rng.random() < 0.7, tier='ab'[i % 2], package='p') for i in range(80)
  ]
  after = [r | {'passed': False} if r['tier'] == 'b' else r for r in before]
  found = {c.domain: c.verdict for c in following.changes('s', before, after)}
  assert found == {'s': 'worse', 's a': '', 's b': 'worse'}


def test_strict_and_loose_grading_stand_side_by_side():
  rows = [
    row(0, True, tokens_out=10, seconds=1.0),
    row(1, False, tokens_out=30, seconds=3.0, flags=['x']) | {'num_passed': 2},
    row(2, False, tokens_out=20, seconds=2.0),
    row(3, False) | {'status': 'infrastructure'},
  ]
  overall = evaluation.summarise(rows, 1)['overall']
  told = following.measured(rows, overall)
  assert told['pass_rate'] == pytest.approx(1 / 3)
  assert told['loose'] == pytest.approx(2 / 3)
  assert told['mean_tokens_out'] == 20 and told['mean_seconds'] == 2


@pytest.fixture
def played(tmp_path):
  """A play that writes rows as a policy with that share of passes would."""
  calls, down = [], set()

  def play(suite, folder, policy):
    calls.append((suite.name, folder.name, policy))
    if policy == 'dead':
      raise RuntimeError('the endpoint is gone')
    folder.mkdir(parents=True, exist_ok=True)
    share = policy if isinstance(policy, float) else 0.5
    rows = [row(i, i < share * 50, tokens_out=10 * i) for i in range(50)]
    if policy in down:
      rows = [r | {'status': 'infrastructure'} for r in rows]
    lines = ''.join(f'{json.dumps(r)}\n' for r in rows)
    (folder / evaluation.EPISODES).write_text(lines)
    return evaluation.summarise(rows, 1)

  suites = [following.Suite(name=n, config='c.py') for n in ('a', 'b')]
  make = lambda: following.SuiteService(suites, tmp_path, play)
  return make, calls, tmp_path, down


def test_a_version_is_played_once_and_compared_with_the_one_before(played):
  make, calls, out, _ = played
  service = make()
  service.play_model(
    following.ComparedModel(name='other', url='http://x/v1', model='m')
  )
  assert (
    service.is_due(3, 'id3') and service.play(3, 'id3', 0.8)['changes'] == []
  )
  second = service.play(5, 'id5', 0.4)
  assert [c['verdict'] for c in second['changes']] == ['worse', 'worse']
  assert {c['before'] for c in second['changes']} == {3}
  # Killed while a line was written, it plays that version again.
  path = out / following.VERSIONS
  path.write_bytes(path.read_bytes()[:-9])
  again = make()
  assert not again.is_due(3, 'id3') and again.is_due(5, 'id5')
  with pytest.raises(ValueError, match="with the weights 'id3'.*another run"):
    again.is_due(3, 'other')
  with pytest.raises(RuntimeError):
    again.play(5, 'id5', 'dead')
  assert again.play(5, 'id5', 0.4)['suites'] == second['suites']
  count = len(calls)
  make().play_model(
    following.ComparedModel(name='other', url='http://x/v1', model='m')
  )
  assert len(calls) == count
  text = page.write(out).read_text()
  assert 'Version 5 is worse than 3 on a: -0.400' in text
  assert 'version 3' in text and 'other' in text and '<svg' in text


def test_what_failed_is_unknown_and_is_played_again(played):
  """Episodes of infrastructure alone are no rate, and none to compare with."""
  make, calls, out, down = played
  other = following.ComparedModel(name='other', url='http://x/v1', model='m')
  down |= {0.3, other}
  service = make()
  service.play(1, 'id1', 0.8)
  service.play_model(other)
  failed = service.play(2, 'id2', 0.3)['suites']['a']
  assert failed['pass_rate'] is failed['loose'] is failed['low'] is None
  assert (failed['episodes'], failed['infrastructure']) == (0, 50)
  text = page.write(out).read_text()
  assert text.count('>unknown<') == 16 and 'infrastructure' in text
  third = service.play(3, 'id3', 0.4)
  assert [(c['before'], c['verdict']) for c in third['changes']] == [
    (1, 'worse')
  ] * 2

  again = make()
  assert again.is_due(2, 'id2') and not again.is_due(1, 'id1')
  down.clear()
  again.play(2, 'id2', 0.3)
  again.play_model(other)
  models = files.read_json(out / following.MODELS)
  assert models['other']['a']['pass_rate'] == 0.5
  assert not make().is_due(2, 'id2')
  assert '>unknown<' not in page.write(out).read_text()
  count = len(calls)
  make().play_model(other)
  assert len(calls) == count


def test_a_name_has_the_figures_of_one_model(played):
  make, calls, _, _ = played
  other = following.ComparedModel(name='other', url='http://x/v1', model='m')
  make().play_model(other)
  count = len(calls)
  for fields in ({'url': 'http://y/v1'}, {'model': 'n'}):
    with pytest.raises(ValueError, match=r"other models .*\['other'\]"):
      make().play_model(dataclasses.replace(other, **fields))
  assert len(calls) == count


def test_suites_are_pinned_in_their_folder(played):
  make, _, out, _ = played
  make()
  for suites in (
    [following.Suite(name='a', config='c.py')],
    [following.Suite(name=n, config='c.py', tasks=int(n == 'b')) for n in 'ab'],
  ):
    with pytest.raises(ValueError, match=r"other suites: \['b'\] differ"):
      following.SuiteService(suites, out, lambda *_: None)


@pytest.mark.parametrize(
  'text, message',
  [
    ('', 'must name a suite or more'),
    (SUITE + SUITE, 'no name twice'),
    (SUITE + 'taskz = 3', 'no .*taskz.*tasks'),
    (SUITE + 'fields = 3', 'fields must be a dict'),
    (SUITE + SUITE.replace('"a"', '"A"'), 'no name twice'),
    (SUITE + 'samples = 0', 'samples must be an integer of at least 1'),
    (SUITE.replace('"a"', '"../a"'), 'must be the name of a folder'),
    ('suites = [3]', 'must be a table, not 3'),
    ('[[suites]]\nname = "a"', "missing.*'config'"),
    ('[[suite]]', 'suite'),
    (
      SUITE + '[[models]]\nname = "7"\nurl = "u"\nmodel = "m"',
      'must be no number',
    ),
  ],
)
def test_a_file_of_suites_is_refused_by_name(tmp_path, text, message):
  path = tmp_path / 'suites.toml'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    following.load(str(path))


def test_the_suites_that_are_shipped_can_be_played():
  suites, models = following.load('configs/suites/tiny.toml')
  assert models == []
  for suite in suites:
    spec = wiring.spec_of(mains.fields_of(suite))
    assert suite.split in wiring.family_of(spec).axes
  wrong = following.Suite(name='a', config='none.py')
  with pytest.raises(ValueError, match="'none.py' must be a file.py"):
    mains.fields_of(wrong)


def pinned(tmp_path, spec, more=''):
  path = tmp_path / 'suites.toml'
  path.write_text(
    SUITE.replace('tiny.py', 'tiny.py:smoke')
    + 'split = "unseen_names"\ntasks = 3\n'
    + 'fields = {"sandbox.level" = "static"}\n'
    + more
  )
  return mains.PinnedSuites(str(path), tmp_path / 'run', spec)


def test_what_a_version_played_is_known_by_its_weights_and_package(tmp_path):
  spec = wiring.spec_of(tiny.get_config('smoke').to_dict())
  suites, identity = pinned(tmp_path, spec), 'a' * 64
  out = tmp_path / 'run' / 'live' / 'suites' / identity[:24] / 'a'
  out.mkdir(parents=True)
  for packages, names in (('pp', ['a']), ('pq', ['a p', 'a q'])):
    rows = [row(i, True, package=p) for i, p in enumerate(packages)]
    lines = ''.join(f'{json.dumps(r)}\n' for r in rows)
    (out / evaluation.EPISODES).write_text(lines)
    files.write_json(out / evaluation.SUMMARY, {})
    # There is nothing to play with.
    played = suites.play(None, 0, identity)
    assert sorted(played) == names
    assert [r for name in names for r in played[name]] == rows
  other = '[[models]]\nname = "m"\nurl = "u"\nmodel = "m"\n'
  with pytest.raises(ValueError, match='which no gate compares'):
    pinned(tmp_path, spec, other)


@pytest.mark.slow
def test_pinned_suites_are_played_by_the_weights_that_are_given(run_dir):
  """Whatever number they have, and whatever the engine had before."""
  source, spec = run_dir
  weights = {name: policy_of(spec, seed) for seed, name in enumerate('ab')}

  def play(*names):
    suites = pinned(source.parent, spec)
    for name in names:
      suites.play(weights[name], 0, name * 64)
    folder = source / 'live' / 'suites' / (names[-1] * 24) / 'a' / 'transcripts'
    return [files.read_json(p)['transcript'] for p in sorted(folder.iterdir())]

  after = play('a', 'b')
  shutil.rmtree(source / 'live')
  assert play('b') == after
  assert play('a') != after


def policy_of(spec, seed):
  shapes, _ = decoder.abstract(spec.model)
  rng = np.random.default_rng(seed)
  masters = jax.tree.map(
    lambda x: 0.02 * rng.normal(size=x.shape).astype(np.float32), shapes
  )
  return jax.jit(decoder.policy)(masters)


@pytest.fixture
def run_dir(tmp_path):
  """A workdir whose RL has begun: its files, and what its store shows."""
  source = tmp_path / 'run'
  config = tiny.get_config('smoke')
  config.sandbox.level = 'static'
  spec = wiring.spec_of(config.to_dict())
  source.mkdir()
  files.write_json(source / 'config.json', spec.as_dict())
  tokenizer = tokenizers.Tokenizer.train(['def total(values):\n'] * 9, 300)
  tokenizer.save(source / 'tokenizer.json')
  wiring.systems_of(spec).groups(source, 'static').begin(0, 0)
  return source, spec


@contextlib.contextmanager
def over_http(folder):
  handler = functools.partial(
    http.server.SimpleHTTPRequestHandler, directory=folder
  )
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


def test_a_store_and_its_key_are_all_of_a_run_that_a_player_needs(
  run_dir, tmp_path
):
  source, _ = run_dir
  store, key = source / 'store', source / transport.KEY
  with over_http(store) as url:
    for name, place in (('folder', str(store)), ('web', url)):
      mains.take_run(place, key, tmp_path / name)
      for file in ('config.json', 'tokenizer.json', transport.KEY):
        theirs, own = (
          (f / file).read_bytes() for f in (source, tmp_path / name)
        )
        assert theirs == own
  with pytest.raises(
    ValueError, match='no workdir of a run.*--key .*delta.key'
  ):
    mains.take_run('runs/nowhere', tmp_path / 'none', tmp_path / 'other')
  key.unlink()
  keys.write_key(key, keys.Hmac(b'x' * 32))
  with pytest.raises(ValueError, match='setup.*cannot be trusted'):
    mains.take_run(str(store), key, tmp_path / 'other')


@pytest.mark.slow
@pytest.mark.parametrize('place', ['workdir', 'folder', 'web'])
def test_the_command_plays_what_a_run_publishes(run_dir, tmp_path, place):
  (source, spec), out = run_dir, tmp_path / 'out'
  pinned(tmp_path, spec)  # Writes the file.

  def publish(version):
    sender = publisher.Publisher(
      transport.store_of(source, spec.systems['delta'].store),
      source / transport.KEY,
      transport.RUN_ID,
    )
    sender.publish(policy_of(spec, version), version)
    sender.close()

  def follow(*flags):
    command = [sys.executable, '-m', 'experiments.evaluate', '--versions=1']
    command += [*flags, f'--suites={tmp_path}/suites.toml', f'--out={out}']
    return subprocess.run(
      [*command, '--config=configs/composer/tiny.py:smoke'],
      capture_output=True, text=True, env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    )  # fmt: skip

  with over_http(source / 'store') as url:
    flags = [f'--follow={source}']
    if place != 'workdir':
      # As on another machine, which has nothing of the run but these two.
      key = shutil.copy(source / transport.KEY, tmp_path / 'run.key')
      for path in source.glob('*.json'):
        path.unlink()
      store = source / 'store' if place == 'folder' else url
      flags = [f'--follow={store}', f'--key={key}']
    publish(0)
    first = follow(*flags)
    assert first.returncode == 0, first.stderr
    assert 'version 0, a: 0 of 3' in first.stdout
    publish(1)
    second = follow(*flags)
    assert second.returncode == 0, second.stderr
  rows = [
    json.loads(x) for x in (out / 'versions.jsonl').read_text().split('\n')[:-1]
  ]
  assert [r['version'] for r in rows] == [0, 1] and {
    c['before'] for c in rows[1]['changes']
  } == {0}
  assert rows[0]['target_id'] != rows[1]['target_id']
  assert 'Over versions' in (out / 'report.html').read_text()
