"""Renders conversations with a checkpoint's chat template, and encodes them.

A template is a program written by the checkpoint's authors. It runs in jinja2's
immutable sandbox and sees nothing but plain JSON values; its time and memory
are not bounded. The text equals that of transformers' `apply_chat_template`.
The tokens differ in one point: words of a message never become a special token,
only words of the template do.
"""

import datetime
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes, parser

from composer_jax.hf.text import roles, tokenizer_json
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.text import tokenizer as own

CONFIG, FILE = 'tokenizer_config.json', 'chat_template.jinja'
Messages = Sequence[Mapping[str, Any]]

# Errors that a template can raise, by itself or while it handles messages.
_FAILURES = (
  *(jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError),
  *(ArithmeticError, RecursionError, MemoryError),
)
# String methods that search for their arguments, and do not write them.
_SEARCHES = frozenset(
  (
    *('count', 'endswith', 'find', 'index', 'lstrip', 'partition', 'rfind'),
    *('removeprefix', 'removesuffix', 'rindex', 'rpartition', 'rsplit'),
    *('rstrip', 'split', 'startswith', 'strip'),
  )
)


class ChatTemplate:
  """Renders conversations as text and as tokens.

  For tokens a conversation is rendered a second time, with a template whose own
  special tokens carry `hf.text.tokenizer.MARK`. A special token is therefore
  one that stands whole in the template, whatever the rendered text spells.

  Attributes:
    name: file of the template.
    nulls: fields of messages that are passed on where they are null. Others are
      left out, as transformers does from version 5 on.
  """

  def __init__(
    self,
    source: str,
    special_tokens: Mapping[str, str],
    name: str,
    now: datetime.datetime | None = None,
  ):
    """Compiles a template; a ValueError names file and line of an error.

    `strftime_now` formats `now` at every call; None is the present.
    """
    clean = own.without_surrogates
    self.name, self.source = name, source
    self.nulls: tuple[str, ...] = ()
    self.special_tokens = {k: clean(v) for k, v in special_tokens.items()}
    self.now = datetime.datetime.now() if now is None else now
    self._plain = self._compiled(clean)
    self._marked: tuple[Any, jinja2.Template] = (None, self._plain)

  def render(self, messages: Messages, **options: Any) -> str:
    """Returns a conversation as text, in which lone surrogates become '?'.

    Options are further variables of the template, such as `tools` (JSON
    schemas) and `add_generation_prompt`. A template that refuses or fails is
    a ValueError with the name of its file.
    """
    variables = self._variables(messages, options)
    return self._run(self._plain, {**self.special_tokens, **variables})

  def markup(
    self,
    tokenizer: hf_tokenizer.ImportedTokenizer,
    messages: Messages,
    **options: Any,
  ) -> str:
    """Returns a text for `encode_markup`, its special tokens marked.

    Raises:
      ValueError: `render` raises it, or the special tokens of the template
        cannot be told from those that a message spells.
    """
    variables = self._variables(messages, options)
    plain = self._run(self._plain, {**self.special_tokens, **variables})
    if self._marked[0] is not tokenizer:
      compiled = self._compiled(tokenizer.mark)
      self._marked = (tokenizer, compiled)
    specials = {k: tokenizer.mark(v) for k, v in self.special_tokens.items()}
    text = self._run(self._marked[1], {**specials, **variables})
    if tokenizer.without_marks(text) != plain:
      raise ValueError(
        f'{self.name}: what the chat template does with these messages '
        'depends on a special token that it holds (it compares, cuts or '
        'changes it), so those of the template cannot be told from those that '
        'a message spells. Take the special token out of the message, or '
        'write that part of the template otherwise.'
      )
    inputs = list(_strings(variables))
    for spelling in sorted(tokenizer.unmarked(text)):
      if not any(spelling in string for string in inputs):
        raise ValueError(
          f'{self.name}: {spelling!r} comes together from pieces of the chat '
          'template or of messages, so it cannot be told whether it is meant '
          'as a special token. If the template means it, write it there as '
          'one string; if not, take the pieces out of the messages.'
        )
    return text

  def _compiled(self, mark: Callable[[str], str]) -> jinja2.Template:
    environment = _environment()
    variables = {**_GLOBALS, 'strftime_now': self.now.strftime}
    where = f'{self.name}: the chat template'
    try:
      tree = environment.parse(self.source)
      _mark_written(tree, mark)
      return environment.from_string(tree, variables)
    except jinja2.TemplateSyntaxError as error:
      raise ValueError(f'{where}, line {error.lineno}: {error}.') from error
    except _FAILURES as error:
      # Constant expressions are computed while a template is compiled.
      raise ValueError(f'{where}: {type(error).__name__} {error}.') from error

  def _variables(
    self, messages: Messages, options: Mapping[str, Any]
  ) -> dict[str, Any]:
    variables = {
      'tools': None,
      'documents': None,
      'add_generation_prompt': False,
      **options,
      'messages': [
        {k: v for k, v in m.items() if v is not None or k in self.nulls}
        for m in messages
      ],
    }
    try:
      # Plain values have no methods through which a template could escape.
      text = json.dumps(variables, ensure_ascii=False)
      return json.loads(own.without_surrogates(text))
    except (TypeError, ValueError, RecursionError) as error:
      raise ValueError(
        f'{self.name}: messages and options must be JSON values ({error}).'
      ) from error

  def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
      return template.render(variables)
    except _FAILURES as error:
      raise ValueError(
        f'{self.name}: the chat template fails on these messages '
        f'({type(error).__name__}: {error}).'
      ) from error


def load(
  folder: str | os.PathLike, now: datetime.datetime | None = None
) -> ChatTemplate:
  """Reads the template of a checkpoint; a ValueError if there is not one."""
  path, source = source_of(folder)
  if not source:
    raise ValueError(
      f'{folder} has no chat template: neither {FILE} nor chat_template in '
      f'{CONFIG}. Checkpoints that were only pretrained often have none; put '
      f'{FILE} there.'
    )
  config = tokenizer_json.read_config(pathlib.Path(folder, CONFIG))
  return ChatTemplate(source, roles.special_tokens(config), str(path), now)


def source_of(folder: str | os.PathLike) -> tuple[pathlib.Path, str]:
  """Returns the template of a checkpoint and its file; '' without one.

  `chat_template.jinja` takes precedence over `tokenizer_config.json`, as in
  transformers.
  """
  folder = pathlib.Path(folder)
  config = tokenizer_json.read_config(folder / CONFIG)
  path, source = folder / CONFIG, config.get('chat_template') or ''
  if (folder / FILE).exists():
    path, source = folder / FILE, _read(folder / FILE)
  if not isinstance(source, str):
    raise ValueError(
      f'{path}: chat_template is not one text; write the template that '
      f'conversations are to have into {folder / FILE}.'
    )
  return path, source


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text('utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is not UTF-8 ({error}).') from error


def _mark_written(node: nodes.Node, mark: Callable[[str], str]) -> None:
  """Marks the strings that a template writes, in its syntax tree.

  Strings that it only compares, tests or searches for stay unmarked, since they
  have to equal the words of a message.
  """
  if isinstance(node, nodes.Compare | nodes.Test):
    return
  if isinstance(node, nodes.Const) and isinstance(node.value, str):
    node.value = mark(node.value)
  elif isinstance(node, nodes.TemplateData):
    node.data = mark(node.data)
  skipped = []
  if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
    if node.node.attr in _SEARCHES:
      skipped = node.args
    elif node.node.attr == 'replace':
      skipped = node.args[:1]
  elif isinstance(node, nodes.Filter) and node.name == 'replace':
    skipped = node.args[:1]
  for child in node.iter_child_nodes():
    if not any(child is s for s in skipped):
      _mark_written(child, mark)


def _strings(value: Any) -> Iterator[str]:
  """Yields all strings of a JSON value, keys included."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict | list):
    for inner in value:
      yield from _strings(inner)
    if isinstance(value, dict):
      yield from _strings(list(value.values()))


class _GenerationBlocks(jinja2.ext.Extension):
  """Reads `{% generation %}`, which some templates have, and adds nothing."""

  tags = {'generation'}

  def parse(self, parser: parser.Parser) -> list[nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def _environment() -> jinja2.Environment:
  """Returns the environment that templates written for transformers expect."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
  )
  environment.filters['tojson'] = _to_json
  # A template must render the same text twice.
  del environment.filters['random'], environment.globals['lipsum']
  return environment


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """Renders JSON without the escapes of HTML that jinja2's own filter adds."""
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


class _Namespace(jinja2.utils.Namespace):
  """Refuses names through which a template could reach Python's internals."""

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


_GLOBALS = {'raise_exception': _raise, 'namespace': _Namespace}
