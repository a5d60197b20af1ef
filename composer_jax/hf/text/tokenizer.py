"""Encodes text with a model's `tokenizer.json` and keeps this project's laws.

The interface is that of `text.tokenizer.Tokenizer`: any bytes survive, and text
never yields the id of a role or of another special token. This differs from
transformers on the same file in three ways: the spelling of a special token in
a text is encoded as ordinary tokens; Unicode is not normalised (text that is
already in the file's normal form gives the same ids); no space is put before
the first word. `encode_markup` encodes as transformers does, with special
tokens only where they are marked.

`hf.text.roles` decides which ids play the ten roles.
"""

import functools
import itertools
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
from composer_jax.text import chat
from composer_jax.text import tokenizer as own

FORMAT = 'composer_jax.hf_tokenizer/1'
SOURCE, CONFIG = 'tokenizer.json', 'tokenizer_config.json'
# Stands before a special token that is meant as one. It is a lone surrogate,
# which messages and files cannot contain.
MARK = '\ud800'

_SURROGATE = re.compile('[\ud800-\udfff]')
_PROBES = (
  'x',
  ' x',
  'def f(a):\n    return  a\n\n\tB',
  'a\r\nb',
  'e\u0301 \u00e9 \ufb01 \u4f60 \U0001f600',
  '  ',
)


class ImportedTokenizer:
  """Turns text into int32 ids of a model's vocabulary and back.

  Attributes:
    PAD, BOS, ...: ids of the roles, named as in `text.tokenizer.Tokenizer`. BOS
      and PAD equal EOD where the vocabulary has no token for them.
    special_ids: ids below `vocab_size` that no text yields.
    language: `text.chat.Language` of the model; None for `text.chat`.
  """

  def __init__(self, source: dict[str, Any], roles: dict[str, int], name: str):
    """Wraps a checked `tokenizer.json`; a ValueError if it loses bytes."""
    self._source, self._roles = source, roles
    self.PAD, self.BOS, self.EOD = roles['PAD'], roles['BOS'], roles['EOD']
    self.USER, self.CALL = roles['USER'], roles['CALL']
    self.TOOL, self.END = roles['TOOL'], roles['END']
    self.FIM_PREFIX = roles['FIM_PREFIX']
    self.FIM_MIDDLE = roles['FIM_MIDDLE']
    self.FIM_SUFFIX = roles['FIM_SUFFIX']
    self._name = name
    self.language: chat.Language | None = None
    self._bpe = tokenizer_json.parse(
      tokenizer_json.for_text(source, roles), name
    )
    self._bytes = tokenizer_json.spellings(source, roles)
    tokenizer_json.check_bytes(source, name)
    added = {t['id'] for t in source['added_tokens'] if t['special']}
    free = {i for i, spelling in enumerate(self._bytes) if spelling is None}
    self.special_ids = frozenset(added | free | set(roles.values()))
    self._specials = {
      t['content']: t
      for t in source['added_tokens']
      if t['id'] in self.special_ids
    }
    self._marked_pattern = re.compile(f'{MARK}({_longest(self._specials)})')
    self._check(name)

  @classmethod
  def from_folder(
    cls, folder: str | os.PathLike, vocab_size: int
  ) -> 'ImportedTokenizer':
    """Reads a checkpoint's tokenizer; a ValueError if it cannot be used."""
    path = pathlib.Path(folder) / SOURCE
    if not path.exists():
      raise ValueError(_missing(path))
    config = tokenizer_json.read_config(path.with_name(CONFIG))
    source = tokenizer_json.checked(files.read_json(path), str(path))
    roles = hf_roles.assign(source, config, vocab_size, path)
    return cls(source, roles, str(path))

  @classmethod
  def load(cls, path: str | os.PathLike) -> 'ImportedTokenizer':
    """Reads a file that `save` wrote; any other is a ValueError."""
    data = files.read_json(path)
    if not isinstance(data, dict) or data.get('format') != FORMAT:
      raise ValueError(
        f'{path} is not a tokenizer of format {FORMAT!r}; delete it to have '
        'it made again.'
      )
    roles = data.get('roles')
    if not isinstance(roles, dict) or roles.keys() != set(hf_roles.NAMES):
      raise ValueError(
        f'{path} is damaged: it has no id for each of '
        f'{", ".join(hf_roles.NAMES)}; delete it to have it made again.'
      )
    source = tokenizer_json.checked(data.get('source'), str(path))
    return cls(source, roles, str(path))

  def save(self, path: str | os.PathLike) -> None:
    """Writes a JSON file, whole or not at all."""
    files.write_atomic(path, self._json)

  @functools.cached_property
  def _json(self) -> bytes:
    value = {'format': FORMAT, 'roles': self._roles, 'source': self._source}
    return (json.dumps(value, sort_keys=True) + '\n').encode()

  def fingerprint(self) -> str:
    """Returns the SHA-256 of the bytes that `save` writes."""
    return files.sha256(self._json)

  @property
  def vocab_size(self) -> int:
    """One more than the largest id in use."""
    return len(self._bytes)

  def encode(self, text: str) -> np.ndarray:
    """Returns int32 ids, never a special one; lone surrogates become '?'."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    texts = [own.without_surrogates(text) for text in texts]
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

    `MARK` and a spelling are a special token; the spelling alone is encoded as
    ordinary tokens. Transformers' encoding of a text is that of `mark(text)`,
    which is for the words of a chat template and never for those of a message,
    a tool or a file.

    Returns:
      int32 ids, and for each id its first character and one past its last.
    """
    ids, spans, start = [], [], 0
    for match in [*self._marked_pattern.finditer(text), None]:
      token = self._specials[match[1]] if match else None
      plain = text[start : match.start() if match else None]
      if token and token['lstrip']:
        plain = plain.rstrip()
      # The library, too, splits a text at special tokens before anything else.
      encoding = self._markup.encode(
        _SURROGATE.sub('?', plain), add_special_tokens=False
      )
      ids += encoding.ids
      spans += [(start + a, start + b) for a, b in encoding.offsets]
      if match and token:
        begin, start = start + len(plain), match.end()
        if token['rstrip']:
          start = len(text) - len(text[start:].lstrip())
        ids.append(token['id'])
        spans.append((begin, start))
    return np.array(ids, np.int32), np.array(spans, np.int32).reshape(-1, 2)

  def shown(self, ids: Iterable[int]) -> str:
    """Returns text, in which ids without a spelling are in angle brackets."""
    has_spelling = lambda i: i < len(self._bytes) and self._bytes[i] is not None
    return ''.join(
      self.decode(run) if is_known else ''.join(f'<{i}>' for i in run)
      for is_known, run in itertools.groupby(map(int, ids), has_spelling)
    )

  def id_of(self, spelling: str) -> int | None:
    """Returns the id of a special token; None if there is no such token."""
    return (
      self._specials[spelling]['id'] if spelling in self._specials else None
    )

  def unmarked(self, text: str) -> set[str]:
    """Returns the special tokens that a text spells without a mark."""
    # A mark is left, so that the texts on both sides of it stay apart.
    plain = self._marked_pattern.sub(MARK, text)
    return {spelling for spelling in self._specials if spelling in plain}

  def without_marks(self, text: str) -> str:
    return self._marked_pattern.sub(r'\1', text)

  @functools.cached_property
  def _markup(self) -> tokenizers.Tokenizer:
    source = tokenizer_json.for_markup(self._source, self._roles)
    return tokenizer_json.parse(source, self._name)

  @functools.cached_property
  def _added_pattern(self) -> re.Pattern:
    return re.compile(
      _longest(t['content'] for t in self._source['added_tokens'])
    )

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
    """Raises for a file that breaks the laws, before any text is encoded."""
    for text in _PROBES:
      decoded = self.decode_bytes(self.encode(text))
      if decoded != text.encode():
        raise ValueError(
          f'{name}: the text {text!r} comes back as {decoded!r}. Only '
          'tokenizers that lose nothing can be used: byte-level BPE.'
        )
    for token in self.special_ids:
      text = (self._bytes[token] or b'').decode()
      if token in self.encode(text).tolist():
        raise ValueError(
          f'{name}: the text {text!r} yields token {token} itself, which must '
          'be kept apart from text.'
        )


AnyTokenizer = own.Tokenizer | ImportedTokenizer


def load_any(path: str | os.PathLike) -> AnyTokenizer:
  """Reads a saved tokenizer of either class."""
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
  problem = 'there is no tokenizer'
  if others:
    problem = f'{others[0]} is of another kind'
  return (
    f'{path} does not exist ({problem}). Write it with transformers and import '
    f'again: AutoTokenizer.from_pretrained({str(path.parent)!r}, use_fast=True'
    f').save_pretrained({str(path.parent)!r}). Where the checkpoint brings its '
    'own code for it, as Kimi K2 does (trust_remote_code), read that code '
    'first.'
  )


def _longest(spellings: Iterable[str]) -> str:
  """Returns a pattern that takes the longest spelling, as the library does."""
  ordered = sorted(map(re.escape, spellings), key=len, reverse=True)
  # The last alternative matches nothing, for a list that is empty.
  return '|'.join([*ordered, '(?!)'])
