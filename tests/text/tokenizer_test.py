"""Laws of the tokenizer: lossless, deterministic, specials unspellable."""

import numpy as np
import pytest

from composer_jax.text import tokenizer as tokenizer_lib

TEXTS = [
  'def total(values):\n  """Adds."""\n  return sum(v for v in values)\n' * 8,
  'for index in range(10):\n    if index > 3:\n        print(index)\n' * 8,
]


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train(TEXTS, 300)


@pytest.mark.parametrize(
  'text',
  ['', ' ', '\n\n\t x', 'é😀 naïve', 'a\r\nb\rc', '\0', *TEXTS],
)
def test_decode_inverts_encode(tokenizer, text):
  ids = tokenizer.encode(text)
  assert ids.dtype == np.int32
  assert tokenizer.decode(ids) == text


def test_every_byte_is_a_token(tokenizer):
  data = [tokenizer.decode_bytes([i]) for i in range(10, 266)]
  assert sorted(data) == [bytes([i]) for i in range(256)]


def test_no_text_spells_a_special_token(tokenizer):
  """Also not when trained on text full of their spellings."""
  spelled = ''.join(tokenizer_lib.SPECIALS)
  poisoned = tokenizer_lib.Tokenizer.train([spelled * 50, *TEXTS], 400)
  for t in (tokenizer, poisoned):
    ids = t.encode(spelled)
    assert ids.min() >= len(tokenizer_lib.SPECIALS)
    assert t.decode(ids) == spelled


def test_special_ids_are_fixed(tokenizer):
  t = tokenizer
  specials = [t.PAD, t.BOS, t.EOD, t.USER, t.CALL, t.TOOL, t.END]
  specials += [t.FIM_PREFIX, t.FIM_MIDDLE, t.FIM_SUFFIX]
  assert specials == list(range(10))
  assert t.decode(specials) == ''.join(tokenizer_lib.SPECIALS)


def test_training_is_deterministic_and_survives_disk(tokenizer, tmp_path):
  again = tokenizer_lib.Tokenizer.train(iter(TEXTS), 300)
  assert again.fingerprint() == tokenizer.fingerprint()
  tokenizer.save(tmp_path / 't.json')
  loaded = tokenizer_lib.Tokenizer.load(tmp_path / 't.json')
  assert loaded.fingerprint() == tokenizer.fingerprint()
  for text in TEXTS:
    np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))


def test_batch_equals_one_by_one(tokenizer):
  for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
    np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_words_end_where_the_rule_says():
  """Line break with indentation, digits alone, names cut at underscores."""
  text = 'x = 31\n    yy_zz = 42\n\nx'
  greedy = tokenizer_lib.Tokenizer.train([text * 50], 400)
  pieces = [greedy.decode([i]) for i in greedy.encode(text)]
  assert pieces == [
    *('x', ' =', ' 3', '1', '\n    ', 'yy', '_zz', ' =', ' 4', '2', '\n\n'),
    'x',
  ]
  # Nothing more to merge, so the vocabulary stays smaller than allowed.
  assert greedy.vocab_size < 400


def test_vocab_size_counts_everything(tokenizer):
  assert tokenizer.vocab_size == 300
  ids = np.concatenate(tokenizer.encode_batch(TEXTS))
  assert ids.max() < 300


def test_lone_surrogates_do_not_break_encoding(tokenizer):
  assert tokenizer.decode(tokenizer.encode('a\ud800b')) == 'a?b'


def test_errors_name_value_and_rule(tokenizer, tmp_path):
  with pytest.raises(ValueError, match=r'vocab_size \(200\).*266'):
    tokenizer_lib.Tokenizer.train(TEXTS, 200)
  with pytest.raises(ValueError, match='none of 1 texts'):
    tokenizer_lib.Tokenizer.train([''], 300)
  with pytest.raises(ValueError, match='outside this vocabulary of 300'):
    tokenizer.decode([300])
  path = tmp_path / 'x.json'
  path.write_text('{"format": "other"}')
  with pytest.raises(ValueError, match=r'x\.json is not a tokenizer'):
    tokenizer_lib.Tokenizer.load(path)
