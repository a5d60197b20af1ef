"""Byte-level BPE with special tokens that no text can spell.

The ids of special tokens are added here, in front of the BPE's own ids, and
`encode` cannot produce them. Text that spells '<|end|>' (a tool's output, a
file in a repository) is encoded as about seven ordinary tokens, so nothing that
a policy reads or prints can close its own turn.
"""

import json
import os
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from composer_jax.core import files

FORMAT = 'composer_jax.tokenizer/1'
SPECIALS = (
  '<|pad|>',
  '<|bos|>',
  '<|eod|>',
  '<|user|>',
  '<|call|>',
  '<|tool|>',
  '<|end|>',
  '<|fim_prefix|>',
  '<|fim_middle|>',
  '<|fim_suffix|>',
)
MIN_VOCAB_SIZE = len(SPECIALS) + 256

# A line break keeps its indentation, so that the shape of code costs one token
# a line; digits stand alone, so that the tokens of a number do not depend on
# the corpus; snake_case splits before underscores, so that names share parts.
_WORDS = (
  r'(?:\r?\n)+[ \t]*'
  r'| ?_*\p{L}+'
  r'| ?\p{N}'
  r'| ?[^\s\p{L}\p{N}]+'
  r'|\s+'
)


def byte_alphabet() -> dict[str, int]:
  """Maps the printable stand-in that byte-level BPE has for each byte to it.

  Radford et al. 2019: printable Latin-1 bytes stand for themselves, the other
  68 are moved to U+0100 and on, in order.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  moved = [byte for byte in range(256) if byte not in printable]
  alphabet = {chr(byte): byte for byte in printable}
  alphabet.update({chr(256 + i): byte for i, byte in enumerate(moved)})
  return alphabet


class Tokenizer:
  """Turns text into int32 ids and back.

  Special tokens are attributes of the class: `Tokenizer.END`. Ids 0 to 9 are
  special, the next 256 are single bytes, merges follow.
  """

  PAD, BOS, EOD, USER, CALL, TOOL, END = range(7)
  FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX = range(7, 10)

  def __init__(self, bpe: tokenizers.Tokenizer):
    """Wraps a byte-level BPE whose ids start at 0, special tokens excluded."""
    self._bpe = bpe
    alphabet, vocab = byte_alphabet(), bpe.get_vocab()
    self._bytes: list[bytes] = [name.encode() for name in SPECIALS]
    for piece in sorted(vocab, key=vocab.__getitem__):
      self._bytes.append(bytes(alphabet[c] for c in piece))

  @classmethod
  def train(cls, texts: Iterable[str], vocab_size: int) -> 'Tokenizer':
    """See `train_bpe`."""
    return cls(train_bpe(texts, vocab_size))

  @classmethod
  def load(cls, path: str | os.PathLike) -> 'Tokenizer':
    """Reads a file of `save`; a ValueError names any other file."""
    data = files.read_json(path)
    form = (FORMAT, [*SPECIALS])
    fields = data if isinstance(data, dict) else {}
    if (fields.get('format'), fields.get('specials')) != form:
      raise ValueError(
        f'{path} is not a tokenizer of format {FORMAT!r} with special tokens '
        f'{list(SPECIALS)}; delete it to have it trained again.'
      )
    return cls(tokenizers.Tokenizer.from_str(json.dumps(fields['bpe'])))

  def save(self, path: str | os.PathLike) -> None:
    """Writes a JSON file, whole or not at all."""
    files.write_atomic(path, self._json())

  def _json(self) -> bytes:
    value = {
      'format': FORMAT,
      'specials': SPECIALS,
      'bpe': json.loads(self._bpe.to_str()),
    }
    return (json.dumps(value, sort_keys=True, indent=1) + '\n').encode()

  def fingerprint(self) -> str:
    """Returns the SHA-256 of the file that `save` writes."""
    return files.sha256(self._json())

  @property
  def special_ids(self) -> frozenset[int]:
    """Ids that no text is encoded to."""
    return frozenset(range(len(SPECIALS)))

  @property
  def vocab_size(self) -> int:
    """Number of ids, special tokens included."""
    return len(self._bytes)

  def encode(self, text: str) -> np.ndarray:
    """Returns int32 ids, never a special one; lone surrogates become '?'."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    encodings = self._bpe.encode_batch_fast([*map(without_surrogates, texts)])
    return [np.array(e.ids, np.int32) + len(SPECIALS) for e in encodings]

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """Returns the exact bytes, with special tokens spelled out."""
    try:
      return b''.join(self._bytes[i] for i in map(int, ids) if i >= 0)
    except IndexError:
      raise ValueError(
        f'A token id is outside this vocabulary of {self.vocab_size}.'
      ) from None

  def decode(self, ids: Iterable[int]) -> str:
    """Returns text; bytes that are not UTF-8 become U+FFFD.

    Special tokens are spelled out, so that a misplaced one stays visible.
    """
    return self.decode_bytes(ids).decode('utf-8', 'replace')


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
  """Learns merges from texts, with room left for the special tokens.

  Args:
    texts: corpus, at least one text of which is not empty.
    vocab_size: largest number of ids, special tokens and the 256 bytes
      included; texts with few pairs to merge give fewer.

  Raises:
    ValueError: vocab_size has no room for the bytes, or every text is empty.
  """
  if vocab_size < MIN_VOCAB_SIZE:
    raise ValueError(
      f'vocab_size ({vocab_size}) must be at least {MIN_VOCAB_SIZE}: '
      f'{len(SPECIALS)} special tokens and 256 bytes.'
    )
  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_WORDS), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size - len(SPECIALS),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  texts = [without_surrogates(text) for text in texts]
  if not any(texts):
    raise ValueError(
      f'Cannot train a tokenizer: none of {len(texts)} texts holds a '
      'character. Give it a corpus that is not empty.'
    )
  bpe.train_from_iterator(texts, trainer=trainer, length=len(texts))
  return bpe


def without_surrogates(text: str) -> str:
  """Replaces lone surrogates, which UTF-8 has no bytes for."""
  return text.encode('utf-8', 'replace').decode()
