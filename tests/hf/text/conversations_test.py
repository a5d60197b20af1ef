"""Conversations of the user's become documents, or an error with the line."""

import json

import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.hf.text import chat_template, conversations
from composer_jax.hf.text import tokenizer as hf_tokenizer
from configs.composer import tiny
from tests.hf.text import chat_template_test, tokenizer_files

TALK, CALLS = chat_template_test.TALK, chat_template_test.CALLS


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('import')
  return tokenizer_files.qwen(path, chat_template=chat_template_test.QWEN)


@pytest.fixture(scope='module')
def tokenizer(folder):
  return hf_tokenizer.ImportedTokenizer.from_folder(folder, 400)


def read(path, folder, tokenizer, *lines, seq_len=2000):
  path.write_text('\n'.join(lines) + '\n', errors='surrogateescape')
  template = chat_template.load(folder)
  return conversations.documents(path, template, tokenizer, seq_len)


def test_each_line_is_what_the_template_makes_of_it(
  folder, tokenizer, tmp_path
):
  values = [
    {'messages': TALK},
    {'messages': CALLS, 'tools': chat_template_test.TOOLS},
  ]
  documents = read(
    tmp_path / 'x', folder, tokenizer, *[json.dumps(v) for v in values]
  )
  template = chat_template.load(folder)
  assert len(documents) == 2
  for (tokens_T, mask_T), value in zip(documents, values):
    messages = value.pop('messages')
    assert tokenizer.decode(tokens_T) == template.render(messages, **value)
    assert mask_T.any() and not mask_T.all()
  # A line ends at a line feed, and at nothing else that looks like one.
  odd = json.dumps({'messages': TALK[1:2] + TALK[4:]}, ensure_ascii=False)
  assert (
    len(read(tmp_path / 'x', folder, tokenizer, odd.replace('.', '\u2028')))
    == 1
  )
  words = tokenizer.decode(documents[0][0][documents[0][1]])
  assert words == '  sum(values) héllo\n<|im_end|>Done.<|im_end|>'


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
      r'line 2: .*tokenizer_config\.json: the chat template fails',
    ),
    (
      json.dumps({'messages': TALK[:2]}),
      'line 2: the chat template marks nothing .* generation .*jinja',
    ),
  ],
)
def test_a_line_that_cannot_be_learnt_is_named(
  folder, tokenizer, tmp_path, line, message
):
  good = json.dumps({'messages': TALK})
  with pytest.raises(ValueError, match=f'talks.jsonl, {message}'):
    read(tmp_path / 'talks.jsonl', folder, tokenizer, good, line)


def test_what_does_not_fit_is_told_with_its_length(folder, tokenizer, tmp_path):
  good = json.dumps({'messages': TALK})
  ((tokens_T, _),) = read(tmp_path / 'x', folder, tokenizer, good)
  size = len(tokens_T)
  read(tmp_path / 'x', folder, tokenizer, good, seq_len=size)
  with pytest.raises(
    ValueError, match=rf'line 1: {size} tokens .*sft\.seq_len \({size - 1}\)'
  ):
    read(tmp_path / 'x', folder, tokenizer, good, seq_len=size - 1)
  (tmp_path / 'x').write_text('')
  with pytest.raises(ValueError, match='holds no conversation'):
    conversations.documents(
      tmp_path / 'x', chat_template.load(folder), tokenizer, 9
    )


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
