"""Forms of tool calls in the text of published models.

Each is found by its marks, which are special tokens in some vocabularies and
words in others. A form writes nothing: calls are written by the chat template.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# An object, in whose texts marks may stand; else what looks like a damaged one.
_JSON = r'(?P<json>\{(?:[^"]|"(?:\\.|[^"\\])*")*?\}|\{.*?\})'


class WrittenCall(NamedTuple):
  """A call as a model wrote it; `number` is '' where its form has none."""

  name: str
  arguments: Mapping[str, Any]
  number: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
  """A form of calls.

  Attributes:
    marks: spellings of the tokens of a call; the first begins all calls of a
      turn, the last ends them.
    pattern: expression of one call, with the groups `json` and optionally
      `name` and `number`.
  """

  marks: tuple[str, ...]
  pattern: re.Pattern

  def find(self, text: str) -> list[WrittenCall] | None:
    """Returns the calls of a text, in order; None if one is damaged."""
    calls = []
    for groups in (m.groupdict() for m in self.pattern.finditer(text)):
      try:
        arguments = json.loads(groups['json'])
      except (ValueError, RecursionError):
        return None
      name = groups.get('name')
      if name is None and isinstance(arguments, dict):
        name, arguments = arguments.get('name'), arguments.get('arguments', {})
      if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
      calls.append(WrittenCall(name, arguments, groups.get('number') or ''))
    return None if not calls and self.marks[0] in text else calls


FORMATS = {
  # Qwen and others that follow Hermes.
  'hermes': CallFormat(
    marks=('<tool_call>', '</tool_call>'),
    pattern=re.compile(rf'<tool_call>\s*{_JSON}\s*</tool_call>', re.S),
  ),
  'deepseek': CallFormat(
    marks=(
      *('<｜tool▁calls▁begin｜>', '<｜tool▁call▁begin｜>', '<｜tool▁sep｜>'),
      *('<｜tool▁call▁end｜>', '<｜tool▁calls▁end｜>'),
    ),
    pattern=re.compile(
      r'<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+?)'
      rf'(?:<｜tool▁sep｜>|\n)\s*(?:```json\s*)?{_JSON}'
      r'\s*(?:```)?\s*<｜tool▁call▁end｜>',
      re.S,
    ),
  ),
  'kimi': CallFormat(
    marks=(
      *('<|tool_calls_section_begin|>', '<|tool_call_begin|>'),
      *('<|tool_call_argument_begin|>', '<|tool_call_end|>'),
      '<|tool_calls_section_end|>',
    ),
    pattern=re.compile(
      r'<\|tool_call_begin\|>\s*(?P<number>(?:functions\.)?(?P<name>[^<:]+)'
      rf'(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*{_JSON}\s*'
      r'<\|tool_call_end\|>',
      re.S,
    ),
  ),
}
