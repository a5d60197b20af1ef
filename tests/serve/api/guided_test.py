"""Answers that are held to a grammar, and logits that requests change."""

import json
import sys
import threading
import types

import numpy as np
import pytest

from composer_jax.hf.text import call_formats
from composer_jax.serve.api import (
  chat_format,
  errors,
  grammars,
  guides,
  requests,
)
from tests.hf.text import published_templates as published

EDIT = {
  'type': 'object',
  'properties': {
    'path': {'type': 'string', 'enum': ['a.py', 'b.py']},
    'line': {'type': 'integer'},
    'body': {'type': 'string'},
  },
  'required': ['path', 'line'],
  'additionalProperties': False,
}
PERSON = {
  'type': 'object',
  'properties': {'name': {'enum': ['é', '"']}, 'age': {'enum': [7, 31]}},
  'required': ['name', 'age'],
  'additionalProperties': False,
}


def tool(name, parameters, **more):
  function = {'name': name, 'parameters': parameters, **more}
  return {'type': 'function', 'function': function}


TOOLS = [tool('edit', EDIT), tool('list', {})]


def _chat(client, **more):
  messages = [{'role': 'user', 'content': 'Hi'}]
  return client.chat.completions.create(
    **{'model': 'tiny', 'messages': messages, 'max_tokens': 55, **more}
  )


def _spaces(tokenizer):
  return [tokenizer._bytes.index(bytes([b])) for b in b' \t\n\r']


def _matches(schema, value):
  import jsonschema

  jsonschema.validate(value, schema)
  return True


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('written', ['', 'Sure! {', '{"age": 1, "name": "x"'])
def test_json_of_a_schema_whatever_the_model_likes(
  say, tokenizer, written, stream
):
  schema = {'name': 'person', 'strict': True, 'schema': PERSON}
  answer = _chat(
    say(written),
    response_format={'type': 'json_schema', 'json_schema': schema},
    # The scripted model draws any token that is allowed, and most are spaces.
    logit_bias={str(i): -100 for i in _spaces(tokenizer)},
    stream=stream,
  )
  text = (
    ''.join(c.choices[0].delta.content or '' for c in answer)
    if stream
    else answer.choices[0].message.content
  )
  assert _matches(PERSON, json.loads(text))


def test_json_mode_keeps_what_is_an_object_already(say):
  mode = {'type': 'json_object'}
  written = '{"a": [1, "é"]}'
  (choice,) = _chat(say(written), response_format=mode).choices
  assert (choice.message.content, choice.finish_reason) == (written, 'stop')
  (choice,) = _chat(say('No.'), response_format=mode, max_tokens=9).choices
  # A limit still ends it before it is whole.
  assert choice.message.content.lstrip().startswith('{')


@pytest.mark.parametrize('name', ['', 'edit', 'list'])
@pytest.mark.parametrize('written', ['', 'I refuse.', 'edit c.py 3'])
def test_a_demanded_call_is_made(say, written, name):
  choice = 'required'
  if name:
    choice = {'type': 'function', 'function': {'name': name}}
  (made,) = _chat(say(written), tools=TOOLS, tool_choice=choice).choices
  if made.finish_reason == 'length':
    # Its last argument is any text, which a limit cut off.
    assert made.message.content.startswith('edit ') and name != 'list'
    return
  (call,) = made.message.tool_calls
  assert call.function.name in ([name] if name else ['edit', 'list'])
  arguments = json.loads(call.function.arguments)
  assert call.function.name == 'list' or _matches(EDIT, arguments)


def test_a_call_that_is_allowed_is_left_alone(say):
  written = 'edit b.py -3\nreturn 1\n'
  (made,) = _chat(say(written), tools=TOOLS, tool_choice='required').choices
  (call,) = made.message.tool_calls
  assert json.loads(call.function.arguments) == {
    'path': 'b.py',
    'line': -3,
    'body': 'return 1\n',
  }


def test_a_strict_tool_gets_arguments_of_its_types_or_none(say):
  tools = [tool('edit', EDIT, strict=True)]
  (made,) = _chat(say('edit a.py three'), tools=tools).choices
  assert made.message.content == 'edit a.py three'
  assert not made.message.tool_calls
  (made,) = _chat(say('edit a.py 3'), tools=tools).choices
  assert made.message.tool_calls


def test_json_or_a_call(say):
  fields = {'tools': TOOLS, 'response_format': {'type': 'json_object'}}
  (made,) = _chat(say('edit a.py 3'), **fields).choices
  assert made.message.tool_calls
  (made,) = _chat(say('{"a": 1}'), **fields).choices
  assert made.message.content == '{"a": 1}' and not made.message.tool_calls


@pytest.mark.parametrize(
  'schema, words',
  [
    ({'$ref': '#'}, 'no answer satisfies it'),
    ({'$ref': 'http://a.b/c'}, 'not present in a registry'),
    ({'type': 'string', 'minLength': 3, 'maxLength': 2}, 'minLength'),
    ({'type': 'object', 'not': {}}, 'Unimplemented keys'),
    ({'type': 5}, 'type'),
    ({'type': 'string', 'pattern': '('}, 'regex'),
    ({'enum': []}, 'Unsatisfiable'),
    ({'oneOf': [{'type': 'integer'}, {'type': 'number'}]}, 'write anyOf'),
  ],
)
def test_a_schema_that_cannot_be_held_to_is_refused(tokenizer, schema, words):
  made = guides.Grammars(tokenizer, 400, (tokenizer.END, tokenizer.EOD))
  grammar = grammars.whole('value', [f'value: {grammars.of_schema(schema)}'])
  with pytest.raises(errors.ApiError, match='cannot be held') as caught:
    made.matcher(grammar)
  assert words in str(caught.value)


@pytest.mark.parametrize(
  'text, fits', [('{"k":"a","n":1}', 1), ('{"k":"b","n":1}', 0), ('7', 1)]
)
def test_alternatives_that_exclude_each_other_are_held_to(
  tokenizer, text, fits
):
  """As unions with a discriminator do: exactly one of them fits."""
  alike = {'type': 'object', 'additionalProperties': False}
  schema = {
    'oneOf': [
      {
        **alike,
        'properties': {'k': {'const': kind}, name: {'type': 'integer'}},
        'required': ['k', name],
      }
      for kind, name in (('a', 'n'), ('b', 'm'))
    ]
    + [{'type': 'integer'}]
  }
  made = guides.Grammars(tokenizer, 400, (tokenizer.END, tokenizer.EOD))
  grammar = grammars.whole('value', [f'value: {grammars.of_schema(schema)}'])
  matcher = made.matcher(grammar)
  ids = tokenizer.encode(text).tolist()
  taken = matcher.try_consume_tokens(ids)
  assert (taken == len(ids)) == fits


def test_a_long_schema_is_refused_unread(tokenizer):
  made = guides.Grammars(tokenizer, 400, (tokenizer.END,))
  rules = [f'value: {grammars.of_schema({"const": "x" * 100_000})}']
  with pytest.raises(errors.ApiError, match='100000 is the most'):
    made.matcher(grammars.whole('value', rules))


def test_a_schema_that_takes_long_holds_up_no_other(tokenizer, monkeypatch):
  made = guides.Grammars(tokenizer, 400, (tokenizer.END,))
  known, other = grammars.whole('"a"'), grammars.whole('"b"')
  made.matcher(known)
  library, vocabulary = made._vocabulary
  freed = threading.Event()

  def slow(*arguments, **named):
    freed.wait()
    return library.LLMatcher(*arguments, **named)

  limits = library.LLParserLimits
  blocking = types.SimpleNamespace(LLMatcher=slow, LLParserLimits=limits)
  made._vocabulary = (blocking, vocabulary)
  monkeypatch.setattr(guides, '_LONGEST_S', 0.01)
  for word in '"c"', '"d"':
    with pytest.raises(errors.ApiError, match='more than 0.01 s to prepare'):
      made.matcher(grammars.whole(word))
  # Both compilers are still at it; what is known needs none.
  with pytest.raises(errors.ApiError, match='try again') as caught:
    made.matcher(other)
  assert caught.value.status == 503
  made.matcher(known)
  freed.set()
  monkeypatch.undo()
  made.matcher(other)


def test_a_chain_of_references_overflows_no_stack(tokenizer):
  """It would end the process, where the stack is that of any thread."""
  made = guides.Grammars(tokenizer, 400, (tokenizer.END,))
  links = {f'{i}': {'items': {'$ref': f'#/$defs/{i + 1}'}} for i in range(2200)}
  schema = {'$defs': {**links, '2200': {}}, '$ref': '#/$defs/0'}
  rules = [f'value: {grammars.of_schema(schema)}']
  matcher = made.matcher(grammars.whole('value', rules))
  text = tokenizer.encode('[[[]]]').tolist()
  assert matcher.try_consume_tokens(text) == len(text)


def test_a_grammar_that_fails_midway_ends_the_answer(tokenizer):
  made = guides.Grammars(tokenizer, 400, (tokenizer.END, tokenizer.EOD))
  matcher = made.matcher(grammars.whole('"ab"'))
  guide = guides.RequestGuide(
    vocab_size=400, ends=(tokenizer.END,), matcher=matcher
  )
  assert not guide.failed
  guide.take(tokenizer._bytes.index(b'x'))
  allowed = np.flatnonzero(guide.bias() > -np.inf)
  assert guide.failed and allowed.tolist() == [tokenizer.END]


def test_a_missing_package_is_named(monkeypatch, tokenizer):
  monkeypatch.setitem(sys.modules, 'llguidance', None)
  made = guides.Grammars(tokenizer, 400, (tokenizer.END,))
  with pytest.raises(errors.ApiError, match=r'\[grammar\]') as caught:
    made.matcher(grammars.whole('"a"'))
  assert caught.value.code == 'unsupported_parameter'


def test_penalties_and_biases_are_the_sums_of_openai():
  guide = guides.RequestGuide(
    vocab_size=5,
    ends=(4,),
    logit_bias={1: -100.0, 2: 3.5},
    frequency_penalty=0.5,
    presence_penalty=-2.0,
  )
  assert guide.bias().tolist() == [0, -100, 3.5, 0, 0]
  for token in (2, 2, 2, 3):
    guide.take(token)
  assert guide.bias().tolist() == [0, -100, 3.5 - 1.5 + 2, 2 - 0.5, 0]
  assert guide.bias().dtype == np.float32


def test_biases_and_penalties_reach_the_engine(say, tokenizer):
  banned = {str(tokenizer._bytes.index(b'a')): -100}
  (made,) = _chat(say('aaa'), logit_bias=banned, max_tokens=3).choices
  assert 'a' not in made.message.content
  (made,) = _chat(say('bbb'), presence_penalty=1.0, max_tokens=3).choices
  assert made.message.content.startswith('b')
  assert made.message.content.count('b') == 1


@pytest.mark.parametrize(
  'name, value',
  [
    ('logit_bias', {'3': 1}),
    ('frequency_penalty', 0.5),
    ('presence_penalty', 1),
    ('response_format', {'type': 'json_object'}),
  ],
)
def test_tokens_for_training_refuse_by_name(shared, post, name, value):
  body = {'prompt': [3], 'max_tokens': 2, name: value}
  answer = post(shared, '/v1/tokens', body)
  assert answer.status_code == 400
  error = answer.json()['error']
  assert error['param'] == name and 'trainer' in error['message']


# ---- formats of published models ----

NAMES = ('qwen3_moe', 'qwen2_5', 'deepseek_v3', 'deepseek_r1', 'kimi_k2')
GIVEN = {'path': 'a.py', 'line': 3, 'body': 'x = {"<y>": \'}\'}\n'}


@pytest.fixture(scope='module', params=NAMES)
def speech(request, tmp_path_factory):
  folder = published.write(tmp_path_factory.mktemp('model'), request.param)
  return published.speech(folder)[1]


def _specs(**more):
  tools = [tool('edit', EDIT, **more), tool('list', {}, **more)]
  return [requests.ToolSpec.model_validate(t) for t in tools]


def _turn(speech, *calls):
  """Returns ids of a turn with calls, as the template writes it."""
  made = [
    call_formats.WrittenCall(n, a, f'functions.{n}:{place}')
    for place, (n, a) in enumerate(calls)
  ]
  if len(made) == 1:
    return speech._written(speech.turn(made, ''))[:-1].tolist()
  talk = [{'role': 'user', 'content': 'x'}]
  ids = speech.ids(speech.continued(talk, speech.turn(made, ''))).tolist()
  ids = ids[: next((i for i, t in enumerate(ids) if t in speech.ends), None)]
  last = call_formats.FORMATS[speech.calls].marks[-1]
  is_open = last not in speech.tokenizer.decode(ids)
  return ids + speech.ids(speech.tokenizer.mark(last)).tolist() * is_open


def _accepts(speech, start, rules, ids):
  """True if the ids are a whole answer of the grammar."""
  made = guides.Grammars(speech.tokenizer, 400, speech.ends)
  matcher = made.matcher(grammars.whole(start, rules))
  took = matcher.try_consume_tokens(ids)
  return took == len(ids) and matcher.is_accepting()


def test_grammars_of_calls_are_what_templates_write(speech):
  form = chat_format.TemplateFormat(speech)
  right, other = ('edit', GIVEN), ('list', {'any': [None]})
  for several in (False, True):
    rules = form.rules(_specs(), several)
    accepts = lambda *calls, r=rules: _accepts(
      speech, 'calls', r, _turn(speech, *calls)
    )
    assert accepts(right) and accepts(other)
    assert accepts(right, other) == several
    assert accepts(other, right, right) == several
    assert not accepts(('edit', {'path': 'a.py'}))
    assert not accepts(('edit', {**GIVEN, 'line': '3'}))
    assert not accepts(('other', {}))
    assert not accepts(('lister', {}))
  # What is accepted is found again.
  text = speech.tokenizer.decode(_turn(speech, right, other))
  found = form.calls(text, _specs())
  assert [(c.name, json.loads(c.arguments)) for c in found] == [right, other]


def test_strict_tools_leave_text_free_up_to_a_call(speech):
  form, tokenizer = chat_format.TemplateFormat(speech), speech.tokenizer
  assert form.held_text(_specs(), True) is None
  rules = form.held_text(_specs(strict=True), True)
  accepts = lambda ids: _accepts(speech, 'text marked?', rules, ids)
  words = tokenizer.encode('Well <tool, then:\n').tolist()
  assert accepts([]) and accepts(words)
  thought = tokenizer.id_of('<think>')
  if thought is not None:
    assert accepts([thought, *words, thought])
  right = _turn(speech, ('edit', GIVEN))
  assert accepts([*words, *right])
  assert not accepts([*words, *_turn(speech, ('edit', {'path': 'a.py'}))])
  # Nothing follows calls, and only one is made where several may not be.
  assert not accepts([*right, *words])
  one = form.held_text(_specs(), False)
  two = _turn(speech, ('edit', GIVEN), ('list', {}))
  assert _accepts(speech, 'text marked?', rules, two)
  assert not _accepts(speech, 'text marked?', one, two)
  assert _accepts(speech, 'text marked?', one, right)
