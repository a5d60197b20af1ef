"""Reads bytes that untrusted code wrote: checks results, makes output safe.

Every function is total: it answers within a second and 64 MiB, or raises
ValueError.
"""

import json
import math
import re
import zlib
from typing import Any

MAX_DEPTH = 64  # the writer stops at 32, below two lists of its own
MAX_BYTES = 4 << 20  # one wide character makes a text four times as large
MAX_ITEMS = 200_000  # a list of lists takes 20 times the space of its text
_MAX_FLOAT = 400
# Possessive quantifiers, and the closing quote is optional: a match never
# backtracks, so hostile text costs one pass.
_MARKS = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?|[\[\]{}]', re.DOTALL)
# Sequences before single characters: CSI; OSC, DCS, SOS, PM and APC with their
# strings, ended or not; two-character escapes. As 7-bit and as C1 characters.
_ESCAPES = re.compile(
  r'(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?'
  r'|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?'
  r'|\x1b[ -/]*[0-~]?'
)
# Characters that move the cursor back or ring; marks of direction, which make
# text look otherwise than it reads; characters that some readers take for line
# ends.
_CONTROLS = re.compile(
  '[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f'
  '\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]'
)
_SHOWN = '\N{REPLACEMENT CHARACTER}'


def parse(data: bytes, num_calls: int) -> list:
  """Parses JSON whose length the caller bounded.

  Returns:
    For each call `['ok', value]` or `['raised', text]`.

  Raises:
    ValueError: the data breaks a rule, which the message states.
  """
  outcomes = read_json(data)
  if type(outcomes) is not list or len(outcomes) != num_calls:
    raise ValueError(f'the result is not a list of {num_calls} outcomes')
  for outcome in outcomes:
    if (
      type(outcome) is not list
      or len(outcome) != 2
      or outcome[0] not in ('ok', 'raised')
      or (outcome[0] == 'raised' and type(outcome[1]) is not str)
    ):
      raise ValueError('an outcome is not [ok, value] or [raised, text]')
  return outcomes


def num_items(data: bytes) -> int:
  """Returns a bound on the values in a JSON text, without parsing it."""
  return 1 + sum(data.count(mark) for mark in (b',', b'[', b'{'))


def read_json(data: bytes) -> Any:
  """Parses JSON without NaN, infinities and lone surrogates.

  Raises:
    ValueError: the data is none, or too large, nested or rich in items.
  """
  if len(data) > MAX_BYTES:
    raise ValueError(f'the result of {len(data)} bytes exceeds {MAX_BYTES}')
  # Counted first, since the parser recurses and allocates.
  if num_items(data) > MAX_ITEMS:
    raise ValueError(f'the result has more than {MAX_ITEMS} items')
  depth = 0
  for match in _MARKS.finditer(data):
    depth += {91: 1, 123: 1, 93: -1, 125: -1}.get(data[match.start()], 0)
    if depth > MAX_DEPTH:
      raise ValueError(f'the result is nested deeper than {MAX_DEPTH}')
  try:
    value = json.loads(
      data.decode('utf-8'), parse_constant=_refuse, parse_float=_finite
    )
    # Escapes can spell lone surrogates, which cannot be encoded again.
    if b'\\u' in data:
      json.dumps(value, ensure_ascii=False).encode('utf-8')
  except UnicodeError as error:
    raise ValueError('the result is not UTF-8') from error
  except json.JSONDecodeError as error:
    raise ValueError(f'the result is not JSON: {error}') from error
  return value


def inflate(data: bytes, most: int = MAX_BYTES) -> bytes:
  """Decompresses one zlib stream; ValueError beyond `most` bytes."""
  inflater = zlib.decompressobj()
  try:
    text = inflater.decompress(data, most + 1)
  except zlib.error as error:
    raise ValueError(f'no zlib stream: {error}') from error
  if len(text) > most:
    raise ValueError(f'a stream of more than {most} bytes')
  return text


def _finite(text: str) -> float:
  if len(text) > _MAX_FLOAT:
    _refuse(f'a number of {len(text)} digits')
  number = float(text)
  return number if math.isfinite(number) else _refuse(text)


def _refuse(constant: str) -> Any:
  raise ValueError(f'the result holds {constant}, which is not JSON')


def clean(data: bytes) -> str:
  """Decodes text, without escapes and control characters but tab and newline.

  A terminal that shows the text does nothing but print. Removed sequences and
  bytes that are not UTF-8 become U+FFFD; a lone carriage return becomes a
  newline, so that progress bars stay readable and nothing is overwritten.
  """
  text = data.decode('utf-8', 'replace')
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  return _CONTROLS.sub(_SHOWN, _ESCAPES.sub(_SHOWN, text))
