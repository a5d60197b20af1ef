"""Conversations as tokens, and tool calls in the text of a model.

A checkpoint with a chat template gets its conversations by that template, and
its calls are found by the marks of its family. A model of our own knows one
protocol (`text.chat`): after the user and every tool it writes a call as text,
which stays content, and it is not told of the request's tools.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.hf.text import chat_template
from composer_jax.serve.api import errors, requests
from composer_jax.text import chat

# Begin of calls: Qwen and others that follow Hermes, DeepSeek, Kimi.
_MARKS = (
  '<tool_call>',
  '<｜tool▁calls▁begin｜>',
  '<|tool_calls_section_begin|>',
)
_ROLES = ('system', 'user', 'assistant', 'tool')
_HERMES = re.compile(r'<tool_call>\s*(\{.*?\})\s*</tool_call>', re.S)
_NAMED = (
  re.compile(
    r'<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+?)'
    r'(?:<｜tool▁sep｜>|\n)\s*(?:```json\s*)?(?P<json>\{.*?\})'
    r'\s*(?:```)?\s*<｜tool▁call▁end｜>',
    re.S,
  ),
  re.compile(
    r'<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^<:]+)(?::\d+)?\s*'
    r'<\|tool_call_argument_begin\|>\s*(?P<json>\{.*?\})\s*'
    r'<\|tool_call_end\|>',
    re.S,
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
  """A tool call, with its arguments as the JSON text of an object."""

  name: str
  arguments: str


class OwnFormat:
  """Speaks the protocol of the policies that this library trains."""

  def __init__(self, tokenizer: Any):
    self._tokenizer = tokenizer

  def encode(
    self, messages: Sequence[Any], tools: Sequence[requests.ToolSpec]
  ) -> np.ndarray:
    del tools
    parts, t = [], self._tokenizer
    for place, message in enumerate(messages):
      role, param = message.get('role'), f'messages.{place}'
      text = _text(message.get('content'), param)
      if message.get('tool_calls'):
        raise errors.invalid(
          f'{param}.tool_calls is given; this model takes earlier calls as the '
          'text that it wrote, in content.',
          f'{param}.tool_calls',
        )
      if role == 'user':
        parts.append(chat.user(t, text))
      elif role == 'tool':
        parts.append(chat.tool(t, text))
      elif role == 'assistant':
        call = (chat.call_prefix(t), t.encode(text), [t.END])
        parts += [np.concatenate(call).astype(np.int32)] if text else []
      else:
        raise errors.invalid(
          f'{param}.role is {role!r}; this model knows user, assistant and '
          'tool.',
          f'{param}.role',
        )
    return np.concatenate([*parts, chat.call_prefix(t)])


class TemplateFormat:
  """Speaks through the chat template of an imported checkpoint."""

  def __init__(self, tokenizer: Any, template: chat_template.ChatTemplate):
    self._tokenizer, self._template = tokenizer, template

  def encode(
    self, messages: Sequence[Any], tools: Sequence[requests.ToolSpec]
  ) -> np.ndarray:
    """Raises errors.ApiError for what the template refuses."""
    listed = [t.model_dump(exclude_none=True) for t in tools] or None
    if listed and not self._knows_tools:
      raise errors.invalid(
        'The chat template of this checkpoint does not tell the model of '
        'tools; describe them in a message.',
        'tools',
        'unsupported_parameter',
      )
    rendered = []
    for place, message in enumerate(messages):
      # OpenAI's newer name of the system, which templates do not know.
      role = message.get('role')
      role = 'system' if role == 'developer' else role
      if role not in _ROLES:
        # Most templates leave out a role that they do not know.
        raise errors.invalid(
          f'messages.{place}.role is {role!r} and must be developer or one of '
          f'{", ".join(_ROLES)}.',
          f'messages.{place}.role',
        )
      content = message.get('content')
      if isinstance(content, list):
        content = _text(content, f'messages.{place}')
      message = _with_parsed_arguments(message)
      rendered.append({**message, 'role': role, 'content': content})
    try:
      return self._ids(rendered, listed)
    except ValueError as error:
      raise errors.invalid(str(error), 'messages') from error

  def _ids(self, messages: Sequence[Any], tools: Any) -> np.ndarray:
    ids, _ = self._template.encode(
      self._tokenizer, messages, tools=tools, add_generation_prompt=True
    )
    return ids

  @functools.cached_property
  def _knows_tools(self) -> bool:
    """True if tools change the text of a conversation."""
    messages = [{'role': 'user', 'content': 'x'}]
    function = {'name': 'f', 'description': 'f', 'parameters': {}}
    tools = [{'type': 'function', 'function': function}]
    try:
      return not np.array_equal(
        self._ids(messages, None), self._ids(messages, tools)
      )
    except ValueError:
      return True  # An error of the template: it looked at them.


AnyFormat = OwnFormat | TemplateFormat


def marks(tools: Sequence[requests.ToolSpec]) -> tuple[str, ...]:
  """Returns the marks that begin calls; () if no call is looked for."""
  return _MARKS if tools else ()


def calls(
  text: str, tools: Sequence[requests.ToolSpec]
) -> list[ParsedCall] | None:
  """Returns the calls of a text; None if one of them is damaged."""
  names = {t.function.name for t in tools}
  matches = [m.group('name', 'json') for p in _NAMED for m in p.finditer(text)]
  matches += [(None, m[1]) for m in _HERMES.finditer(text)]
  found = []
  for name, data in matches:
    try:
      arguments = json.loads(data)
    except ValueError:
      return None
    if name is None and isinstance(arguments, dict):
      name, arguments = arguments.get('name'), arguments.get('arguments', {})
    if name not in names or not isinstance(arguments, dict):
      return None
    written = json.dumps(arguments, ensure_ascii=False)
    found.append(ParsedCall(name=name, arguments=written))
  return found or None


def _text(content: Any, param: str) -> str:
  """Returns content that is a text or a list of texts."""
  if content is None or isinstance(content, str):
    return content or ''
  if isinstance(content, list) and all(
    isinstance(p, dict)
    and p.get('type') == 'text'
    and isinstance(p.get('text'), str)
    for p in content
  ):
    return ''.join(p['text'] for p in content)
  raise errors.invalid(
    f'{param}.content must be a text or a list of parts of type text.',
    f'{param}.content',
  )


def _parsed(call: Any, param: str) -> tuple[str, dict[str, Any]]:
  """Returns name and arguments of a call that a client sent."""
  try:
    function = call['function']
    name, arguments = function['name'], function.get('arguments') or '{}'
    arguments = json.loads(arguments)
  except (TypeError, ValueError, KeyError, AttributeError) as error:
    raise errors.invalid(
      f'{param} must hold functions with a name and arguments that are the '
      'JSON text of an object.',
      param,
    ) from error
  if not isinstance(arguments, dict) or not isinstance(name, str):
    raise errors.invalid(f'{param}: arguments must be an object.', param)
  return name, arguments


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
  """Turns the text of arguments into the object that templates expect."""
  calls = message.get('tool_calls')
  if not calls or not isinstance(calls, list):
    return dict(message)
  parsed = []
  for call in calls:
    name, arguments = _parsed(call, 'messages.tool_calls')
    function = {'name': name, 'arguments': arguments}
    parsed.append({**call, 'function': function})
  return {**message, 'tool_calls': parsed}
