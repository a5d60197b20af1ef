"""Conversations as tokens, and tool calls in the text of a model.

A checkpoint with a chat template gets its conversations by that template, and
its calls are found by the marks of its family. A model of our own knows one
protocol (`text.chat`): after the user and every tool it writes a call, and
nothing else.

  edit stats.py total        the words are the first properties of the tool's
  return sum(values)         parameters, in order; lines below are the last one

A model of our own is not told of the request's tools: it knows those that it
was trained with. A text that is no call of a listed tool becomes content.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.hf.text import call_formats, language
from composer_jax.serve.api import errors, requests
from composer_jax.text import chat, tool_calls

_ROLES = ('system', 'user', 'assistant', 'tool')


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
    parts = []
    for place, message in enumerate(messages):
      role, param = message.get('role'), f'messages.{place}'
      text = _text(message.get('content'), param)
      if role == 'user':
        parts.append(chat.user(self._tokenizer, text))
      elif role == 'tool':
        parts.append(chat.tool(self._tokenizer, text))
      elif role == 'assistant':
        parts += self._calls(message, text, tools, param)
      else:
        raise errors.invalid(
          f'{param}.role is {role!r}; this model knows user, assistant and '
          'tool.',
          f'{param}.role',
        )
    return np.concatenate([*parts, chat.call_prefix(self._tokenizer)])

  def _calls(self, message, text, tools, param) -> list[np.ndarray]:
    param, texts = f'{param}.tool_calls', [text] if text else []
    calls = message.get('tool_calls') or []
    if not isinstance(calls, list):
      raise errors.invalid(f'{param} must be a list.', param)
    texts += [_as_text(call, tools, param) for call in calls]
    end = np.asarray([self._tokenizer.END], np.int32)
    prefix = chat.call_prefix(self._tokenizer)
    return [
      np.concatenate([prefix, self._tokenizer.encode(t), end]) for t in texts
    ]

  def mark(self, tools: Sequence[requests.ToolSpec]) -> tuple[str, ...] | None:
    """Returns the marks that begin calls; None if the whole text may be one."""
    return None if tools else ()

  def calls(
    self, text: str, tools: Sequence[requests.ToolSpec]
  ) -> list[ParsedCall] | None:
    """Returns the calls of a text; None if it is no call."""
    try:
      call = tool_calls.parse(text)
    except tool_calls.ToolCallError:
      return None
    for tool in tools:
      arguments = _arguments(call, tool.function.parameters)
      if tool.function.name == call.name and arguments is not None:
        return [_call(call.name, arguments)]
    return None


class TemplateFormat:
  """Speaks the chat template of a checkpoint, as RL on it does."""

  def __init__(self, speech: language.TemplateLanguage):
    self._speech = speech

  def encode(
    self, messages: Sequence[Any], tools: Sequence[requests.ToolSpec]
  ) -> np.ndarray:
    """Raises errors.ApiError for what the template refuses."""
    listed = [t.model_dump(exclude_none=True) for t in tools] or None
    if listed and not self._speech.lists_tools:
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
      return self._speech.encode(
        rendered, tools=listed, add_generation_prompt=True
      )
    except ValueError as error:
      raise errors.invalid(str(error), 'messages') from error

  def mark(self, tools: Sequence[requests.ToolSpec]) -> tuple[str, ...] | None:
    """Returns the marks that begin calls; () if no call is looked for."""
    forms = call_formats.FORMATS.values()
    return tuple(form.marks[0] for form in forms) if tools else ()

  def calls(
    self, text: str, tools: Sequence[requests.ToolSpec]
  ) -> list[ParsedCall] | None:
    """Returns the calls of a text; None if one of them is damaged."""
    names, calls = {t.function.name for t in tools}, []
    for form in call_formats.FORMATS.values():
      found = form.find(text)
      if found is None or any(call.name not in names for call in found):
        return None
      calls += [_call(call.name, call.arguments) for call in found]
    return calls or None


AnyFormat = OwnFormat | TemplateFormat


def _call(name: str, arguments: Mapping[str, Any]) -> ParsedCall:
  return ParsedCall(
    name=name, arguments=json.dumps(arguments, ensure_ascii=False)
  )


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


def _properties(parameters: Mapping[str, Any]) -> dict[str, Any]:
  properties = parameters.get('properties')
  return properties if isinstance(properties, dict) else {}


def _arguments(
  call: tool_calls.Call, parameters: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Returns values by property; None if the call does not fit them."""
  properties = _properties(parameters)
  names = list(properties)
  values = list(call.arguments)
  if call.payload:
    # Properties between the last word and the lines below were left out.
    values += [None] * (len(names) - 1 - len(values)) + [call.payload]
  if len(values) > len(names):
    return None
  given = {
    name: _typed(value, properties[name])
    for name, value in zip(names, values, strict=False)
    if value is not None
  }
  required = parameters.get('required')
  if isinstance(required, list) and any(name not in given for name in required):
    return None
  return given


def _typed(value: str, schema: Any) -> Any:
  kind = schema.get('type') if isinstance(schema, dict) else None
  if kind in ('integer', 'number', 'boolean', 'array', 'object'):
    try:
      return json.loads(value)
    except ValueError:
      return value
  return value


def _as_text(call: Any, tools: Sequence[requests.ToolSpec], param: str) -> str:
  """Returns a call of an earlier turn as the policy wrote it."""
  name, arguments = _parsed(call, param)
  known = {t.function.name: t.function.parameters for t in tools}
  order = [*_properties(known.get(name, {})), *arguments]
  values = [
    v if isinstance(v, str) else json.dumps(v)
    for v in (arguments[k] for k in dict.fromkeys(order) if k in arguments)
  ]
  payload = ''
  if values and values[-1].split() != [values[-1]]:
    payload = values.pop()
  try:
    return tool_calls.render(
      tool_calls.Call(name=name, arguments=tuple(values), payload=payload)
    )
  except tool_calls.ToolCallError as error:
    raise errors.invalid(
      f'{param}: {error} Only the last argument may be of several words.',
      param,
    ) from error
