"""Tool calls as text, in two forms.

Words, for tools whose arguments are words, then an optional payload:

  edit stats.py total
  return sum(values)

JSON, for tools whose arguments are texts:

  {"tool": "edit", "arguments": {"path": "a.py", "old": "1", "new": "2"}}

The tools and their arguments belong to environments (`tasks`).
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

_FORM = '{"tool": NAME, "arguments": {...}}'


class ToolCallError(ValueError):
  """The text is not a tool call."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
  """A parsed call of words; the payload holds the lines after the first."""

  name: str
  arguments: tuple[str, ...] = ()
  payload: str = ''

  def __post_init__(self):
    for word in (self.name, *self.arguments):
      if not word or word.split() != [word]:
        raise ToolCallError(f'{word!r} must be one word without white space.')


def render(call: Call) -> str:
  line = ' '.join((call.name, *call.arguments))
  return f'{line}\n{call.payload}' if call.payload else line


def parse(text: str) -> Call:
  """Parses the form of `render`; ignores extra spaces in the first line."""
  line, _, payload = text.partition('\n')
  words = line.split()
  if not words:
    raise ToolCallError('empty call')
  return Call(name=words[0], arguments=tuple(words[1:]), payload=payload)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JsonCall:
  """A parsed call whose arguments are JSON values by name."""

  name: str
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def render_json(call: JsonCall) -> str:
  value = {'tool': call.name, 'arguments': dict(call.arguments)}
  return json.dumps(value, ensure_ascii=False)


def parse_json(text: str) -> JsonCall:
  """Parses the form of `render_json`; a ToolCallError for any other text."""
  if not text.strip():
    raise ToolCallError(f'empty call; a call is {_FORM}')
  try:
    value = json.loads(
      text, object_pairs_hook=_without_doubles, parse_constant=_no_constant
    )
  except json.JSONDecodeError as error:
    place = f'line {error.lineno} column {error.colno}'
    raise ToolCallError(
      f'not JSON: {error.msg} at {place}; a call is {_FORM} and nothing else'
    ) from error
  except RecursionError as error:
    raise ToolCallError('not JSON: too deeply nested') from error
  except ToolCallError:
    raise
  except ValueError as error:  # A number has more digits than Python reads.
    raise ToolCallError(f'not JSON: {error}') from error
  if not isinstance(value, dict) or not isinstance(value.get('tool'), str):
    raise ToolCallError(f'no call: it must be {_FORM}, NAME a string')
  if not value.keys() <= {'tool', 'arguments'}:
    raise ToolCallError(
      f'no call: it may hold "tool" and "arguments" and nothing else: {_FORM}'
    )
  arguments = value.get('arguments', {})
  if not isinstance(arguments, dict):
    raise ToolCallError(f'no call: "arguments" must be an object: {_FORM}')
  return JsonCall(name=value['tool'], arguments=arguments)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) < len(pairs):
    raise ToolCallError('not JSON: an object names a key twice')
  return value


def _no_constant(name: str) -> Any:
  raise ToolCallError(f'not JSON: {name} is no JSON number')
