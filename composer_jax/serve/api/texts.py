"""Turns tokens into text as they arrive, up to a stop string.

A piece of text goes out only when no later token can take it back: half a
character waits for its other half, and a possible beginning of a stop string
waits until it is none. So the pieces, put together, are the text of the whole
answer, however the tokens arrived.
"""

import codecs
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Token:
  """A sampled token and the likeliest tokens at its place.

  Attributes:
    logprob: log-probability under the model's own distribution, untruncated, at
      temperature 1.
    top: bytes and log-probability of the likeliest tokens, best first.
  """

  data: bytes
  logprob: float
  top: tuple[tuple[bytes, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
  """Text that can go out; its tokens, and their offsets in the whole text."""

  text: str
  tokens: tuple[Token, ...]
  offsets: tuple[int, ...]


def spelling(tokenizer: Any, token: int) -> bytes:
  """Returns a token's bytes, or `<id>` for a logit beyond the vocabulary."""
  try:
    return tokenizer.decode_bytes([token])
  except ValueError:
    return f'<{token}>'.encode()


class Scanner:
  """Finds the first of several marks in a text that arrives in pieces.

  Attributes:
    mark: mark that was found; '' before.
    after: text after the mark, in the piece that completed it.
  """

  def __init__(self, marks: Sequence[str]):
    self.mark = self.after = ''
    self._marks = tuple(marks)
    self._held = ''

  def add(self, text: str) -> str:
    """Returns the text before the mark, as far as no mark can begin in it."""
    if self.mark:
      return ''
    text = self._held + text
    # The mark that is complete first counts, so it does not matter how many
    # characters come at once.
    ends = [
      (at + len(mark), at, mark)
      for mark in self._marks
      if (at := text.find(mark)) >= 0
    ]
    if ends:
      end, at, self.mark = min(ends)
      self._held, self.after = '', text[end:]
      return text[:at]
    # The longest end of the text with which a mark may begin waits.
    longest = max((len(mark) for mark in self._marks), default=1) - 1
    start = max(0, len(text) - longest)
    while start < len(text) and not any(
      mark.startswith(text[start:]) for mark in self._marks
    ):
      start += 1
    self._held = text[start:]
    return text[:start]

  def finish(self) -> str:
    """Returns the text that was held back; nothing follows."""
    held, self._held = self._held, ''
    return held


class Text:
  """The growing text of one choice; a stop string has ended it if `stopped`."""

  def __init__(self, stop: Sequence[str] = ()):
    self.stopped = False
    self._scanner = Scanner(stop)
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
    self._decoded = self._given = 0  # characters
    # Offsets of tokens that have not gone out.
    self._tokens: list[tuple[int, Token]] = []

  def add(self, tokens: Iterable[Token]) -> tuple[TextPiece, int]:
    """Returns a piece and the number of tokens used, up to a stop string."""
    used, text = 0, ''
    for token in tokens:
      if self.stopped:
        break
      used += 1
      self._tokens.append((self._decoded, token))
      text += self._decode(token.data)
    return self._give(text), used

  def finish(self) -> TextPiece:
    """Returns the last piece; no token follows."""
    if self.stopped:
      return self._give('')
    text = self._decode(b'', final=True) + self._scanner.finish()
    # Tokens that spell nothing begin where the text ends.
    return self._give(text, last=not self.stopped)

  def _decode(self, data: bytes, final: bool = False) -> str:
    decoded = self._decoder.decode(data, final)
    self._decoded += len(decoded)
    text = self._scanner.add(decoded)
    self.stopped = bool(self._scanner.mark)
    return text

  def _give(self, text: str, last: bool = False) -> TextPiece:
    self._given += len(text)
    begun = [(o, t) for o, t in self._tokens if o < self._given or last]
    self._tokens = self._tokens[len(begun) :]
    return TextPiece(
      text=text,
      tokens=tuple(t for _, t in begun),
      offsets=tuple(o for o, _ in begun),
    )
