"""/v1/tokens: what a trainer needs, and sessions that go on."""

import base64
import threading

import numpy as np
import pytest

from composer_jax.core.routes import codec
from composer_jax.serve.api import tokens
from tests.serve import scripted


@pytest.fixture
def ask(shared, post):
  """ask(**fields) -> (status, answer); the script is [20, 21, 22, 6]."""
  shared.engine.script = lambda _: [20, 21, 22, 6]

  def send(**fields):
    answer = post(shared, '/v1/tokens', {'prompt': [40, 41], **fields})
    return answer.status_code, answer.json()

  yield send
  shared.settle()


def test_all_that_was_sampled_is_told(ask, shared):
  status, answer = ask(max_tokens=3, top_logprobs=2, stop_token_ids=[22])
  assert status == 200
  assert answer['policy_version'] == 7 and answer['session_length'] is None
  (choice,) = answer['choices']
  tape = codec.decode(base64.b64decode(choice['routes']['data']))
  assert tape.scheme == tokens.scheme_of(shared.served.config)
  assert (choice['routes']['start'], tape.start) == (0, 0)
  assert tape.scheme.layers == (1, 2)
  # All tokens but the last: two of context and two sampled.
  np.testing.assert_array_equal(tape.ids_TMA, np.tile([0, 1], (4, 2, 1)))
  del choice['routes']
  assert choice == {
    'index': 0,
    'tokens': [20, 21, 22],
    'logprobs': [-0.25] * 3,
    'raw_logprobs': [-0.5] * 3,
    'policy_versions': [7] * 3,
    'context_versions': [6] * 3,
    'consumed_versions': [6, 7, 7, 7],
    'finish_reason': 'stop',
    'cached_tokens': 3,
    'top_logprobs': [[[t, -0.5], [t + 1, -0.5]] for t in (20, 21, 22)],
  }
  assert answer['usage']['total_tokens'] == 5


def test_stop_tokens_are_only_those_named(ask):
  _, answer = ask(max_tokens=4, routes='none', n=2)
  for choice in answer['choices']:
    assert choice['tokens'] == [20, 21, 22, 6]
    assert choice['finish_reason'] == 'length'
    assert choice['routes'] is None


def test_a_plain_tape_holds_the_same(ask):
  tapes = []
  for form in ('packed', 'plain'):
    _, answer = ask(max_tokens=2, routes=form)
    data = answer['choices'][0]['routes']['data']
    tapes.append(codec.decode(base64.b64decode(data)))
  np.testing.assert_array_equal(tapes[0].ids_TMA, tapes[1].ids_TMA)


def test_older_weights_than_asked_for_are_a_conflict(ask):
  assert ask(min_policy_version=7, max_tokens=2)[0] == 200
  status, answer = ask(min_policy_version=8)
  assert status == 409
  error = answer['error']
  assert error['code'] == 'policy_too_old' and error['policy_version'] == 7
  assert error['param'] == 'min_policy_version'


def test_a_session_goes_on_and_ends(ask, shared, post):
  _, first = ask(session='a', max_tokens=2)
  assert first['session_length'] == 4
  status, second = ask(session='a', max_tokens=2, session_length=4, prompt=[9])
  assert (status, second['session_length']) == (200, 7)
  # From the last token of the first answer on.
  assert second['choices'][0]['routes']['start'] == 4
  status, answer = ask(session='a', session_length=4)
  assert status == 409
  assert answer['error']['code'] == 'session_mismatch'
  assert answer['error']['session_length'] == 7
  # The session is as it was: a request that is refused changes nothing.
  assert ask(session='a', session_length=7, max_tokens=1)[0] == 200
  gone = post(shared, '/v1/tokens/sessions/a', method='DELETE')
  assert gone.json() == {
    'id': 'a',
    'object': 'session.deleted',
    'deleted': True,
  }
  assert (
    post(shared, '/v1/tokens/sessions/a', method='DELETE').status_code == 404
  )
  assert shared.engine.stats().sessions == 0


def test_a_session_has_one_request_at_a_time(serve, post):
  server = serve(lambda _: [20] * 50)
  server.engine.go.clear()

  body = {'prompt': [40], 'session': 'a', 'max_tokens': 3}
  responses = []
  first = threading.Thread(
    target=lambda: responses.append(post(server, '/v1/tokens', body))
  )
  first.start()
  scripted.wait_for(lambda: server.engine.works)
  answer = post(server, '/v1/tokens', body)
  assert answer.status_code == 409
  assert answer.json()['error']['code'] == 'session_busy'
  server.engine.go.set()
  first.join(10)
  assert responses[0].json()['session_length'] == 4


def test_sessions_are_bounded_in_number_and_age(serve, post):
  server = serve(lambda _: [20] * 50, limits={'max_sessions': 2})
  for name in 'abc':
    body = {'prompt': [40], 'session': name, 'max_tokens': 3}
    assert post(server, '/v1/tokens', body).status_code == 200
  scripted.wait_for(lambda: len(server.engine.held) == 2)
  assert sorted(server.engine.held) == ['kept/b', 'kept/c']
  server = serve(lambda _: [20] * 50, limits={'session_idle_s': 0.2})
  body = {'prompt': [40], 'session': 'a', 'max_tokens': 3}
  assert post(server, '/v1/tokens', body).status_code == 200
  assert server.engine.held
  scripted.wait_for(lambda: not server.engine.held)


@pytest.mark.parametrize(
  'fields, param, code',
  [
    ({'prompt': []}, 'prompt', 'empty_prompt'),
    ({'prompt': 'text'}, 'prompt', 'invalid_value'),
    ({'prompt': [1.5]}, 'prompt.0', 'invalid_value'),
    ({'prompt': [400]}, 'prompt', 'invalid_value'),
    ({'prompt': [1] * 64}, 'prompt', 'context_length_exceeded'),
    ({'session': 'a', 'n': 2}, 'n', 'invalid_value'),
    ({'session_length': 4}, 'session_length', 'invalid_value'),
    ({'routes': 'zip'}, 'routes', 'invalid_value'),
    ({'stream': True}, 'stream', 'unknown_parameter'),
    ({'top_logprobs': 3}, 'top_logprobs', 'invalid_value'),
  ],
)
def test_bad_requests_are_named(ask, fields, param, code):
  status, answer = ask(**fields)
  assert status == 400
  error = answer['error']
  assert (error['param'], error['code']) == (param, code), error
