"""The chat template that a checkpoint brings, as text and as tokens.

A template is a program from whoever made the checkpoint. It runs in jinja2's
immutable sandbox and sees plain JSON values and nothing else. What it renders
equals transformers' `apply_chat_template`; as tokens it differs in one point:
what a message says never becomes a special token, only what the template says.
"""

import datetime
import functools
import json
import os
import pathlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from jinja2 import nodes, parser

from composer_jax.core import files
from composer_jax.text import hf_roles, hf_tokenizer

CONFIG, FILE = 'tokenizer_config.json', 'chat_template.jinja'
MORE = 'additional_chat_templates'
Messages = Sequence[Mapping[str, Any]]

# What a template can raise, by itself or by what it does with messages.
_FAILURES = (
  *(jinja2.TemplateError, ValueError, TypeError, LookupError),
  *(ArithmeticError, RecursionError),
)


class ChatTemplate:
  """Renders conversations.

  The marks around what `{% generation %}` encloses, and those that break up
  special tokens in messages, are drawn at random: no message can hold them.
  """

  def __init__(
    self,
    sources: Mapping[str, str],
    special_tokens: Mapping[str, str],
    name: str,
  ):
    """Compiles templates.

    Args:
      sources: {name: template}; 'default', and 'tool_use' if tools have one
        of their own.
      special_tokens: variables of the template, such as `bos_token`.
      name: of the file, for errors.

    Raises:
      ValueError: a template is not one; names the file and the line.
    """
    self._name, self._special_tokens = name, dict(special_tokens)
    nonce = secrets.token_hex(16)
    self._begin, self._end = f'[{nonce}', f'{nonce}]'
    self._guard = f'|{nonce}|'
    environment = _environment(self._begin, self._end)
    self._templates = {}
    for key, source in sources.items():
      try:
        self._templates[key] = environment.from_string(source, _GLOBALS)
      except jinja2.TemplateSyntaxError as error:
        raise ValueError(
          f'{name}: chat template {key!r}, line {error.lineno}: {error}.'
        ) from error

  def render(self, messages: Messages, **options: Any) -> str:
    """Returns a conversation as text.

    Args:
      messages: JSON objects with a role and mostly a content.
      **options: variables of the template: `tools` (JSON schemas),
        `documents`, `add_generation_prompt`, and any of its own.

    Raises:
      ValueError: the template refuses the messages, fails, or does what the
        sandbox forbids; names the file.
    """
    return _parts(self._render(messages, options), self._begin, self._end)[0]

  def encode(
    self, tokenizer: hf_tokenizer.Tokenizer, messages: Messages, **options: Any
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 ids and which of them the assistant wrote.

    The mask is what the template encloses in `{% generation %}`; without such
    blocks it is all false.
    """
    guard = functools.partial(_guarded, tokenizer.special_pattern, self._guard)
    texts = {'messages': messages, **options}
    for name in ('messages', 'tools', 'documents'):
      texts[name] = guard(texts.get(name))
    messages = texts.pop('messages')
    text, spans = _parts(self._render(messages, texts), self._begin, self._end)
    is_written = np.zeros(len(text), bool)
    for start, stop in spans:
      is_written[start:stop] = True
    # Characters of the assistant before each place.
    written = np.concatenate([[0], np.cumsum(is_written)])
    ids_parts, mask_parts, first = [np.zeros(0, np.int32)], [], 0
    # What the guard broke up is encoded apart, and so stays in pieces.
    for piece in text.split(self._guard):
      ids, offsets = tokenizer.encode_markup(piece)
      starts, stops = offsets[:, 0] + first, offsets[:, 1] + first
      ids_parts.append(ids)
      mask_parts.append(written[stops] > written[starts])
      first += len(piece) + len(self._guard)
    return np.concatenate(ids_parts), np.concatenate(mask_parts)

  def _render(self, messages: Messages, options: Mapping[str, Any]) -> str:
    kept = [{k: v for k, v in m.items() if v is not None} for m in messages]
    variables = {
      'tools': None,
      'documents': None,
      'add_generation_prompt': False,
      **self._special_tokens,
      **options,
      'messages': kept,
    }
    try:
      # Plain values have no methods through which a template could get out.
      variables = json.loads(json.dumps(variables))
    except TypeError as error:
      raise ValueError(
        f'{self._name}: messages and options must be JSON values ({error}).'
      ) from error
    try:
      return self._pick(variables['tools']).render(variables)
    except _FAILURES as error:
      raise ValueError(
        f'{self._name}: the chat template fails on these messages '
        f'({type(error).__name__}: {error}).'
      ) from error

  def _pick(self, tools: Any) -> jinja2.Template:
    name = 'tool_use' if tools and 'tool_use' in self._templates else 'default'
    if name not in self._templates:
      raise ValueError(
        f"{self._name} has no chat template 'default', only "
        f'{sorted(self._templates)}.'
      )
    return self._templates[name]


def load(folder: str | os.PathLike) -> ChatTemplate:
  """Reads the templates of a checkpoint.

  `chat_template.jinja` and `additional_chat_templates/*.jinja` count more than
  what `tokenizer_config.json` holds, as they do in transformers.

  Raises:
    ValueError: the folder has no chat template, or one that is none.
  """
  folder = pathlib.Path(folder)
  config_path = folder / CONFIG
  config = files.read_json(config_path) if config_path.exists() else {}
  name, found = config_path, config.get('chat_template') or {}
  if isinstance(found, str):
    found = {'default': found}
  elif isinstance(found, list):
    found = {item['name']: item['template'] for item in found}
  if (folder / FILE).exists():
    name, found = folder / FILE, {'default': (folder / FILE).read_text()}
    found |= {p.stem: p.read_text() for p in (folder / MORE).glob('*.jinja')}
  if not found:
    raise ValueError(
      f'{folder} has no chat template: neither {FILE} nor chat_template in '
      f'{CONFIG}. Checkpoints that were only pretrained often have none; put '
      f'{FILE} there.'
    )
  return ChatTemplate(found, hf_roles.special_tokens(config), str(name))


def _environment(begin: str, end: str) -> jinja2.Environment:
  """What templates written for transformers expect to find."""

  class Generation(jinja2.ext.Extension):
    """Marks the text between `{% generation %}` and `{% endgeneration %}`."""

    tags = {'generation'}

    def parse(self, parser: parser.Parser) -> nodes.Node:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      call = self.call_method('_mark')
      return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
      return f'{begin}{caller()}{end}'

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, jinja2.ext.loopcontrols],
  )
  environment.filters['tojson'] = _to_json
  return environment


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """Without jinja2's own escapes of HTML."""
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


class _Namespace(jinja2.utils.Namespace):
  """Without names through which Python's internals can be reached."""

  def __init__(*args: Any, **attributes: Any):
    self, *others = args
    attributes = dict(*others, **attributes)
    for name in attributes:
      _refuse_private(name)
    jinja2.utils.Namespace.__init__(self, attributes)

  def __setitem__(self, name: str, value: Any) -> None:
    _refuse_private(name)
    super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
  if isinstance(name, str) and name.startswith('_'):
    raise jinja2.exceptions.SecurityError(f'namespace() holds no {name!r}.')


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


_GLOBALS = {
  'raise_exception': _raise,
  'strftime_now': _strftime_now,
  'namespace': _Namespace,
}


def _guarded(pattern: re.Pattern, guard: str, value: Any) -> Any:
  """Breaks up every special token that a string of a JSON value spells."""
  if isinstance(value, str):
    return pattern.sub(lambda match: match[0] + guard, value)
  if isinstance(value, Mapping):
    return {k: _guarded(pattern, guard, v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_guarded(pattern, guard, v) for v in value]
  return value


def _parts(
  text: str, begin: str, end: str
) -> tuple[str, list[tuple[int, int]]]:
  """Takes the marks out; returns the text and the spans between them."""
  plain, spans, open_at, length = [], [], [], 0
  for piece in re.split(f'({re.escape(begin)}|{re.escape(end)})', text):
    if piece == begin:
      open_at.append(length)
    elif piece == end and open_at:
      spans.append((open_at.pop(), length))
    else:
      plain.append(piece)
      length += len(piece)
  return ''.join(plain), spans
