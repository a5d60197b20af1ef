"""Tool calls as text: one line of words, then an optional payload.

  edit stats.py total
  return sum(values)

What a tool is and which arguments it takes is not known here (agent.tools).
"""

import dataclasses


class ToolCallError(ValueError):
  """The text is not a tool call."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
  """A parsed call.

  Attributes:
    name: of the tool.
    arguments: words without white space.
    payload: the lines after the first; '' when there are none.
  """

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
  """Reads what `render` wrote; extra spaces in the first line are forgiven.

  Raises:
    ToolCallError: the first line is blank.
  """
  line, _, payload = text.partition('\n')
  words = line.split()
  if not words:
    raise ToolCallError('empty call')
  return Call(name=words[0], arguments=tuple(words[1:]), payload=payload)
