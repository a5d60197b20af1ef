"""Objects that OpenAI's clients read: choices, chunks, log-probabilities."""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from composer_jax.serve import exchange, generation
from composer_jax.serve.api import chat_format, texts

Events = AsyncIterator[tuple[generation.GrowingAnswer, generation.AnswerDelta]]


def _key(data: bytes) -> str:
  """Names a token as OpenAI does, also one that is no text by itself."""
  try:
    return data.decode()
  except UnicodeDecodeError:
    return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in data)


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
  text = data.decode('utf-8', 'replace')
  return {'token': text, 'logprob': logprob, 'bytes': list(data)}


def logprob_entries(
  pieces: Sequence[texts.TextPiece], top: int
) -> list[dict[str, Any]]:
  """Returns an object for each token, with `top` alternatives."""
  return [
    {
      **_entry(token.data, token.logprob),
      'top_logprobs': [_entry(*other) for other in token.top[:top]],
    }
    for piece in pieces
    for token in piece.tokens
  ]


class ChatAnswer:
  """Makes the objects of /v1/chat/completions."""

  kind = 'chat.completion'
  chunk_kind = 'chat.completion.chunk'
  id_prefix = 'chatcmpl'

  def __init__(self, model: str, policy_version: int):
    self._fields = {
      'id': f'{self.id_prefix}-{secrets.token_hex(12)}',
      'created': int(time.time()),
      'model': model,
      # Version of the first token; /v1/tokens tells that of each token.
      'system_fingerprint': f'policy-{policy_version}',
    }

  def logprobs(
    self, pieces: Sequence[texts.TextPiece], top: int
  ) -> dict[str, Any]:
    return {'content': logprob_entries(pieces, top), 'refusal': None}

  def choice(
    self,
    index: int,
    text: str,
    calls: Sequence[chat_format.ParsedCall],
    logprobs: Any,
    finish: str,
  ) -> dict[str, Any]:
    message: dict[str, Any] = {
      'role': 'assistant',
      # OpenAI has null and not '' beside calls.
      'content': text if text or not calls else None,
      'refusal': None,
    }
    if calls:
      message['tool_calls'] = [_call(call) for call in calls]
    return _part(index, logprobs, finish, message=message)

  def whole(
    self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]
  ) -> dict[str, Any]:
    more = {'object': self.kind, 'choices': choices, 'usage': usage}
    return {**self._fields, **more}

  def chunk(
    self, choices: Sequence[dict[str, Any]], **more: Any
  ) -> dict[str, Any]:
    more = {'object': self.chunk_kind, 'choices': choices, **more}
    return {**self._fields, **more}

  def usage(self, prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return chat_usage(prompt, completion, cached)

  async def stream(
    self,
    to: exchange.Exchange,
    events: Events,
    choices: Sequence[generation.GrowingAnswer],
    top: int | None,
    usage: Callable[[], dict[str, Any]],
    include_usage: bool,
  ) -> None:
    """Sends a stream; `top` is None where no log-probabilities go out."""
    # With usage asked for, OpenAI's chunks but the last say that it is null.
    none = {'usage': None} if include_usage else {}
    for choice in choices:
      if opening := self.opening(choice.index):
        await to.event(self.chunk([opening], **none))
    async for choice, delta in events:
      for part in self._parts(choice, delta, top):
        await to.event(self.chunk([part], **none))
    if include_usage:
      await to.event(self.chunk([], usage=usage()))
    await to.end_events()

  def _parts(
    self,
    choice: generation.GrowingAnswer,
    delta: generation.AnswerDelta,
    top: int | None,
  ) -> Iterator[dict[str, Any]]:
    logprobs = None
    if top is not None and any(piece.tokens for piece in delta.pieces):
      logprobs = self.logprobs(delta.pieces, top)
    if delta.text or logprobs:
      yield self.delta(choice.index, delta.text, logprobs)
    if choice.finish:
      yield from self.closing(choice.index, choice.calls, choice.finish)

  def opening(self, index: int) -> dict[str, Any] | None:
    return _part(index, None, None, delta={'role': 'assistant', 'content': ''})

  def delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
    return _part(index, logprobs, None, delta={'content': text})

  def closing(
    self, index: int, calls: Sequence[chat_format.ParsedCall], finish: str
  ) -> Iterator[dict[str, Any]]:
    for place, call in enumerate(calls):
      delta = {'tool_calls': [{'index': place, **_call(call)}]}
      yield _part(index, None, None, delta=delta)
    yield _part(index, None, finish, delta={})


class TextAnswer(ChatAnswer):
  """Makes the objects of /v1/completions, whose chunks are small answers."""

  kind = chunk_kind = 'text_completion'
  id_prefix = 'cmpl'

  def logprobs(
    self, pieces: Sequence[texts.TextPiece], top: int
  ) -> dict[str, Any]:
    tokens = [token for piece in pieces for token in piece.tokens]
    tops = [
      {_key(data): logprob for data, logprob in token.top[:top]}
      for token in tokens
    ]
    return {
      'tokens': [_key(token.data) for token in tokens],
      'token_logprobs': [token.logprob for token in tokens],
      'top_logprobs': tops if top else None,
      'text_offset': [o for piece in pieces for o in piece.offsets],
    }

  def choice(self, index, text, calls, logprobs, finish) -> dict[str, Any]:
    return _part(index, logprobs, finish, text=text)

  def opening(self, index: int) -> None:
    """Returns None: a stream of text begins with its first part."""

  def delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
    return _part(index, logprobs, None, text=text)

  def closing(self, index, calls, finish) -> Iterator[dict[str, Any]]:
    yield _part(index, None, finish, text='')


def _part(
  index: int, logprobs: Any, finish: str | None, **content: Any
) -> dict[str, Any]:
  more = {'logprobs': logprobs, 'finish_reason': finish}
  return {'index': index, **content, **more}


def _call(call: chat_format.ParsedCall) -> dict[str, Any]:
  return {
    'id': f'call_{secrets.token_hex(12)}',
    'type': 'function',
    'function': {'name': call.name, 'arguments': call.arguments},
  }


def chat_usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
  return {
    'prompt_tokens': prompt,
    'completion_tokens': completion,
    'total_tokens': prompt + completion,
    'prompt_tokens_details': {'cached_tokens': cached},
  }
