"""Reads bytes that untrusted code wrote: checks results, makes output safe."""

import json
import math
import re
from typing import Any

MAX_DEPTH = 64  # the writer stops at 32, below two lists of its own
# Possessive quantifiers, and the closing quote is optional: a match never
# backtracks, so hostile text costs one pass.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)
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
  # The parser recurses, so depth is counted first, outside of strings.
  depth = 0
  for byte in re.findall(rb'[\[\]{}]', _STRING.sub(b'', data)):
    depth += 1 if byte in b'[{' else -1
    if depth > MAX_DEPTH:
      raise ValueError(f'the result is nested deeper than {MAX_DEPTH}')
  try:
    outcomes = json.loads(
      data.decode('utf-8'), parse_constant=_refuse, parse_float=_finite
    )
    # Escapes can spell lone surrogates, which cannot be encoded again.
    json.dumps(outcomes, ensure_ascii=False).encode('utf-8')
  except UnicodeError as error:
    raise ValueError('the result is not UTF-8') from error
  except json.JSONDecodeError as error:
    raise ValueError(f'the result is not JSON: {error}') from error
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


def _finite(text: str) -> float:
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
