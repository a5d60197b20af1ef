"""Checks the content of a `tokenizer.json` and gives it the forms needed here.

Nothing is encoded here; `hf.text.tokenizer` does that. The file may be damaged,
or be of a tokenizer that loses text; both are refused with the file's name.
Only the normalizers and pre-tokenizers listed here are known to lose nothing,
so others are refused as well.
"""

import collections
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from composer_jax.core import files
from composer_jax.text import tokenizer as own

_FLAGS = ('single_word', 'lstrip', 'rstrip', 'normalized', 'special')
# Normalizers left out for text, since their changes cannot be undone.
_NORMAL_FORMS = ('NFC', 'NFD', 'NFKC', 'NFKD')
_PRE_TOKENIZERS = ('ByteLevel', 'Digits', 'Punctuation', 'Split')


def read_config(path: pathlib.Path) -> dict[str, Any]:
  """Reads a `tokenizer_config.json`; {} where there is none."""
  value = files.read_json(path) if path.exists() else {}
  if not isinstance(value, dict):
    raise ValueError(f'{os.fspath(path)} holds no JSON object.')
  return value


def checked(source: Any, name: str) -> dict[str, Any]:
  """Returns the content of a `tokenizer.json` that can be trusted."""
  model = source.get('model') if isinstance(source, dict) else None
  if not isinstance(model, dict):
    raise ValueError(f"{name} has no 'model'; is it a tokenizer.json?")
  normalizers = _components(source.get('normalizer'), name)
  pre_tokenizers = _components(source.get('pre_tokenizer'), name)
  is_byte_level = any(c['type'] == 'ByteLevel' for c in pre_tokenizers)
  kind = model.get('type', 'BPE')
  if kind != 'BPE' or not is_byte_level:
    raise ValueError(
      f'{name} is a {kind} model without byte-level pieces: text that it does '
      'not know is lost. Only byte-level BPE can be used.'
    )
  for part in normalizers:
    if part['type'] not in _NORMAL_FORMS:
      raise ValueError(
        f'{name}: the normalizer {part} may lose text. Those that can be used '
        f'are {", ".join(_NORMAL_FORMS)}.'
      )
  for part in pre_tokenizers:
    is_known = part['type'] in _PRE_TOKENIZERS
    if not is_known or part.get('behavior') == 'Removed':
      raise ValueError(
        f'{name}: the pre-tokenizer {part} may lose text. Those that can be '
        f'used are {", ".join(_PRE_TOKENIZERS)}, with no behavior Removed.'
      )
  for key in ('dropout', 'continuing_subword_prefix', 'end_of_word_suffix'):
    if model.get(key):
      raise ValueError(
        f'{name}: {key} ({model[key]!r}) of the model must be absent: the same '
        'text must always give the same ids and come back whole.'
      )
  added = _added(source, name)
  _check_ids(model.get('vocab'), added, name)
  return {**source, 'added_tokens': added}


def _components(part: Any, name: str) -> list[dict[str, Any]]:
  """Returns the steps of a normalizer or pre-tokenizer, sequences unrolled."""
  if part is None:
    return []
  for key in ('normalizers', 'pretokenizers'):
    if isinstance(part, dict) and isinstance(part.get(key), list):
      return [c for inner in part[key] for c in _components(inner, name)]
  if not isinstance(part, dict) or not isinstance(part.get('type'), str):
    raise ValueError(f'{name}: {part!r} is no normalizer or pre-tokenizer.')
  return [part]


def _added(source: dict[str, Any], name: str) -> list[dict[str, Any]]:
  """Returns the added tokens with all their flags."""
  tokens = source.get('added_tokens') or []
  try:
    return [
      {
        'id': int(token['id']),
        'content': str(token['content']),
        **{flag: token.get(flag) is True for flag in _FLAGS},
      }
      for token in tokens
    ]
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{name}: added_tokens is damaged ({type(error).__name__}: {error}); '
      'each token needs an id and a content.'
    ) from error


def _check_ids(vocab: Any, added: list[dict[str, Any]], name: str) -> None:
  if not isinstance(vocab, dict) or not all(
    type(i) is int and i >= 0 for i in vocab.values()
  ):
    raise ValueError(f"{name}: 'vocab' of the model is no {{piece: id}}.")
  pieces = {(content, i) for content, i in vocab.items()}
  pieces |= {(token['content'], token['id']) for token in added}
  for part, what in ((0, 'the piece'), (1, 'the id')):
    counts = collections.Counter(piece[part] for piece in pieces)
    value, count = counts.most_common(1)[0] if counts else ('', 0)
    if count > 1:
      same = sorted(str(p[1 - part]) for p in pieces if p[part] == value)
      raise ValueError(
        f'{name}: {what} {value!r} belongs to {", ".join(same)}; a piece has '
        'one id, and an id one piece.'
      )


def parse(source: dict[str, Any], name: str) -> tokenizers.Tokenizer:
  """Builds the library's tokenizer, in which no text yields a special token.

  Raises:
    ValueError: the library cannot read the file, or numbers a token otherwise.
  """
  try:
    library = tokenizers.Tokenizer.from_str(json.dumps(source))
  except Exception as error:
    # The library raises nothing more precise for a file it cannot read.
    raise ValueError(f'{name} is not a tokenizer.json ({error}).') from error
  for token in source['added_tokens']:
    library_id = library.token_to_id(token['content'])
    if library_id != token['id']:
      raise ValueError(
        f'{name} gives {token["content"]!r} the id {token["id"]}, the library '
        f'tokenizers gives it {library_id}: added tokens that the vocabulary '
        'lacks must follow it in order and without a gap.'
      )
  # The files cannot say so, and without it spellings become special tokens.
  library.encode_special_tokens = True
  return library


def for_markup(
  source: dict[str, Any], roles: Mapping[str, int]
) -> dict[str, Any]:
  """Returns the tokenizer for the text of a chat template.

  The tokens of roles become special, and special tokens are not recognised.
  """
  ids = set(roles.values())
  return {
    **source,
    # These shorten texts, fill them up, or move the offsets of tokens.
    **{'truncation': None, 'padding': None, 'post_processor': None},
    'added_tokens': [
      {**t, 'special': t['special'] or t['id'] in ids}
      for t in source['added_tokens']
    ],
  }


def for_text(
  source: dict[str, Any], roles: Mapping[str, int]
) -> dict[str, Any]:
  """Returns the same tokenizer without the steps that lose bytes."""
  parts = [
    {**part, 'add_prefix_space': False} if part['type'] == 'ByteLevel' else part
    for part in _components(source.get('pre_tokenizer'), '')
  ]
  markup = for_markup(source, roles)
  # A token that takes in the white space around it would lose it.
  bare = {'lstrip': False, 'rstrip': False}
  return {
    **markup,
    'normalizer': None,
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': parts},
    'added_tokens': [{**token, **bare} for token in markup['added_tokens']],
  }


def spellings(
  source: dict[str, Any], roles: Mapping[str, int]
) -> list[bytes | None]:
  """Returns the bytes of every id; None for an id without a token."""
  alphabet = own.byte_alphabet()
  by_id: dict[int, bytes] = {
    i: f'<|{role.lower()}|>'.encode() for role, i in roles.items()
  }
  for piece, i in source['model']['vocab'].items():
    is_bytes = alphabet.keys() >= set(piece)
    by_id[i] = bytes(alphabet[c] for c in piece) if is_bytes else piece.encode()
  for token in source['added_tokens']:
    by_id[token['id']] = token['content'].encode()
  return [by_id.get(i) for i in range(max(by_id) + 1)]


def check_bytes(source: dict[str, Any], name: str) -> None:
  """Raises a ValueError unless every single byte has an id."""
  alphabet, vocab = own.byte_alphabet(), source['model']['vocab']
  lacking = [byte for piece, byte in alphabet.items() if piece not in vocab]
  if lacking:
    raise ValueError(
      f'{name}: the vocabulary lacks {len(lacking)} of the 256 single bytes, '
      f'the first is 0x{min(lacking):02X}: not every text can be encoded.'
    )
