"""Messages as tokens.

  <|user|> prompt <|end|> <|call|> read stats.py <|end|> <|tool|> ... <|end|>

The harness writes everything up to and including `<|call|>`; the policy
samples the text of the call and its `<|end|>`. Message text never yields a
special token (see tokenizer.encode), so a tool result cannot pose as a message.
"""

import itertools
from typing import Any

import numpy as np

# The name of a role is that of the special token that opens its messages.
_ROLES = ('USER', 'CALL', 'TOOL')


def _message(tokenizer: Any, opening: int, text: str) -> np.ndarray:
  ids = tokenizer.encode(text)
  return np.concatenate(([opening], ids, [tokenizer.END])).astype(np.int32)


def user(tokenizer: Any, text: str) -> np.ndarray:
  """Returns the int32 ids of a user's message."""
  return _message(tokenizer, tokenizer.USER, text)


def tool(tokenizer: Any, text: str) -> np.ndarray:
  return _message(tokenizer, tokenizer.TOOL, text)


def call_prefix(tokenizer: Any) -> np.ndarray:
  """Returns the int32 ids after which the policy writes a call."""
  return np.asarray([tokenizer.CALL], np.int32)


def is_text(tokenizer: Any, ids: np.ndarray) -> bool:
  """True if no id is special or, as a model's may be, beyond the vocabulary."""
  size, specials = tokenizer.vocab_size, tokenizer.special_ids
  return all(i < size and i not in specials for i in ids.tolist())


def turns(tokenizer: Any, tokens_T: np.ndarray) -> list[dict[str, str]]:
  """Returns a window's messages, `{'role': ..., 'text': ...}` each.

  The roles are 'user', 'call' and 'tool', and 'text' for tokens before the
  first role marker. Special or unknown tokens inside a message, which only a
  policy can put there, are shown as their ids in angle brackets.
  """
  roles = {int(getattr(tokenizer, r)): r.lower() for r in _ROLES}
  size, specials = tokenizer.vocab_size, tokenizer.special_ids
  messages: list[dict[str, str]] = []
  is_open = False
  for is_plain, run in itertools.groupby(
    np.asarray(tokens_T).tolist(), lambda t: t < size and t not in specials
  ):
    if is_plain:
      if not messages:
        messages.append({'role': 'text', 'text': ''})
      messages[-1]['text'] += tokenizer.decode(np.array([*run], np.int32))
      continue
    for token in run:
      if token == tokenizer.END:
        is_open = False
      elif token in roles and not is_open:
        messages.append({'role': roles[token], 'text': ''})
        is_open = True
      elif messages:
        messages[-1]['text'] += f'<{token}>'
  return messages
