"""Conversations of the user's own, for SFT of an imported model.

A file of JSON lines, each with `messages` and maybe `tools`, as transformers'
`apply_chat_template` takes them. The import's chat template writes them, so the
model goes on in the form of speech that it knows; loss is on what the template
marks as the assistant's.
"""

import json
import os
import pathlib
from typing import Any

import numpy as np

from composer_jax.text import chat_template, hf_tokenizer

_KEYS = {'messages', 'tools'}


def documents(
  path: str | os.PathLike,
  template: chat_template.ChatTemplate,
  tokenizer: hf_tokenizer.Tokenizer,
  seq_len: int,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns (tokens, loss mask) of every conversation.

  Args:
    path: of the file.
    template: of the import.
    tokenizer: of the import.
    seq_len: of SFT's rows, which a conversation has to fit.

  Raises:
    ValueError: names the line that is no conversation, is too long, or of
      which nothing is marked as the assistant's.
  """
  found = []
  # Not splitlines, which also splits at characters that JSON may hold.
  lines = pathlib.Path(path).read_text('utf-8').removesuffix('\n').split('\n')
  for number, line in enumerate(lines if lines != [''] else [], 1):
    where = f'{os.fspath(path)}, line {number}'
    messages, tools = _parts(line, where)
    tokens_T, mask_T = template.encode(tokenizer, messages, tools=tools)
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


def _parts(line: str, where: str) -> tuple[list[dict[str, Any]], Any]:
  try:
    value = json.loads(line)
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
