"""Messages as tokens.

  <|user|> prompt <|end|> <|call|> read stats.py <|end|> <|tool|> ... <|end|>

The harness writes everything up to and including `<|call|>`; the policy
samples the text of the call and its `<|end|>`. Message text never yields a
special token (see tokenizer.encode), so a tool result cannot pose as a message.
"""

from typing import Any

import numpy as np

# The name of a role is that of the special token that opens its messages.
_ROLES = ('USER', 'CALL', 'TOOL')


def _message(tokenizer: Any, opening: int, text: str) -> np.ndarray:
  ids = tokenizer.encode(text)
  return np.concatenate(([opening], ids, [tokenizer.END])).astype(np.int32)


def user(tokenizer: Any, text: str) -> np.ndarray:
  """int32 ids of what the user says."""
  return _message(tokenizer, tokenizer.USER, text)


def tool(tokenizer: Any, text: str) -> np.ndarray:
  """int32 ids of what a tool answers."""
  return _message(tokenizer, tokenizer.TOOL, text)


def call_prefix(tokenizer: Any) -> np.ndarray:
  """int32 ids after which the policy writes a call."""
  return np.asarray([tokenizer.CALL], np.int32)


def is_text(tokenizer: Any, ids: np.ndarray) -> bool:
  """Whether ids are all of text: none special, none beyond the vocabulary.

  A model may have more logits than its tokenizer has ids.
  """
  specials = tokenizer.special_ids
  return all(
    i < tokenizer.vocab_size and i not in specials for i in ids.tolist()
  )


def turns(tokenizer: Any, tokens_T: np.ndarray) -> list[dict[str, str]]:
  """Readable messages of a window.

  As `{'role': 'user' | 'call' | 'tool' | 'text', 'text': ...}`. Tokens before
  the first role marker form a message of role 'text'; special or unknown tokens
  inside a message, which only a policy can put there, are shown as their ids in
  angle brackets.
  """
  roles = {int(getattr(tokenizer, r)): r.lower() for r in _ROLES}
  specials = tokenizer.special_ids
  messages: list[tuple[str, list[str]]] = []
  plain: list[int] = []
  is_open = False

  def flush() -> None:
    if plain:
      if not messages:
        messages.append(('text', []))
      messages[-1][1].append(tokenizer.decode(np.asarray(plain, np.int32)))
      plain.clear()

  for token in np.asarray(tokens_T).tolist():
    if token not in specials and token < tokenizer.vocab_size:
      plain.append(token)
      continue
    flush()
    if token == tokenizer.END:
      is_open = False
    elif token in roles and not is_open:
      messages.append((roles[token], []))
      is_open = True
    elif messages:
      messages[-1][1].append(f'<{token}>')
  flush()
  return [{'role': role, 'text': ''.join(parts)} for role, parts in messages]
