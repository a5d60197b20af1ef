"""A corpus as token ids: trains the tokenizer, tokenises, keeps both on disk.

Both results lie beside the corpus under names with a hash of their inputs, so
only a rerun on the same corpus finds them.
"""

import io
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from composer_jax.core import files
from composer_jax.corpus import build as corpus_lib
from composer_jax.text import tokenizer as tokenizer_lib

# Documents encoded at once: bounds memory, keeps threads busy.
_CHUNK = 64


class TokenizerLike(Protocol):
  """Turns a corpus into tokens: this project's tokenizer or another model's."""

  BOS: int
  EOD: int

  @property
  def vocab_size(self) -> int: ...
  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...
  def fingerprint(self) -> str: ...


class Documents(Sequence[np.ndarray]):
  """Token ids of many documents in one array, which may be a memory map."""

  def __init__(self, ids_Z: np.ndarray, starts: np.ndarray):
    """Document `i` is `ids_Z[starts[i]:starts[i + 1]]`."""
    self.ids_Z = ids_Z
    self.starts = starts

  def __len__(self) -> int:
    return len(self.starts) - 1

  def __getitem__(self, index: Any) -> Any:
    if not 0 <= index < len(self):
      raise IndexError(index)
    return self.ids_Z[self.starts[index] : self.starts[index + 1]].astype(
      np.int32
    )

  @property
  def num_tokens(self) -> int:
    return int(self.starts[-1])


def train_tokenizer(
  corpus: corpus_lib.Corpus,
  vocab_size: int,
  *,
  max_bytes: int = 2_000_000,
  extra_texts: Iterable[str] = (),
  report: Callable[[str], None] = print,
) -> tokenizer_lib.Tokenizer:
  """Trains on a sample of the train split, or loads what was trained.

  Args:
    corpus: corpus whose folder keeps the tokenizer.
    max_bytes: most characters of the sample: whole documents, chosen by hash.
    extra_texts: further texts, such as transcripts of tool calls, used in full.
  """
  extra = list(extra_texts)
  inputs = [corpus.fingerprint, vocab_size, max_bytes, *extra]
  key = files.sha256(json.dumps(inputs).encode())
  path = corpus.folder / f'tokenizer-{key[:16]}.json'
  if path.exists():
    return tokenizer_lib.Tokenizer.load(path)
  sample, total = [], 0
  texts = corpus.texts(corpus_lib.TRAIN)
  for text in sorted(texts, key=lambda t: files.sha256(t.encode())):
    if total + len(text) <= max_bytes or not sample:
      sample.append(text)
      total += len(text)
  report(f'tokenizer: {vocab_size} ids from {total / 1e6:.1f} MB')
  tokenizer = tokenizer_lib.Tokenizer.train([*sample, *extra], vocab_size)
  tokenizer.save(path)
  return tokenizer


def tokenise(
  corpus: corpus_lib.Corpus,
  tokenizer: TokenizerLike,
  *,
  report: Callable[[str], None] = print,
) -> dict[str, Documents]:
  """Returns the token ids of each split, read from disk if they are there.

  Every document is framed by BOS and EOD; a damaged file is a ValueError.
  """
  inputs = f'{corpus.fingerprint} {tokenizer.fingerprint()}'
  key = files.sha256(inputs.encode())[:16]
  result = {}
  for split in corpus_lib.SPLITS:
    path = corpus.folder / f'tokens-{key}-{split}.npy'
    index = path.with_suffix('.json')
    if not index.exists():
      report(
        f'tokens: {split}: encoding {corpus.num_bytes(split) / 1e6:.1f} MB'
      )
      # It writes the index last: without that the array does not count.
      _tokenise(corpus.texts(split), tokenizer, path, index)
    result[split] = _load(path, index)
    report(
      f'tokens: {split}: {result[split].num_tokens / 1e6:.2f} million in '
      f'{len(result[split])} documents'
    )
  return result


def _tokenise(
  texts: list[str],
  tokenizer: TokenizerLike,
  path: pathlib.Path,
  index: pathlib.Path,
) -> None:
  small = tokenizer.vocab_size <= np.iinfo(np.uint16).max
  dtype = np.uint16 if small else np.int32
  parts, starts = [np.zeros(0, dtype)], [0]
  for i in range(0, len(texts), _CHUNK):
    for ids in tokenizer.encode_batch(texts[i : i + _CHUNK]):
      framed = [[tokenizer.BOS], ids, [tokenizer.EOD]]
      parts.append(np.concatenate(framed).astype(dtype))
      starts.append(starts[-1] + len(parts[-1]))
  buffer = io.BytesIO()
  np.save(buffer, np.concatenate(parts), allow_pickle=False)
  data = buffer.getvalue()
  files.write_atomic(path, data)
  files.write_json(index, {'sha256': files.sha256(data), 'starts': starts})


def _load(path: os.PathLike, index: pathlib.Path) -> Documents:
  meta = files.read_json(index)
  data = pathlib.Path(path).read_bytes()
  if files.sha256(data) != meta['sha256']:
    raise ValueError(
      f'{path} is damaged; delete {index} to have it tokenised again.'
    )
  ids_Z = np.load(path, mmap_mode='r', allow_pickle=False)
  return Documents(ids_Z, np.array(meta['starts'], np.int64))
