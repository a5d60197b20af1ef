"""An episode of one turn: given what came before, make the expert's call."""

import json
from collections.abc import Mapping
from typing import Any

from composer_jax.agent import environment
from composer_jax.core import records, turns
from composer_jax.tasks.pivots import equivalence, recorded
from composer_jax.text import tool_calls


def protocol_of(tools: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the text that tells a policy of the tools of a file."""
  lines = [
    'Each of your messages is one call of a tool, as JSON and nothing else: '
    '{"tool": NAME, "arguments": {...}}. The tools:'
  ]
  for name, tool in tools.items():
    function = tool['function']
    parameters = json.dumps(function.get('parameters', {}), ensure_ascii=False)
    lines.append(f'{name}: {function.get("description", "")} {parameters}')
  return '\n'.join(lines)


class PivotEnvironment(environment.Environment):
  """The environment of one `recorded.Pivot`; nothing is executed."""

  single_turn = True

  def __init__(
    self, pivot: recorded.Pivot, tools: Mapping[str, Mapping[str, Any]]
  ):
    self.task_id, self.history = pivot.task_id, pivot.history
    self.protocol = protocol_of(tools)
    self.prompt = f'{pivot.prompt}\n\n{self.protocol}'
    self.tools = tuple(tools)
    self._pivot, self._is_same = pivot, False

  def call(self, text: str) -> environment.ToolResult:
    try:
      made = tool_calls.parse_json(text)
    except tool_calls.ToolCallError as error:
      return environment.ToolResult(
        text=f'error: {error}', tool='', outcome=turns.NOT_A_CALL
      )
    if made.name not in self.tools:
      return environment.ToolResult(
        text='error: there is no such tool', tool='', outcome=turns.UNKNOWN_TOOL
      )
    self._is_same = equivalence.same(self._pivot.call, made)
    return environment.ToolResult(text='', tool=made.name, is_final=True)

  def verdict(self, finished: bool) -> records.Verdict:
    return records.Verdict(
      passed=finished and self._is_same,
      num_passed=int(finished and self._is_same),
      num_tests=1,
      status=records.GRADED if finished else records.UNFINISHED,
      sandbox_level='none',
    )
