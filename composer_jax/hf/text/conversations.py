"""Reads the user's own conversations, for SFT of an imported model.

Each line is a JSON object with `messages` and optionally `tools`, in the form
that transformers' `apply_chat_template` takes. The import's chat template
renders them, so the format is the one that the model already knows. The loss
covers what the assistant said: what the template writes of it behind the
opening of a turn, up to the token that ends it. A run keeps the tokens: a
template may write the date, and the documents must not change when the run is
restarted.
"""

import io
import json
import os
import pathlib
from typing import Any

import numpy as np

from composer_jax.core import files
from composer_jax.hf.text import language

FILE = 'conversations.npz'  # in a workdir
_KEYS = {'messages', 'tools'}


def documents(
  path: str | os.PathLike,
  speech: language.TemplateLanguage,
  seq_len: int,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns (tokens, loss mask) of the conversations in a file of JSON lines.

  A ValueError names a line that is no conversation, is too long, is refused by
  the template, or in which the assistant says nothing.
  """
  encoded = []
  # Not splitlines, which also splits at characters that JSON may hold.
  lines = _read(path).removesuffix(b'\n').split(b'\n')
  for number, line in enumerate(lines if lines != [b''] else [], 1):
    where = f'{os.fspath(path)}, line {number}'
    messages, tools = _parts(line, where)
    try:
      made = of_messages(speech, messages, tools)
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from error
    for tokens_T, _ in made:
      if len(tokens_T) > seq_len:
        raise ValueError(
          f'{where}: {len(tokens_T)} tokens do not fit --config.sft.seq_len '
          f'({seq_len}); raise it or leave the conversation out.'
        )
    if not made:
      raise ValueError(
        f'{where}: no message has the role assistant, so there is nothing to '
        'learn; leave the line out.'
      )
    encoded += made
  if not encoded:
    raise ValueError(f'{os.fspath(path)} holds no conversation.')
  return encoded


def of_messages(
  speech: language.TemplateLanguage, messages: list[dict[str, Any]], tools: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns (tokens, loss mask) of one conversation, in as few parts as can be.

  Where the template changes earlier turns, a part ends: the next one begins
  with the changed turns, on which it has no loss, as a served model reads them.
  """
  made: list[tuple[str, list[tuple[int, int]]]] = []
  for place, message in enumerate(messages):
    if message['role'] != 'assistant':
      continue
    before = messages[:place]
    opening = speech.markup(before, tools=tools, add_generation_prompt=True)
    body = speech.continued(before, message, tools=tools)
    _check_calls(speech, before, message, tools, body)
    body = speech.closed(body, message)
    start, stop = len(opening), len(opening) + len(body)
    text, spans = made[-1] if made else ('', [])
    if not made or not opening.startswith(text):
      spans = []
      made.append(('', spans))
    spans.append((start, stop))
    made[-1] = (opening + body, spans)
  return [speech.masked(text, spans) for text, spans in made]


def _check_calls(
  speech: language.TemplateLanguage, before: Any, turn: Any, tools: Any, body
) -> None:
  """Raises for a turn whose calls the template leaves out beside its words."""
  if not (language.turn_calls(turn) and turn.get('content')):
    return
  words = {name: turn[name] for name in turn if name != 'tool_calls'}
  if speech.continued(before, words, tools=tools) == body:
    raise ValueError(
      f'{speech.template.name}: the chat template leaves out the calls of a '
      'turn that has content, too; give that turn the content null, and its '
      'words, if they matter, a turn before it.'
    )


def identity(path: str | os.PathLike) -> str:
  """Returns the SHA-256 of a file; a ValueError where it cannot be read."""
  return files.sha256(_read(path))


def save(
  path: pathlib.Path, documents: list[tuple[np.ndarray, np.ndarray]]
) -> None:
  stored = io.BytesIO()
  np.savez(
    stored,
    lengths=np.array([len(tokens_T) for tokens_T, _ in documents]),
    tokens=np.concatenate([tokens_T for tokens_T, _ in documents]),
    mask=np.concatenate([mask_T for _, mask_T in documents]),
  )
  files.write_atomic(path, stored.getvalue())


def load(path: pathlib.Path) -> list[tuple[np.ndarray, np.ndarray]]:
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
  if not (
    isinstance(value, dict)
    and value.keys() <= _KEYS
    and isinstance(value.get('messages'), list)
    and all(isinstance(m, dict) and 'role' in m for m in value['messages'])
  ):
    raise ValueError(
      f'{where} is no conversation: it must be an object with `messages`, a '
      'list of objects with a role, and optionally `tools`.'
    )
  return value['messages'], value.get('tools') or None
