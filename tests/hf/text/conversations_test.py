"""Conversations of the user's become documents, or an error with the line."""

import json

import numpy as np
import pytest
import transformers

from composer_jax import wiring
from composer_jax.hf.text import conversations
from configs.composer import tiny
from tests.hf.text import chat_template_test
from tests.hf.text import published_templates as published

TALK, CALLS = chat_template_test.TALK, chat_template_test.CALLS


# Chat templates that mark what the assistant says, for transformers' own mask.
MARKED = ('qwen', 'deepseek')


@pytest.fixture(scope='module')
def speech(tmp_path_factory):
  folder = published.write(tmp_path_factory.mktemp('import'), 'qwen2_5')
  return published.speech(folder)[1]


def read(path, speech, *lines, seq_len=2000):
  path.write_text('\n'.join(lines) + '\n', errors='surrogateescape')
  return conversations.documents(path, speech, seq_len)


def test_each_line_is_what_the_template_makes_of_it(speech, tmp_path):
  values = [
    {'messages': TALK},
    {'messages': CALLS, 'tools': chat_template_test.TOOLS},
  ]
  documents = read(tmp_path / 'x', speech, *[json.dumps(v) for v in values])
  assert len(documents) == 2
  decode, end = speech.tokenizer.decode, '<|im_end|>'
  for (tokens_T, mask_T), value in zip(documents, values, strict=True):
    messages = value.pop('messages')
    whole = decode(speech.encode(messages, **value))
    text = decode(tokens_T)
    assert whole.startswith(text) and text.endswith(end)
    assert mask_T[-1] and not mask_T.all()
  said = decode(documents[0][0][documents[0][1]])
  assert said == f'  sum(values) héllo\n{end}Done.{end}'
  called = decode(documents[1][0][documents[1][1]])
  call = '{"name": "read", "arguments": {"path": "a"}}'
  assert called == f'<tool_call>\n{call}\n</tool_call>{end}'
  # A line ends at a line feed, and at nothing else that looks like one.
  odd = json.dumps({'messages': TALK[1:2] + TALK[4:]}, ensure_ascii=False)
  assert len(read(tmp_path / 'x', speech, odd.replace('.', '\u2028'))) == 1


@pytest.mark.parametrize('kind', MARKED)
def test_the_loss_is_where_transformers_sees_the_assistant(kind, tmp_path):
  write, template = chat_template_test.TEMPLATES[kind]
  folder = write(tmp_path, chat_template=template)
  reference = transformers.AutoTokenizer.from_pretrained(folder)
  _, own = published.speech(folder)
  ((tokens_T, mask_T),) = conversations.of_messages(own, TALK[:3], None)
  expected = reference.apply_chat_template(
    TALK[:3], return_dict=True, return_assistant_tokens_mask=True
  )
  size = len(tokens_T)
  assert tokens_T.tolist() == expected['input_ids'][:size]
  marked = expected['assistant_masks'][:size]
  # Transformers also has the empty reasoning that this template puts before.
  learnt = own.tokenizer.decode(tokens_T[mask_T])
  assert learnt.removeprefix('<think>\n\n</think>\n\n') == (
    own.tokenizer.decode(tokens_T[np.array(marked, bool)])
  )


def test_a_token_over_the_border_of_a_turn_has_no_loss(speech):
  markup = 'def total(values):'
  _, offsets = speech.tokenizer.encode_markup(markup)
  shared = next(i for i, (a, b) in enumerate(offsets) if i and b - a > 1)
  border, places = int(offsets[shared][0]) + 1, np.arange(len(offsets))
  for span, learnt in (
    ((border, len(markup)), places > shared),
    ((0, border), places < shared),
    ((0, len(markup)), places >= 0),
  ):
    np.testing.assert_array_equal(speech.masked(markup, [span])[1], learnt)


def test_where_a_template_changes_earlier_turns_a_part_ends(tmp_path):
  folder = published.write(tmp_path, 'qwen3_moe')
  tokenizer, own = published.speech(folder)
  thought = {'role': 'assistant', 'content': 'b', 'reasoning_content': 'why'}
  user = {'role': 'user', 'content': 'a'}
  parts = conversations.of_messages(own, [user, thought, user, thought], None)
  texts = [tokenizer.decode(tokens_T) for tokens_T, _ in parts]
  learnt = [tokenizer.decode(tokens_T[mask_T]) for tokens_T, mask_T in parts]
  assert learnt == ['<think>\nwhy\n</think>\n\nb<|im_end|>'] * 2
  assert texts[1].count('why') == 1 and texts[1].count('<|im_end|>') == 4
  # After tools, and not after a user, Qwen3 keeps reasoning.
  tool = {'role': 'tool', 'content': 'c'}
  parts = conversations.of_messages(own, [user, thought, tool, thought], None)
  assert len(parts) == 1 and tokenizer.decode(parts[0][0]).count('why') == 2
  # DeepSeek-R1 opens turns with reasoning, and drops it once they are over.
  folder = published.write(tmp_path / 'r1', 'deepseek_r1')
  tokenizer, own = published.speech(folder)
  parts = conversations.of_messages(own, [user, thought, user, thought], None)
  learnt = [tokenizer.decode(tokens_T[mask_T]) for tokens_T, mask_T in parts]
  assert learnt == ['why\n</think>\n\nb<｜end▁of▁sentence｜>'] * 2
  assert '<｜Assistant｜>b' in tokenizer.decode(parts[1][0])


def test_the_last_call_of_a_turn_is_ended(tmp_path):
  folder = published.write(tmp_path, 'deepseek_v3')
  tokenizer, own = published.speech(folder)
  user = {'role': 'user', 'content': 'a'}
  function = {'name': 'find', 'arguments': {'word': 'x'}}
  call = {'id': 'call00000', 'type': 'function', 'function': function}
  turn = {'role': 'assistant', 'content': None, 'tool_calls': [call]}
  told = {'role': 'tool', 'tool_call_id': 'call00000', 'content': 'b'}
  said = {'role': 'assistant', 'content': 'c'}
  parts = conversations.of_messages(own, [user, turn, told, said], None)
  learnt = [tokenizer.decode(tokens_T[mask_T]) for tokens_T, mask_T in parts]
  assert learnt[0].endswith(
    '<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
  )
  assert learnt[1] == 'c<｜end▁of▁sentence｜>'
  # It writes the words of a turn, or its calls.
  with pytest.raises(ValueError, match='leaves out the calls of a turn'):
    conversations.of_messages(own, [user, {**turn, 'content': 'w'}], None)
  _, own = published.speech(published.write(tmp_path / 'q', 'qwen2_5'))
  ((tokens_T, _),) = conversations.of_messages(
    own, [user, {**turn, 'content': 'w'}], None
  )
  assert 'find' in own.tokenizer.decode(tokens_T)


@pytest.mark.parametrize(
  'line, message',
  [
    ('{', 'line 2 is not valid JSON'),
    ('[]', 'line 2 is no conversation'),
    ('{"messages": [{"content": "x"}]}', 'line 2 is no conversation'),
    ('{"messages": [], "system": "x"}', 'line 2 is no conversation'),
    ('"\udcff"', r'line 2 is not UTF-8 \(.* 0xff in position 1'),
    (
      '{"messages": [{"role": "assistant", "content": "", "tool_calls": 1}]}',
      r'line 2: .*chat_template\.jinja: the chat template fails',
    ),
    (
      json.dumps({'messages': TALK[:2]}),
      'line 2: no message has the role assistant',
    ),
  ],
)
def test_a_line_that_cannot_be_learnt_is_named(speech, tmp_path, line, message):
  good = json.dumps({'messages': TALK})
  with pytest.raises(ValueError, match=f'talks.jsonl, {message}'):
    read(tmp_path / 'talks.jsonl', speech, good, line)


def test_what_does_not_fit_is_told_with_its_length(speech, tmp_path):
  good = json.dumps({'messages': TALK})
  ((tokens_T, _),) = read(tmp_path / 'x', speech, good)
  size = len(tokens_T)
  read(tmp_path / 'x', speech, good, seq_len=size)
  with pytest.raises(
    ValueError, match=rf'line 1: {size} tokens .*sft\.seq_len \({size - 1}\)'
  ):
    read(tmp_path / 'x', speech, good, seq_len=size - 1)
  (tmp_path / 'x').write_text('')
  with pytest.raises(ValueError, match='holds no conversation'):
    conversations.documents(tmp_path / 'x', speech, 9)


def test_what_is_kept_is_what_was_made(tmp_path):
  documents = [
    (np.array([3, 1, 4], np.int32), np.array([True, False, True])),
    (np.array([1], np.int32), np.array([False])),
  ]
  for pairs in (documents, documents[:1]):
    conversations.save(tmp_path / 'kept.npz', pairs)
    read = conversations.load(tmp_path / 'kept.npz')
    assert len(read) == len(pairs)
    for pair, other in zip(pairs, read, strict=True):
      for array, same in zip(pair, other, strict=True):
        assert array.dtype == same.dtype
        np.testing.assert_array_equal(array, same)


def test_a_model_of_our_own_has_no_form_of_speech():
  config = tiny.get_config('smoke')
  config.demonstrations.conversations = 'talks.jsonl'
  with pytest.raises(ValueError, match="'talks.jsonl'.*--config.initial"):
    wiring.spec_of(config.to_dict())
