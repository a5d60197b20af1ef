"""The Responses API of OpenAI: requests become chat requests, answers items.

Nothing is stored: a request brings its whole conversation, and what refers to
an earlier response is refused. An answer is a message, function calls, or both.
"""

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pydantic

from composer_jax.serve import exchange, generation
from composer_jax.serve.api import (
  answers,
  chat_format,
  errors,
  requests,
  texts,
)

_TEXTS = ('input_text', 'output_text', 'text')
_LOGPROBS = 'message.output_text.logprobs'
_STRICT = pydantic.ConfigDict(extra='forbid', strict=True)


class FunctionTool(pydantic.BaseModel):
  """A function, in the flat form of the Responses API."""

  model_config = _STRICT
  type: Literal['function']
  name: str
  description: str | None = None
  parameters: dict[str, Any] | None = None
  strict: bool | None = None


class TextOptions(pydantic.BaseModel):
  """How the text of an answer shall be."""

  model_config = _STRICT
  format: dict[str, Any] | None = None


class ResponsesRequest(pydantic.BaseModel):
  """POST /v1/responses."""

  model_config = _STRICT
  model: str | None = None
  input: str | list[dict[str, Any]]
  instructions: str | None = None
  tools: list[FunctionTool] = []
  tool_choice: Any = 'auto'
  parallel_tool_calls: bool = True
  text: TextOptions = TextOptions()
  max_output_tokens: int | None = None
  temperature: float | None = None
  top_p: float | None = None
  top_logprobs: int | None = None
  include: list[str] = []
  stream: bool | None = None
  stream_options: dict[str, Any] | None = None
  # Beyond OpenAI's, as in chat completions.
  top_k: int | None = None
  min_p: float | None = None
  seed: int | None = None
  stop_token_ids: list[int] = []
  metadata: dict[str, Any] = {}


# Parameters that may be sent with values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'store': (False,),
  'background': (False,),
  'truncation': ('disabled',),
  'service_tier': ('auto', 'default'),
  'reasoning': ({},),
}


# Parameters of chat completions by what a request here calls them.
_NAMES = {
  'messages': 'input',
  'max_completion_tokens': 'max_output_tokens',
  'max_tokens': 'max_output_tokens',
  'response_format': 'text.format',
  'logprobs': 'include',
}
# Messages are counted otherwise than items.
_NAMED = re.compile(rf'\b({"|".join(_NAMES)})\b(?:\.\d+)?')


@contextlib.contextmanager
def own_names() -> Iterator[None]:
  """Has errors of the chat request name the parameters of this API."""
  try:
    yield
  except errors.ApiError as error:
    own = lambda text: _NAMED.sub(lambda found: _NAMES[found[1]], text)
    raise errors.ApiError(
      error.status,
      own(str(error)),
      code=error.code,
      param=own(error.param) if error.param else None,
      details=error.details,
    ) from error


def parse(body: Any) -> tuple[ResponsesRequest, requests.ChatRequest]:
  """Returns a checked request, and the chat request that asks for the same.

  Raises:
    errors.ApiError: 400, naming the parameter.
  """
  if isinstance(body, dict):
    body = dict(body)
    for name in requests.IGNORED:
      body.pop(name, None)
    for name, neutral in _NEUTRAL.items():
      value = body.pop(name, None)
      if value is not None and value not in neutral:
        raise errors.invalid(
          f'{name} is not supported here; leave it out. Nothing is stored, and '
          'a request brings its whole conversation.',
          name,
          'unsupported_parameter',
        )
  asked = requests.parse(ResponsesRequest, body)
  for name in asked.include:
    # Agents ask for the reasoning in every request; there is none to give.
    if name not in (_LOGPROBS, 'reasoning.encrypted_content'):
      raise errors.invalid(f'include cannot name {name!r} here.', 'include')
  logprobs = _LOGPROBS in asked.include or bool(asked.top_logprobs)
  fields = {
    'messages': _messages(asked),
    'tools': [_chat_tool(tool) for tool in asked.tools],
    'response_format': asked.text.format,
    'max_completion_tokens': asked.max_output_tokens,
    'logprobs': logprobs or None,
  }
  same = ('model', 'tool_choice', 'parallel_tool_calls', 'temperature', 'top_p')
  more = ('top_logprobs', 'stream', 'top_k', 'min_p', 'seed', 'stop_token_ids')
  more += ('metadata',)
  fields |= {name: getattr(asked, name) for name in (*same, *more)}
  with own_names():
    return asked, requests.parse(requests.ChatRequest, fields)


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
  function = tool.model_dump(exclude={'type'}, exclude_none=True)
  return {'type': 'function', 'function': function}


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
  messages: list[dict[str, Any]] = []
  if asked.instructions:
    messages.append({'role': 'system', 'content': asked.instructions})
  items = asked.input
  if isinstance(items, str):
    items = [{'role': 'user', 'content': items}]
  for place, item in enumerate(items):
    _add(messages, item, f'input.{place}')
  return messages


def _add(
  messages: list[dict[str, Any]], item: dict[str, Any], param: str
) -> None:
  """Adds an item; calls belong to the message of the assistant before them."""
  kind = item.get('type', 'message')
  if kind == 'message' and isinstance(item.get('role'), str):
    content = _words(item.get('content'), f'{param}.content')
    messages.append({'role': item['role'], 'content': content})
  elif kind == 'function_call':
    if not messages or messages[-1]['role'] != 'assistant':
      messages.append({'role': 'assistant', 'content': None})
    function = {key: item.get(key) for key in ('name', 'arguments')}
    messages[-1].setdefault('tool_calls', []).append(
      {'id': item.get('call_id'), 'type': 'function', 'function': function}
    )
  elif kind == 'function_call_output':
    content = _words(item.get('output'), f'{param}.output')
    message = {'role': 'tool', 'content': content}
    messages.append({**message, 'tool_call_id': item.get('call_id')})
  else:
    raise errors.invalid(
      f'{param} is of type {kind!r}; items are messages with a role, '
      'function_call and function_call_output.',
      param,
    )


def _words(content: Any, param: str) -> str:
  """Returns a text, or the texts of a list of parts."""
  if isinstance(content, str):
    return content
  if isinstance(content, list) and all(
    isinstance(part, dict)
    and part.get('type') in _TEXTS
    and isinstance(part.get('text'), str)
    for part in content
  ):
    return ''.join(part['text'] for part in content)
  raise errors.invalid(
    f'{param} must be a text or a list of parts of type input_text.', param
  )


class ResponseAnswer:
  """Makes the objects and events of /v1/responses."""

  def __init__(self, model: str, policy_version: int, asked: ResponsesRequest):
    self._response = {
      'id': _name('resp'),
      'object': 'response',
      'created_at': int(time.time()),
      'model': model,
      'status': 'in_progress',
      'error': None,
      'incomplete_details': None,
      'instructions': asked.instructions,
      'max_output_tokens': asked.max_output_tokens,
      'metadata': {'policy_version': str(policy_version)},
      'output': [],
      'parallel_tool_calls': asked.parallel_tool_calls,
      'previous_response_id': None,
      'store': False,
      'temperature': 1.0 if asked.temperature is None else asked.temperature,
      'text': {'format': asked.text.format or {'type': 'text'}},
      'tool_choice': asked.tool_choice,
      'tools': [tool.model_dump() for tool in asked.tools],
      'top_p': 1.0 if asked.top_p is None else asked.top_p,
      'truncation': 'disabled',
      'usage': None,
    }

  def usage(self, prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
      'input_tokens': prompt,
      'input_tokens_details': {
        'cached_tokens': cached,
        'cache_write_tokens': 0,
      },
      'output_tokens': completion,
      'output_tokens_details': {'reasoning_tokens': 0},
      'total_tokens': prompt + completion,
    }

  def logprobs(
    self, pieces: Sequence[texts.TextPiece], top: int
  ) -> list[dict[str, Any]]:
    return answers.logprob_entries(pieces, top)

  def choice(
    self,
    index: int,
    text: str,
    calls: Sequence[chat_format.ParsedCall],
    logprobs: Any,
    finish: str,
  ) -> tuple[list[dict[str, Any]], str]:
    """Returns the items of the answer and its finish reason."""
    status = 'incomplete' if finish == 'length' else 'completed'
    items = []
    if text or not calls:
      items.append(_message(_name('msg'), status, text, logprobs or []))
    return [*items, *map(_item, calls)], finish

  def whole(
    self,
    choices: Sequence[tuple[list[dict[str, Any]], str]],
    usage: dict[str, Any],
  ) -> dict[str, Any]:
    ((items, finish),) = choices
    return self._ended(items, finish, usage)

  def _ended(
    self, items: list[dict[str, Any]], finish: str, usage: dict[str, Any]
  ) -> dict[str, Any]:
    ended = {**self._response, 'output': items, 'usage': usage}
    if finish == 'length':
      reason = {'reason': 'max_output_tokens'}
      return {**ended, 'status': 'incomplete', 'incomplete_details': reason}
    return {**ended, 'status': 'completed'}

  async def stream(
    self,
    to: exchange.Exchange,
    events: answers.Events,
    choices: Sequence[generation.GrowingAnswer],
    top: int | None,
    usage: Callable[[], dict[str, Any]],
    include_usage: bool,
  ) -> None:
    """Sends the events of a response, whose usage is always in the last."""
    out = _EventStream(to)
    await out.send('response.created', response=self._response)
    await out.send('response.in_progress', response=self._response)
    message = _GrowingMessage(out)
    entries: list[dict[str, Any]] = []
    items, finish = [], ''
    async for choice, delta in events:
      if top is not None:
        # Those of text that is held back, as calls may be, wait for it.
        entries += self.logprobs(delta.pieces, top)
      if delta.text:
        await message.add(delta.text, entries)
        entries = []
      finish = choice.finish
      if finish and (message.text or not choice.calls):
        items.append(await message.end(finish))
      if finish:
        for call in choice.calls:
          items.append(await _send_call(out, len(items), call))
    ended = self._ended(items, finish, usage())
    await out.send(f'response.{ended["status"]}', response=ended, more=False)


class _EventStream:
  """Numbers and sends events."""

  def __init__(self, to: exchange.Exchange):
    self._to, self._number = to, 0

  async def send(self, kind: str, *, more: bool = True, **fields: Any) -> None:
    body = {'type': kind, 'sequence_number': self._number, **fields}
    self._number += 1
    await self._to.event(body, kind, more=more)


class _GrowingMessage:
  """The message of an answer as it is sent, the first of its items."""

  def __init__(self, out: _EventStream):
    self.text = ''
    self._logprobs: list[dict[str, Any]] = []
    self._out, self._name = out, _name('msg')
    self._place = {'item_id': self._name, 'output_index': 0, 'content_index': 0}
    self._is_open = False

  async def _open(self) -> None:
    if self._is_open:
      return
    self._is_open = True
    item = {**_message(self._name, 'in_progress', '', []), 'content': []}
    await self._out.send(
      'response.output_item.added', output_index=0, item=item
    )
    await self._out.send(
      'response.content_part.added', **self._place, part=_text_part('', [])
    )

  async def add(self, text: str, logprobs: list[dict[str, Any]]) -> None:
    await self._open()
    self.text += text
    self._logprobs += logprobs
    kind = 'response.output_text.delta'
    fields = {**self._place, 'delta': text, 'logprobs': logprobs}
    await self._out.send(kind, **fields)

  async def end(self, finish: str) -> dict[str, Any]:
    """Returns the whole item."""
    await self._open()
    status = 'incomplete' if finish == 'length' else 'completed'
    item = _message(self._name, status, self.text, self._logprobs)
    fields = {**self._place, 'text': self.text, 'logprobs': self._logprobs}
    await self._out.send('response.output_text.done', **fields)
    await self._out.send(
      'response.content_part.done', **self._place, part=item['content'][0]
    )
    await self._out.send('response.output_item.done', output_index=0, item=item)
    return item


async def _send_call(
  out: _EventStream, index: int, call: chat_format.ParsedCall
) -> dict[str, Any]:
  item = _item(call)
  begun = {**item, 'arguments': '', 'status': 'in_progress'}
  await out.send('response.output_item.added', output_index=index, item=begun)
  kind = 'response.function_call_arguments'
  place = {'item_id': item['id'], 'output_index': index}
  await out.send(f'{kind}.delta', **place, delta=call.arguments)
  await out.send(f'{kind}.done', **place, arguments=call.arguments)
  await out.send('response.output_item.done', output_index=index, item=item)
  return item


def _name(prefix: str) -> str:
  return f'{prefix}_{secrets.token_hex(12)}'


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
  part = {'type': 'output_text', 'text': text, 'annotations': []}
  return {**part, 'logprobs': logprobs}


def _message(
  name: str, status: str, text: str, logprobs: list[dict[str, Any]]
) -> dict[str, Any]:
  return {
    'id': name,
    'type': 'message',
    'role': 'assistant',
    'status': status,
    'content': [_text_part(text, logprobs)],
  }


def _item(call: chat_format.ParsedCall) -> dict[str, Any]:
  return {
    'id': _name('fc'),
    'type': 'function_call',
    'status': 'completed',
    'call_id': _name('call'),
    'name': call.name,
    'arguments': call.arguments,
  }
