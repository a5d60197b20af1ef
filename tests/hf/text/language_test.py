"""Laws of speaking a chat template: the tokens are those of transformers."""

import json

import numpy as np
import pytest
import transformers
from transformers.utils import chat_template_utils

from composer_jax.serve.api import chat_format, requests
from composer_jax.tasks.repository import schemas
from composer_jax.text import tool_calls
from tests.hf.text import published_templates as published

FUNCTIONS = [tool.function() for tool in schemas.TOOLS.values()]
PROTOCOL = schemas.prompt(schemas.TOOLS)
PROMPT = f'Restore total in a<b>.py.\n\n{PROTOCOL}'
CALLS = [
  tool_calls.JsonCall(name='read', arguments={'path': 'a<b>.py'}),
  tool_calls.JsonCall(
    name='edit', arguments={'path': 'é', 'old': '"1"\n', 'new': "<|im_end|>'"}
  ),
]
ANSWERS = ['x = 1\n', 'edited <|im_end|></tool_response>']
# Form of calls, whether the template lists tools, and changes earlier turns.
CHOSEN = {
  'qwen3_moe': ('hermes', True, True),
  'qwen2_5': ('hermes', True, False),
  'chatml': ('text', False, False),
  'deepseek_v3': ('deepseek', False, False),
  'deepseek_r1': ('deepseek', False, True),
  'kimi_k2': ('kimi', True, False),
  'llama3': ('text', True, False),
  'mistral': ('text', False, False),
}


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  root = tmp_path_factory.mktemp('published')
  return {name: published.write(root / name, name) for name in CHOSEN}


@pytest.fixture(params=CHOSEN)
def name(request):
  return request.param


def reference(folder, messages, tools, dumps):
  """Returns the ids that transformers gives a prompt, and its text."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  made = []
  for message in messages:
    calls = [dict(c) for c in message.get('tool_calls', ())]
    for call in calls:
      function = call['function']
      if dumps:
        arguments = json.dumps(function['arguments'], ensure_ascii=False)
        call['function'] = {**function, 'arguments': arguments}
    made.append({**message, **({'tool_calls': calls} if calls else {})})
  options = {'tools': tools or None, 'add_generation_prompt': True}
  if dumps:
    # Version 5 of transformers drops content that is null before it renders, on
    # which DeepSeek's templates depend.
    (text,), _ = chat_template_utils.render_jinja_template(
      conversations=[made],
      chat_template=tokenizer.chat_template,
      **{**tokenizer.special_tokens_map, **options},
    )
    return tokenizer(text, add_special_tokens=False)['input_ids'], text
  return (
    tokenizer.apply_chat_template(made, **options)['input_ids'],
    tokenizer.apply_chat_template(made, tokenize=False, **options),
  )


def assistant(speech, call, place):
  text = tool_calls.render_json(call)
  if not speech.is_native:
    return {'role': 'assistant', 'content': text}, 'user'
  number = f'functions.{call.name}:{place}'
  function = {'name': call.name, 'arguments': dict(call.arguments)}
  made = {'id': number, 'type': 'function', 'function': function}
  return {'role': 'assistant', 'content': None, 'tool_calls': [made]}, 'tool'


def answered(message, role, text):
  reply = {'role': role, 'content': text}
  if role == 'tool':
    reply['tool_call_id'] = message['tool_calls'][0]['id']
  return reply


def test_what_was_chosen_is_told(folders, name):
  tokenizer, speech = published.speech(folders[name], FUNCTIONS)
  calls, lists_tools, rewrites = CHOSEN[name]
  assert (speech.calls, speech.lists_tools) == (calls, lists_tools)
  assert speech.rewrites == rewrites
  text = speech.describe()
  assert f"form '{calls}'" in text and ('as sampled' in text) == rewrites
  eos = published.PUBLISHED[name][3]
  assert tokenizer.id_of(eos) in speech.ends


def test_prompts_of_rl_and_of_the_server_are_those_of_transformers(
  folders, name
):
  """Token by token, but for reasoning and ends that the template leaves out."""
  tokenizer, speech = published.speech(folders[name], FUNCTIONS)
  form = chat_format.TemplateFormat(speech)
  native, served = speech.native_functions, []
  if native:
    served = [requests.ToolSpec.model_validate(f) for f in native]
  dialogue = speech.dialogue(PROMPT, PROTOCOL)
  window_T = dialogue.opening_T
  prompt = PROMPT
  if speech.is_native:
    prompt = PROMPT.removesuffix(PROTOCOL).rstrip()
    if not speech.lists_tools:
      prompt = f'{prompt}\n\n{speech._listing()}'
  messages = [{'role': 'user', 'content': prompt}]
  # A second call of DeepSeek's is written by another rule than its first.
  count = 1 if name.startswith('deepseek') else 2
  for place in range(count + 1):
    # Spelled special tokens become text here, and tokens in transformers.
    spelled = any(x in str(messages) for x in tokenizer._specials)
    ids, text = reference(folders[name], messages, native, speech._dumps)
    options = {'tools': native, 'add_generation_prompt': True}
    np.testing.assert_array_equal(
      form.encode(_sent(messages), served), speech.encode(messages, **options)
    )
    ours = tokenizer.decode(window_T)
    if place and name == 'qwen3_moe':
      ours = ours.replace('<think>\n\n</think>\n\n', '')
    if place and name.startswith('deepseek'):
      ours = ours.replace('<｜tool▁calls▁end｜><｜end▁of▁sentence｜>', '')
      ours = ours.replace('<think>\n\n</think>\n\n', '')
    assert ours == text
    if not (spelled or (place and ours != tokenizer.decode(window_T))):
      assert window_T.tolist() == ids
    if place == count:
      break
    call = CALLS[place]
    turn_T = speech.written(tool_calls.render_json(call), place)
    said = dialogue.read(turn_T, True)
    assert said.calls == (tool_calls.render_json(call),) and not said.fault
    answer_T = dialogue.answer([ANSWERS[place]])
    window_T = np.concatenate([window_T, turn_T, answer_T])
    message, role = assistant(speech, call, place)
    messages += [message, answered(message, role, ANSWERS[place])]


def test_whole_conversations_have_the_ids_of_transformers(folders, name):
  _, speech = published.speech(folders[name], FUNCTIONS)
  message, role = assistant(speech, CALLS[0], 0)
  messages = [
    {'role': 'user', 'content': PROMPT},
    *(message, answered(message, role, ANSWERS[0])),
  ]
  native = speech.native_functions
  ids, _ = reference(folders[name], messages, native, speech._dumps)
  ours = speech.encode(messages, tools=native, add_generation_prompt=True)
  assert ours.tolist() == ids


def _sent(messages):
  """Messages as OpenAI's clients send them: arguments are text."""
  sent = []
  for message in messages:
    calls = []
    for call in message.get('tool_calls', ()):
      arguments = json.dumps(call['function']['arguments'])
      calls.append(
        {**call, 'function': {**call['function'], 'arguments': arguments}}
      )
    sent.append({**message, **({'tool_calls': calls} if calls else {})})
  return sent
