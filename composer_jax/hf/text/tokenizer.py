"""A tokenizer read from Hugging Face's `tokenizer.json`, with our laws.

It offers what `text.tokenizer.Tokenizer` does: any bytes survive, and text
never yields the id of a role or of another special token. So it differs from
what transformers does with the same file in three ways: spellings of special
tokens are encoded as the ordinary tokens they are; Unicode is not normalised
(text that is in the file's normal form already gives the same ids); and no
space is put before the first word. `encode_markup` is transformers' encoding,
with special tokens only where they are meant.

Which ids our ten roles are is decided in `hf.text.roles`.
"""

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
from composer_jax.hf.text import roles as hf_roles
from composer_jax.hf.text import tokenizer_json
from composer_jax.text import tokenizer as own

FORMAT = 'composer_jax.hf_tokenizer/1'
SOURCE, CONFIG = 'tokenizer.json', 'tokenizer_config.json'
# Stands before a special token that is meant. Not a character of Unicode, so
# what messages and files say cannot hold it.
MARK = '\ud800'

_SURROGATE = re.compile('[\ud800-\udfff]')
_PROBES = (
  'x',
  ' x',
  'def f(a):\n    return  a\n\n\tB',
  'a\r\nb',
  'e\u0301 \u00e9 \ufb01 \u4f60 \U0001f600',
  f'{tokenizer_json.SPACE}a {tokenizer_json.SPACE}{tokenizer_json.SPACE}',
  '<0x41>',
  '  ',
)
# Planes 15 and 16, which no vocabulary and hardly a text uses.
_PRIVATE_USE = range(0xF0000, 0x10FFFE)


class ImportedTokenizer:
  """Text to int32 ids of a model's vocabulary and back.

  Attributes:
    PAD, BOS, ...: ids of the roles, as in `text.tokenizer.Tokenizer`. BOS and
      PAD are those of EOD where the vocabulary has none.
    special_ids: ids below `vocab_size` that no text yields.
  """

  def __init__(self, source: dict[str, Any], roles: dict[str, int], name: str):
    """Wraps the content of a `tokenizer.json`; `name` is for errors.

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
    self._bpe = tokenizer_json.parse(
      tokenizer_json.for_text(source, roles), name
    )
    # Its files cannot say so; without it spellings become special tokens.
    self._bpe.encode_special_tokens = True
    self._has_spaces = not tokenizer_json.is_byte_level(source)
    self._bytes = tokenizer_json.spellings(source, roles)
    self._byte_ids = tokenizer_json.byte_ids(source, name)
    added = {t['id'] for t in source['added_tokens'] if t['special']}
    free = {i for i, s in enumerate(self._bytes) if s is None}
    self.special_ids = frozenset(added | free | set(roles.values()))
    self._name, self._stand_ins = name, ''
    self._library: tokenizers.Tokenizer | None = None
    self._check(name)

  @classmethod
  def from_folder(
    cls, folder: str | os.PathLike, vocab_size: int
  ) -> 'ImportedTokenizer':
    """Reads the tokenizer of a checkpoint.

    Raises:
      ValueError: there is no such file, it is not one that can be used (see
        the constructor), or the embedding of so many rows has no room for our
        roles.
    """
    path = pathlib.Path(folder) / SOURCE
    if not path.exists():
      raise ValueError(_missing(path))
    config = tokenizer_json.read_config(path.with_name(CONFIG))
    source = tokenizer_json.checked(files.read_json(path), config, str(path))
    roles = hf_roles.assign(source, config, vocab_size, path)
    return cls(source, roles, str(path))

  @classmethod
  def load(cls, path: str | os.PathLike) -> 'ImportedTokenizer':
    """Reads what `save` wrote; a ValueError names any other file."""
    data = files.read_json(path)
    if not isinstance(data, dict) or data.get('format') != FORMAT:
      raise ValueError(
        f'{path} is not a tokenizer of format {FORMAT!r}; delete it to have '
        'it made again.'
      )
    roles = data.get('roles')
    if (
      not isinstance(roles, dict)
      or roles.keys() != set(hf_roles.NAMES)
      or not all(type(i) is int and i >= 0 for i in roles.values())
    ):
      raise ValueError(
        f'{path} is damaged: it has no id for each of '
        f'{", ".join(hf_roles.NAMES)}; delete it to have it made again.'
      )
    source = tokenizer_json.checked(data.get('source'), {}, str(path))
    return cls(source, roles, str(path))

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
    mark = np.array(
      [self._byte_ids[b] for b in tokenizer_json.SPACE.encode()], np.int32
    )
    pieces = [text.split(tokenizer_json.SPACE) for text in texts]
    flat = iter(self._encode_batch([p for parts in pieces for p in parts]))
    # A mark before every part, but for the first.
    return [
      np.concatenate([a for _ in parts for a in (mark, next(flat))][1:])
      for parts in pieces
    ]

  def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
    encodings = self._bpe.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(e.ids, np.int32) for e in encodings]

  def mark(self, text: str) -> str:
    """Puts `MARK` before every special token that a template's text spells."""
    return self._added_pattern.sub(
      lambda m: MARK + m[0] if m[0] in self._specials else m[0],
      own.without_surrogates(text),
    )

  def encode_markup(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Encodes as transformers does, but special tokens only where marked.

    A special token of the text is `MARK` and its spelling; the spelling alone
    is the ordinary tokens it is. Transformers' encoding of a text is that of
    `mark(text)`, which is for what a chat template wrote and never for what a
    message, a tool or a file says.

    Returns:
      int32 ids and, of each, the first and last + 1 character.
    """
    markup = self._markup(text)
    stand_ins = dict(zip(self._specials, self._stand_ins, strict=False))
    # Each character that is encoded, and the place of each in the text.
    parts, starts, stops, last = [], [], [], 0
    for match in [*self._marked_pattern.finditer(text), None]:
      plain = text[last : match.start() if match else None]
      parts.append(_SURROGATE.sub('?', plain))
      starts += range(last, last + len(plain))
      stops += range(last + 1, last + 1 + len(plain))
      if match:
        parts.append(stand_ins[match[1]])
        starts.append(match.start())
        stops.append(match.end())
        last = match.end()
    encoding = markup.encode(''.join(parts), add_special_tokens=False)
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    places = np.array([[*starts, len(text)], [0, *stops]], np.int32)
    spans = [places[0][offsets[:, 0]], places[1][offsets[:, 1]]]
    return np.array(encoding.ids, np.int32), np.stack(spans, axis=1)

  def unmarked(self, text: str) -> set[str]:
    """Special tokens that a text spells where they are not marked."""
    # Nothing may arise from what stands on both sides of a marked one.
    rest = self._marked_pattern.sub(MARK, text)
    return {s for s in self._specials if s in rest}

  def without_marks(self, text: str) -> str:
    """Takes away the marks that stand before a special token."""
    return self._marked_pattern.sub(r'\1', text)

  def _markup(self, text: str) -> tokenizers.Tokenizer:
    """Special tokens renamed to characters that the text does not hold.

    So the library finds them as transformers finds them, and nothing that the
    text says is one of them.
    """
    if self._library is None or not set(self._stand_ins).isdisjoint(text):
      size = max(1, len(self._specials))
      vocab, said = self._source['model']['vocab'], set(text)
      for i in range(_PRIVATE_USE.start, _PRIVATE_USE.stop - size, size):
        block = [chr(j) for j in range(i, i + size)]
        if not any(c in vocab or c in said for c in block):
          break
      else:
        raise ValueError(
          f'A text of {len(text)} characters leaves no {size} characters of '
          'private use free for the special tokens; shorten it.'
        )
      names = dict(zip(self._specials, block, strict=False))
      source = tokenizer_json.renamed(tokenizer_json.whole(self._source), names)
      self._library = tokenizer_json.parse(source, self._name)
      self._stand_ins = ''.join(block)
    return self._library

  @functools.cached_property
  def _specials(self) -> dict[str, int]:
    return {
      t['content']: t['id']
      for t in self._source['added_tokens']
      if t['id'] in self.special_ids
    }

  @functools.cached_property
  def _added_pattern(self) -> re.Pattern:
    return _longest(t['content'] for t in self._source['added_tokens'])

  @functools.cached_property
  def _marked_pattern(self) -> re.Pattern:
    return re.compile(f'{MARK}({_longest(self._specials).pattern})')

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """Returns the exact bytes, with special tokens spelled."""
    spellings = []
    for i in map(int, ids):
      spelling = self._bytes[i] if 0 <= i < len(self._bytes) else None
      if spelling is None:
        raise ValueError(
          f'Token id {i} is outside this vocabulary: {self.vocab_size} ids, '
          'some of them free.'
        )
      spellings.append(spelling)
    return b''.join(spellings)

  def decode(self, ids: Iterable[int]) -> str:
    """Returns text; bytes that are not UTF-8 become U+FFFD."""
    return self.decode_bytes(ids).decode('utf-8', 'replace')

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
    for token in self.special_ids:
      spelling = (self._bytes[token] or b'').decode()
      # Where vocabularies of sentencepiece mean a space, text has one.
      for text in (spelling, spelling.replace(tokenizer_json.SPACE, ' ')):
        if token in self.encode(text).tolist():
          raise ValueError(
            f'{name}: the text {text!r} yields token {token} itself, which '
            'must be kept apart from text.'
          )


AnyTokenizer = own.Tokenizer | ImportedTokenizer


def load_any(path: str | os.PathLike) -> AnyTokenizer:
  """Reads what either kind of tokenizer saved."""
  data = files.read_json(path)
  if isinstance(data, dict) and data.get('format') == FORMAT:
    return ImportedTokenizer.load(path)
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


def _longest(spellings: Iterable[str]) -> re.Pattern:
  """Matches the longest of those that begin at a place, as the library does."""
  ordered = sorted(map(re.escape, spellings), key=len, reverse=True)
  # Without any, the last alternative matches nothing.
  return re.compile('|'.join([*ordered, '(?!)']))
