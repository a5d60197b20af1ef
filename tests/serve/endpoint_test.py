"""Requests are repeated while that may help, and no longer than patience."""

import concurrent.futures
import email.utils
import json
import time

import pytest

from composer_jax.serve import chat, endpoint
from composer_jax.tasks.practice import conversation
from tests.serve import faulty

USER = [{'role': 'user', 'content': 'Do.'}]
ERROR = {'error': {'message': 'later', 'code': 'busy'}}


def reply(status, body=None, **headers):
  named = {k.replace('_', '-'): v for k, v in headers.items()}
  return faulty.Reply(body or ERROR, status, named)


def address(url, clock=None, **more):
  clock = clock or faulty.Clock()
  return endpoint.Endpoint(url=url, clock=clock, **more)


def ask(url, clock=None, stream=False, fields=None, functions=(), **more):
  client = chat.ChatClient(
    address(url, clock, **more), stream=stream, fields=fields
  )
  return client(USER, functions, max_tokens=9, temperature=0.5, seed=3)


OK = faulty.said('list', usage={'prompt_tokens': 5, 'completion_tokens': 2})
EVENTS = faulty.streamed(OK)
FAULTS = {
  **{str(s): reply(s) for s in (408, 409, 429, 500, 502, 503, 504, 529)},
  'no answer': faulty.Reply(breaks=True),
  'half an answer': faulty.Reply(OK, breaks=True),
  'a page of a proxy': faulty.Reply(b'<html>'),
  'another form': faulty.Reply({'choices': []}),
  'no message': faulty.Reply({'choices': [{'message': None}]}),
  'content of another type': faulty.Reply(faulty.said([1])),
}
STREAM_FAULTS = {
  'an error in the stream': faulty.Reply(events=[*EVENTS[:2], ERROR]),
  'a stream that breaks': faulty.Reply(events=EVENTS[:3], breaks=True),
  'a stream without end': faulty.Reply(events=EVENTS[:3]),
  'no JSON': faulty.Reply(events=[b'{']),
  'another form in a stream': faulty.Reply(events=[{'choices': 7}]),
}


@pytest.mark.parametrize(
  'fault, stream',
  [(f, s) for f in FAULTS for s in (False, True)]
  + [(f, True) for f in STREAM_FAULTS],
)
def test_what_may_pass_is_asked_again(fault, stream):
  bad = (FAULTS | STREAM_FAULTS)[fault]
  good = faulty.Reply(events=EVENTS) if stream else OK
  clock = faulty.Clock()
  with faulty.serving(faulty.in_turn(bad, bad, good)) as (url, seen):
    answer = ask(url, clock, stream)
  assert answer.message['content'] == 'list' and answer.attempts == 3
  assert answer.usage == OK['usage'] and len(seen) == 3
  assert (answer.first_s is not None) == stream
  # Longer each time, and not the same for all threads.
  first, second = clock.waits
  assert 1 <= first <= 2 <= second <= 4


def test_a_connection_that_is_refused_is_tried_again():
  with faulty.serving(faulty.in_turn()) as (url, _):
    pass
  clock = faulty.Clock()
  with pytest.raises(conversation.EndpointError, match='Connection') as caught:
    ask(url, clock)
  assert caught.value.status is None and len(clock.waits) > 5
  assert 600 - 60 < sum(clock.waits) <= 600


def test_an_endpoint_that_says_nothing_is_left():
  held = concurrent.futures.Future()
  with faulty.serving(lambda body: held.result()) as (url, _):
    with pytest.raises(conversation.EndpointError, match='timed out'):
      ask(url, timeout_s=0.05, patience_s=0.0)
    held.set_result(faulty.Reply(OK))


@pytest.mark.parametrize(
  'headers, least',
  [
    ({'retry_after': '17'}, 17),
    ({'retry_after': '90.5'}, 90.5),
    # No hour passes between here and the test.
    (
      {'retry_after': email.utils.formatdate(time.time() + 7200, usegmt=True)},
      3600,
    ),
  ],
)
def test_a_wait_that_the_endpoint_names_is_kept(headers, least):
  clock = faulty.Clock()
  for status in (429, 503):
    with faulty.serving(faulty.in_turn(reply(status, **headers), OK)) as (
      url,
      _,
    ):
      ask(url, clock, patience_s=9000)
    assert least <= clock.waits.pop() <= max(1.1 * least, 7920 * (least > 99))


@pytest.mark.parametrize('value', ['-3', '0', 'inf', 'nan', 'soon', ''])
def test_a_wait_that_is_none_is_ours(value):
  clock = faulty.Clock()
  with faulty.serving(faulty.in_turn(reply(503, retry_after=value), OK)) as (
    url,
    _,
  ):
    ask(url, clock)
  assert 1 <= clock.waits[0] <= 2


def test_a_refusal_is_told_at_once():
  no_room = {'error': {'message': 'too long', 'code': 'no_room'}}
  for made, status in (
    (reply(400, no_room), 400),
    (reply(401), 401),
    (reply(409, x_should_retry='false'), 409),
  ):
    with faulty.serving(faulty.in_turn(made)) as (url, seen):
      with pytest.raises(
        conversation.EndpointError, match=f'completions: .*{status}'
      ) as caught:
        ask(url)
    assert len(seen) == 1 and caught.value.status == status
  with faulty.serving(faulty.in_turn(reply(400, no_room))) as (url, _):
    with pytest.raises(conversation.EndpointError) as caught:
      ask(url)
  assert caught.value.code == 'no_room'


def test_patience_is_for_a_request_and_for_the_endpoint():
  clock = faulty.Clock()
  with faulty.serving(lambda body: reply(500)) as (url, seen):
    made = address(url, clock, patience_s=100)
    counts = []
    for begin in (1000, 1100):
      clock.now, before = begin, len(seen)
      with pytest.raises(conversation.EndpointError, match='500.*attempt'):
        made.send('/x', {})
      assert clock.now <= 1100
      counts.append(len(seen) - before)
  # Those after the first know that the endpoint is dead.
  assert counts[0] > 4 and counts[1] == 1
  # A wait beyond patience is not begun.
  with faulty.serving(lambda body: reply(429, retry_after='101')) as (url, _):
    with pytest.raises(conversation.EndpointError, match='attempt 1'):
      address(url, clock, patience_s=100).send('/x', {})


def test_a_request_that_always_fails_ends_while_others_are_answered():
  answer = lambda body: reply(500) if body['bad'] else faulty.Reply({})
  clock = faulty.Clock()
  with faulty.serving(answer) as (url, _):
    made = address(url, clock, patience_s=100)
    sleep = clock.sleep

    def others(seconds):
      sleep(seconds)
      made.send('/x', {'bad': False})

    clock.sleep = others
    with pytest.raises(conversation.EndpointError, match='500'):
      made.send('/x', {'bad': True})
  assert clock.now <= 1100


def test_requests_of_all_threads_are_spaced():
  clock = faulty.Clock()
  with faulty.serving(lambda body: faulty.Reply({})) as (url, _):
    made = address(url, clock, requests_per_minute=30)
    for _ in range(4):
      made.send('/x', {})
    assert clock.now == 1006.0


def test_a_busy_endpoint_is_left_alone_by_every_thread():
  clock = faulty.Clock()
  answers = faulty.in_turn(reply(429, retry_after='50'), {}, {})
  with faulty.serving(answers) as (url, _):
    made = address(url, clock)
    begun, first = [], [True]
    sleep = clock.sleep

    def other(seconds):
      if first.pop() if first else False:
        # Another thread that comes while the first one waits.
        clock.sleep = sleep
        made.send('/x', {})
        begun.append(clock.now)
      sleep(max(0.0, 1000 + seconds - clock.now))

    clock.sleep = other
    made.send('/x', {})
  assert begun and begun[0] >= 1050


CALLS = [('a', 'read', '{"path": "x"}'), ('b', 'list', '')]


@pytest.mark.parametrize('size', [1, 3, 1000])
def test_a_stream_is_the_answer_that_it_adds_up_to(size):
  whole = faulty.said(
    'I look.',
    'tool_calls',
    CALLS,
    usage={'prompt_tokens': 5},
    reasoning_content='First I read.',
    refusal='',
  )
  events = faulty.streamed(whole, size)
  with faulty.serving(faulty.in_turn(whole, faulty.Reply(events=events))) as (
    url,
    seen,
  ):
    plain, stream = ask(url), ask(url, stream=True)
  for name in ('content', 'reasoning_content'):
    assert stream.message[name] == plain.message[name]
  assert [c['id'] for c in stream.message['tool_calls']] == ['a', 'b']
  functions = [[c['function'] for c in a.message['tool_calls']]
               for a in (plain, stream)]  # fmt: skip
  assert functions[0] == functions[1]
  assert (stream.usage, stream.finish) == (plain.usage, plain.finish)
  assert seen[1][1]['stream_options'] == {'include_usage': True}


@pytest.mark.parametrize('keeps_id', [False, True])
def test_calls_of_a_stream_need_no_index(keeps_id):
  whole = faulty.said('I look.', 'tool_calls', CALLS)
  events, last = faulty.streamed(whole), ''
  for event in events[:-1]:
    for choice in event['choices']:
      for call in choice['delta'].get('tool_calls', ()):
        del call['index']
        last = call.get('id', last)
        if keeps_id:
          call['id'] = last
  with faulty.serving(faulty.in_turn(whole, faulty.Reply(events=events))) as (
    url,
    _,
  ):
    plain, stream = (ask(url, stream=s).message for s in (False, True))
  names = lambda m: [(c['id'], c['function']) for c in m['tool_calls']]
  assert [f for _, f in names(plain)] == [f for _, f in names(stream)]


PARTS = [{'type': 'text', 'text': 'I '}, {'type': 'x'}, {'text': 'look.'}]


def test_content_in_parts_is_their_text():
  delta = {'role': 'assistant', 'content': PARTS}
  end = {'index': 0, 'delta': {}, 'finish_reason': 'stop'}
  events = [{'choices': [c]} for c in ({'index': 0, 'delta': delta}, end)]
  replies = (faulty.said(PARTS), faulty.Reply(events=[*events, b'[DONE]']))
  with faulty.serving(faulty.in_turn(*replies)) as (url, _):
    assert ask(url).message['content'] == 'I look.'
    assert ask(url, stream=True).message['content'] == 'I look.'


def test_numbers_that_no_json_has_are_left_out():
  usage = {'cost': float('nan'), 'prompt_tokens': float('inf')}
  body = json.dumps(faulty.said('list', usage=usage)).encode()
  body = body.replace(b'Infinity', b'1e999')
  with faulty.serving(faulty.in_turn(faulty.Reply(body))) as (url, _):
    assert ask(url).usage == {'cost': None, 'prompt_tokens': None}


def test_requests_have_what_was_asked_for_and_nothing_else():
  with faulty.serving(faulty.in_turn(OK, OK)) as (url, seen):
    ask(url, api_key='k', fields={'max_tokens': None, 'reasoning': 'high'})
    ask(url, model='m', functions=[{'type': 'function'}])
  (headers, first), (_, second) = seen
  assert headers['authorization'] == 'Bearer k'
  assert first == {
    'messages': USER,
    'temperature': 0.5,
    'seed': 3,
    'reasoning': 'high',
  }
  assert second['model'] == 'm' and second['tools'] == [{'type': 'function'}]


def test_halves_of_surrogate_pairs_can_be_sent_back():
  with faulty.serving(faulty.in_turn(faulty.said('half \ud800'))) as (url, _):
    assert ask(url).message['content'] == 'half ?'


def test_endpoints_that_cannot_be_are_refused_and_keys_are_not_shown():
  with pytest.raises(ValueError, match='must begin with http'):
    endpoint.Endpoint(url='localhost:8000')
  with pytest.raises(ValueError, match='timeout_s must be positive; got 0'):
    endpoint.Endpoint(url='http://a', timeout_s=0)
  shown = repr(endpoint.Endpoint(url='http://a', api_key='secret'))
  assert 'secret' not in shown


def test_threads_that_fail_together_come_back_one_by_one():
  waits = {endpoint._wait_s(ValueError(), 3) for _ in range(20)}
  assert len(waits) == 20 and 4 <= min(waits) < max(waits) <= 8
