"""Conversations as tokens, and tool calls in the text of a model.

A checkpoint with a chat template gets its conversations by that template, and
its calls are found by the marks of its family. A model of our own knows one
protocol (`text.chat`): after the user and every tool it writes a call, and
nothing else.

  edit stats.py total        the words are the first properties of the tool's
  return sum(values)         parameters, in order; lines below are the last one

A model of our own is not told of the request's tools: it knows those that it
was trained with. It knows no system either: words of a system or developer are
the beginning of the user's message that follows. A text that is no call of a
listed tool becomes content.

Each format also tells of its calls as rules of a grammar (`grammars`), one of
which is named `calls`.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.hf.text import call_formats, language
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.serve.api import errors, grammars, requests
from composer_jax.text import chat, tool_calls

_ROLES = ('system', 'user', 'assistant', 'tool')
# Words of our protocol, which are apart at any white space of Python's.
_WORDS = {
  'integer': r'/-?(0|[1-9][0-9]{0,17})/',
  'number': r'/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/',
  'boolean': '("true" | "false")',
}
_WORD = r'/[^\s\x00-\x1f\x7f-\x9f]+/'
# Kinds of JSON that words can be held to.
_KINDS = {
  'string': str,
  'integer': int,
  'number': int | float,
  'boolean': bool,
  'array': list,
  'object': dict,
}


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
    parts: list[np.ndarray] = []
    ahead: list[str] = []  # words of the system, for the next user's message
    for place, message in enumerate(messages):
      role, param = message.get('role'), f'messages.{place}'
      text = _text(message.get('content'), param)
      if role in ('system', 'developer'):
        ahead.append(text)
        continue
      if role == 'user' or ahead:
        words = [*ahead, text] if role == 'user' else ahead
        parts.append(chat.user(self._tokenizer, '\n\n'.join(words)))
        ahead = []
      if role == 'tool':
        parts.append(chat.tool(self._tokenizer, text))
      elif role == 'assistant':
        parts += self._calls(message, text, tools, param)
      elif role != 'user':
        raise errors.invalid(
          f'{param}.role is {role!r}; this model knows system, developer, '
          'user, assistant and tool.',
          f'{param}.role',
        )
    if ahead:
      parts.append(chat.user(self._tokenizer, '\n\n'.join(ahead)))
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
      properties = _properties(tool.function.parameters)
      arguments = _arguments(call, tool.function.parameters)
      if tool.function.name != call.name or arguments is None:
        continue
      if tool.function.strict and not all(
        _is_of(value, properties[name]) for name, value in arguments.items()
      ):
        continue
      return [_call(call.name, arguments)]
    return None

  def rules(
    self, tools: Sequence[requests.ToolSpec], several: bool
  ) -> list[str]:
    """Returns rules of one call: it is a whole turn, so `several` is moot."""
    forms = [form for tool in tools for form in _word_forms(tool.function)]
    return [f'calls: {" | ".join(forms)}']

  def held_text(
    self, tools: Sequence[requests.ToolSpec], several: bool
  ) -> list[str] | None:
    """Returns None: what is no call that a tool allows becomes content."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CallForm:
  """Elements of a rule, as a template writes calls.

  Attributes:
    thought: reasoning without words before calls; '' where there is none.
    before: from the mark of calls to the name of the first.
    between: from a name to its arguments.
    apart: from the arguments of a call to the name of the next.
    after: from the arguments of the last call to the end.
  """

  thought: str
  before: str
  between: str
  apart: str
  after: str


class TemplateFormat:
  """Speaks the chat template of a checkpoint, as RL on it does."""

  def __init__(self, speech: language.TemplateLanguage):
    self._speech = speech

  def encode(
    self, messages: Sequence[Any], tools: Sequence[requests.ToolSpec]
  ) -> np.ndarray:
    """Raises errors.ApiError for what the template refuses."""
    listed = [t.model_dump(exclude_none=True) for t in tools] or None
    is_told = bool(listed) and not self._speech.lists_tools
    if is_told and self._speech.calls not in call_formats.FORMATS:
      raise errors.invalid(
        'The chat template of this checkpoint tells the model of no tools and '
        'writes no calls; describe the tools in a message.',
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
    if is_told:
      # DeepSeek-V3's template writes calls and leaves out the tools.
      rendered, listed = _with_tools(rendered, listed or []), None
    try:
      return self._speech.encode(
        rendered, tools=listed, add_generation_prompt=True
      )
    except ValueError as error:
      raise errors.invalid(str(error), 'messages') from error

  def rules(
    self, tools: Sequence[requests.ToolSpec], several: bool
  ) -> list[str]:
    """Returns rules of calls as the template writes them."""
    form = self._form
    rules, names = [], []
    for place, tool in enumerate(tools):
      function = tool.function
      names.append(
        f'{grammars.literal(function.name)} {form.between} arguments_{place}'
      )
      schema = grammars.of_arguments(function.parameters)
      rules.append(f'arguments_{place}: {schema}')
    more = f'({form.apart} call)*' if several else ''
    thought = f'({form.thought})?' if form.thought else ''
    return [
      f'calls: {thought} marked',
      f'marked: {form.before} call {more} {form.after}',
      f'call: {" | ".join(names)}',
      *rules,
    ]

  def held_text(
    self, tools: Sequence[requests.ToolSpec], several: bool
  ) -> list[str] | None:
    """Returns rules of `text`, all of it before calls, and of `marked` calls.

    None where no tool is strict and several calls may be made: then nothing
    has to be held to anything.
    """
    if several and not any(tool.function.strict for tool in tools):
      return None
    tokenizer, form = self._speech.tokenizer, self._form
    mark = call_formats.FORMATS[self._speech.calls].marks[0]
    marks = {tokenizer.shown([i]): i for i in tokenizer.special_ids}
    closed = {*self._speech.ends, marks.get(mark)}
    others = sorted(set(marks.values()) - closed)
    one = f'TEXT | {grammars.tokens(others)}' if others else 'TEXT'
    text = f'text: ({one})*'
    if mark in marks:
      return [text, f'TEXT: {grammars.TEXT}', *self.rules(tools, several)]
    # The mark is words: the shortest text that ends with it begins the calls.
    rules = self.rules(tools, several)
    head = form.before.replace(grammars.literal(mark)[:-1], '"', 1)
    rules[1] = rules[1].replace(form.before, f'begun {head}', 1)
    begun = rf'begun[lazy]: /(.|\n)*/ {grammars.literal(mark)}'
    return [text, f'TEXT: {grammars.TEXT}', begun, *rules]

  @functools.cached_property
  def _form(self) -> '_CallForm':
    """What the template writes around the names and arguments of calls."""
    speech = self._speech
    if speech.calls not in call_formats.FORMATS:
      raise errors.invalid(
        'The chat template of this checkpoint writes calls in no form that is '
        'known here, so none can be demanded; describe the tools in a message.',
        'tools',
        'unsupported_parameter',
      )
    made = [
      call_formats.WrittenCall(name, {'w': name}, f'functions.{name}:{place}')
      for place, name in enumerate(('first_tool', 'other_tool'))
    ]
    turn = speech.turn(made, '')
    body = speech.continued([{'role': 'user', 'content': 'x'}], turn)
    # What stands behind the mark of the turn's end is no part of it.
    spellings = [re.escape(speech.tokenizer.decode([i])) for i in speech.ends]
    body = re.split('|'.join(spellings), body)[0]
    one, two = (
      re.search(
        rf'{name}(?!"\s*\}})(.*?)\{{\s*"w"\s*:\s*"{name}"\s*\}}', body, re.S
      )
      for name in ('first_tool', 'other_tool')
    )
    assert one and two, body
    marks = call_formats.FORMATS[speech.calls].marks
    first, last = (speech.tokenizer.mark(marks[place]) for place in (0, -1))
    at = body.index(first)
    after = body[two.end() :].removesuffix(hf_tokenizer.MARK)
    if last not in after:
      # DeepSeek-V3's template leaves the last call of a turn open.
      after += last
    between = self._elements(one[1])
    if one[1].startswith(':0'):
      between = rf'/:[0-9]+/ {self._elements(one[1][2:])}'
    return _CallForm(
      thought=self._elements(body[:at]),
      before=self._elements(body[at : one.start()]),
      between=between,
      apart=self._elements(body[one.end() : two.start()]),
      after=self._elements(after),
    )

  def _elements(self, markup: str) -> str:
    """Returns a template's text as elements of a rule."""
    tokenizer = self._speech.tokenizer
    ids: list[int] = self._speech.ids(markup).tolist()
    elements = []
    for is_special, run in itertools.groupby(
      ids, lambda token: token in tokenizer.special_ids
    ):
      if is_special:
        elements += [grammars.tokens([token]) for token in run]
      else:
        elements.append(grammars.literal(tokenizer.decode(run)))
    return ' '.join(elements)

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
  except (
    TypeError, ValueError, KeyError, AttributeError, RecursionError
  ) as error:  # fmt: skip
    raise errors.invalid(
      f'{param} must hold functions with a name and arguments that are the '
      'JSON text of an object.',
      param,
    ) from error
  if not isinstance(arguments, dict) or not isinstance(name, str):
    raise errors.invalid(f'{param}: arguments must be an object.', param)
  return name, arguments


def _with_tools(
  messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
  """Tells of tools at the end of the system's message, or in one before all."""
  lines = [json.dumps(t['function'], ensure_ascii=False) for t in tools]
  text = '\n'.join(['You may call these tools:', *lines])
  first, rest = {'role': 'system', 'content': ''}, [*messages]
  if rest and rest[0]['role'] == 'system':
    first, *rest = rest
  return [{**first, 'content': f'{first["content"]}\n\n{text}'.strip()}, *rest]


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


def _is_of(value: Any, schema: Any) -> bool:
  """True if a value is of the type of its schema, where that is one type."""
  kind = schema.get('type') if isinstance(schema, dict) else None
  known = _KINDS.get(kind) if isinstance(kind, str) else None
  return known is None or (
    isinstance(value, known) and (kind == 'boolean') == isinstance(value, bool)
  )


def _word_forms(function: requests.Function) -> list[str]:
  """Returns calls of a tool in words, one form for each number of words."""
  properties = _properties(function.parameters)
  names = list(properties)
  listed = function.parameters.get('required')
  listed = listed if isinstance(listed, list) else []
  are_names = all(isinstance(n, str) and n in names for n in listed)
  if function.name.split() != [function.name] or not are_names:
    raise errors.invalid(
      f'Tool {function.name!r} cannot be called by words: its name must be one '
      'word, and what it requires must be properties.',
      'tools',
    )
  forms, required = [], set(listed)
  for count in range(len(names) + 1):
    words = [f'" " {_word(properties[name])}' for name in names[:count]]
    head = ' '.join([grammars.literal(function.name), *words])
    if required <= set(names[:count]):
      forms.append(head)
    if count < len(names) and required <= {*names[:count], names[-1]}:
      forms.append(f'{head} "\\n" {_lines(properties[names[-1]])}')
  return forms


def _kind(schema: Any) -> str:
  kind = schema.get('type') if isinstance(schema, dict) else None
  return kind if isinstance(kind, str) else ''


def _word(schema: Any) -> str:
  """Returns a value that is one word as an element of a rule."""
  given = schema.get('enum') if isinstance(schema, dict) else None
  if _kind(schema) == 'string' and isinstance(given, list):
    words = [v for v in given if isinstance(v, str) and v.split() == [v]]
    if words:
      return f'({" | ".join(map(grammars.literal, words))})'
  return _WORDS.get(_kind(schema), _WORD)


def _lines(schema: Any) -> str:
  """Returns a value of several lines as an element of a rule."""
  if _kind(schema) in ('array', 'object'):
    return grammars.of_schema(schema)
  return _WORDS.get(_kind(schema), grammars.TEXT)


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
