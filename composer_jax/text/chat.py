"""Messages as tokens.

  <|user|> prompt <|end|> <|call|> read stats.py <|end|> <|tool|> ... <|end|>

The harness writes everything up to and including `<|call|>`; the policy
samples the text of the call and its `<|end|>`. Message text never yields a
special token (see tokenizer.encode), so a tool result cannot pose as a message.

This is the language of models trained here. A checkpoint may bring another one
(`hf.text.language`); in each, tokens are only appended to a window.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Said:
  """What a turn says: calls as environments take them, or its fault."""

  calls: tuple[str, ...] = ()
  fault: str = ''


class Dialogue(Protocol):
  """The messages of one window; `opening_T` is the context of a first turn."""

  opening_T: np.ndarray

  def read(self, tokens_T: np.ndarray, stopped: bool) -> Said:
    """Takes in a sampled turn, whose last token ended it if it `stopped`."""

  def answer(self, texts: Sequence[str], is_query: bool = False) -> np.ndarray:
    """Returns the context that answers the turn read last, or asks a query."""


class Language(Protocol):
  """How one model is spoken to; no text ever becomes a special token."""

  ends: tuple[int, ...]  # ids that end a sampled turn

  def dialogue(
    self,
    prompt: str,
    protocol: str = '',
    notes: tuple[np.ndarray, np.ndarray] | None = None,
  ) -> Dialogue:
    """Opens a window; the prompt may end with the protocol of calls as text.

    A later window repeats notes, the ids of a summary and of the last answer.
    """

  def written(self, call: str, place: int = 0) -> np.ndarray:
    """Returns the turn that makes a call, with `place` calls before it."""

  def words(self, tokens_T: np.ndarray) -> np.ndarray:
    """Returns the ids of a turn's text, for a later window."""

  def remark(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a message of the host, and the ids before a turn it precedes."""

  def messages(
    self, tokens_T: np.ndarray, loss_mask_T: np.ndarray | None = None
  ) -> list[dict[str, str]]:
    """Returns a window, or a context and an empty call, in readable form."""


def language_of(tokenizer: Any) -> Language:
  """Returns the language that a tokenizer brings, or the one of this module."""
  return getattr(tokenizer, 'language', None) or RoleLanguage(tokenizer)


class RoleLanguage(Language):
  """Implements `Language` by the roles; a whole turn is one call."""

  def __init__(self, tokenizer: Any):
    self._tokenizer = tokenizer
    self.ends = (int(tokenizer.END),)

  def dialogue(self, prompt, protocol='', notes=None) -> 'RoleDialogue':
    ids = self._tokenizer
    parts = [user(ids, prompt)]
    if notes is not None:
      for opening, note_T in zip((ids.USER, ids.TOOL), notes, strict=True):
        parts.append(np.concatenate(([opening], note_T, [ids.END])))
    parts.append(call_prefix(ids))
    return RoleDialogue(ids, np.concatenate(parts).astype(np.int32))

  def written(self, call: str, place: int = 0) -> np.ndarray:
    ids = self._tokenizer
    return np.append(ids.encode(call), ids.END).astype(np.int32)

  def words(self, tokens_T: np.ndarray) -> np.ndarray:
    is_kept = [is_text(self._tokenizer, t_1) for t_1 in tokens_T[:, None]]
    return tokens_T[np.array(is_kept, bool)]

  def remark(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    return tool(self._tokenizer, text), call_prefix(self._tokenizer)

  def messages(self, tokens_T, loss_mask_T=None) -> list[dict[str, str]]:
    return turns(self._tokenizer, tokens_T)


class RoleDialogue(Dialogue):
  """Implements `Dialogue` by the roles."""

  def __init__(self, tokenizer: Any, opening_T: np.ndarray):
    self._tokenizer, self.opening_T = tokenizer, opening_T
    self._is_open = False  # True after a turn that lacks its end token.

  def read(self, tokens_T: np.ndarray, stopped: bool) -> Said:
    self._is_open = not stopped
    if not stopped:
      return Said(fault='error: call too long')
    if not is_text(self._tokenizer, tokens_T[:-1]):
      return Said(fault='error: not a call')
    return Said(calls=(self._tokenizer.decode(tokens_T[:-1]),))

  def answer(self, texts: Sequence[str], is_query: bool = False) -> np.ndarray:
    ids, write = self._tokenizer, user if is_query else tool
    parts = [np.array([ids.END] * self._is_open, np.int32)]
    parts += [*(write(ids, text) for text in texts), call_prefix(ids)]
    return np.concatenate(parts)
