"""What a `tokenizer.json` holds: checked, and in the forms that we need.

Nothing here encodes; `hf.text.tokenizer` does. Whoever wrote the file may have
damaged it, and may have meant a tokenizer that loses text: both are refused
with the name of the file. What normalizers and pre-tokenizers do is known for
those that are listed here alone, so others are refused as well.
"""

import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from composer_jax.core import files
from composer_jax.text import tokenizer as own

SPACE = '\u2581'  # what stands for a space in vocabularies of sentencepiece
_BYTE_PIECE = re.compile('<0x([0-9A-F]{2})>')
_FLAGS = ('single_word', 'lstrip', 'rstrip', 'normalized', 'special')
# Left out for text: what they change is lost.
_NORMAL_FORMS = ('NFC', 'NFD', 'NFKC', 'NFKD', 'Prepend')
_PRE_TOKENIZERS = ('ByteLevel', 'Digits', 'Metaspace', 'Punctuation', 'Split')


def read(path: str | os.PathLike) -> dict[str, Any]:
  """Reads a JSON object; a ValueError names a file that holds none."""
  value = files.read_json(path)
  if not isinstance(value, dict):
    raise ValueError(f'{os.fspath(path)} holds no JSON object.')
  return value


def read_config(path: pathlib.Path) -> dict[str, Any]:
  """Reads a `tokenizer_config.json`, which may be absent."""
  return read(path) if path.exists() else {}


def checked(source: Any, config: Mapping[str, Any], name: str) -> dict:
  """Returns the content of a `tokenizer.json` that can be trusted.

  Args:
    source: its content.
    config: of `tokenizer_config.json`, which may know more tokens.
    name: of the file, for errors.
  """
  model = source.get('model') if isinstance(source, dict) else None
  if not isinstance(model, dict):
    raise ValueError(f"{name} has no 'model'; is it a tokenizer.json?")
  parts = {
    key: _components(source.get(key), name)
    for key in ('normalizer', 'pre_tokenizer')
  }
  is_byte_level = any(c['type'] == 'ByteLevel' for c in parts['pre_tokenizer'])
  kind = model.get('type', 'BPE')
  if kind != 'BPE' or not (is_byte_level or model.get('byte_fallback')):
    raise ValueError(
      f'{name} is a {kind} model without byte-level pieces and '
      'byte fallback: text that it does not know is lost. Only byte-level BPE '
      'and BPE with byte fallback can be used.'
    )
  for c in parts['normalizer']:
    _check_normalizer(c, name)
  for c in parts['pre_tokenizer']:
    _check_pre_tokenizer(c, name)
  for key in ('dropout', 'continuing_subword_prefix', 'end_of_word_suffix'):
    if model.get(key):
      raise ValueError(
        f'{name}: {key} ({model[key]!r}) of the model must be absent: the same '
        'text must always give the same ids and come back whole.'
      )
  added = _added(source, config, name)
  _check_ids(model.get('vocab'), added, name)
  return {**source, 'added_tokens': added}


def _components(part: Any, name: str) -> list[dict[str, Any]]:
  """A normalizer or pre-tokenizer as the list of what it applies."""
  if part is None:
    return []
  for key in ('normalizers', 'pretokenizers'):
    if isinstance(part, dict) and isinstance(part.get(key), list):
      return [c for inner in part[key] for c in _components(inner, name)]
  if not isinstance(part, dict) or not isinstance(part.get('type'), str):
    raise ValueError(f'{name}: {part!r} is no normalizer or pre-tokenizer.')
  return [part]


def _check_normalizer(part: dict[str, Any], name: str) -> None:
  shown = (part['type'], part.get('pattern'), part.get('content'))
  is_space = shown == ('Replace', {'String': ' '}, SPACE)
  if part['type'] not in _NORMAL_FORMS and not is_space:
    raise ValueError(
      f'{name}: the normalizer {part} may lose text. Those that can be used '
      f'are {", ".join(_NORMAL_FORMS)}, and Replace of " " by "{SPACE}".'
    )


def _check_pre_tokenizer(part: dict[str, Any], name: str) -> None:
  if (
    part['type'] not in _PRE_TOKENIZERS
    or part.get('behavior') == 'Removed'
    or part.get('replacement', SPACE) != SPACE
  ):
    raise ValueError(
      f'{name}: the pre-tokenizer {part} may lose text. Those that can be used '
      f'are {", ".join(_PRE_TOKENIZERS)}, with no behavior Removed and no '
      f'replacement but "{SPACE}".'
    )


def _added(
  source: dict[str, Any], config: Mapping[str, Any], name: str
) -> list[dict[str, Any]]:
  """The added tokens, also those that `tokenizer_config.json` alone knows."""
  listed = source.get('added_tokens') or []
  more = config.get('added_tokens_decoder') or {}
  try:
    extra = {int(key): token for key, token in more.items()}
    # In this order the library numbers them.
    tokens = [*listed, *({**extra[i], 'id': i} for i in sorted(extra))]
    found: dict[int, dict[str, Any]] = {}
    for token in tokens:
      flags = {flag: token.get(flag) is True for flag in _FLAGS}
      i, content = token['id'], token['content']
      if type(i) is not int or i < 0 or type(content) is not str or not content:
        raise TypeError(f'{token}')
      found.setdefault(i, {'id': i, 'content': content, **flags})
      if found[i]['content'] != content:
        raise TypeError(f'{i} is {found[i]["content"]!r} and {content!r}')
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{name}: added_tokens, or added_tokens_decoder of tokenizer_config.json '
      f'beside it, is damaged ({type(error).__name__}: {error}): each token '
      'needs an id of its own and a content.'
    ) from error
  return list(found.values())


def _check_ids(vocab: Any, added: list[dict[str, Any]], name: str) -> None:
  if not isinstance(vocab, dict) or not all(
    type(i) is int and i >= 0 for i in vocab.values()
  ):
    raise ValueError(f"{name}: 'vocab' of the model is no {{piece: id}}.")
  spellings = {t['id']: t['content'] for t in added}
  ids = {content: i for i, content in spellings.items()}
  seen: dict[int, str] = {}
  for piece, i in [*vocab.items(), *ids.items()]:
    other = seen.setdefault(i, piece)
    if other != piece:
      raise ValueError(f'{name}: both {other!r} and {piece!r} have the id {i}.')
  for i, content in spellings.items():
    others = {i, ids[content], vocab.get(content, i)}
    if len(others) > 1:
      raise ValueError(f'{name}: {content!r} has the ids {sorted(others)}.')


def parse(source: dict[str, Any], name: str) -> tokenizers.Tokenizer:
  """Raises a ValueError also where an added token would get another id."""
  try:
    made = tokenizers.Tokenizer.from_str(json.dumps(source))
  except Exception as error:
    # The library raises nothing more precise for a file it cannot read.
    raise ValueError(f'{name} is not a tokenizer.json ({error}).') from error
  for token in source['added_tokens']:
    found = made.token_to_id(token['content'])
    if found != token['id']:
      raise ValueError(
        f'{name} gives {token["content"]!r} the id {token["id"]}, the library '
        f'tokenizers gives it {found}: added tokens that the vocabulary lacks '
        'must follow it in order and without a gap.'
      )
  return made


def for_text(source: dict[str, Any], roles: Mapping[str, int]) -> dict:
  """The same tokenizer without what loses bytes, for text alone."""
  kept = [
    c
    for c in _components(source.get('normalizer'), '')
    if c['type'] not in _NORMAL_FORMS
  ]
  splits = []
  for part in _components(source.get('pre_tokenizer'), ''):
    if part['type'] == 'ByteLevel':
      part = {**part, 'add_prefix_space': False}
    elif part['type'] == 'Metaspace':
      part = {**part, 'prepend_scheme': 'never'}
    splits.append(part)
  pre_tokenizer = {'type': 'Sequence', 'pretokenizers': splits}
  ids = set(roles.values())
  # White space around a token must not vanish in it.
  bare = {'lstrip': False, 'rstrip': False}
  return {
    **whole(source),
    'normalizer': {'type': 'Sequence', 'normalizers': kept},
    'pre_tokenizer': pre_tokenizer if splits else None,
    'added_tokens': [
      {**t, **bare, 'special': t['special'] or t['id'] in ids}
      for t in source['added_tokens']
    ],
  }


def whole(source: dict[str, Any]) -> dict:
  """The same without what shortens, fills up, or moves offsets."""
  # A byte-level post-processor takes white space out of offsets.
  return {**source, 'truncation': None, 'padding': None, 'post_processor': None}


def renamed(source: dict[str, Any], names: Mapping[str, str]) -> dict:
  """The same with other contents of added tokens, under the same ids."""
  model = dict(source['model'])
  model['vocab'] = {names.get(p, p): i for p, i in model['vocab'].items()}
  added = [
    {**t, 'content': names.get(t['content'], t['content'])}
    for t in source['added_tokens']
  ]
  return {**source, 'model': model, 'added_tokens': added}


def is_byte_level(source: dict[str, Any]) -> bool:
  """Whether pieces are spelled in the alphabet of bytes, or fall back to it."""
  parts = _components(source.get('pre_tokenizer'), '')
  return any(c['type'] == 'ByteLevel' for c in parts)


def spellings(
  source: dict[str, Any], roles: Mapping[str, int]
) -> list[bytes | None]:
  """The bytes of every id; None for those that nothing uses."""
  alphabet = own.byte_alphabet()
  is_bytes = is_byte_level(source)
  found: dict[int, bytes] = {
    i: f'<|{role.lower()}|>'.encode() for role, i in roles.items()
  }
  for piece, i in source['model']['vocab'].items():
    if is_bytes and alphabet.keys() >= set(piece):
      found[i] = bytes(alphabet[c] for c in piece)
    elif byte := _BYTE_PIECE.fullmatch(piece):
      found[i] = bytes([int(byte[1], 16)])
    else:
      found[i] = piece.replace(SPACE, ' ').encode()
  for token in source['added_tokens']:
    found[token['id']] = token['content'].encode()
  return [found.get(i) for i in range(max(found) + 1)]


def byte_ids(source: dict[str, Any], name: str) -> dict[int, int]:
  """The token of every single byte."""
  vocab = source['model']['vocab']
  pieces = {f'<0x{byte:02X}>': byte for byte in range(256)}
  if is_byte_level(source):
    pieces = own.byte_alphabet()
  lacking = [byte for piece, byte in pieces.items() if piece not in vocab]
  if lacking:
    raise ValueError(
      f'{name}: the vocabulary lacks {len(lacking)} of the 256 single bytes, '
      f'the first is 0x{min(lacking):02X}: not every text can be encoded.'
    )
  return {byte: vocab[piece] for piece, byte in pieces.items()}
