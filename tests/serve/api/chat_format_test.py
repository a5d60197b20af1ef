"""Conversations go in by the checkpoint's template, and calls come out."""

import json

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.hf.text import chat_template, language
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.rollout import sessions
from composer_jax.serve import generation
from composer_jax.serve.api import chat_format, errors, requests
from tests.hf.text import chat_template_test as templates
from tests.hf.text import published_templates, tokenizer_files

TOOLS = [
  requests.ToolSpec.model_validate(
    {'type': 'function', 'function': {'name': name, 'parameters': {}}}
  )
  for name in ('read', 'edit')
]
CALLS = [('read', {'path': 'a<b>.py'}), ('edit', {'lines': {'3': '}'}, 'n': 1})]


@pytest.fixture(scope='module')
def qwen(tmp_path_factory):
  folder = tokenizer_files.qwen(
    tmp_path_factory.mktemp('qwen'), chat_template=templates.QWEN
  )
  tokenizer = hf_tokenizer.ImportedTokenizer.from_folder(folder, 400)
  return tokenizer, language.from_folder(folder, tokenizer)


def _written(family):
  if family == 'hermes':
    return 'So:\n' + '\n'.join(
      f'<tool_call>\n{json.dumps({"name": n, "arguments": a})}\n</tool_call>'
      for n, a in CALLS
    )
  if family == 'deepseek':
    calls = ''.join(
      f'<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n'
      f'{json.dumps(a)}\n```<｜tool▁call▁end｜>'
      for n, a in CALLS
    )
    return f'So:\n<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>'
  if family == 'deepseek 3.1':
    calls = ''.join(
      f'<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>'
      for n, a in CALLS
    )
    return f'So:\n<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>'
  calls = ''.join(
    f'<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>'
    f'{json.dumps(a)}<|tool_call_end|>'
    for i, (n, a) in enumerate(CALLS)
  )
  return f'So:\n<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>'


@pytest.mark.parametrize(
  'family', ['hermes', 'deepseek', 'deepseek 3.1', 'kimi']
)
def test_calls_of_each_family_are_found(qwen, family):
  form = chat_format.TemplateFormat(qwen[1])
  calls = form.calls(_written(family), TOOLS)
  assert [(c.name, json.loads(c.arguments)) for c in calls] == CALLS
  assert any(mark in _written(family) for mark in form.mark(TOOLS))
  # One that is not listed, or damaged, and none of them is a call.
  assert form.calls(_written(family), TOOLS[:1]) is None
  assert form.calls(_written(family).replace('"n": 1', '"n": '), TOOLS) is None
  assert form.mark([]) == ()


@pytest.mark.parametrize('size', [1, 7, 1000])
@pytest.mark.parametrize('family', ['hermes', 'deepseek', 'kimi'])
def test_text_streams_up_to_the_first_call(qwen, tokenizer, family, size):
  form = chat_format.TemplateFormat(qwen[1])
  text = 'a < b <tool' + _written(family)
  ids = [tokenizer._bytes.index(bytes([b])) for b in text.encode()] + [
    tokenizer.END
  ]
  choice = generation.GrowingAnswer(
    0, tokenizer, (tokenizer.END,), form=form, tools=TOOLS
  )
  parts = []
  for start in range(0, len(ids), size):
    event = _tokens(ids[start : start + size])
    parts.append(choice.add(event).text)
  # What cannot be a call is given out at once.
  assert ''.join(parts) == 'a < b <toolSo:\n'
  parts.append(choice.end(_end(ids)).text)
  assert ''.join(parts) == 'a < b <toolSo:\n'
  assert choice.finish == 'tool_calls'
  assert [(c.name, json.loads(c.arguments)) for c in choice.calls] == CALLS


def _tokens(ids):
  zeros_T, none_TX = np.zeros(len(ids), np.float32), np.zeros((len(ids), 0))
  return sessions.SampledTokens(
    session='a',
    position=0,
    tokens_T=np.array(ids, np.int32),
    logprobs_T=zeros_T,
    raw_logprobs_T=zeros_T,
    policy_version_T=zeros_T.astype(np.int32),
    context_version_T=zeros_T.astype(np.int32),
    top_ids_TX=none_TX.astype(np.int32),
    top_logprobs_TX=none_TX.astype(np.float32),
  )


def _end(ids):
  event = _tokens(ids)
  return records.Completion(
    session='a',
    tokens_T=event.tokens_T,
    logprobs_T=event.logprobs_T,
    policy_version_T=event.policy_version_T,
    consumed_expert_ids_TMA=np.zeros((0, 1, 1), np.uint16),
    stopped=True,
  )


def test_the_template_tells_of_tools_and_earlier_calls(qwen):
  tokenizer, speech = qwen
  call = {
    'id': 'call_1',
    'type': 'function',
    # As OpenAI's clients send them.
    'function': {'name': 'read', 'arguments': '{"path": "a"}'},
  }
  messages = [
    {'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]},
    {'role': 'assistant', 'tool_calls': [call]},
    {'role': 'tool', 'tool_call_id': 'call_1', 'content': 'x = 1'},
  ]
  ids = chat_format.TemplateFormat(qwen[1]).encode(messages, TOOLS)
  plain = [
    {'role': 'user', 'content': 'Hi'},
    {
      'role': 'assistant',
      'tool_calls': [
        {'function': {'name': 'read', 'arguments': {'path': 'a'}}}
      ],
    },
    {'role': 'tool', 'content': 'x = 1'},
  ]
  tools = [t.model_dump(exclude_none=True) for t in TOOLS]
  wanted = speech.encode(plain, tools=tools, add_generation_prompt=True)
  np.testing.assert_array_equal(ids, wanted)
  text = tokenizer.decode(ids)
  assert '"name": "edit"' in text and text.endswith('assistant\n')
  assert '{"name": "read", "arguments": {"path": "a"}}' in text


@pytest.mark.parametrize(
  'messages, param',
  [
    ([{'role': 'robot', 'content': 'x'}], 'messages.0.role'),
    ([{'content': 'x'}], 'messages.0.role'),
    (
      [
        {'role': 'user', 'content': 'x'},
        {
          'role': 'assistant',
          'tool_calls': [{'function': {'name': 'read', 'arguments': '{'}}],
        },
      ],
      'messages.tool_calls',
    ),
  ],
)
def test_a_message_that_is_none_is_named(qwen, messages, param):
  with pytest.raises(errors.ApiError) as caught:
    chat_format.TemplateFormat(qwen[1]).encode(messages, [])
  assert (caught.value.status, caught.value.param) == (400, param)


def _format(qwen, source):
  template = chat_template.ChatTemplate(source, {}, 'a template')
  return chat_format.TemplateFormat(
    language.TemplateLanguage(qwen[0], template, ends=[qwen[0].END])
  )


SILENT = """
{%- for m in messages %}
  {%- if m.role in ('system', 'user', 'assistant') %}{{ m.content }};{% endif %}
{%- endfor %}"""
USER = [{'role': 'user', 'content': 'x'}]


def test_what_the_template_refuses_is_the_clients_fault(qwen):
  refusing = "{% if 'y' in messages[0].content %}"
  refusing += "{{ raise_exception('Not today') }}{% endif %}{{ tools }}"
  form = _format(qwen, refusing + templates.QWEN)
  for tools in ([], TOOLS):
    with pytest.raises(errors.ApiError, match='Not today') as caught:
      form.encode([{'role': 'user', 'content': 'y'}], tools)
    assert (caught.value.status, caught.value.param) == (400, 'messages')


def test_what_a_template_leaves_out_is_told(qwen):
  form = _format(qwen, SILENT)
  messages = [{'role': 'developer', 'content': 'Be brief'}, *USER]
  text = qwen[0].decode(form.encode(messages, []))
  assert text.split() == ['Be', 'brief;x;']
  with pytest.raises(
    errors.ApiError, match='tells the model of no tools'
  ) as caught:
    form.encode(USER, TOOLS)
  assert (caught.value.status, caught.value.param) == (400, 'tools')
  with pytest.raises(errors.ApiError, match="'observation' and must be"):
    form.encode([{'role': 'observation', 'content': 'x'}], [])


def test_deepseeks_tools_are_told_by_the_system(tmp_path):
  """Its template leaves out tools, and writes the calls of earlier turns."""
  folder = published_templates.write(tmp_path / 'model', 'deepseek_v3')
  tokenizer, speech = published_templates.speech(folder)
  form = chat_format.TemplateFormat(speech)
  lines = [json.dumps(t.function.model_dump(exclude_none=True)) for t in TOOLS]
  told = '\n'.join(['You may call these tools:', *lines])
  text = lambda *messages, tools=TOOLS: tokenizer.decode(
    form.encode([*messages], tools)
  )
  alone = text(*USER)
  assert alone.startswith(f'<｜begin▁of▁sentence｜>{told}<｜User｜>x')
  system = {'role': 'developer', 'content': 'Be brief'}
  assert f'Be brief\n\n{told}<｜User｜>' in text(system, *USER)
  assert 'You may call' not in text(system, *USER, tools=[])
  call = {'name': 'read', 'arguments': '{"path": "a.py"}'}
  turn = {'role': 'assistant', 'content': None}
  turn['tool_calls'] = [{'id': 'a', 'type': 'function', 'function': call}]
  said = text(*USER, turn, {'role': 'tool', 'content': 'text'})
  assert '<｜tool▁sep｜>read' in said and 'output▁begin｜>text' in said
  # And what it samples in that form comes back as calls.
  (found,) = form.calls(
    _written('deepseek').split('\n```<')[0]
    + ('\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    TOOLS,
  )
  assert found.name == 'read'
