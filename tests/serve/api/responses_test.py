"""The Responses API, by OpenAI's own client."""

import json

import openai
import pytest

from tests.serve.api import guided_test

EDIT = guided_test.EDIT
TOOLS = [{'type': 'function', 'name': 'edit', 'parameters': EDIT}]
CALL = 'edit a.py 3\nreturn 1'


def _create(client, **more):
  fields = {'model': 'tiny', 'input': 'Hi', 'max_output_tokens': 50, **more}
  return client.responses.create(**fields)


def test_a_message(say):
  answer = _create(say('hé!'), metadata={'a': 'b'}, store=False)
  assert (answer.status, answer.output_text) == ('completed', 'hé!')
  (item,) = answer.output
  assert (item.type, item.role, item.status) == (
    'message',
    'assistant',
    'completed',
  )
  usage = answer.usage
  assert (usage.input_tokens, usage.output_tokens) == (5, 5)
  assert usage.input_tokens_details.cached_tokens == 3
  assert answer.metadata == {'policy_version': '7'}


def test_a_limit_makes_it_incomplete(say):
  answer = _create(say('hello'), max_output_tokens=3)
  assert (answer.status, answer.output_text) == ('incomplete', 'hel')
  assert answer.incomplete_details.reason == 'max_output_tokens'


def test_the_conversation_is_that_of_chat_completions(say, tokenizer):
  asked = []

  def script(request):
    asked.append(request.context_T.tolist())
    return [tokenizer.END]

  made = say(script)
  calls = [{'name': 'edit', 'arguments': '{"path": "a.py", "line": 3}'}]
  _create(
    made,
    instructions='Be brief.',
    tools=TOOLS,
    max_output_tokens=2,
    input=[
      {'role': 'user', 'content': [{'type': 'input_text', 'text': 'Hi'}]},
      {'type': 'function_call', 'call_id': 'c', **calls[0]},
      {'type': 'function_call_output', 'call_id': 'c', 'output': 'ok'},
    ],
  )
  made.chat.completions.create(
    model='tiny',
    max_tokens=2,
    tools=guided_test.TOOLS,
    messages=[
      {'role': 'system', 'content': 'Be brief.'},
      {'role': 'user', 'content': 'Hi'},
      {
        'role': 'assistant',
        'tool_calls': [{'id': 'c', 'type': 'function', 'function': calls[0]}],
      },
      {'role': 'tool', 'tool_call_id': 'c', 'content': 'ok'},
    ],
  )
  assert asked[0] == asked[1]


@pytest.mark.parametrize('written', ['hé there', '', CALL])
def test_a_stream_has_the_events_of_the_whole(say, written):
  made = say(written, 2)
  include = ['message.output_text.logprobs']
  fields = {'tools': TOOLS, 'include': include, 'top_logprobs': 1}
  whole = _create(made, **fields)
  with made.responses.stream(
    model='tiny', input='Hi', max_output_tokens=50, **fields
  ) as stream:
    events = list(stream)
    final = stream.get_final_response()
  kinds = [e.type for e in events]
  numbers = [e.sequence_number for e in events]
  assert numbers == list(range(len(events)))
  assert kinds[:2] == ['response.created', 'response.in_progress']
  assert kinds[-1] == 'response.completed'
  assert final.output_text == whole.output_text
  assert [i.type for i in final.output] == [i.type for i in whole.output]
  assert final.usage == whole.usage
  if written == CALL:
    (call,), (other,) = final.output, whole.output
    assert call.arguments == other.arguments
    return
  text = ''.join(e.delta for e in events if e.type.endswith('text.delta'))
  assert text == written
  assert kinds[-4:-1] == [
    'response.output_text.done',
    'response.content_part.done',
    'response.output_item.done',
  ]
  (part,) = final.output[0].content
  assert [x.logprob for x in part.logprobs] == [-0.5] * len(written.encode())
  assert part.logprobs == whole.output[0].content[0].logprobs


def test_log_probabilities_of_a_stream_go_out_once(say):
  include = ['message.output_text.logprobs']
  with say('hé there', 2).responses.stream(
    model='tiny', input='Hi', max_output_tokens=50, include=include
  ) as stream:
    deltas = [e for e in stream if e.type.endswith('text.delta')]
    final = stream.get_final_response()
  assert len(deltas) > 2
  assert sum(len(e.logprobs) for e in deltas) == 9
  assert len(final.output[0].content[0].logprobs) == 9


def test_calls_that_are_demanded(say):
  choice = {'type': 'function', 'name': 'edit'}
  answer = _create(say('edit c'), tools=TOOLS, tool_choice=choice)
  if answer.status == 'completed':
    (call,) = answer.output
    guided_test._matches(EDIT, json.loads(call.arguments))
  answer = _create(say(CALL), tools=TOOLS, tool_choice='required')
  (call,) = answer.output
  assert (call.type, call.name) == ('function_call', 'edit')
  assert json.loads(call.arguments)['body'] == 'return 1'


def test_a_schema(say, tokenizer):
  form = {'type': 'json_schema', 'name': 'p', 'schema': guided_test.PERSON}
  answer = _create(
    say('No.'),
    text={'format': form},
    max_output_tokens=55,
    extra_body={'seed': 1},
  )
  if answer.status == 'completed':
    guided_test._matches(guided_test.PERSON, json.loads(answer.output_text))
  assert answer.output_text.lstrip().startswith('{')


@pytest.mark.parametrize(
  'more, param',
  [
    ({'store': True}, 'store'),
    ({'previous_response_id': 'resp_1'}, 'previous_response_id'),
    ({'background': True}, 'background'),
    ({'reasoning': {'effort': 'high'}}, 'reasoning'),
    ({'truncation': 'auto'}, 'truncation'),
    ({'include': ['file_search_call.results']}, 'include'),
    ({'tools': [{'type': 'web_search'}]}, 'tools.0.type'),
    ({'input': [{'type': 'reasoning', 'summary': []}]}, 'input.0'),
    ({'input': [{'role': 'user', 'content': 3}]}, 'input.0.content'),
    (
      {'input': [{'role': 'user', 'content': [{'type': 'input_image'}]}]},
      'input.0.content',
    ),
    ({'input': []}, 'input'),
    ({'max_output_tokens': 0}, 'max_output_tokens'),
    ({'max_output_tokens': 10**6}, 'max_output_tokens'),
    ({'input': 'x' * 5000}, 'input'),
    ({'input': [{'role': 'poet', 'content': 'x'}]}, 'input.role'),
    ({'extra_body': {'messages': []}}, 'messages'),
    ({'tool_choice': 'required'}, 'tool_choice'),
    ({'top_logprobs': 3}, 'top_logprobs'),
    ({'text': {'format': {'type': 'json_schema'}}}, 'text.format'),
  ],
)
def test_bad_requests_are_named(shared_client, more, param):
  with pytest.raises(openai.BadRequestError) as caught:
    _create(shared_client, **more)
  assert caught.value.body['param'] == param, caught.value.body
  # Nor does the message speak of chat completions.
  for name in ('messages.0', 'max_tokens', 'max_completion', 'response_format'):
    assert name not in caught.value.body['message'] or name == param
