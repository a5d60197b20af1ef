"""Arguments of the JSON tools, and errors by which a policy can mend a call.

An error names the tool, the argument, the rule and the value, and ends with an
example of a valid call.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.core import turns as turns_lib
from composer_jax.tasks import calls
from composer_jax.text import tool_calls

# Name of a JSON type in errors and schemas -> Python type.
KINDS = {'string': str, 'integer': int}

# Most characters of a policy's own words in an error.
_MAX_SHOWN = 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolParameter:
  """One argument of a tool.

  Attributes:
    kind: one of `KINDS`.
    means: description for the policy.
    required: true if a call must have the argument.
    choices: the only strings allowed; () allows any.
    minimum: smallest integer allowed.
    may_be_empty: true if a string may be ''.
  """

  kind: str
  means: str
  required: bool = True
  choices: tuple[str, ...] = ()
  minimum: int = 1
  may_be_empty: bool = False

  @property
  def wanted(self) -> str:
    """Rule for a value, to follow 'must be'."""
    if self.choices:
      return 'one of ' + ', '.join(f'"{c}"' for c in self.choices)
    if self.kind == 'integer':
      return f'an integer of at least {self.minimum}'
    return 'a string' if self.may_be_empty else 'a string that is not empty'

  def fault(self, value: Any) -> str:
    """Describes a wrong value, to follow 'but is'; '' for a right one."""
    # A bool is an int in Python, but not in JSON.
    if isinstance(value, bool) or not isinstance(value, KINDS[self.kind]):
      return shown(json.dumps(value))
    if isinstance(value, int):
      return '' if value >= self.minimum else 'smaller'
    if self.choices:
      return '' if value in self.choices else f'"{shown(value)}"'
    if not value and not self.may_be_empty:
      return 'empty'
    try:
      value.encode()
    except UnicodeEncodeError:
      return 'one with half a surrogate pair, which no file can hold'
    return ''


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
  """A tool's interface.

  Attributes:
    does: one sentence for the policy.
    parameters: arguments by name, in the order of the prompt.
    example: arguments of a valid call.
  """

  name: str
  does: str
  parameters: Mapping[str, ToolParameter]
  example: Mapping[str, Any]

  @property
  def usage(self) -> str:
    call = tool_calls.JsonCall(name=self.name, arguments=self.example)
    return tool_calls.render_json(call)

  def fault(self, arguments: Mapping[str, Any]) -> str:
    """Describes the first fault in a call's arguments; '' if there is none."""
    for name in arguments:
      if name not in self.parameters:
        known = ', '.join(self.parameters) or 'none'
        like = _like(name, self.parameters)
        return f'there is no argument "{shown(name)}"{like}; there are: {known}'
    for name, parameter in self.parameters.items():
      if name not in arguments:
        if parameter.required:
          return f'argument "{name}" is missing; it must be {parameter.wanted}'
        continue
      if fault := parameter.fault(arguments[name]):
        return f'argument "{name}" must be {parameter.wanted}, but is {fault}'
    return ''

  def description(self) -> str:
    """Returns the tool's lines of a prompt."""
    lines = [f'{self.name}: {self.does} {self.usage}']
    for name, parameter in self.parameters.items():
      optional = '' if parameter.required else ' (may be left out)'
      lines.append(f'  {name}: {parameter.means}; {parameter.wanted}{optional}')
    return '\n'.join(lines)

  def function(self) -> dict[str, Any]:
    """Returns the tool in the form of OpenAI's chat endpoints."""
    properties: dict[str, dict[str, Any]] = {}
    for name, p in self.parameters.items():
      properties[name] = {'type': p.kind, 'description': p.means}
      if p.choices:
        properties[name]['enum'] = list(p.choices)
    required = [n for n, p in self.parameters.items() if p.required]
    parameters = dict(type='object', properties=properties, required=required)
    function = dict(
      name=self.name, description=self.does, parameters=parameters
    )
    return {'type': 'function', 'function': function}


def _tool(
  name: str, does: str, example: dict[str, Any], **parameters: ToolParameter
) -> Tool:
  return Tool(name=name, does=does, parameters=parameters, example=example)


def _string(means: str, **more: Any) -> ToolParameter:
  return ToolParameter(kind='string', means=means, **more)


def _integer(means: str) -> ToolParameter:
  return ToolParameter(kind='integer', means=means, required=False)


# The tools of a repository, in the order of the prompt.
_TOOLS = (
  _tool(
    'read',
    'Shows a file, or some of its lines.',
    {'path': 'src/a.py', 'first': 1, 'last': 80},
    path=_string('file, relative to the root of the repository'),
    first=_integer('first line'),
    last=_integer('last line'),
  ),
  _tool(
    'search',
    'Finds lines that match a regular expression of Python.',
    {'pattern': 'def \\w+_total', 'path': 'src'},
    pattern=_string('regular expression'),
    path=_string('file or folder to search', required=False),
  ),
  _tool(
    'list',
    'Lists the files below a folder.',
    {'path': 'src'},
    path=_string('folder', required=False),
  ),
  _tool(
    'edit',
    'Replaces a text that occurs exactly once in a file.',
    {'path': 'src/a.py', 'old': 'return 1', 'new': 'return 2'},
    path=_string('file'),
    old=_string('the text as it stands there'),
    new=_string('the text instead', may_be_empty=True),
  ),
  _tool(
    'write',
    'Writes a whole file, a new one or over an old one.',
    {'path': 'src/a.py', 'text': 'X = 1\n'},
    path=_string('file'),
    text=_string('all that it shall hold', may_be_empty=True),
  ),
  _tool(
    'run',
    'Runs a command of the shell in the root of the repository.',
    {'command': 'python -c "import a"', 'seconds': 10},
    command=_string('for sh -c'),
    seconds=_integer('to be stopped after'),
  ),
  _tool('test', 'Runs the tests that are shown to you.', {}),
  _tool(
    'todo',
    'Keeps your plan: adds an item, marks one as done, or lists all.',
    {'action': 'add', 'text': 'restore the parser'},
    action=_string('what to do', choices=('add', 'done', 'list')),
    text=_string('with "add": the item', required=False),
    item=_integer('with "done": its number'),
  ),
  _tool('finish', 'Ends your work and has it graded.', {}),
)
TOOLS = {tool.name: tool for tool in _TOOLS}

# For tasks of one missing body, which the general tools can restore as well.
BODY = _tool(
  'body',
  'Writes the body that is missing.',
  {'text': 'return 1'},
  text=_string('its lines'),
)
KNOWN = {**TOOLS, BODY.name: BODY}


def check(
  call: tool_calls.JsonCall, tools: Mapping[str, Tool]
) -> dict[str, Any]:
  """Returns a call's arguments; InvalidCall for a wrong tool or argument."""
  if call.name not in tools:
    raise calls.InvalidCall(
      turns_lib.UNKNOWN_TOOL,
      f'there is no tool "{shown(call.name)}"{_like(call.name, tools)}; the '
      f'tools are {", ".join(tools)}',
    )
  if fault := tools[call.name].fault(call.arguments):
    raise bad_arguments(tools[call.name], fault)
  return dict(call.arguments)


def bad_arguments(tool: Tool, fault: str) -> calls.InvalidCall:
  """Returns the error of a call whose arguments the tool cannot take."""
  return calls.InvalidCall(
    turns_lib.BAD_ARGUMENTS, f'{tool.name}: {fault}. Example: {tool.usage}'
  )


def prompt(tools: Mapping[str, Tool]) -> str:
  """Returns the text that tells a policy how to call the tools."""
  return (
    'Each of your messages is one call of a tool, as JSON and nothing else. '
    'The tools:\n' + '\n'.join(tool.description() for tool in tools.values())
  )


def shown(text: str) -> str:
  """Quotes a policy's own word, which may have megabytes, in an error."""
  return calls.quoted(text[: 2 * _MAX_SHOWN], _MAX_SHOWN)


def _like(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
  # A policy may write megabytes, whose beginning is enough.
  near = difflib.get_close_matches(name[:_MAX_SHOWN].lower(), list(known), n=1)
  return f' (did you mean "{near[0]}"?)' if near else ''
