"""Policies over HTTP give what the server sampled, and survive its failures."""

import contextlib
import dataclasses
import http.server
import json
import threading

import numpy as np
import openai
import pytest

from composer_jax.agent import episode
from composer_jax.core import records
from composer_jax.serve import client
from composer_jax.serve.api import chat_format
from composer_jax.tasks.list_functions import environment, family, runners
from composer_jax.tasks.repository import schemas
from composer_jax.text import chat, tool_calls
from composer_jax.text import tokenizer as tokenizer_lib
from tests.serve import scripted as serving

TASK = family.generate(3, 'unseen_all')
EDIT = f'edit {TASK.path} {TASK.function}\n{TASK.reference}'
HONEST = ['list', f'read {TASK.path}', EDIT, 'test', 'finish']
OPTIONS = episode.EpisodeOptions(
  max_tokens=4000, max_turns=9, max_call_tokens=300
)


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train([*TASK.files.values(), *HONEST * 4], 290)


class _Engine(serving.ScriptedEngine):
  """Routes the token at p to experts p and p + 1, from the last one on."""

  def step(self):
    return [self._routed(end) for end in super().step()]

  def _routed(self, end):
    start = max(end.routes_start - 1, 0)
    stop = end.routes_start + len(end.consumed_expert_ids_TMA)
    return dataclasses.replace(
      end,
      routes_start=start,
      consumed_expert_ids_TMA=_routes(start, stop),
      consumed_version_T=np.repeat(end.context_version_T[:1], stop - start),
    )


def _routes(start, stop):
  at_T = np.arange(start, stop)
  ids_TA = np.stack([at_T, at_T + 1], 1) % 4
  return np.repeat(ids_TA[:, None], 2, axis=1).astype(np.uint16)


@pytest.fixture
def served(tokenizer):
  """A server whose engine writes one of `engine.calls` each turn."""
  engine = _Engine(None, per_step=64)
  engine.options.max_len = 8000
  engine.calls = []

  def script(request):
    del request
    text = engine.calls.pop(0)
    return [*tokenizer.encode(text).tolist(), tokenizer.END]

  engine.script = script
  limits = dataclasses.replace(serving.LIMITS, max_body_bytes=200_000)
  form = chat_format.OwnFormat(tokenizer)
  with serving.serving(engine, tokenizer, form, limits) as running:
    yield running


def _endpoint(url, **more):
  return client.Endpoint(url=f'{url}/v1', **{'attempts': 3, **more})


def _play(policy, tokenizer):
  made = environment.FunctionEnvironment(TASK, runners.TrustedRunner())
  return episode.run(
    made, policy, tokenizer, OPTIONS, group=5, member=2, seed=7
  )


def test_an_episode_over_tokens_has_everything_a_trainer_needs(
  served, tokenizer
):
  served.engine.calls = list(HONEST)
  policy = client.TokenPolicy(_endpoint(served.url))
  rollout = _play(policy, tokenizer)
  assert rollout.verdict.passed
  (trajectory,) = rollout.trajectories
  sampled_T = trajectory.loss_mask_T
  assert (trajectory.policy_version_T == served.engine.version).all()
  for name in ('context_version_T', 'consumed_version_T'):
    assert (getattr(trajectory, name) == served.engine.version - 1).all()
  assert (trajectory.logprobs_T == np.where(sampled_T, -0.25, 0)).all()
  np.testing.assert_array_equal(
    trajectory.expert_ids_TMA[:-1], _routes(0, len(trajectory) - 1)
  )
  serving.wait_for(lambda: not served.engine.held)


def test_a_window_that_the_server_forgot_is_sent_again(
  served, tokenizer, monkeypatch
):
  waits = []
  monkeypatch.setattr(
    openai.OpenAI, '_sleep_for_retry', lambda *_, **__: waits.append(1)
  )
  policy = client.TokenPolicy(_endpoint(served.url))

  class Forgetful(environment.FunctionEnvironment):
    def call(self, text):
      # As if the server were restarted between two turns.
      for name in list(policy._sessions.values()):
        policy._forget(name)
      return super().call(text)

  whole = {}
  for kind in (environment.FunctionEnvironment, Forgetful):
    served.engine.calls = list(HONEST)
    whole[kind] = episode.run(
      kind(TASK, runners.TrustedRunner()),
      policy,
      tokenizer,
      OPTIONS,
      group=5,
      member=2,
      seed=7,
    )
  kept, lost = (r.trajectories[0] for r in whole.values())
  for field in dataclasses.fields(records.Trajectory):
    np.testing.assert_array_equal(
      getattr(kept, field.name), getattr(lost, field.name)
    )
  assert served.engine.calls == []
  # The refused requests were not sent twice.
  assert not waits


def test_sampling_is_asked_for_as_the_request_says(served, tokenizer):
  seen = []
  served.engine.script = lambda request: seen.append(request) or [20, 21, 22]
  request = records.SampleRequest(
    session='a',
    context_T=np.array([40, 41], np.int32),
    max_new_tokens=3,
    stop_tokens=(21,),
    seed=(1, 2, 3),
    temperature=0.5,
    top_p=0.9,
    top_k=4,
    min_p=0.1,
  )
  policy = client.TokenPolicy(_endpoint(served.url, model='tiny'))
  completion = policy.complete(request)
  assert completion.tokens_T.tolist() == [20, 21] and completion.stopped
  policy.complete(dataclasses.replace(request, session='b', seed=(1, 2, 4)))
  first, second = seen
  for name in ('temperature', 'top_p', 'top_k', 'min_p', 'stop_tokens'):
    assert getattr(first, name) == getattr(request, name)
  assert first.context_T.tolist() == [40, 41]
  assert first.seed != second.seed and first.session != second.session
  policy.close('a')
  policy.close('b')
  policy.close('unknown')
  serving.wait_for(lambda: not served.engine.held)


def test_an_episode_over_chat_of_our_own_server_passes(served, tokenizer):
  served.engine.calls = list(HONEST)
  policy = client.ChatPolicy(
    _endpoint(served.url), tokenizer, answer_role='tool'
  )
  requests = []
  served.engine.submit = _noting(served.engine.submit, requests)
  rollout = _play(policy, tokenizer)
  assert rollout.verdict.passed and rollout.tools[-1] == 'finish'
  # The server makes of the messages the very tokens that the episode holds.
  tokens = rollout.trajectories[0].tokens_T.tolist()
  for request in requests:
    context = request.context_T.tolist()
    assert context == tokens[: len(context)]
  assert (rollout.trajectories[0].expert_ids_TMA == records.NO_ROUTE).all()


def _noting(submit, seen):
  def noted(request, on_tokens=None):
    seen.append(request)
    submit(request, on_tokens)

  return noted


@contextlib.contextmanager
def _answering(answers):
  """Serves each (status, body) in turn; yields its URL and the requests."""
  seen = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      size = int(self.headers['content-length'])
      seen.append((self.headers, json.loads(self.rfile.read(size))))
      status, body = answers.pop(0)
      data = body if isinstance(body, bytes) else json.dumps(body).encode()
      self.send_response(status)
      self.send_header('content-length', str(len(data)))
      self.send_header('content-type', 'application/json')
      self.send_header('retry-after-ms', '1')
      self.end_headers()
      self.wfile.write(data)

    def log_message(self, *arguments):
      del arguments

  server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  thread.start()
  try:
    yield f'http://127.0.0.1:{server.server_port}', seen
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def _said(text=None, finish='stop', calls=()):
  made = [{'function': {'name': n, 'arguments': a}} for n, a in calls]
  message = {'role': 'assistant', 'content': text, 'tool_calls': made or None}
  return 200, {'choices': [{'message': message, 'finish_reason': finish}]}


def _request(tokenizer, context_T=None, **more):
  if context_T is None:
    context_T = np.concatenate(
      [chat.user(tokenizer, 'Do.'), chat.call_prefix(tokenizer)]
    )
  fields = {'max_new_tokens': 400, 'seed': (1,), 'stop_tokens': (0,), **more}
  return records.SampleRequest(session='s', context_T=context_T, **fields)


def _next(tokenizer, answer):
  parts = [chat.tool(tokenizer, answer), chat.call_prefix(tokenizer)]
  return np.concatenate(parts)


def test_calls_by_an_endpoints_own_means_become_calls_of_ours(tokenizer):
  functions = [schemas.TOOLS['read'].function()]
  answers = [
    _said(calls=[('read', '{"path": "a"}'), ('list', '{}')]),
    _said('I stop.'),
    _said(calls=[('read', '{"path"')]),
  ]
  with _answering(answers) as (url, seen):
    policy = client.ChatPolicy(
      _endpoint(url, model='m', api_key='k'), tokenizer, functions=functions
    )
    texts = []
    context_T = None
    for answer in ('the text', 'error: no call', ''):
      completion = policy.complete(_request(tokenizer, context_T))
      texts.append(tokenizer.decode(completion.tokens_T[:-1]))
      context_T = _next(tokenizer, answer)
  call = tool_calls.JsonCall(name='read', arguments={'path': 'a'})
  assert texts == [
    tool_calls.render_json(call),
    'I stop.',
    'read {"path"',
  ]
  headers, body = seen[2]
  assert headers['authorization'] == 'Bearer k'
  assert (body['model'], body['tools']) == ('m', functions)
  user, called, answered, refused, error = body['messages']
  assert user == {'role': 'user', 'content': 'Do.'}
  (native,) = called['tool_calls']
  assert native['function'] == {'name': 'read', 'arguments': '{"path": "a"}'}
  assert answered == {
    'role': 'tool',
    'tool_call_id': native['id'],
    'content': 'the text',
  }
  assert refused == {'role': 'assistant', 'content': 'I stop.'}
  assert error == {'role': 'user', 'content': 'error: no call'}


def test_a_text_that_was_cut_has_no_end(tokenizer):
  answers = [_said('read a', 'length'), _said('read a'), _said('', 'length')]
  with _answering(answers) as (url, _):
    policy = client.ChatPolicy(_endpoint(url), tokenizer)
    cut = policy.complete(_request(tokenizer))
    assert not cut.stopped
    assert tokenizer.decode(cut.tokens_T) == 'read a'
    assert len(cut.consumed_expert_ids_TMA) == (
      len(_request(tokenizer).context_T) + len(cut.tokens_T) - 1
    )
    context_T = np.append(tokenizer.END, _next(tokenizer, 'error'))
    short = policy.complete(
      _request(tokenizer, context_T.astype(np.int32), max_new_tokens=2)
    )
    assert len(short.tokens_T) == 2 and not short.stopped
    policy.close('s')
    # Nothing at all: an end is at least one token.
    assert policy.complete(_request(tokenizer)).tokens_T.tolist() == [
      tokenizer.END
    ]


def test_a_busy_server_is_asked_again_and_a_refusal_is_told(tokenizer):
  busy = (503, {'error': {'message': 'later', 'code': 'draining'}})
  with _answering([busy, (502, b'<html>'), _said('list')]) as (url, seen):
    policy = client.ChatPolicy(_endpoint(url), tokenizer)
    assert policy.complete(_request(tokenizer)).stopped
    assert len(seen) == 3
  refused = (400, {'error': {'message': 'too long', 'code': 'no_room'}})
  with _answering([refused, busy, busy]) as (url, seen):
    policy = client.ChatPolicy(_endpoint(url, attempts=2), tokenizer)
    with pytest.raises(
      client.EndpointError, match='completions: .*400.*too long'
    ) as caught:
      policy.complete(_request(tokenizer))
    assert caught.value.code == 'no_room' and len(seen) == 1
    with pytest.raises(client.EndpointError, match='503.*at most 2 attempts'):
      policy.complete(_request(tokenizer))
  with pytest.raises(client.EndpointError, match='Connection error'):
    policy.complete(_request(tokenizer))


@pytest.mark.parametrize('message, text', [
    ({'tool_calls': [{'function': {'name': 'read', 'arguments': '[1]'}}]},
     'read [1]'),
    ({'tool_calls': [{'function': {'name': 'x', 'arguments': '[' * 99_999}}]},
     'x [['),
    ({'content': 'half \ud800'}, 'half ?'),
])  # fmt: skip
def test_what_a_model_wrote_wrongly_is_no_failure_of_the_endpoint(
  tokenizer, message, text
):
  answer = {'choices': [{'message': message, 'finish_reason': 'stop'}]}
  with _answering([(200, answer)]) as (url, _):
    policy = client.ChatPolicy(_endpoint(url), tokenizer)
    made = policy.complete(_request(tokenizer))
  assert tokenizer.decode(made.tokens_T).startswith(text)


@pytest.mark.parametrize('answer', [
    {}, {'choices': []}, {'choices': [{}]}, [],
    {'choices': [{'message': None, 'finish_reason': 'stop'}]},
    {'choices': [{'message': {'content': [1]}, 'finish_reason': 'stop'}]},
])  # fmt: skip
def test_an_answer_of_another_form_is_named(tokenizer, answer):
  with _answering([(200, answer)]) as (url, _):
    policy = client.ChatPolicy(_endpoint(url), tokenizer)
    with pytest.raises(client.EndpointError, match='no chat completion'):
      policy.complete(_request(tokenizer))


def test_endpoints_that_cannot_be_are_refused_and_keys_are_not_shown():
  with pytest.raises(ValueError, match='must begin with http'):
    client.Endpoint(url='localhost:8000')
  with pytest.raises(
    ValueError, match='attempts must be an integer of at least 1; got 0'
  ):
    client.Endpoint(url='http://a', attempts=0)
  assert 'secret' not in repr(client.Endpoint(url='http://a', api_key='secret'))
