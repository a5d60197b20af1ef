"""Chat models behind `/chat/completions`, whole answers or streams."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composer_jax.serve import endpoint
from composer_jax.tasks.practice import conversation

_PATH = '/chat/completions'


class ChatClient:
  """Implements `tasks.practice.conversation.Ask`; threads share it."""

  def __init__(
    self,
    address: endpoint.Endpoint,
    *,
    stream: bool = False,
    fields: Mapping[str, Any] | None = None,
  ):
    """Talks to one endpoint.

    Args:
      stream: true to have answers sent while they are written, which proxies
        with short time limits need.
      fields: fields of every request that replace those given; a None leaves a
        field out.
    """
    self._address, self._stream, self._fields = address, stream, fields or {}

  def __call__(
    self,
    messages: Sequence[Mapping[str, Any]],
    functions: Sequence[Mapping[str, Any]],
    **sampling: Any,
  ) -> conversation.ChatAnswer:
    """Asks for the next message; an EndpointError if there is none."""
    body = {
      'model': self._address.model or None,
      'messages': messages,
      'tools': functions or None,
      **sampling,
    }
    if self._stream:
      body |= {'stream': True, 'stream_options': {'include_usage': True}}
    # Many endpoints refuse parameters that they do not know.
    body = {k: v for k, v in (body | self._fields).items() if v is not None}
    client = self._address.client
    answer, attempts = self._address.repeat(
      _PATH, lambda: self._once(client, body)
    )
    return conversation.ChatAnswer(**answer, attempts=attempts)

  def _once(self, client: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    clock = self._address.clock
    begin, first_s = clock.monotonic(), None
    if self._stream:
      import openai

      kind, chunks = openai.Stream[object], []
      for chunk in client.post(
        _PATH, body=body, cast_to=object, stream=True, stream_cls=kind
      ):
        chunks.append(chunk)
        if first_s is None:
          first_s = clock.monotonic() - begin
      given = _joined(chunks)
    else:
      given = client.post(_PATH, body=body, cast_to=object)
    try:
      # JSON has halves of surrogate pairs, which no request can send back.
      text = json.dumps(given, ensure_ascii=False).encode('utf-8', 'replace')
      made = json.loads(text)
      choice, usage = made['choices'][0], made.get('usage') or {}
      message, finish = choice['message'], choice.get('finish_reason')
      content, calls = message.get('content'), message.get('tool_calls') or []
      for call in calls:
        call['function'].get('name')
      if not isinstance(content or '', str) or not isinstance(usage, dict):
        raise TypeError
    except (AttributeError, LookupError, TypeError) as error:
      raise ValueError(f'no chat completion: {str(given)[:200]}') from error
    return {
      'message': message,
      'finish': str(finish or 'stop'),
      'usage': usage,
      'seconds': clock.monotonic() - begin,
      'first_s': first_s,
    }


def _joined(chunks: Iterable[Any]) -> dict[str, Any]:
  """Returns the completion that a stream's chunks add up to."""
  message: dict[str, Any] = {'role': 'assistant', 'content': None}
  calls: dict[int, dict[str, Any]] = {}
  finish, usage = None, None
  try:
    for chunk in chunks:
      usage = chunk.get('usage') or usage
      for choice in chunk.get('choices') or ():
        finish = choice.get('finish_reason') or finish
        delta = dict(choice.get('delta') or {})
        for part in delta.pop('tool_calls', None) or ():
          place = part.get('index', len(calls))
          call = calls.setdefault(place, {'function': {'name': ''}})
          _extend(call['function'], part.get('function') or {})
          call['id'] = part.get('id') or call.get('id')
        _extend(message, {k: v for k, v in delta.items() if k != 'role'})
  except (AttributeError, TypeError) as error:
    raise ValueError(f'no chunk of a chat completion: {error}') from error
  if finish is None:
    raise ValueError('the stream broke off before its end')
  if calls:
    message['tool_calls'] = [calls[place] for place in sorted(calls)]
  choice = {'message': message, 'finish_reason': finish}
  return {'choices': [choice], 'usage': usage}


def _extend(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
  """Appends texts and lists to those of the same name; replaces the rest."""
  for name, value in part.items():
    if isinstance(value, str | list) and whole.get(name):
      whole[name] = whole[name] + value
    elif value is not None:
      whole[name] = value
