"""What JSON tools take, and errors from which a policy can mend its call.

An error names the tool, the argument, what it must be and what it is, and ends
with a call that would be right in form.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.core import turns as turns_lib
from composer_jax.tasks import calls
from composer_jax.text import tool_calls

# How kinds are called in errors and in JSON schemas.
KINDS = {'string': str, 'integer': int}

# Characters of a policy's own words in an error.
_MAX_SHOWN = 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolParameter:
  """One argument.

  Attributes:
    kind: one of `KINDS`.
    means: a few words for the policy.
    choices: the only strings allowed; () allows any.
    minimum: of an integer.
    may_be_empty: whether a string may be ''.
  """

  kind: str
  means: str
  required: bool = True
  choices: tuple[str, ...] = ()
  minimum: int = 1
  may_be_empty: bool = False

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(
        f'ToolParameter.kind {self.kind!r} is not one of {tuple(KINDS)}.'
      )

  @property
  def wanted(self) -> str:
    """What a value must be."""
    if self.choices:
      return 'one of ' + ', '.join(f'"{c}"' for c in self.choices)
    if self.kind == 'integer':
      return f'an integer of at least {self.minimum}'
    return 'a string' if self.may_be_empty else 'a string that is not empty'

  def fault(self, value: Any) -> str:
    """What is wrong with a value; '' if nothing is."""
    # To Python a bool is an int; to JSON it is not.
    if isinstance(value, bool) or not isinstance(value, KINDS[self.kind]):
      return _named(value)
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
    name: as it is called.
    does: one sentence for the policy.
    parameters: by name, in the order of telling.
    example: arguments of a call that is right in form.
  """

  name: str
  does: str
  parameters: Mapping[str, ToolParameter] = dataclasses.field(
    default_factory=dict
  )
  example: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    fault = self.fault(self.example)
    if fault:
      raise ValueError(f'The example of tool {self.name!r} is wrong: {fault}.')

  @property
  def usage(self) -> str:
    call = tool_calls.JsonCall(name=self.name, arguments=self.example)
    return tool_calls.render_json(call)

  def fault(self, arguments: Mapping[str, Any]) -> str:
    """What is wrong with a call's arguments; '' if nothing is."""
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
      fault = parameter.fault(arguments[name])
      if fault:
        return f'argument "{name}" must be {parameter.wanted}, but is {fault}'
    return ''

  def description(self) -> str:
    """Lines for a prompt."""
    lines = [f'{self.name}: {self.does} {self.usage}']
    for name, parameter in self.parameters.items():
      optional = '' if parameter.required else ' (may be left out)'
      lines.append(f'  {name}: {parameter.means}; {parameter.wanted}{optional}')
    return '\n'.join(lines)

  def function(self) -> dict[str, Any]:
    """The tool as chat endpoints of OpenAI's form take it."""
    properties = {}
    for name, parameter in self.parameters.items():
      enum = {'enum': list(parameter.choices)} if parameter.choices else {}
      kind, means = parameter.kind, parameter.means
      properties[name] = {'type': kind, 'description': means, **enum}
    required = [n for n, p in self.parameters.items() if p.required]
    parameters = {
        'type': 'object', 'properties': properties, 'required': required,
    }  # fmt: skip
    function = {
        'name': self.name, 'description': self.does, 'parameters': parameters,
    }  # fmt: skip
    return {'type': 'function', 'function': function}


def _string(means: str, **more: Any) -> ToolParameter:
  return ToolParameter(kind='string', means=means, **more)


def _integer(means: str) -> ToolParameter:
  return ToolParameter(kind='integer', means=means, required=False)


# The tools of a repository, in the order of telling.
TOOLS = {
  tool.name: tool
  for tool in (
    Tool(
      name='read',
      does='Shows a file, or some of its lines.',
      parameters={
        'path': _string('file, relative to the root of the repository'),
        'first': _integer('first line'),
        'last': _integer('last line'),
      },
      example={'path': 'src/a.py', 'first': 1, 'last': 80},
    ),
    Tool(
      name='search',
      does='Finds lines that match a regular expression of Python.',
      parameters={
        'pattern': _string('regular expression'),
        'path': _string('file or folder to search', required=False),
      },
      example={'pattern': 'def \\w+_total', 'path': 'src'},
    ),
    Tool(
      name='list',
      does='Lists the files below a folder.',
      parameters={'path': _string('folder', required=False)},
      example={'path': 'src'},
    ),
    Tool(
      name='edit',
      does='Replaces a text that occurs exactly once in a file.',
      parameters={
        'path': _string('file'),
        'old': _string('the text as it stands there'),
        'new': _string('the text instead', may_be_empty=True),
      },
      example={'path': 'src/a.py', 'old': 'return 1', 'new': 'return 2'},
    ),
    Tool(
      name='write',
      does='Writes a whole file, a new one or over an old one.',
      parameters={
        'path': _string('file'),
        'text': _string('all that it shall hold', may_be_empty=True),
      },
      example={'path': 'src/a.py', 'text': 'X = 1\n'},
    ),
    Tool(
      name='run',
      does='Runs a command of the shell in the root of the repository.',
      parameters={
        'command': _string('for sh -c'),
        'seconds': _integer('to be stopped after'),
      },
      example={'command': 'python -c "import a"', 'seconds': 10},
    ),
    Tool(name='test', does='Runs the tests that are shown to you.'),
    Tool(
      name='todo',
      does='Keeps your plan: adds an item, marks one as done, or lists all.',
      parameters={
        'action': _string('what to do', choices=('add', 'done', 'list')),
        'text': _string('with "add": the item', required=False),
        'item': _integer('with "done": its number'),
      },
      example={'action': 'add', 'text': 'restore the parser'},
    ),
    Tool(name='finish', does='Ends your work and has it graded.'),
  )
}


def check(
  call: tool_calls.JsonCall, tools: Mapping[str, Tool]
) -> dict[str, Any]:
  """The arguments of a call that one of the tools can carry out.

  Raises:
    calls.InvalidCall: there is no such tool, or an argument is wrong.
  """
  if call.name not in tools:
    raise calls.InvalidCall(
      turns_lib.UNKNOWN_TOOL,
      f'there is no tool "{shown(call.name)}"{_like(call.name, tools)}; the '
      f'tools are {", ".join(tools)}',
    )
  tool = tools[call.name]
  fault = tool.fault(call.arguments)
  if fault:
    raise bad_arguments(tool, fault)
  return dict(call.arguments)


def bad_arguments(tool: Tool, fault: str) -> calls.InvalidCall:
  """The error of a call whose arguments the tool cannot take."""
  return calls.InvalidCall(
    turns_lib.BAD_ARGUMENTS, f'{tool.name}: {fault}. Example: {tool.usage}'
  )


def prompt(tools: Mapping[str, Tool]) -> str:
  """Tells a policy how to call the tools."""
  return (
    'Each of your messages is one call of a tool, as JSON and nothing else. '
    'The tools:\n' + '\n'.join(tool.description() for tool in tools.values())
  )


def shown(text: str) -> str:
  """A policy's own word, short enough to be repeated to it."""
  text = text.encode('utf-8', 'replace').decode()
  text = ' '.join(text[: 2 * _MAX_SHOWN].split())
  return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + '...'


def _like(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
  # A policy may write megabytes, whose end tells nothing more.
  near = difflib.get_close_matches(name[:_MAX_SHOWN].lower(), list(known), n=1)
  return f' (did you mean "{near[0]}"?)' if near else ''


def _named(value: Any) -> str:
  """The JSON kind of a value, as it is called in errors."""
  if value is None:
    return 'null'
  if isinstance(value, bool):
    return 'true' if value else 'false'
  names = {str: 'a string', dict: 'an object', list: 'a list'}
  return names.get(type(value), 'a number')
