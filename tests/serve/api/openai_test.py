"""OpenAI's own client against a server with a scripted engine."""

import json

import numpy as np
import openai
import pytest

from tests.serve import scripted

TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': 'edit',
      'parameters': {
        'type': 'object',
        'properties': {
          'path': {'type': 'string'},
          'line': {'type': 'integer'},
          'body': {'type': 'string'},
        },
        'required': ['path', 'line'],
      },
    },
  }
]


def _chat(client, **more):
  messages = [{'role': 'user', 'content': 'Hi'}]
  return client.chat.completions.create(
    **{'model': 'tiny', 'messages': messages, 'max_tokens': 40, **more}
  )


def _joined(stream):
  """Returns {index: (text, finish reason, tool calls, logprobs)}."""
  joined = {}
  for chunk in stream:
    for choice in chunk.choices:
      text, finish, calls, logprobs = joined.get(
        choice.index, ('', None, [], [])
      )
      delta = choice.delta
      calls = calls + list(delta.tool_calls or [])
      if choice.logprobs:
        logprobs = logprobs + choice.logprobs.content
      joined[choice.index] = (
        text + (delta.content or ''),
        choice.finish_reason or finish,
        calls,
        logprobs,
      )
  return joined


def test_the_prompt_is_that_of_the_protocol(say, tokenizer):
  asked = []

  def script(request):
    asked.append(request)
    return [*tokenizer.encode('ok'), tokenizer.END]

  _chat(
    say(script),
    seed=3,
    temperature=0.5,
    top_p=0.9,
    extra_body={'top_k': 7, 'min_p': 0.1, 'stop_token_ids': [9]},
  )
  (request,) = asked
  wanted = [tokenizer.USER, *tokenizer.encode('Hi'), tokenizer.END]
  assert request.context_T.tolist() == [*wanted, tokenizer.CALL]
  assert request.stop_tokens == (9, tokenizer.END, tokenizer.EOD)
  assert (request.temperature, request.top_p) == (0.5, 0.9)
  assert (request.top_k, request.min_p) == (7, 0.1)
  assert (request.seed, request.max_new_tokens) == ((3, 0), 40)


@pytest.mark.parametrize('per_step', [1, 3, 50])
@pytest.mark.parametrize(
  'written, stop, text, used',
  [
    ('aé€😀z', None, 'aé€😀z', 12),
    (b'a\xff\xe2\x82b', None, 'a\ufffd\ufffdb', 6),
    (b'a\xe2\x82', None, 'a\ufffd', 4),
    ('one STOP two', ['STOP'], 'one ', 8),
    ('one STO two', ['STOP'], 'one STO two', 12),
    ('xaab', ['aab'], 'x', 4),
    ('xaaab', ['aab', 'never'], 'xa', 5),
    # The one that is complete first counts, though the other begins first.
    ('abcd', ['abcd', 'bc'], 'a', 3),
    ('é', ['é'], '', 2),
    ('', ['x'], '', 1),
  ],
)
def test_text_and_stop_strings(say, written, stop, text, used, per_step):
  made = say(written, per_step)
  whole = _chat(made, stop=stop)
  assert whole.choices[0].message.content == text
  assert whole.choices[0].finish_reason == 'stop'
  assert whole.usage.completion_tokens == used
  options = {'include_usage': True}
  chunks = list(_chat(made, stop=stop, stream=True, stream_options=options))
  assert _joined(chunks)[0][:2] == (text, 'stop')
  assert chunks[-1].usage.completion_tokens == used
  assert not chunks[-1].choices
  # Said to be none, as OpenAI says it, and not left out.
  assert {c.to_dict()['usage'] for c in chunks[:-1]} == {None}


def test_the_end_that_a_limit_makes(say):
  answer = _chat(say('hello'), max_completion_tokens=3, max_tokens=None)
  assert answer.choices[0].message.content == 'hel'
  assert answer.choices[0].finish_reason == 'length'
  usage = answer.usage
  assert (usage.prompt_tokens, usage.completion_tokens) == (5, 3)
  assert usage.total_tokens == 8
  assert usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize('stream', [False, True])
def test_logprobs_are_those_of_the_text(say, stream):
  made = say('aé! STOP', 2)
  answer = _chat(
    made, logprobs=True, top_logprobs=2, stop='STOP', stream=stream
  )
  joined = (
    _joined(answer)[0][3] if stream else answer.choices[0].logprobs.content
  )
  assert bytes(b for t in joined for b in t.bytes) == 'aé! '.encode()
  assert {t.logprob for t in joined} == {-0.5}
  assert [t.logprob for t in joined[0].top_logprobs] == [-0.5, -0.5]
  assert joined[0].top_logprobs[1].token == 'b'
  assert joined[1].token == '\ufffd'


def test_completions_and_their_logprobs(say, tokenizer):
  made = say('aéb', 3)
  fields = {'model': 'tiny', 'prompt': 'x', 'max_tokens': 9, 'logprobs': 1}
  answer = made.completions.create(**fields)
  (choice,) = answer.choices
  assert (choice.text, choice.finish_reason) == ('aéb', 'stop')
  assert choice.logprobs.tokens == ['a', r'bytes:\xc3', r'bytes:\xa9', 'b']
  # Both halves of a character begin where it does.
  assert choice.logprobs.text_offset == [0, 1, 1, 2]
  assert choice.logprobs.token_logprobs == [-0.5] * 4
  assert choice.logprobs.top_logprobs[0] == {'a': -0.5}
  parts = list(made.completions.create(**fields, stream=True))
  assert ''.join(p.choices[0].text for p in parts) == 'aéb'
  offsets = [
    o
    for p in parts
    if p.choices[0].logprobs
    for o in p.choices[0].logprobs.text_offset
  ]
  assert offsets == choice.logprobs.text_offset
  # Many clients send a list of prompts, though it be of one.
  for prompt, num in ([40, 41], 2), ([[40, 41]], 2), (['xyz'], 3):
    tokens = made.completions.create(**{**fields, 'prompt': prompt})
    assert tokens.usage.prompt_tokens == num


def test_several_prompts_are_answered_in_order(say, tokenizer):
  asked = []

  def script(request):
    asked.append(request)
    words = f'{tokenizer.decode(request.context_T)} {request.seed[1]}'
    return [*tokenizer.encode(words), tokenizer.END]

  made = say(script)
  fields = {'model': 'tiny', 'max_tokens': 20, 'n': 2, 'seed': 3}
  prompts = (['a', 'bcd'], [[70], [71, 72, 73]])
  for prompt, spelled in zip(prompts, (['a', 'bcd'], None), strict=True):
    spelled = spelled or [tokenizer.decode(ids) for ids in prompt]
    answer = made.completions.create(prompt=prompt, **fields)
    wanted = [f'{text} {n}' for text in spelled for n in (0, 1)]
    assert [c.text for c in answer.choices] == wanted
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    # Each prompt counts once, and its cached tokens, too.
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 6
    stream = made.completions.create(prompt=prompt, **fields, stream=True)
    texts = ['', '', '', '']
    for chunk in stream:
      texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted
  # A prompt's numbers are those that it has alone.
  assert [r.seed for r in asked[:4]] == [(3, 0), (3, 1), (3, 0), (3, 1)]
  with pytest.raises(openai.BadRequestError, match='for each of 3') as no:
    made.completions.create(prompt=['a', 'b', 'c'], **fields)
  assert no.value.param == 'prompt'


def test_words_of_the_system_begin_the_next_message_of_the_user(say, tokenizer):
  asked = []

  def script(request):
    asked.append(request.context_T.tolist())
    return [tokenizer.END]

  talk = [
    {'role': 'system', 'content': 'Be'},
    {'role': 'developer', 'content': [{'type': 'text', 'text': 'brief.'}]},
    {'role': 'user', 'content': 'Hi'},
    {'role': 'system', 'content': 'Now'},
    {'role': 'tool', 'content': 'ok'},
    {'role': 'system', 'content': 'End'},
  ]
  _chat(say(script), messages=talk, max_tokens=2)
  t = tokenizer
  users = ('Be\n\nbrief.\n\nHi', 'Now')
  wanted = [i for text in users for i in [t.USER, *t.encode(text), t.END]]
  wanted += [t.TOOL, *t.encode('ok'), t.END]
  wanted += [t.USER, *t.encode('End'), t.END, t.CALL]
  assert asked == [wanted]


def test_choices_are_told_apart(say, tokenizer):
  def script(request):
    word = f'choice {request.seed[1]}'
    return [*tokenizer.encode(word), tokenizer.END, *[0] * 50]

  made = say(script)
  answer = _chat(made, n=3)
  texts = [c.message.content for c in answer.choices]
  assert texts == ['choice 0', 'choice 1', 'choice 2']
  assert [c.index for c in answer.choices] == [0, 1, 2]
  # The prompt counts once.
  assert answer.usage.prompt_tokens == 5
  joined = _joined(_chat(made, n=3, stream=True))
  assert [joined[i][0] for i in range(3)] == texts


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize(
  'written, arguments',
  [
    (
      'edit a.py 3\nreturn 1\n',
      {'path': 'a.py', 'line': 3, 'body': 'return 1\n'},
    ),
    ('edit a.py 3', {'path': 'a.py', 'line': 3}),
    ('edit a.py three', {'path': 'a.py', 'line': 'three'}),
    ('edit a.py', None),
    ('edit a.py 3 4 5', None),
    ('edit a.py 3 4\nreturn 1', None),
    ('list', None),
    ('', None),
  ],
)
def test_calls_of_our_protocol(say, written, arguments, stream):
  made = say(written)
  answer = _chat(made, tools=TOOLS, stream=stream)
  if stream:
    text, finish, calls, _ = _joined(answer)[0]
  else:
    (choice,) = answer.choices
    text, finish = choice.message.content, choice.finish_reason
    calls = choice.message.tool_calls or []
  if arguments is None:
    assert (text, finish, calls) == (written, 'stop', [])
    return
  assert (text, finish) == ('' if stream else None, 'tool_calls')
  assert calls[0].function.name == 'edit' and calls[0].id
  assert json.loads(calls[0].function.arguments) == arguments


def test_a_call_that_a_limit_cut_off_is_none(say):
  (choice,) = _chat(
    say('edit a.py 3\nreturn 1'), tools=TOOLS, max_tokens=11
  ).choices
  assert choice.message.content == 'edit a.py 3'
  assert (choice.finish_reason, choice.message.tool_calls) == ('length', None)


def test_without_tools_nothing_is_a_call(say):
  made = say('edit a.py 3')
  for more in ({}, {'tools': TOOLS, 'tool_choice': 'none'}):
    assert _chat(made, **more).choices[0].message.content == 'edit a.py 3'


def test_earlier_calls_are_written_as_the_policy_wrote_them(say, tokenizer):
  asked = []

  def script(request):
    asked.append(request.context_T)
    return [*tokenizer.encode('ok'), tokenizer.END]

  written = 'edit a.py 3\nreturn 1'
  made = say(written)
  call = _chat(made, tools=TOOLS).choices[0].message
  _chat(
    say(script),
    tools=TOOLS,
    max_tokens=4,
    messages=[
      {'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]},
      call.model_dump(exclude_none=True),
      {
        'role': 'tool',
        'tool_call_id': call.tool_calls[0].id,
        'content': 'edited',
      },
    ],
  )
  t = tokenizer
  wanted = [t.USER, *t.encode('Hi'), t.END, t.CALL, *t.encode(written), t.END]
  wanted += [t.TOOL, *t.encode('edited'), t.END, t.CALL]
  assert asked[0].tolist() == wanted


def test_what_a_message_spells_is_no_special_token(say, tokenizer):
  asked = []

  def script(request):
    asked.append(request.context_T)
    return [*tokenizer.encode('ok'), tokenizer.END]

  message = {'role': 'user', 'content': '<|end|><|call|>'}
  _chat(say(script), messages=[message])
  specials = np.isin(asked[0], list(tokenizer.special_ids))
  assert specials.sum() == 3


def test_models_and_versions(serve, client, tokenizer):
  updates = [(9, 'good')]
  made = serve(
    lambda _: [tokenizer.END],
    poll=lambda: updates.pop() if updates else None,
  )
  listed = client(made)
  scripted.wait_for(lambda: made.served.version == 9)
  (model,) = listed.models.list().data
  assert (model.id, model.policy_version) == ('tiny', 9)
  assert listed.models.retrieve('tiny').max_model_len == 64
  assert _chat(listed).system_fingerprint == 'policy-9'
  with pytest.raises(openai.NotFoundError) as caught:
    _chat(listed, model='gpt')
  assert caught.value.code == 'model_not_found'
  assert "serves 'tiny'" in caught.value.message


@pytest.mark.parametrize(
  'more, param, code',
  [
    ({'extra_body': {'top_kk': 3}}, 'top_kk', 'unknown_parameter'),
    ({'logit_bias': {'400': 1}}, 'logit_bias', 'invalid_value'),
    ({'logit_bias': {'-1': 1}}, 'logit_bias', 'invalid_value'),
    ({'logit_bias': {'3': 101}}, 'logit_bias', 'invalid_value'),
    ({'logit_bias': {'٣': 1}}, 'logit_bias', 'invalid_value'),
    ({'presence_penalty': 2.1}, 'presence_penalty', 'invalid_value'),
    ({'presence_penalty': False}, 'presence_penalty', 'invalid_value'),
    ({'extra_body': {'store': 0}}, 'store', 'unsupported_parameter'),
    ({'tool_choice': 'required'}, 'tool_choice', 'invalid_value'),
    ({'tool_choice': 'must'}, 'tool_choice', 'invalid_value'),
    (
      {
        'tools': TOOLS,
        'tool_choice': {'type': 'function', 'function': {'name': 'no'}},
      },
      'tool_choice',
      'invalid_value',
    ),
    (
      {'response_format': {'type': 'json_schema', 'json_schema': {}}},
      'response_format',
      'invalid_value',
    ),
    ({'response_format': {'type': 'xml'}}, 'response_format', 'invalid_value'),
    ({'temperature': -1}, 'temperature', 'invalid_value'),
    ({'temperature': 'hot'}, 'temperature', 'invalid_value'),
    ({'max_tokens': '5'}, 'max_tokens', 'invalid_value'),
    ({'temperature': 1e-300}, 'temperature', 'invalid_value'),
    ({'extra_body': {'top_k': 2**31}}, 'top_k', 'invalid_value'),
    (
      {'extra_body': {'stop_token_ids': [2**40]}},
      'stop_token_ids',
      'invalid_value',
    ),
    (
      {'messages': [{'role': 'assistant', 'tool_calls': 5}]},
      'messages.0.tool_calls',
      'invalid_value',
    ),
    ({'top_p': 0}, 'top_p', 'invalid_value'),
    ({'extra_body': {'min_p': 1.0}}, 'min_p', 'invalid_value'),
    ({'max_tokens': 0}, 'max_tokens', 'invalid_value'),
    ({'max_completion_tokens': 5}, 'max_tokens', 'invalid_value'),
    ({'n': 5}, 'n', 'invalid_value'),
    ({'stop': ['']}, 'stop', 'invalid_value'),
    ({'stop': [3]}, 'stop', 'invalid_value'),
    ({'top_logprobs': 1}, 'top_logprobs', 'invalid_value'),
    ({'logprobs': True, 'top_logprobs': 3}, 'top_logprobs', 'invalid_value'),
    ({'stream_options': {}}, 'stream_options', 'invalid_value'),
    ({'messages': []}, 'messages', 'empty_prompt'),
    ({'max_tokens': 60}, 'max_tokens', 'context_length_exceeded'),
    (
      {'messages': [{'role': 'user', 'content': 'x' * 80}]},
      'messages',
      'context_length_exceeded',
    ),
    (
      {'messages': [{'role': 'critic', 'content': 'x'}]},
      'messages.0.role',
      'invalid_value',
    ),
    (
      {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
      'messages.0.content',
      'invalid_value',
    ),
    (
      {'extra_body': {'stop_token_ids': [1, 3, 4]}},
      'stop_token_ids',
      'invalid_value',
    ),
    ({'tools': [{'type': 'web'}]}, 'tools.0.type', 'invalid_value'),
  ],
)
def test_bad_requests_are_named(shared_client, more, param, code):
  with pytest.raises(openai.BadRequestError) as caught:
    _chat(shared_client, **more)
  body = caught.value.body
  assert (body['param'], body['code']) == (param, code), body
  assert body['type'] == 'invalid_request_error' and body['message']


def test_what_asks_for_nothing_is_accepted(shared_client):
  neutral = {
    'frequency_penalty': 0,
    'presence_penalty': 0.0,
    'logit_bias': {},
    'response_format': {'type': 'text'},
    'store': False,
    'user': 'me',
    'metadata': {'a': 'b'},
    'parallel_tool_calls': True,
    'tool_choice': 'auto',
    'seed': None,
  }
  assert _chat(shared_client, **neutral).choices[0].finish_reason == 'stop'


def test_lone_surrogates_come_back(shared, post):
  answer = post(
    shared, '/v1/completions', b'{"prompt": "x", "model": "\\ud800"}'
  )
  assert answer.status_code == 404
  assert r'\ud800' in answer.text
  body = b'{"prompt": "\\ud800", "max_tokens": 4}'
  assert post(shared, '/v1/completions', body).status_code == 200


@pytest.mark.parametrize('prompt', ['', []])
def test_an_empty_prompt_is_refused(shared_client, prompt):
  with pytest.raises(openai.BadRequestError) as caught:
    shared_client.completions.create(model='tiny', prompt=prompt)
  assert caught.value.code == 'empty_prompt'


def test_a_token_outside_the_vocabulary_is_refused(shared_client):
  for token in (400, -1, 2**40):
    with pytest.raises(openai.BadRequestError) as caught:
      shared_client.completions.create(model='tiny', prompt=[token])
    assert caught.value.param == 'prompt'
