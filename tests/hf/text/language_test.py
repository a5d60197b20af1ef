"""Laws of speaking a chat template: the tokens are those of transformers."""

import functools
import json
import shutil

import numpy as np
import pytest
import transformers
from transformers.utils import chat_template_utils

from composer_jax.agent import environment, episode, summarize
from composer_jax.core import records, turns
from composer_jax.hf.text import call_formats, language
from composer_jax.serve.api import chat_format, requests
from composer_jax.tasks import mistakes
from composer_jax.tasks.repository import schemas, scripts
from composer_jax.text import tool_calls
from tests.hf.text import published_templates as published

TOOLS = {name: schemas.TOOLS[name] for name in ('read', 'edit', 'finish')}
FUNCTIONS = [tool.function() for tool in TOOLS.values()]
PROTOCOL = schemas.prompt(TOOLS)
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
  'deepseek_v3': ('deepseek', False, True),
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


loaded = functools.cache(transformers.AutoTokenizer.from_pretrained)


def reference(folder, messages, tools, dumps):
  """Returns the ids that transformers gives a prompt, and its text."""
  tokenizer = loaded(folder)
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


@pytest.mark.parametrize(
  'old, new',
  [
    ('{%- for message in messages %}', '{%- for message in messages[-3:] %}'),
    ('{{- message.content }}', '{{- message.content[:: -1] if loop.last }}'),
    (
      '{%- for tool_call in message.tool_calls %}',
      '{%- for tool_call in message.tool_calls if messages|length < 9 %}',
    ),
    (
      '{%- for message in messages %}',
      '{%- set ns = namespace(last=-1) %}'
      '{%- for message in messages if message.role == "assistant" and not '
      'message.tool_calls %}{% set ns.last = messages.index(message) %}'
      '{%- endfor %}{%- for message in messages %}'
      '{{- message.reasoning_content if loop.index0 > ns.last }}',
    ),
  ],
  ids=['last messages', 'answers', 'calls', 'reasoning of calls'],
)
def test_templates_that_change_earlier_turns_are_named(
  folders, tmp_path, old, new
):
  folder = tmp_path / 'changed'
  shutil.copytree(folders['qwen2_5'], folder)
  path = folder / 'chat_template.jinja'
  source = path.read_text()
  assert old in source
  path.write_text(source.replace(old, new))
  _, speech = published.speech(folder, FUNCTIONS)
  assert (speech.calls, speech.rewrites) == ('hermes', True)


def test_prompts_of_rl_and_of_the_server_are_those_of_transformers(
  folders, name
):
  """Token by token, but for reasoning and ends that the template leaves out."""
  tokenizer, speech = published.speech(folders[name], FUNCTIONS)
  form = chat_format.TemplateFormat(speech)
  native, served = speech.listed, []
  if native:
    served = [requests.ToolSpec.model_validate(f) for f in native]
  dialogue = speech.dialogue(PROMPT, PROTOCOL)
  window_T = dialogue.opening_T
  prompt = PROMPT
  if speech.is_native:
    prompt = PROMPT.removesuffix(PROTOCOL).rstrip()
    if not speech.lists_tools:
      prompt = f'{prompt}\n\n{speech._listing}'
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
  native = speech.listed
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


class Desk(environment.Environment):
  """Answers calls of tools as JSON, and says which it was asked."""

  task_id, prompt, protocol = 'desk', PROMPT, PROTOCOL
  tools = ('read', 'edit', 'finish')

  def __init__(self):
    self.asked = []

  def call(self, text):
    self.asked.append(text)
    name = tool_calls.parse_json(text).name
    if name not in self.tools:
      return environment.ToolResult(
        text='error: no such tool', tool='', outcome=turns.UNKNOWN_TOOL
      )
    return environment.ToolResult(
      text=f'done {len(self.asked)} <|im_end|>',
      tool=name,
      is_final=name == 'finish',
    )

  def verdict(self, finished):
    return records.Verdict(
      status=records.GRADED,
      passed=finished,
      num_passed=int(finished),
      num_tests=1,
      sandbox_level='static',
    )


class Tape:
  """Samples given ids, turn by turn."""

  def __init__(self, tokenizer, tape):
    self._tokenizer, self._tape, self.requests = tokenizer, list(tape), []

  def complete(self, request):
    is_first = all(r.session != request.session for r in self.requests)
    self.requests.append(request)
    ids = np.array(self._tape.pop(0), np.int32)[: request.max_new_tokens]
    count = len(request.context_T) + len(ids) - is_first
    return records.Completion(
      session=request.session,
      tokens_T=ids,
      logprobs_T=np.zeros(len(ids), np.float32),
      policy_version_T=np.zeros(len(ids), np.int32),
      consumed_expert_ids_TMA=np.zeros((count, 1, 1), np.uint16),
      stopped=int(ids[-1]) in request.stop_tokens,
    )

  def close(self, session):
    del session


def play(tokenizer, tape, env, summary=summarize.OFF, **changes):
  options = episode.EpisodeOptions(
    **{**dict(max_tokens=30_000, max_call_tokens=200), **changes}
  )
  policy = Tape(tokenizer, tape)
  rollout = episode.run(
    *(env, policy, tokenizer, options),
    group=0,
    member=0,
    seed=0,
    summary=summary,
    hints=mistakes.HintOptions().write,
  )
  return rollout, policy


def call_of(name, **arguments):
  call = tool_calls.JsonCall(name=name, arguments=arguments)
  return tool_calls.render_json(call)


def test_windows_are_only_appended_to(folders, name):
  """Faulty turns, cut turns and hints, in every published form."""
  tokenizer, speech = published.speech(folders[name], FUNCTIONS)
  encode, end = tokenizer.encode, speech.ends[0]
  beyond, opening = tokenizer.vocab_size + 3, speech.dialogue(PROMPT).opening_T
  tape = [
    speech.written(call_of('read', path='a')),
    [*encode('hm'), beyond, end],
    [*encode('x' * 400)],
    [*encode('{"tool": '), opening[0], end],
    speech.written(call_of('look')),
    speech.written(call_of('finish'), 2),
  ]
  env = Desk()
  rollout, policy = play(tokenizer, tape, env)
  assert rollout.verdict.passed and env.asked == [
    *(call_of('read', path='a'), call_of('look'), call_of('finish')),
  ]
  (window,) = rollout.trajectories
  parts = [r.context_T for r in policy.requests]
  made = [np.array(t, np.int32)[:200] for t in tape]
  whole = [part for pair in zip(parts, made, strict=True) for part in pair]
  np.testing.assert_array_equal(window.tokens_T, np.concatenate(whole))
  sampled = [np.full(len(p), i % 2, bool) for i, p in enumerate(whole)]
  np.testing.assert_array_equal(window.loss_mask_T, np.concatenate(sampled))
  outcomes = [t.outcome for t in rollout.turns]
  wrong = [turns.NOT_A_CALL] * 3
  assert outcomes == [turns.OK, *wrong, turns.UNKNOWN_TOOL, turns.OK]
  assert [h.kind for h in rollout.hints] == ['not_a_call'] * 3 + [
    'unknown_tool'
  ]
  # A turn that was cut off is ended by the host, one that ended is not.
  closed = [end in p[:2].tolist() for p in parts[1:]]
  assert closed[2] and not closed[0] and not closed[1]
  texts = [m['text'] for m in episode.turns(rollout, tokenizer)]
  assert call_of('read', path='a') in texts and f'hm<{beyond}>' in texts
  # What a tool prints ends no message.
  assert '<|im_end|>' in tokenizer.decode(parts[1])
  count = parts[1].tolist().count(end)
  calm_T = encode('done 1 <|im_end|>')
  assert end not in calm_T.tolist() and count <= 1 + (name == 'mistral')


def test_a_turn_is_closed_once(folders):
  tokenizer, speech = published.speech(folders['qwen2_5'], FUNCTIONS)
  turn = {'role': 'assistant', 'tool_calls': [{}]}
  calls, end = tokenizer.mark('<tool_call>a'), tokenizer.mark('<|im_end|>')
  closing = tokenizer.mark('</tool_call>')
  for body in (calls, calls + closing, f'{calls}{closing}{end}\n'):
    assert speech.closed(body, turn) == calls + closing + end
  assert speech.closed('a', {'role': 'assistant'}) == f'a{end}'


def test_answers_are_written_as_after_the_turns_before_them(folders):
  """DeepSeek-V3 opens its outputs once, and then only goes on with them."""
  tokenizer, speech = published.speech(folders['deepseek_v3'], FUNCTIONS)
  dialogue, answers = speech.dialogue(PROMPT, PROTOCOL), []
  for place in range(3):
    dialogue.read(speech.written(call_of('read', path='a'), place), True)
    answers.append(tokenizer.decode(dialogue.answer(['x'])))
  one = '<｜tool▁output▁begin｜>x<｜tool▁output▁end｜><｜tool▁outputs▁end｜>'
  assert answers == [f'<｜tool▁outputs▁begin｜>{one}', f'\n{one}', f'\n{one}']


@pytest.mark.parametrize('name', ['qwen3_moe', 'kimi_k2', 'deepseek_v3'])
def test_several_calls_of_a_turn_are_carried_out(folders, name):
  tokenizer, speech = published.speech(folders[name], FUNCTIONS)
  one = speech.written(call_of('read', path='a'))
  text = tokenizer.decode(one[:-1])
  begin, end = (speech._format.marks[i] for i in (0, -1))
  body = text[text.index(begin) + len(begin) : text.index(end)]
  joined = f'{begin}{body}{body}{end}'
  if name == 'qwen3_moe':
    joined = f'{begin}{body}{end}\n{begin}{body}{end}'
  both = [*speech.ids(tokenizer.mark(joined)), speech.ends[0]]
  env = Desk()
  rollout, policy = play(
    tokenizer, [both, speech.written(call_of('finish'), 2)], env
  )
  assert env.asked == [call_of('read', path='a')] * 2 + [call_of('finish')]
  answer = tokenizer.decode(policy.requests[1].context_T)
  assert 'done 1' in answer and 'done 2' in answer
  assert rollout.num_turns == 2 and rollout.verdict.passed


@pytest.mark.parametrize('name', ['qwen3_moe', 'mistral', 'deepseek_r1'])
def test_a_new_window_begins_as_the_template_renders_it(folders, name):
  tokenizer, speech = published.speech(folders[name], FUNCTIONS)
  opening = len(speech.dialogue(PROMPT, PROTOCOL).opening_T)
  summary = summarize.SummaryOptions(
    trigger=opening + 700, max_tokens=60, max_summaries=1
  )
  thought = (
    '<think>\nsecret\n</think>\n\nread it' if speech.is_native else 'read it'
  )
  tape = [speech.written(call_of('read', path='a'))] * 3
  calls = [*tape, [*tokenizer.encode(thought), speech.ends[0]]]
  env = Desk()
  asked = []

  class Counting(Tape):
    def complete(self, request):
      text = tokenizer.decode(request.context_T)
      is_query = summary.query in text
      asked.append(is_query)
      self._tape.insert(0, calls[-1] if is_query else calls[0])
      if len(asked) > 2 and not is_query and any(asked):
        self._tape[0] = speech.written(call_of('finish'))
      return super().complete(request)

  rollout = episode.run(
    env,
    Counting(tokenizer, []),
    tokenizer,
    episode.EpisodeOptions(
      max_tokens=30_000, max_call_tokens=150, max_turns=40
    ),
    group=0,
    member=0,
    seed=0,
    summary=summary,
  )
  first, second = rollout.trajectories
  assert len(first) <= summary.trigger and rollout.verdict.passed
  text = tokenizer.decode(second.tokens_T)
  assert 'summary 1\nread it' in text and 'secret' not in text
  assert 'done' in text and second.loss_mask_T.any()
  head = second.loss_mask_T.tolist().index(True)
  messages = tokenizer.decode(second.tokens_T[:head])
  assert messages.count('Restore total') == 1


@pytest.mark.parametrize('name', ['qwen2_5', 'deepseek_v3', 'llama3'])
def test_the_gold_policy_speaks_it(folders, name):
  tokenizer, speech = published.speech(folders[name], FUNCTIONS)
  calls = [call_of('read', path='a'), call_of('edit'), call_of('finish')]
  env = Desk()
  rollout = episode.run(
    env,
    scripts.ScriptedCalls(tokenizer, calls),
    tokenizer,
    episode.EpisodeOptions(max_tokens=30_000, max_call_tokens=400),
    group=0,
    member=0,
    seed=0,
  )
  assert env.asked == calls and rollout.num_invalid == 0
  assert rollout.verdict.passed


@pytest.mark.parametrize('form', ['hermes', 'deepseek', 'kimi'])
def test_marks_in_an_argument_are_words(form):
  call_format = call_formats.FORMATS[form]
  end = call_format.marks[1 if form == 'hermes' else 3]
  open_call = {
    'hermes': '<tool_call>\n{"name": "f", "arguments": ',
    'deepseek': '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n',
    'kimi': '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>',
  }[form]
  closing = {'hermes': '}\n', 'deepseek': '\n```', 'kimi': ''}[form]

  def written(text):
    return f'{open_call}{text}{closing}{end}\n'

  words = {'new': f'a "b" {{}}{end} \\'}
  found = call_format.find(written(json.dumps(words)) * 2)
  assert [(c.name, c.arguments) for c in found] == [('f', words)] * 2
  for damaged in ('{"a": "x}', '{"a": x}', '{"a" "x"}'):
    both = call_format.marks[0] + written(damaged) + written('{}')
    assert call_format.find(both) is None
    assert call_format.find(written('{}') + written(damaged)) is None


def test_what_was_kept_speaks_as_the_import_does(folders, tmp_path):
  tokenizer, speech = published.speech(
    folders['qwen3_moe'], FUNCTIONS, variables='{"enable_thinking": false}'
  )
  tokenizer.save(tmp_path / 'tokenizer.json')
  path = tmp_path / language.FILE
  language.save(path, speech)
  again = language.load_any(tmp_path / 'tokenizer.json', FUNCTIONS)
  ours, theirs = (
    t.language.dialogue(PROMPT, PROTOCOL).opening_T for t in (tokenizer, again)
  )
  np.testing.assert_array_equal(ours, theirs)
  assert tokenizer.decode(ours).endswith('<think>\n\n</think>\n\n')
  assert again.language.ends == speech.ends
  path.write_text('{}')
  with pytest.raises(ValueError, match='language.json is not a language'):
    language.load_any(tmp_path / 'tokenizer.json')


def test_what_cannot_be_spoken_is_named(folders, tmp_path):
  with pytest.raises(ValueError, match="no calls in the form 'kimi'"):
    published.speech(folders['chatml'], FUNCTIONS, calls='kimi')
  for options in ({'calls': 'xml'}, {'variables': '[1]'}):
    with pytest.raises(ValueError, match=next(iter(options))):
      language.LanguageOptions(**options)
  assert published.speech(folders['qwen3_moe'], calls='roles')[1] is None
  assert published.speech(folders['qwen3_moe'], calls='text')[1].calls == 'text'
  folder = published.write(tmp_path, 'chatml')
  (folder / 'chat_template.jinja').write_text('{{ messages[0].content }}')
  with pytest.raises(ValueError, match='leaves out what the assistant said'):
    published.speech(folder)
  (folder / 'chat_template.jinja').unlink()
  assert published.speech(folder)[1] is None
