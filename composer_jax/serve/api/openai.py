"""/v1/chat/completions and /v1/completions, as OpenAI's clients speak them.

Log-probabilities are those of the model's own distribution: at temperature 1
and without truncation, whatever was sampled from.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from composer_jax.serve import exchange, generation, metrics, service
from composer_jax.serve.api import answers, chat_format, errors, requests, texts


class OpenAI:
  """The endpoints of one model."""

  def __init__(
    self,
    served: service.Service,
    figures: metrics.Metrics,
    *,
    name: str,
    tokenizer: Any,
    stop_tokens: tuple[int, ...],
    form: chat_format.AnyFormat | None,
  ):
    """Serves a model.

    Args:
      served: samples.
      figures: to count in.
      name: of the model.
      tokenizer: of the model.
      stop_tokens: that end every answer.
      form: of conversations; None where the checkpoint has no chat template.
    """
    self._service, self._figures, self._name = served, figures, name
    self._tokenizer, self._form = tokenizer, form
    self._stop_tokens = stop_tokens
    self._started = int(time.time())
    # Streams go on while a long text becomes tokens. One at a time: templates
    # and tokenizers of imports keep what they compiled, unguarded.
    self._encoder = futures.ThreadPoolExecutor(1, 'tokenizer')

  async def models(self, to: exchange.Exchange, body: Any) -> None:
    del body
    await to.answer({'object': 'list', 'data': [self._model()]})

  async def model(self, to: exchange.Exchange, body: Any) -> None:
    del body
    generation.check_model(to.path_params['name'], self._name)
    await to.answer(self._model())

  def _model(self) -> dict[str, Any]:
    return {
      'id': self._name,
      'object': 'model',
      'created': self._started,
      'owned_by': 'composer_jax',
      'policy_version': self._service.version,
      'max_model_len': self._service.engine_options.max_len,
    }

  async def chat(self, to: exchange.Exchange, body: Any) -> None:
    asked = requests.parse(requests.ChatRequest, body)
    generation.check_model(asked.model, self._name)
    if self._form is None:
      raise errors.invalid(
        'This checkpoint has no chat template; use /v1/completions.',
        'messages',
        'no_chat_template',
      )
    if not asked.messages:
      raise errors.invalid(
        'messages is empty; give at least one.', 'messages', 'empty_prompt'
      )
    if asked.top_logprobs and not asked.logprobs:
      raise errors.invalid(
        'top_logprobs needs logprobs to be true.', 'top_logprobs'
      )
    generation.check_top(asked.top_logprobs, 'top_logprobs', self._service)
    tools = [] if asked.tool_choice == 'none' else asked.tools
    if asked.max_tokens and asked.max_completion_tokens:
      raise errors.invalid(
        'Give max_tokens or max_completion_tokens, not both.', 'max_tokens'
      )
    generation.admit(asked, self._service)
    await self._respond(
      to,
      asked,
      await self._encoded(self._form.encode, asked.messages, tools),
      answers.ChatAnswer(self._name, self._service.version),
      form=self._form,
      tools=tools,
      max_tokens=asked.max_completion_tokens or asked.max_tokens,
      # None: none are asked for.
      top=(asked.top_logprobs or 0) if asked.logprobs else None,
    )

  async def complete(self, to: exchange.Exchange, body: Any) -> None:
    asked = requests.parse(requests.CompletionRequest, body)
    generation.check_model(asked.model, self._name)
    generation.check_top(asked.logprobs, 'logprobs', self._service)
    generation.admit(asked, self._service)
    if isinstance(asked.prompt, str):
      prompt_T = await self._encoded(self._tokenizer.encode, asked.prompt)
    else:
      prompt_T = token_ids(asked.prompt)
    await self._respond(
      to,
      asked,
      prompt_T,
      answers.TextAnswer(self._name, self._service.version),
      form=None,
      tools=(),
      max_tokens=asked.max_tokens,
      top=asked.logprobs,
    )

  async def _encoded(
    self, encode: Callable[..., np.ndarray], *args: Any
  ) -> np.ndarray:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._encoder, encode, *args)

  async def _respond(
    self,
    to: exchange.Exchange,
    asked: requests.GenerationRequest,
    prompt_T: np.ndarray,
    answer: answers.ChatAnswer,
    *,
    form: chat_format.AnyFormat | None,
    tools: Sequence[requests.ToolSpec],
    max_tokens: int | None,
    top: int | None,
  ) -> None:
    generation.check_stops(asked.stops)
    if asked.stream_options and not asked.stream:
      raise errors.invalid(
        'stream_options needs stream to be true.', 'stream_options'
      )
    sampled = generation.sample_requests(
      asked,
      prompt_T,
      self._service,
      stop_tokens=self._stop_tokens,
      max_tokens=max_tokens,
      param='messages' if form else 'prompt',
    )
    ends = sampled[0].stop_tokens
    choices = [
      generation.GrowingAnswer(
        i, self._tokenizer, ends, asked.stops, form, tools
      )
      for i in range(len(sampled))
    ]
    async with self._service.open(sampled) as job:
      self._figures.prompt_tokens.inc(len(prompt_T))
      events = generation.play(job, choices, self._figures)
      if asked.stream:
        options = asked.stream_options or requests.StreamOptions()
        await _stream(
          to, answer, events, choices, top, len(prompt_T), options.include_usage
        )
      else:
        await _whole(to, answer, events, choices, top, len(prompt_T))


def token_ids(prompt: list[int]) -> np.ndarray:
  """Returns int32 ids; the vocabulary is checked later."""
  if any(not 0 <= token < 2**31 for token in prompt):
    raise errors.invalid('prompt holds a number that is no token.', 'prompt')
  return np.array(prompt, np.int32)


async def _whole(to, answer, events, choices, top, prompt_tokens) -> None:
  said: list[list[str]] = [[] for _ in choices]
  pieces: list[list[texts.TextPiece]] = [[] for _ in choices]
  async for choice, delta in events:
    said[choice.index].append(delta.text)
    pieces[choice.index] += delta.pieces
  found = [
    answer.choice(
      choice.index,
      ''.join(said[choice.index]),
      choice.calls,
      None if top is None else answer.logprobs(pieces[choice.index], top),
      choice.finish,
    )
    for choice in choices
  ]
  await to.answer(answer.whole(found, _usage(choices, prompt_tokens)))


async def _stream(
  to, answer, events, choices, top, prompt_tokens, include_usage
) -> None:
  # OpenAI's chunks hold no usage until the last one, but say so.
  none = {'usage': None} if include_usage else {}
  await to.begin_events()
  for choice in choices:
    opening = answer.opening(choice.index)
    if opening:
      await to.event(answer.chunk([opening], none))
  async for choice, delta in events:
    logprobs = None
    if top is not None and any(piece.tokens for piece in delta.pieces):
      logprobs = answer.logprobs(delta.pieces, top)
    if delta.text or logprobs:
      part = answer.delta(choice.index, delta.text, logprobs)
      await to.event(answer.chunk([part], none))
    if choice.finish:
      for part in answer.closing(choice.index, choice.calls, choice.finish):
        await to.event(answer.chunk([part], none))
  if include_usage:
    total = {'usage': _usage(choices, prompt_tokens)}
    await to.event(answer.chunk([], total))
  await to.end_events()


def _usage(
  choices: Sequence[generation.GrowingAnswer], prompt_tokens: int
) -> dict[str, Any]:
  known = [c.num_cached for c in choices if c.num_cached is not None]
  return answers.usage(
    prompt_tokens, sum(c.num_tokens for c in choices), min(known, default=0)
  )
