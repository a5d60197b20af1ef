"""Conversations of the user's own, for SFT of an imported model.

A file of JSON lines, each with `messages` and maybe `tools`, as transformers'
`apply_chat_template` takes them. The import's chat template writes them, so the
model goes on in the form of speech that it knows; loss is on what the template
marks as the assistant's. A run keeps them as tokens: a template may write the
date, and what is learnt must not change from one start to the next.
"""

import io
import json
import os
import pathlib
from typing import Any

import numpy as np

from composer_jax.core import files
from composer_jax.hf.text import chat_template
from composer_jax.hf.text import tokenizer as hf_tokenizer

FILE = 'conversations.npz'  # of a workdir
_KEYS = {'messages', 'tools'}


def documents(
  path: str | os.PathLike,
  template: chat_template.ChatTemplate,
  tokenizer: hf_tokenizer.ImportedTokenizer,
  seq_len: int,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns (tokens, loss mask) of every conversation of a file.

  Raises:
    ValueError: names the line that is no conversation, that the template
      refuses, is too long, or of which nothing is marked as the assistant's.
  """
  found = []
  # Not splitlines, which also splits at characters that JSON may hold.
  lines = _read(path).removesuffix(b'\n').split(b'\n')
  for number, line in enumerate(lines if lines != [b''] else [], 1):
    where = f'{os.fspath(path)}, line {number}'
    messages, tools = _parts(line, where)
    try:
      tokens_T, mask_T = template.encode(tokenizer, messages, tools=tools)
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from error
    if len(tokens_T) > seq_len:
      raise ValueError(
        f'{where}: {len(tokens_T)} tokens do not fit --config.sft.seq_len '
        f'({seq_len}); raise it or leave the conversation out.'
      )
    if not mask_T.any():
      raise ValueError(
        f'{where}: the chat template marks nothing as said by the assistant. '
        'Enclose that in {% generation %} ... {% endgeneration %} in '
        f'{chat_template.FILE} of the import.'
      )
    found.append((tokens_T, mask_T))
  if not found:
    raise ValueError(f'{os.fspath(path)} holds no conversation.')
  return found


def identity(path: str | os.PathLike) -> str:
  """SHA-256 of the file; a ValueError where it cannot be read."""
  return files.sha256(_read(path))


def save(
  path: pathlib.Path, documents: list[tuple[np.ndarray, np.ndarray]]
) -> None:
  """Keeps what `documents` returned."""
  stored = io.BytesIO()
  np.savez(
    stored,
    lengths=np.array([len(tokens_T) for tokens_T, _ in documents]),
    tokens=np.concatenate([tokens_T for tokens_T, _ in documents]),
    mask=np.concatenate([mask_T for _, mask_T in documents]),
  )
  files.write_atomic(path, stored.getvalue())


def load(path: pathlib.Path) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns what `save` was given."""
  with np.load(path) as stored:
    ends = np.cumsum(stored['lengths'])[:-1]
    tokens = np.split(stored['tokens'], ends)
    return list(zip(tokens, np.split(stored['mask'], ends), strict=True))


def _read(path: str | os.PathLike) -> bytes:
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as error:
    raise ValueError(
      f'--config.demonstrations.conversations names {os.fspath(path)!r}, which '
      f"cannot be read ({error.strerror}); correct it, or name none: ''."
    ) from error


def _parts(line: bytes, where: str) -> tuple[list[dict[str, Any]], Any]:
  try:
    value = json.loads(line.decode())
  except UnicodeDecodeError as error:
    raise ValueError(f'{where} is not UTF-8 ({error}).') from error
  except ValueError as error:
    raise ValueError(f'{where} is not valid JSON ({error}).') from error
  is_one = (
    isinstance(value, dict)
    and value.keys() <= _KEYS
    and isinstance(value.get('messages'), list)
    and all(isinstance(m, dict) and 'role' in m for m in value['messages'])
  )
  if not is_one:
    raise ValueError(
      f'{where} is no conversation: an object with `messages`, a list of '
      'objects with a role, and maybe `tools`.'
    )
  return value['messages'], value.get('tools') or None
