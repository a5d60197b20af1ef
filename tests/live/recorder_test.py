"""Consent, answers, events and withdrawal over HTTP, as a client does it."""

import contextlib
import json
import queue
import threading

import httpx2
import numpy as np
import openai
import pytest

from composer_jax.live import recorder as recorders
from composer_jax.live import trial
from composer_jax.serve.api import chat_format
from composer_jax.telemetry import append
from composer_jax.text import tokenizer as tokenizers
from tests.serve import scripted


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizers.Tokenizer.train(['hello world hello world'], 270)


class Client:
  """A client of a server that records, with a clock that it may set."""

  def __init__(self, url, recorder):
    self.url, self.recorder = url, recorder
    headers = {'content-type': 'application/json'}
    self._http = httpx2.Client(timeout=20, headers=headers)

  def post(self, path, **body):
    data = json.dumps(body)  # ASCII: a lone surrogate is an escape, too.
    answer = self._http.post(self.url + path, content=data)
    return answer.status_code, answer.json()

  def open(self, **fields):
    body = {'user': 'ann', 'consent': True, 'domain': 'web', **fields}
    return self.post('/v1/live/episodes', **body)

  def ask(self, episode, **fields):
    metadata = {} if episode is None else {'metadata': {'episode': episode}}
    body = {'messages': [{'role': 'user', 'content': 'hi'}], 'seed': 1}
    answer = self.post('/v1/chat/completions', **body, **metadata, **fields)
    self.recorder.settle()
    return answer


@pytest.fixture
def client(folder, tokenizer):
  with contextlib.ExitStack() as stack:
    recorder = recorders.Recorder(folder.episodes, now=lambda: folder.now)
    stack.callback(recorder.close)
    script = lambda _: [*tokenizer.encode('hello').tolist(), tokenizer.END]
    running = stack.enter_context(
      scripted.serving(
        scripted.ScriptedEngine(script),
        tokenizer,
        chat_format.OwnFormat(tokenizer),
        recorder=recorder,
      )
    )
    yield Client(running.url, recorder)


def test_an_episode_is_kept_with_all_that_training_needs(
  client, folder, tokenizer
):
  status, opened = client.open()
  assert (status, opened['arm']) == (200, 'control')
  assert client.ask(opened['episode'])[0] == 200
  (claim,) = folder.episodes.claims()
  (window,) = folder.episodes.read(claim).windows
  text = tokenizer.decode(window.tokens_T[window.loss_mask_T][:-1])
  assert text == 'hello' and window.tokens_T[-1] == tokenizer.END
  np.testing.assert_array_equal(window.logprobs_T[window.loss_mask_T], -0.25)
  assert (window.expert_ids_TMA[:-1] == [0, 1]).all()
  assert set(folder.episodes.read(claim).policies) <= {6, 7}
  # What users said is beside it, once.
  fields = dict(episode=opened['episode'], id='a', kind='thumb', value=1)
  fates = [client.post('/v1/live/events', **fields)[1]['fate'] for _ in '12']
  assert fates == ['counted', 'double']


def test_an_event_that_follows_at_once_counts(client, folder):
  """However long the disk takes; an answer is as old as its last token."""
  held, event = threading.Event(), dict(kind='thumb', value=1)
  client.recorder._waiting.put(held.wait)
  fates = []
  for i in range(5):
    _, opened = client.open()
    metadata = {'episode': opened['episode']}
    messages = [{'role': 'user', 'content': 'hi'}]
    client.post('/v1/chat/completions', messages=messages, metadata=metadata)
    folder.now += 40
    body = dict(episode=opened['episode'], id=f'e{i}', **event)
    if not held.is_set():
      threading.Timer(0.2, held.set).start()
    fates.append(client.post('/v1/live/events', **body)[1]['fate'])
  assert fates == ['counted'] * 5
  ends = [
    folder.episodes.read(c).events[0].at for c in folder.episodes.claims()
  ]
  assert sorted(ends) == [1000.0, 1040.0, 1080.0, 1120.0, 1160.0]


def test_without_consent_nothing_is_kept(client, folder):
  before = sorted(folder.episodes.folder.rglob('*'))
  for consent in (False, None, 'true', 1):
    status, answer = client.open(consent=consent)
    assert (status, answer['error']['code']) == (400, 'no_consent')
  assert client.ask(None)[0] == 200
  assert sorted(folder.episodes.folder.rglob('*')) == before


def test_forged_tokens_are_refused_and_counted(client, folder):
  _, opened = client.open()
  forged = opened['episode'][:-1] + (
    '0' if opened['episode'][-1] != '0' else '1'
  )
  status, answer = client.ask(forged)
  assert (status, answer['error']['code']) == (403, 'forged')
  event = dict(id='a', kind='thumb', value=1)
  assert client.post('/v1/live/events', episode=forged, **event)[0] == 403
  assert client.post('/v1/live/withdrawal', withdrawal=forged)[0] == 403
  assert folder.episodes.fates() == {'forged': 3}


@pytest.mark.parametrize(
  'fields, named',
  [
    ({'temperature': 0}, 'temperature'),
    ({'top_p': 0.9}, 'top_p'),
    ({'n': 2}, 'n.'),
    ({'stop': 'x'}, 'stop'),
    ({'logit_bias': {'5': 1}}, 'constraint'),
  ],
)
def test_what_no_trainer_could_recompute_is_refused(client, fields, named):
  _, opened = client.open()
  status, answer = client.ask(opened['episode'], **fields)
  assert (status, answer['error']['code']) == (400, 'untrained_parameter')
  assert named in answer['error']['message']
  assert client.ask(None, **fields)[0] == 200


def test_withdrawal_over_http_deletes_what_was_kept(client, folder):
  opened = [client.open()[1] for _ in range(2)]
  other = client.open(user='bob')[1]
  for each in (*opened, other):
    client.ask(each['episode'])
  body = {'withdrawal': opened[0]['withdrawal']}
  assert client.post('/v1/live/withdrawal', **body) == (200, {'episodes': 2})
  assert len(folder.episodes.claims()) == 1
  # An answer under way when the user withdrew is not written.
  assert client.ask(opened[1]['episode'])[0] == 200
  assert len(folder.episodes.claims()) == 1
  assert folder.episodes.fates()['unknown'] == 1


def test_a_user_of_the_other_arm_is_sent_there(client, folder):
  trial.begin(folder.episodes.folder, trial.Running(name='t', share=0.5))
  arms = {client.open(user=f'u{i}')[1]['arm'] for i in range(20)}
  assert arms == {'control', 'candidate'}
  users = (client.open(user=f'u{i}')[1] for i in range(20))
  for each in users:
    status, answer = client.ask(each['episode'])
    assert status == (200 if each['arm'] == 'control' else 421)
    if status == 421:
      assert answer['error']['code'] == 'other_arm'
  # A learner tells the trial's episodes by its name.
  assert {c.trial for c in folder.episodes.claims()} == {'t'}
  trial.end(folder.episodes.folder)
  assert client.open(user='u0')[1]['arm'] == 'control'


def test_openais_client_records_with_metadata(client, folder):
  _, opened = client.open()
  with openai.OpenAI(base_url=f'{client.url}/v1', api_key='x') as made:
    stream = made.chat.completions.create(
      model='tiny',
      messages=[{'role': 'user', 'content': 'hi'}],
      metadata={'episode': opened['episode']},
      stream=True,
    )
    text = ''.join(
      c.choices[0].delta.content or '' for c in stream if c.choices
    )
  client.recorder.settle()
  (claim,) = folder.episodes.claims()
  assert text == 'hello' and len(folder.episodes.read(claim).windows) == 1


def test_a_bad_event_is_named_over_http(client):
  _, opened = client.open()
  body = dict(episode=opened['episode'], id='a', kind='thumb', value=7)
  status, answer = client.post('/v1/live/events', **body)
  assert status == 400 and 'from -1 to 1' in answer['error']['message']
  body['value'] = 10**400
  assert client.post('/v1/live/events', **body)[0] == 400
  status, answer = client.open(user='\ud800')
  assert status == 400 and answer['error']['param'] == 'user'
  assert client.open(domain='\ud800')[0] == 400
  for token in ('\ud800', '\ud800.\ud800', f'\ud800{opened["withdrawal"]}'):
    assert client.post('/v1/live/withdrawal', withdrawal=token)[0] == 403
    assert (
      client.post('/v1/live/events', **(body | {'episode': token}))[0] == 403
    )
  status, answer = client.post('/v1/live/episodes', user='', consent=True)
  assert status == 400 and answer['error']['param'] == 'user'


def test_an_error_of_the_disk_ends_neither_engine_nor_recording(
  client, folder, monkeypatch
):
  def fails(*_, **__):
    raise OSError(28, 'No space left on device')

  _, opened = client.open()
  with monkeypatch.context() as patch:
    patch.setattr(append, 'AppendFile', fails)
    assert client.ask(opened['episode'])[0] == 200
    # The engine's thread counts what it has to drop.
    patch.setattr(client.recorder._waiting, 'put_nowait', full)
    assert client.post('/v1/chat/completions', **asked(opened))[0] == 200
  assert client.ask(opened['episode'])[0] == 200
  (claim,) = folder.episodes.claims()
  assert len(folder.episodes.read(claim).windows) == 1


def full(_):
  raise queue.Full


def asked(opened):
  messages = [{'role': 'user', 'content': 'hi'}]
  return dict(messages=messages, metadata={'episode': opened['episode']})


def test_a_disk_that_hangs_is_a_503(client, folder, monkeypatch):
  monkeypatch.setattr(recorders, '_SETTLE_S', 0.05)
  held = threading.Event()
  _, opened = client.open()
  client.recorder._waiting.put(held.wait)
  body = dict(episode=opened['episode'], id='a', kind='thumb', value=1)
  status, answer = client.post('/v1/live/events', **body)
  held.set()
  assert (status, answer['error']['code']) == (503, 'disk')
  client.recorder.settle()
