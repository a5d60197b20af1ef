"""Chat models behind `/chat/completions`, whole answers or streams."""

import json
from collections.abc import Mapping, Sequence
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
    self._address, self._stream = address, stream
    self._fields = dict(fields or {})

  def __call__(
    self,
    messages: Sequence[Mapping[str, Any]],
    functions: Sequence[Mapping[str, Any]],
    **sampling: Any,
  ) -> conversation.ModelMessage:
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
    return conversation.ModelMessage(**answer, attempts=attempts)

  def _once(self, client: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an answer; a ValueError for one of another form."""
    import openai
    from openai.lib.streaming import chat as streams
    from openai.types import chat as forms

    clock = self._address.clock
    begin, first_s, given = clock.monotonic(), None, None
    try:
      if self._stream:
        state, ids = streams.ChatCompletionStreamState(), {}
        for chunk in client.post(
          _PATH,
          body=body,
          cast_to=forms.ChatCompletionChunk,
          stream=True,
          stream_cls=openai.Stream[forms.ChatCompletionChunk],
        ):
          if first_s is None:
            first_s = clock.monotonic() - begin
          _in_form(chunk, ids)
          state.handle_chunk(chunk)
        snapshot = state.current_completion_snapshot
        given = snapshot.to_dict(exclude_none=True, warnings=False)
      else:
        given = client.post(_PATH, body=body, cast_to=object)
      # JSON has halves of surrogate pairs, which no request can send back.
      text = json.dumps(given, ensure_ascii=False).encode('utf-8', 'replace')
      # Nor has it NaN and infinities, which Python reads.
      made = json.loads(text, parse_constant=lambda constant: None)
      # A stream that broke off has no reason to have ended.
      choice, usage = made['choices'][0], made.get('usage') or {}
      message, finish = choice['message'], choice['finish_reason']
      for call in message.get('tool_calls') or ():
        call['function'].get('name')
      message['content'] = content = _text(message.get('content'))
      if not isinstance(content or '', str):
        raise TypeError
      usage.get('prompt_tokens')
    except (
      AssertionError, AttributeError, LookupError, RuntimeError, TypeError
    ) as error:  # fmt: skip
      raise ValueError(f'no chat completion: {str(given)[:200]}') from error
    return {
      'message': message,
      'finish': str(finish or 'stop'),
      'usage': usage,
      'seconds': clock.monotonic() - begin,
      'first_s': first_s,
    }


def _text(content: Any) -> Any:
  """Joins the texts of a list of parts."""
  if isinstance(content, list):
    return ''.join(part.get('text') or '' for part in content)
  return content


def _in_form(chunk: Any, ids: dict[str, int]) -> None:
  """Joins content; a call's part without index has its id's or the last."""
  for choice in chunk.choices:
    choice.delta.content = _text(getattr(choice.delta, 'content', None))
    for call in choice.delta.tool_calls or ():
      if call.id:
        ids.setdefault(call.id, len(ids))
      if getattr(call, 'index', None) is None:
        call.index = ids[call.id] if call.id else max(0, len(ids) - 1)
