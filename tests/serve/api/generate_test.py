"""vLLM's token route has the bytes that its clients look for."""

import base64
import json

import pytest

PATH = '/inference/v1/generate'
# As `renderers` sends it.
BODY = {
  'model': 'tiny',
  'token_ids': [5, 6, 7],
  'sampling_params': {
    'temperature': 0.7,
    'max_tokens': 8,
    'top_k': -1,
    'stop_token_ids': [9],
    'logprobs': 1,
    'skip_special_tokens': False,
  },
}


@pytest.fixture
def answer(shared, post, say):
  def ask(script, **params):
    say(script)
    sampling = {**BODY['sampling_params'], **params}
    return post(shared, PATH, {**BODY, 'sampling_params': sampling})

  return ask


def test_an_answer_is_the_json_of_vllm_byte_by_byte(answer):
  requests = []

  def script(request):
    requests.append(request)
    return [40, 41, 9]

  sent = answer(script)
  number = sent.json()['request_id']
  routes = base64.b64encode(bytes([0, 1] * 2 * 5)).decode()
  entry = (
    '{"token":"token_id:%d","logprob":-0.25,"bytes":null,"top_logprobs":[]}'
  )
  entries = ','.join(entry % token for token in (40, 41, 9))
  assert sent.text == (
    f'{{"request_id":"{number}","choices":[{{"index":0,'
    f'"logprobs":{{"content":[{entries}]}},"finish_reason":"stop",'
    '"token_ids":[40,41,9],'
    f'"routed_experts":{{"data":"{routes}","dtype":"uint8",'
    '"shape":[5,2,2],"start":0}}],"prompt_logprobs":null,'
    '"kv_transfer_params":null,"usage":{"prompt_tokens":3,'
    '"completion_tokens":3,"total_tokens":6,'
    '"prompt_tokens_details":{"cached_tokens":3}}}'
  )
  (request,) = requests
  assert request.context_T.tolist() == [5, 6, 7]
  # Only the stop tokens that are named, and no truncation.
  assert request.stop_tokens == (9,) and not request.truncates
  assert (request.temperature, request.max_new_tokens) == (0.7, 8)


def test_routes_begin_where_they_are_asked_for(answer):
  sent = answer(lambda _: [40] * 8, routed_experts_prompt_start=2)
  (choice,) = sent.json()['choices']
  assert choice['finish_reason'] == 'length'
  routes = choice['routed_experts']
  # Ten tokens are consumed, of eleven.
  assert (routes['start'], routes['shape']) == (2, [8, 2, 2])


@pytest.mark.parametrize(
  'name, value',
  [
    ('frequency_penalty', 0.1),
    ('repetition_penalty', 1.1),
    ('logit_bias', {'1': 1}),
    ('structured_outputs', {'json': {}}),
    ('stop', ['x']),
    ('ignore_eos', True),
    ('top_k', -2),
    ('logprobs', 30),
    ('unheard_of', 1),
  ],
)
def test_what_is_not_to_be_had_is_refused_by_name(answer, name, value):
  error = answer(lambda _: [9], **{name: value})
  assert error.status_code == 400
  assert error.json()['error']['param'] == name


def test_neutral_values_are_taken(answer):
  neutral = {'repetition_penalty': 1.0, 'min_tokens': 0, 'stop': []}
  assert answer(lambda _: [9], **neutral).status_code == 200


def test_a_request_that_is_not_for_tokens_is_refused(shared, post):
  body = {**BODY, 'features': {'mm_hashes': {}}}
  error = post(shared, PATH, body).json()['error']
  assert error['param'] == 'features'
  error = post(shared, PATH, {**BODY, 'token_ids': 'abc'}).json()['error']
  assert error['param'].startswith('token_ids')
  assert json.dumps(error)
