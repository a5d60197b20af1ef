"""Grammars of answers, in the Lark syntax of llguidance.

An answer is a text, JSON of a schema, calls, or a choice of those.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# A model that may write white space for ever would.
_WHITE_SPACE = r'[\x20\x0A\x0D\x09]{0,32}'
_HEAD = '%llguidance {}\n'
TEXT = r'/(.|\n)+/'


def literal(text: str) -> str:
  """Returns a text as an element of a rule."""
  return json.dumps(text, ensure_ascii=False)


def tokens(ids: Iterable[int]) -> str:
  """Returns a choice of special tokens as an element of a rule."""
  return f'<[{",".join(map(str, ids))}]>'


def of_schema(schema: Mapping[str, Any]) -> str:
  """Returns JSON of a schema as the body of a rule."""
  options = {'whitespace_pattern': _WHITE_SPACE}
  return f'%json {json.dumps({**schema, "x-guidance": options})}'


def of_arguments(schema: Mapping[str, Any]) -> str:
  """Returns the JSON object of a tool's parameters as the body of a rule."""
  return of_schema({'type': 'object', **schema})


def whole(start: str, rules: Sequence[str] = ()) -> str:
  """Returns a grammar whose answers are those of the expression `start`."""
  return _HEAD + '\n'.join([f'start: {start}', *rules]) + '\n'
