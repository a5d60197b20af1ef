"""Whatever happens to clients and to the engine, no request waits for ever."""

import asyncio
import dataclasses
import json
import socket
import threading

import httpx2
import numpy as np
import openai
import pytest

from composer_jax.core import records
from composer_jax.serve import http_server, service
from composer_jax.serve.api import errors
from tests.serve import scripted

ENDLESS = [20] * 1000
CHAT = {
  'model': 'tiny',
  'messages': [{'role': 'user', 'content': 'Hi'}],
  'max_tokens': 50,
}


def _still(server):
  """Stops the engine of a server, with its requests open."""
  server.engine.go.clear()


def _begin(server, body=None):
  """Sends a request for a stream; returns the socket."""
  data = json.dumps({**CHAT, 'stream': True, **(body or {})}).encode()
  host, port = server.url.removeprefix('http://').split(':')
  sock = socket.create_connection((host, int(port)), timeout=10)
  sock.sendall(
    b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n'
    b'Content-Type: application/json\r\nContent-Length: '
    + str(len(data)).encode()
    + b'\r\n\r\n'
    + data
  )
  return sock


def _read(sock):
  data = b''
  while part := sock.recv(4096):
    data += part
    if data.endswith(b'0\r\n\r\n'):
      break
  return data.decode()


def test_a_full_queue_is_told(serve, client):
  server = serve(lambda _: ENDLESS, num_slots=1, limits={'max_queue': 1})
  _still(server)
  open_ones = [_begin(server), _begin(server)]
  scripted.wait_for(lambda: server.served.num_open == 2)
  with pytest.raises(openai.RateLimitError) as caught:
    client(server).chat.completions.create(**CHAT)
  assert caught.value.code == 'queue_full'
  assert caught.value.response.headers['retry-after'] == '1'
  assert '2 choices are open' in caught.value.message
  server.engine.go.set()
  assert all('[DONE]' in _read(sock) for sock in open_ones)
  server.settle()
  client(server).chat.completions.create(**CHAT)


@pytest.mark.parametrize('stream', [False, True])
def test_who_leaves_frees_the_session(serve, stream):
  server = serve(lambda _: ENDLESS)
  _still(server)
  sock = _begin(server, {'stream': stream, 'n': 2})
  scripted.wait_for(lambda: server.engine.stats().sessions == 2)
  sock.close()
  # Though no token ever comes that could fail to be sent.
  scripted.wait_for(lambda: server.engine.stats().sessions == 0)
  assert server.served.num_open == 0


def test_a_request_ends_when_its_time_is_up(serve, client):
  server = serve(lambda _: ENDLESS, limits={'request_timeout_s': 0.3})
  _still(server)
  with pytest.raises(openai.APIStatusError) as caught:
    client(server).chat.completions.create(**CHAT)
  assert (caught.value.status_code, caught.value.code) == (504, 'timeout')
  # OpenAI's clients try others again.
  assert caught.value.response.headers['x-should-retry'] == 'false'
  with pytest.raises(openai.APIError, match='longer than the 0.3 s'):
    list(client(server).chat.completions.create(**CHAT, stream=True))
  server.settle()


def test_a_stop_string_frees_the_engine_at_once(serve, client, tokenizer):
  # After it nothing comes any more, not even an end.
  script = [*tokenizer.encode('ab!!')]
  server = serve(lambda _: script)
  answer = client(server).chat.completions.create(**CHAT, stop='!!', n=2)
  assert [c.message.content for c in answer.choices] == ['ab', 'ab']
  server.settle()
  assert server.engine.stats().sessions == 0


def test_a_choice_that_is_finished_waits_for_no_other(serve, client, tokenizer):
  scripts = [[*tokenizer.encode('ab!!')], [20]]
  server = serve(lambda request: scripts[request.seed[1]])
  stream = client(server).chat.completions.create(
    **CHAT, stop='!!', n=2, stream=True
  )
  for chunk in stream:
    if any(choice.finish_reason for choice in chunk.choices):
      break
  # The other one goes on, for ever.
  scripted.wait_for(lambda: server.engine.stats().sessions == 1)
  assert server.served.num_open == 1
  stream.close()
  server.settle()


def test_a_failed_request_leaves_the_others_alone(serve, client, tokenizer):
  def script(request):
    bad = request.seed[0] == 13
    return [20, 20, None] if bad else [20, 20, 20, tokenizer.END]

  server = serve(script)
  made = client(server)
  sock = _begin(server, {'seed': 1})
  with pytest.raises(openai.InternalServerError) as caught:
    made.chat.completions.create(**CHAT, seed=13)
  assert caught.value.code == 'sampling_failed'
  assert caught.value.body['position'] == 5
  assert 'NaN logits' in caught.value.message
  assert '[DONE]' in _read(sock)
  server.settle()
  assert server.served.unhealthy() == ''


def test_a_dead_engine_fails_everyone(serve, post, client, caplog):
  server = serve(lambda _: ENDLESS)
  _still(server)
  sock = _begin(server)
  scripted.wait_for(lambda: server.served.num_open == 1)
  assert post(server, '/health', method='GET').status_code == 200
  server.engine.dies = RuntimeError('out of memory')
  received = _read(sock)
  assert 'engine_failed' in received and 'out of memory' in received
  assert '[DONE]' not in received
  answer = post(server, '/health', method='GET')
  assert answer.status_code == 503 and 'out of memory' in answer.text
  assert post(server, '/ready', method='GET').status_code == 503
  with pytest.raises(openai.InternalServerError) as caught:
    client(server).chat.completions.create(**CHAT)
  assert caught.value.code == 'engine_failed'
  answer = post(server, '/v1/tokens/sessions/a', method='DELETE')
  assert answer.status_code == 500
  assert 'The engine failed' in caplog.text


def test_an_engine_that_stands_still_is_told(serve, post):
  held = threading.Event()

  def script(request):
    held.wait(5)
    return [20]

  server = serve(script, limits={'stall_s': 0.1})
  sock = _begin(server)
  scripted.wait_for(
    lambda: post(server, '/health', method='GET').status_code == 503
  )
  assert 'no step' in server.served.unhealthy()
  held.set()
  sock.close()
  server.settle()


def test_a_drain_lets_running_requests_end(serve, client):
  server = serve(lambda _: ENDLESS)
  _still(server)
  sock = _begin(server)
  scripted.wait_for(lambda: server.served.num_open == 1)
  server.server.should_exit = True
  with pytest.raises(openai.APIConnectionError):
    while True:
      client(server).models.list()
  server.engine.go.set()
  assert '[DONE]' in _read(sock)
  server.thread.join(5)
  assert not server.thread.is_alive()


def test_a_drain_cancels_what_lasts_too_long(serve):
  server = serve(lambda _: ENDLESS, limits={'drain_s': 0.2})
  _still(server)
  sock = _begin(server)
  scripted.wait_for(lambda: server.served.num_open == 1)
  server.server.should_exit = True
  assert 'draining' in _read(sock)
  server.thread.join(5)
  assert not server.thread.is_alive()
  scripted.wait_for(lambda: server.engine.stats().sessions == 0)


def _one_by_one(updates):
  """Returns a poll that gives one update after another, or raises it."""

  def poll():
    if not updates:
      return None
    update = updates.pop(0)
    if isinstance(update, Exception):
      raise update
    return update

  return poll


def test_weights_are_swapped_and_damaged_ones_are_not(serve, client, post):
  updates = []
  server = serve(lambda _: [20, 6], poll=_one_by_one(updates))
  updates += [(8, 'good')]
  scripted.wait_for(lambda: server.served.version == 8)
  updates += [ValueError('blob 3 is torn')] * 20
  scripted.wait_for(lambda: 'blob 3 is torn' in server.served.problem)
  updates += [(9, 'damaged')]
  scripted.wait_for(lambda: 'params/x of version 9' in server.served.problem)
  assert server.served.version == 8 and server.engine.swaps == [8]
  answer = post(server, '/ready', method='GET')
  assert answer.status_code == 200 and answer.json()['policy_version'] == 8
  assert 'params/x' in answer.json()['problem']
  client(server).chat.completions.create(**CHAT)
  updates += [(10, 'good')]
  scripted.wait_for(lambda: server.served.version == 10)
  assert server.served.problem == ''


def test_a_token_is_wanted(serve, client, post):
  server = serve(lambda _: [6], token='geheim')
  client(server, 'geheim').chat.completions.create(**CHAT)
  with pytest.raises(openai.AuthenticationError) as caught:
    client(server, 'geheimnis').chat.completions.create(**CHAT)
  assert caught.value.code == 'invalid_api_key'
  for path in ('/metrics', '/v1/models'):
    answer = post(server, path, method='GET')
    assert answer.status_code == 401
    assert answer.headers['www-authenticate'] == 'Bearer'
  for path in ('/health', '/ready'):
    assert post(server, path, method='GET').status_code == 200


@pytest.mark.parametrize('path', ['/v1/completions', '/v1/tokens'])
@pytest.mark.parametrize(
  'kind', ['', 'text/plain', 'application/x-www-form-urlencoded']
)
def test_no_page_of_the_web_can_send_a_request(shared, post, path, kind):
  # What a browser sends to other origins without asking them first.
  body = b'{"prompt": [40], "max_tokens": 1}'
  answer = post(shared, path, body, headers={'content-type': kind})
  assert answer.status_code == 415
  error = answer.json()['error']
  assert error['code'] == 'unsupported_media_type'
  assert repr(kind) in error['message']
  kind = 'Application/JSON; charset=utf-8'
  answer = post(shared, path, body, headers={'content-type': kind})
  assert answer.status_code == 200


@pytest.mark.parametrize(
  'host, status',
  [
    ('evil.example', 403),
    ('evil.example:80', 403),
    ('localhost.evil.example', 403),
    ('[', 403),
    ('LOCALHOST:1', 200),
    ('127.0.0.1', 200),
    ('[::1]:1', 200),
  ],
)
def test_no_page_of_the_web_can_read_an_answer(shared, post, host, status):
  # Its name may be resolved to this machine; the name is what it cannot hide.
  for path in ('/v1/models', '/health'):
    answer = post(shared, path, method='GET', headers={'host': host})
    assert answer.status_code == status
    if status == 403:
      error = answer.json()['error']
      assert error['code'] == 'host_not_allowed'
      assert repr(host) in error['message'] and '--token_file' in str(error)


def test_with_a_token_any_name_will_do(serve, post):
  server = serve(lambda _: [6], token='geheim')
  headers = {'host': 'models.example', 'authorization': 'Bearer geheim'}
  answer = post(server, '/v1/models', method='GET', headers=headers)
  assert answer.status_code == 200
  assert http_server.hosts_of('0.0.0.0', '') is None


def test_a_text_becomes_tokens_beside_the_streams(serve, post, tokenizer):
  begun, go = threading.Event(), threading.Event()

  class Slow:
    def encode(self, messages, tools):
      begun.set()
      assert go.wait(10)
      return np.array([40], np.int32)

    def mark(self, tools):
      return ()

  server = serve(lambda _: ENDLESS, form=Slow(), limits={'max_queue': 0})
  responses = []
  waits = threading.Thread(
    target=lambda: responses.append(post(server, '/v1/chat/completions', CHAT))
  )
  waits.start()
  assert begun.wait(10)
  assert post(server, '/health', method='GET').status_code == 200
  # A server that is full has nothing become tokens at all.
  server.engine.go.clear()
  _still(server)
  body = {'prompt': [40], 'max_tokens': 3}
  full = threading.Thread(
    target=lambda: post(server, '/v1/tokens', {**body, 'n': 2})
  )
  full.start()
  scripted.wait_for(lambda: server.served.num_open == 2)
  begun.clear()
  assert post(server, '/v1/chat/completions', CHAT).status_code == 429
  assert not begun.is_set()
  server.engine.go.set()
  full.join(10)
  go.set()
  waits.join(10)
  assert responses[0].status_code == 200


def test_more_choices_than_places_are_never_promised(serve, post):
  server = serve(lambda _: [6], num_slots=1, limits={'max_queue': 1})
  answer = post(server, '/v1/completions', {'prompt': 'x', 'n': 3})
  assert answer.status_code == 400
  assert 'n (3) exceeds the 2 choices' in answer.json()['error']['message']


def test_who_closes_a_session_is_told_of_the_end(caplog):
  engine = scripted.ScriptedEngine(lambda _: [])
  stepping, go = threading.Event(), threading.Event()

  def step():
    stepping.set()
    assert go.wait(10)
    raise RuntimeError('out of memory')

  engine.step = step
  served = service.Service(engine, scripted.LIMITS)
  served.start()

  async def close():
    assert await asyncio.to_thread(stepping.wait, 10)
    missing = errors.invalid('missing', None)
    closing = asyncio.ensure_future(served.close_session('a', missing))
    await asyncio.sleep(0)
    # With the command still before it.
    go.set()
    await asyncio.wait_for(closing, 5)

  for _ in range(2):
    with pytest.raises(errors.ApiError, match='failed .out of memory'):
      asyncio.run(close())
  assert served.stop(5)


def test_following_that_breaks_off_is_told(serve, post, monkeypatch):
  monkeypatch.setattr(threading, 'excepthook', lambda _: None)

  def poll():
    raise KeyError('no such thing')

  server = serve(lambda _: [6], poll=poll)
  scripted.wait_for(lambda: server.served.problem)
  answer = post(server, '/ready', method='GET')
  assert answer.status_code == 200
  assert "any more: KeyError('no such thing')" in answer.json()['problem']


def test_addresses_of_both_kinds_are_told_as_urls():
  for host, url in ('127.0.0.1', 'http://127.0.0.1'), ('::1', 'http://[::1]'):
    with http_server.bind(host, 0, '') as sock:
      port = sock.getsockname()[1]
      assert http_server.url_of(sock) == f'{url}:{port}'


def test_other_addresses_want_a_token(caplog):
  for host, token, warned in (
    ('127.0.0.1', '', False),
    ('0.0.0.0', 'x', False),
    ('0.0.0.0', '', True),
  ):
    caplog.clear()
    http_server.bind(host, 0, token).close()
    assert ('without a token' in caplog.text) == warned


def test_a_port_in_use_is_told():
  with http_server.bind('127.0.0.1', 0, '') as sock:
    sock.listen()
    port = sock.getsockname()[1]
    for taken in (port, 99_999):
      with pytest.raises(ValueError, match=f'127.0.0.1:{taken} .*--port'):
        http_server.bind('127.0.0.1', taken, '')


@pytest.mark.parametrize(
  'path, body, method, status, code',
  [
    ('/v1/chat', None, 'GET', 404, 'unknown_url'),
    ('/v1/completions', None, 'GET', 405, 'method_not_allowed'),
    ('/v1/completions', b'{', 'POST', 400, 'invalid_json'),
    ('/v1/completions', b'{"temperature": NaN}', 'POST', 400, 'invalid_json'),
    ('/v1/completions', b'[' * 9000, 'POST', 400, 'invalid_json'),
    ('/v1/completions', b'[]', 'POST', 400, 'invalid_value'),
    ('/v1/completions', b'{}', 'POST', 400, 'missing_required_parameter'),
    ('/v1/completions', b'x' * 20_001, 'POST', 413, 'request_too_large'),
  ],
)
def test_errors_have_the_shape_of_openai(
  shared, post, path, body, method, status, code
):
  answer = post(shared, path, body, method)
  assert answer.status_code == status
  error = answer.json()['error']
  assert error.keys() == {'message', 'type', 'param', 'code'}
  assert error['code'] == code


def test_a_body_of_unknown_length_is_bounded(shared, post):
  def parts():
    for _ in range(30):
      yield b'x' * 1000

  with httpx2.Client() as http:
    answer = http.post(
      f'{shared.url}/v1/completions',
      content=parts(),
      headers={'content-type': 'application/json'},
    )
  assert answer.status_code == 413


def test_figures_for_prometheus(serve, client, post):
  server = serve(lambda _: [20, 21, 22, 6])
  client(server).chat.completions.create(**CHAT)
  post(server, '/v1/completions', {'prompt': ''})
  server.settle()
  text = post(server, '/metrics', method='GET').text
  lines = set(text.splitlines())
  for line in (
    'composer_requests_total{route="/v1/chat/completions",status="200"} 1.0',
    'composer_requests_total{route="/v1/completions",status="400"} 1.0',
    'composer_prompt_tokens_total 5.0',
    'composer_sampled_tokens_total 4.0',
    'composer_time_to_first_token_seconds_count 1.0',
    'composer_time_per_token_seconds_count 3.0',
    'composer_queue_depth 0.0',
    'composer_policy_version 7.0',
    'composer_engine_sessions 0.0',
    'composer_healthy 1.0',
  ):
    assert line in lines, (line, text)


def test_a_bug_is_told_by_a_number(serve, post, caplog, monkeypatch):
  server = serve(lambda _: [20])
  monkeypatch.setattr(
    type(server.served), 'version', property(lambda self: 1 / 0)
  )
  answer = post(server, '/v1/completions', {'prompt': 'x'})
  assert answer.status_code == 500
  assert answer.json()['error']['code'] == 'internal_error'
  assert 'ZeroDivisionError' not in answer.text
  assert 'ZeroDivisionError' in caplog.text


def test_jobs_outlive_their_event_loop():
  served = service.Service(
    scripted.ScriptedEngine(lambda _: ENDLESS), scripted.LIMITS
  )
  served.start()

  async def leave_it_open():
    job = served.open(
      [
        records.SampleRequest(
          session='a',
          context_T=np.ones(3, np.int32),
          max_new_tokens=50,
          stop_tokens=(),
          seed=(1,),
        )
      ]
    )
    await job.next()

  asyncio.run(leave_it_open())
  # The engine sampled on without a reader, and then ended.
  scripted.wait_for(lambda: not served.num_open)
  assert served.unhealthy() == ''
  assert served.stop(5)
  assert 'not running' in served.unhealthy()
  with pytest.raises(errors.ApiError, match='shutting down'):
    asyncio.run(leave_it_open())


@pytest.mark.parametrize(
  'field, value', [('max_queue', -1), ('drain_s', 'x'), ('stall_s', 0)]
)
def test_impossible_limits_are_named(field, value):
  with pytest.raises(ValueError, match=rf'ServeOptions\.{field}'):
    dataclasses.replace(scripted.LIMITS, **{field: value})
