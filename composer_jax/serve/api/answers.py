"""What OpenAI's clients read: choices, chunks, log-probabilities, usage."""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_jax.serve.api import chat_format, texts

STOP, LENGTH, TOOL_CALLS = 'stop', 'length', 'tool_calls'


def _shown(data: bytes) -> str:
  return data.decode('utf-8', 'replace')


def _key(data: bytes) -> str:
  """As OpenAI names tokens that are no text, of which there are many."""
  try:
    return data.decode()
  except UnicodeDecodeError:
    return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in data)


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
  return {'token': _shown(data), 'logprob': logprob, 'bytes': list(data)}


class ChatAnswer:
  """Envelopes of /v1/chat/completions."""

  kind = 'chat.completion'
  chunk_kind = 'chat.completion.chunk'

  def __init__(self, model: str, policy_version: int):
    self.fields = {
      'id': f'chatcmpl-{secrets.token_hex(12)}',
      'created': int(time.time()),
      'model': model,
      # Which weights began it; those of each token are told by /v1/tokens.
      'system_fingerprint': f'policy-{policy_version}',
    }

  def logprobs(
    self, pieces: Sequence[texts.TextPiece], top: int
  ) -> dict[str, Any]:
    return {
      'content': [
        {
          **_entry(token.data, token.logprob),
          'top_logprobs': [_entry(*other) for other in token.top[:top]],
        }
        for piece in pieces
        for token in piece.tokens
      ],
      'refusal': None,
    }

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
      # Beside calls, nothing said is nothing.
      'content': text if text or not calls else None,
      'refusal': None,
    }
    if calls:
      message['tool_calls'] = [_call(call) for call in calls]
    return {
      'index': index,
      'message': message,
      'logprobs': logprobs,
      'finish_reason': finish,
    }

  def whole(
    self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]
  ) -> dict[str, Any]:
    return {
      **self.fields,
      'object': self.kind,
      'choices': list(choices),
      'usage': usage,
    }

  def chunk(
    self, choices: Sequence[dict[str, Any]], more: Mapping[str, Any]
  ) -> dict[str, Any]:
    return {
      **self.fields,
      'object': self.chunk_kind,
      'choices': list(choices),
      **more,
    }

  def opening(self, index: int) -> dict[str, Any] | None:
    return self._delta(index, {'role': 'assistant', 'content': ''}, None, None)

  def delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
    return self._delta(index, {'content': text}, logprobs, None)

  def closing(
    self,
    index: int,
    calls: Sequence[chat_format.ParsedCall],
    finish: str,
  ) -> Iterator[dict[str, Any]]:
    for place, call in enumerate(calls):
      delta = {'tool_calls': [{'index': place, **_call(call)}]}
      yield self._delta(index, delta, None, None)
    yield self._delta(index, {}, None, finish)

  def _delta(self, index, delta, logprobs, finish) -> dict[str, Any]:
    return {
      'index': index,
      'delta': delta,
      'logprobs': logprobs,
      'finish_reason': finish,
    }


class TextAnswer(ChatAnswer):
  """Envelopes of /v1/completions, whose chunks are small answers."""

  kind = chunk_kind = 'text_completion'

  def __init__(self, model: str, policy_version: int):
    super().__init__(model, policy_version)
    self.fields['id'] = f'cmpl-{secrets.token_hex(12)}'

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
    del calls
    return {
      'index': index,
      'text': text,
      'logprobs': logprobs,
      'finish_reason': finish,
    }

  def opening(self, index: int) -> None:
    del index

  def delta(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
    return self.choice(index, text, (), logprobs, None)

  def closing(self, index, calls, finish) -> Iterator[dict[str, Any]]:
    del calls
    yield self.choice(index, '', (), None, finish)


def _call(call: chat_format.ParsedCall) -> dict[str, Any]:
  return {
    'id': f'call_{secrets.token_hex(12)}',
    'type': 'function',
    'function': {'name': call.name, 'arguments': call.arguments},
  }


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
  return {
    'prompt_tokens': prompt,
    'completion_tokens': completion,
    'total_tokens': prompt + completion,
    'prompt_tokens_details': {'cached_tokens': cached},
  }
