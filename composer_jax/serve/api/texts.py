"""What tokens say, as they arrive: text, stop strings and log-probabilities.

A piece of text is given out only when no later token can take it back: half a
character waits for its other half, and what may be the beginning of a stop
string waits until it is not. So the pieces, put together, are the text of the
whole answer, however the tokens arrived.
"""

import codecs
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Token:
  """A sampled token and what it was chosen among.

  Attributes:
    data: the bytes it spells.
    logprob: of the model's own distribution, untruncated, at temperature 1.
    top: (bytes, log-probability) of the likeliest tokens, best first.
  """

  data: bytes
  logprob: float
  top: tuple[tuple[bytes, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
  """What can be given out: text, and the tokens that begin in it.

  Attributes:
    offsets: the character of the whole text at which each token begins.
  """

  text: str
  tokens: tuple[Token, ...]
  offsets: tuple[int, ...]


def spelling(tokenizer: Any, token: int) -> bytes:
  """Returns a token's bytes; one beyond the vocabulary is shown as its id.

  A model may have more logits than its tokenizer has ids.
  """
  try:
    return tokenizer.decode_bytes([token])
  except ValueError:
    return f'<{token}>'.encode()


class Scanner:
  """Finds the first of some texts in one that arrives in pieces.

  Attributes:
    found: which, '' before.
    rest: what stood after it in the piece that completed it.
  """

  def __init__(self, wanted: Sequence[str]):
    self.found = self.rest = ''
    self._wanted = tuple(wanted)
    self._held = ''

  def add(self, text: str) -> str:
    """Returns what stands before the text that is found, as far as is known."""
    if self.found:
      return ''
    text = self._held + text
    # The one that is complete first: so it does not matter how many characters
    # come at once.
    ends = [
      (at + len(wanted), at, wanted)
      for wanted in self._wanted
      if (at := text.find(wanted)) >= 0
    ]
    if ends:
      end, at, self.found = min(ends)
      self._held, self.rest = '', text[end:]
      return text[:at]
    keep = self._may_begin(text)
    self._held = text[len(text) - keep :]
    return text[: len(text) - keep]

  def finish(self) -> str:
    """Returns what was held back; nothing follows."""
    held, self._held = self._held, ''
    return held

  def _may_begin(self, text: str) -> int:
    """Characters at the end with which one that is wanted may begin."""
    longest = max((len(w) for w in self._wanted), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
      if any(w.startswith(text[-size:]) for w in self._wanted):
        return size
    return 0


class Text:
  """The growing text of one choice.

  Attributes:
    stopped: a stop string has appeared; it and what follows are not text.
  """

  def __init__(self, stop: Sequence[str] = ()):
    self.stopped = False
    self._scanner = Scanner(stop)
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
    self._decoded = self._given = 0  # characters
    # Where each token begins that is not given out.
    self._tokens: list[tuple[int, Token]] = []

  def add(self, tokens: Iterable[Token]) -> tuple[TextPiece, int]:
    """Takes tokens in order; returns what is settled, and the tokens used.

    Tokens after the one that completes a stop string are not used.
    """
    used, text = 0, ''
    for token in tokens:
      if self.stopped:
        break
      used += 1
      self._tokens.append((self._decoded, token))
      text += self._decode(token.data)
    return self._give(text), used

  def finish(self) -> TextPiece:
    """Returns what was held back; no token follows."""
    if self.stopped:
      return self._give('')
    text = self._decode(b'', final=True) + self._scanner.finish()
    # Tokens that spell nothing begin where the text ends.
    return self._give(text, last=not self.stopped)

  def _decode(self, data: bytes, final: bool = False) -> str:
    decoded = self._decoder.decode(data, final)
    self._decoded += len(decoded)
    text = self._scanner.add(decoded)
    self.stopped = bool(self._scanner.found)
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
