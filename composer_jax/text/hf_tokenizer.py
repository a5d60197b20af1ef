"""A tokenizer read from Hugging Face's `tokenizer.json`, with our laws.

It offers what `text.tokenizer.Tokenizer` does: any bytes survive, and text
never yields the id of a role or of another special token. So it differs from
what transformers does with the same file in three ways: spellings of special
tokens are encoded as the ordinary tokens they are; Unicode is not normalised
(text that is in the file's normal form already gives the same ids); and no
space is put before the first word. `encode_markup` is transformers' encoding.

Which ids our ten roles are is decided in `text.hf_roles`.
"""

import copy
import functools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers

from composer_jax.core import files
from composer_jax.text import hf_roles
from composer_jax.text import tokenizer as own

FORMAT = 'composer_jax.hf_tokenizer/1'
SOURCE, CONFIG = 'tokenizer.json', 'tokenizer_config.json'

_SPACE = '\u2581'  # what stands for a space in vocabularies of sentencepiece
_BYTE_PIECE = re.compile('<0x([0-9A-F]{2})>')
_PROBES = (
  'x',
  ' x',
  'def f(a):\n    return  a\n\n\tB',
  'a\r\nb',
  'e\u0301 \u00e9 \ufb01 \u4f60 \U0001f600',
  f'{_SPACE}a {_SPACE}{_SPACE}',
  '<0x41>',
  '  ',
)


class Tokenizer:
  """Text to int32 ids of a model's vocabulary and back.

  Attributes:
    PAD, BOS, ...: ids of the roles, as in `text.tokenizer.Tokenizer`. BOS and
      PAD are those of EOD where the vocabulary has none.
    special_ids: ids below `vocab_size` that no text yields.
  """

  def __init__(self, source: dict[str, Any], roles: dict[str, int], name: str):
    """Wraps the content of a `tokenizer.json`.

    Args:
      source: its content.
      roles: {name: id} of the ten roles.
      name: of the file, for errors.

    Raises:
      ValueError: the file is of a kind that loses bytes, or whose special
        tokens text can spell.
    """
    self._source, self._roles = source, roles
    self.PAD, self.BOS, self.EOD = roles['PAD'], roles['BOS'], roles['EOD']
    self.USER, self.CALL = roles['USER'], roles['CALL']
    self.TOOL, self.END = roles['TOOL'], roles['END']
    self.FIM_PREFIX = roles['FIM_PREFIX']
    self.FIM_MIDDLE = roles['FIM_MIDDLE']
    self.FIM_SUFFIX = roles['FIM_SUFFIX']
    self._bpe = _parse(_for_text(source, roles), name)
    # Its files cannot say so; without it spellings become special tokens.
    self._bpe.encode_special_tokens = True
    is_byte_level = _is_byte_level(source, name)
    self._has_spaces = not is_byte_level
    self._bytes = _spellings(source, roles, is_byte_level)
    self._byte_ids = _byte_ids(source, is_byte_level, name)
    added = {t['id'] for t in source['added_tokens'] if t['special']}
    free = {i for i, s in enumerate(self._bytes) if s is None}
    self.special_ids = frozenset(added | free | set(roles.values()))
    self._check(name)

  @classmethod
  def from_folder(
    cls, folder: str | os.PathLike, vocab_size: int
  ) -> 'Tokenizer':
    """Reads the tokenizer of a checkpoint.

    Args:
      folder: holds `tokenizer.json` and, usually, `tokenizer_config.json`.
      vocab_size: rows of the model's embedding.

    Raises:
      ValueError: there is no such file, it is not one that can be used (see
        the constructor), or the embedding has no room for our roles.
    """
    path = pathlib.Path(folder) / SOURCE
    if not path.exists():
      raise ValueError(_missing(path))
    source = files.read_json(path)
    if not isinstance(source, dict) or 'model' not in source:
      raise ValueError(f"{path} has no 'model'; is it a tokenizer.json?")
    config_path = path.with_name(CONFIG)
    config = files.read_json(config_path) if config_path.exists() else {}
    source = _with_added(source, config)
    # Before the roles: other kinds have no vocabulary of this form.
    _is_byte_level(source, str(path))
    roles = hf_roles.assign(source, config, vocab_size, path)
    return cls(source, roles, str(path))

  @classmethod
  def load(cls, path: str | os.PathLike) -> 'Tokenizer':
    """Reads what `save` wrote; a ValueError names any other file."""
    data = files.read_json(path)
    if not isinstance(data, dict) or data.get('format') != FORMAT:
      raise ValueError(
        f'{path} is not a tokenizer of format {FORMAT!r}; delete it to have '
        'it made again.'
      )
    return cls(data['source'], data['roles'], str(path))

  def save(self, path: str | os.PathLike) -> None:
    """Writes JSON, whole or not at all."""
    files.write_atomic(path, self._json)

  @functools.cached_property
  def _json(self) -> bytes:
    value = {'format': FORMAT, 'roles': self._roles, 'source': self._source}
    return (json.dumps(value, sort_keys=True) + '\n').encode()

  def fingerprint(self) -> str:
    """Returns the SHA-256 of what `save` writes."""
    return files.sha256(self._json)

  @property
  def vocab_size(self) -> int:
    """One more than the largest id in use."""
    return len(self._bytes)

  def encode(self, text: str) -> np.ndarray:
    """Returns int32 ids, never a special one; lone surrogates become '?'."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes many texts at once, each as `encode` would."""
    texts = [own.without_surrogates(text) for text in texts]
    if not self._has_spaces:
      return self._encode_batch(texts)
    # The stand-in of a space cannot stand for itself: its bytes do.
    mark = np.array([self._byte_ids[b] for b in _SPACE.encode()], np.int32)
    pieces = [text.split(_SPACE) for text in texts]
    flat = iter(self._encode_batch([p for parts in pieces for p in parts]))
    result = []
    for parts in pieces:
      ids = [next(flat)]
      for _ in parts[1:]:
        ids += [mark, next(flat)]
      result.append(np.concatenate(ids))
    return result

  def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
    encodings = self._bpe.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(e.ids, np.int32) for e in encodings]

  def encode_markup(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Encodes as transformers does: spellings of special tokens are these.

    For what a chat template wrote, and never for what a tool or file says.

    Returns:
      int32 ids and, of each, the first and last + 1 character.
    """
    encoding = self._markup.encode(text, add_special_tokens=False)
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    return np.array(encoding.ids, np.int32), offsets

  @functools.cached_property
  def _markup(self) -> tokenizers.Tokenizer:
    source = {**self._source, 'truncation': None, 'padding': None}
    return _parse(source, SOURCE)

  @functools.cached_property
  def special_pattern(self) -> re.Pattern:
    """Matches the first character of a special token that text spells."""
    spellings = [
      re.escape(t['content'])
      for t in self._source['added_tokens']
      if t['id'] in self.special_ids
    ]
    # Without any, the last alternative matches nothing.
    return re.compile(f'(?={"|".join([*spellings, "(?!)"])}).', re.DOTALL)

  def encode_bytes(self, data: bytes) -> np.ndarray:
    """Encodes any bytes so that `decode_bytes` returns them.

    Bytes that are not UTF-8 become single-byte tokens; the rest is encoded as
    text.
    """
    return own.encode_bytes(data, self.encode, self._byte_ids)

  def decode_bytes(
    self, ids: Iterable[int], skip_specials: bool = False
  ) -> bytes:
    """Returns the exact bytes; special tokens are spelled unless skipped."""
    skipped = self.special_ids if skip_specials else frozenset()
    spellings = []
    for i in map(int, ids):
      spelling = self._bytes[i] if 0 <= i < len(self._bytes) else None
      if spelling is None:
        raise ValueError(
          f'Token id {i} is outside this vocabulary: {self.vocab_size} ids, '
          'some of them free.'
        )
      if i not in skipped:
        spellings.append(spelling)
    return b''.join(spellings)

  def decode(self, ids: Iterable[int], skip_specials: bool = False) -> str:
    """Returns text; bytes that are not UTF-8 become U+FFFD.

    Special tokens are spelled by default, so that one which a policy wrote
    where none belongs is seen and not silently dropped.
    """
    return self.decode_bytes(ids, skip_specials).decode('utf-8', 'replace')

  def _check(self, name: str) -> None:
    """Raises for a file that breaks our laws, before any text is encoded."""
    for text in _PROBES:
      found = self.decode_bytes(self.encode(text))
      if found != text.encode():
        raise ValueError(
          f'{name}: the text {text!r} comes back as {found!r}. Only '
          'tokenizers that lose nothing can be used: byte-level BPE, or BPE '
          'with byte fallback.'
        )
    spelled = {i: self._bytes[i] for i in self.special_ids}
    for token, spelling in spelled.items():
      if spelling and token in self.encode(spelling.decode()).tolist():
        raise ValueError(
          f'{name}: text that spells {spelling.decode()!r} yields token '
          f'{token} itself, which must be kept apart from text.'
        )


AnyTokenizer = own.Tokenizer | Tokenizer


def load_any(path: str | os.PathLike) -> AnyTokenizer:
  """Reads what either kind of tokenizer saved."""
  data = files.read_json(path)
  if isinstance(data, dict) and data.get('format') == FORMAT:
    return Tokenizer.load(path)
  return own.Tokenizer.load(path)


def _missing(path: pathlib.Path) -> str:
  others = [
    name
    for name in ('tiktoken.model', 'tokenizer.model', 'vocab.json')
    if path.with_name(name).exists()
  ]
  there = f'{others[0]} is of another kind' if others else 'nothing like it'
  return (
    f'{path} does not exist ({there}). Write it with transformers and import '
    f'again: AutoTokenizer.from_pretrained({str(path.parent)!r}, use_fast=True'
    f').save_pretrained({str(path.parent)!r}). Where the checkpoint brings its '
    'own code for it, as Kimi K2 does (trust_remote_code), read that code '
    'first.'
  )


def _with_added(
  source: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
  """Adds the tokens that only `tokenizer_config.json` knows."""
  added = {t['id']: t for t in source.get('added_tokens', ())}
  for key, token in config.get('added_tokens_decoder', {}).items():
    defaults = dict.fromkeys(
      ('single_word', 'lstrip', 'rstrip', 'normalized', 'special'), False
    )
    added.setdefault(int(key), {**defaults, **token, 'id': int(key)})
  return {**source, 'added_tokens': [added[i] for i in sorted(added)]}


def _parse(source: dict[str, Any], name: str) -> tokenizers.Tokenizer:
  try:
    return tokenizers.Tokenizer.from_str(json.dumps(source))
  except Exception as error:
    # The library raises nothing more precise for a file it cannot read.
    raise ValueError(f'{name} is not a tokenizer.json ({error}).') from error


def _components(part: Any) -> list[dict[str, Any]]:
  """A normalizer or pre-tokenizer as the list of what it applies."""
  if part is None:
    return []
  for key in ('normalizers', 'pretokenizers'):
    if key in part:
      return [c for inner in part[key] for c in _components(inner)]
  return [part]


def _for_text(source: dict[str, Any], roles: dict[str, int]) -> dict[str, Any]:
  """The same tokenizer without what loses bytes, for text alone."""
  result = copy.copy(source)
  result |= {'truncation': None, 'padding': None, 'post_processor': None}
  lossy = ('NFC', 'NFD', 'NFKC', 'NFKD', 'Prepend')
  kept = [
    c for c in _components(source['normalizer']) if c['type'] not in lossy
  ]
  result['normalizer'] = {'type': 'Sequence', 'normalizers': kept}
  splits = []
  for part in _components(source['pre_tokenizer']):
    if part['type'] == 'ByteLevel':
      part = {**part, 'add_prefix_space': False}
    elif part['type'] == 'Metaspace':
      part = {**part, 'prepend_scheme': 'never'}
    splits.append(part)
  result['pre_tokenizer'] = None
  if splits:
    result['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': splits}
  ids = set(roles.values())
  # White space around a token must not vanish in it.
  bare = {'lstrip': False, 'rstrip': False}
  result['added_tokens'] = [
    {**t, **bare, 'special': t['special'] or t['id'] in ids}
    for t in source['added_tokens']
  ]
  return result


def _is_byte_level(source: dict[str, Any], name: str) -> bool:
  """Whether pieces are spelled in the alphabet of bytes, or fall back to it."""
  model = source['model']
  if model.get('type', 'BPE') == 'BPE':
    if any(
      c['type'] == 'ByteLevel' for c in _components(source['pre_tokenizer'])
    ):
      return True
    if model.get('byte_fallback'):
      return False
  raise ValueError(
    f'{name} is a {model.get("type")} model without byte-level pieces and '
    'byte fallback: text that it does not know is lost. Only byte-level BPE '
    'and BPE with byte fallback can be used.'
  )


def _spellings(
  source: dict[str, Any], roles: dict[str, int], is_byte_level: bool
) -> list[bytes | None]:
  """The bytes of every id; None for those that nothing uses."""
  alphabet = own.byte_alphabet()
  found: dict[int, bytes] = {
    i: f'<|{role.lower()}|>'.encode() for role, i in roles.items()
  }
  added = {t['id'] for t in source['added_tokens']}
  for piece, i in source['model']['vocab'].items():
    if i in added:
      continue
    if is_byte_level and alphabet.keys() >= set(piece):
      found[i] = bytes(alphabet[c] for c in piece)
    elif byte := _BYTE_PIECE.fullmatch(piece):
      found[i] = bytes([int(byte[1], 16)])
    else:
      found[i] = piece.replace(_SPACE, ' ').encode()
  found |= {t['id']: t['content'].encode() for t in source['added_tokens']}
  return [found.get(i) for i in range(max(found) + 1)]


def _byte_ids(
  source: dict[str, Any], is_byte_level: bool, name: str
) -> dict[int, int]:
  """The token of every single byte."""
  vocab = source['model']['vocab']
  pieces = {f'<0x{byte:02X}>': byte for byte in range(256)}
  if is_byte_level:
    pieces = own.byte_alphabet()
  lacking = [byte for piece, byte in pieces.items() if piece not in vocab]
  if lacking:
    raise ValueError(
      f'{name}: the vocabulary lacks {len(lacking)} of the 256 single bytes, '
      f'the first is 0x{min(lacking):02X}: not every text can be encoded.'
    )
  return {byte: vocab[piece] for piece, byte in pieces.items()}
