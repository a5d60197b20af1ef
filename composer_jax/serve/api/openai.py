"""/v1/chat/completions and /v1/completions, as OpenAI's clients speak them.

Log-probabilities are those of the model's own distribution: at temperature 1
and without truncation, whatever distribution was sampled from.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from composer_jax.serve import exchange, generation, metrics, service
from composer_jax.serve.api import answers, chat_format, errors, requests, texts

_MAX_STOPS = 16
_Events = AsyncIterator[tuple[generation.GrowingAnswer, generation.AnswerDelta]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """The served model; `form` is None where it has no chat template."""

  name: str
  tokenizer: Any
  stop_tokens: tuple[int, ...]
  form: chat_format.AnyFormat | None


class OpenAI:
  def __init__(
    self, served: service.Service, figures: metrics.Metrics, model: Model
  ):
    self._service, self._figures, self._model = served, figures, model
    self._started = int(time.time())
    # Streams go on while a long text becomes tokens. One thread: templates and
    # tokenizers of imports cache what they compiled without a lock.
    self._encoder = futures.ThreadPoolExecutor(1, 'tokenizer')

  async def models(self, to: exchange.Exchange, _: Any) -> None:
    await to.answer({'object': 'list', 'data': [self._about()]})

  async def model(self, to: exchange.Exchange, _: Any) -> None:
    generation.check_model(to.path_params['name'], self._model.name)
    await to.answer(self._about())

  def _about(self) -> dict[str, Any]:
    return {
      'id': self._model.name,
      'object': 'model',
      'created': self._started,
      'owned_by': 'composer_jax',
      'policy_version': self._service.version,
      'max_model_len': self._service.engine_options.max_len,
    }

  async def chat(self, to: exchange.Exchange, body: Any) -> None:
    asked = requests.parse(requests.ChatRequest, body)
    generation.check_model(asked.model, self._model.name)
    form = self._model.form
    if form is None:
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
    if asked.max_tokens and asked.max_completion_tokens:
      raise errors.invalid(
        'Give max_tokens or max_completion_tokens, not both.', 'max_tokens'
      )
    generation.admit(asked, self._service, asked.top_logprobs, 'top_logprobs')
    tools = [] if asked.tool_choice == 'none' else asked.tools
    await self._respond(
      to,
      asked,
      await self._encoded(form.encode, asked.messages, tools),
      answers.ChatAnswer(self._model.name, self._service.version),
      form=form,
      tools=tools,
      max_tokens=asked.max_completion_tokens or asked.max_tokens,
      top=(asked.top_logprobs or 0) if asked.logprobs else None,
    )

  async def complete(self, to: exchange.Exchange, body: Any) -> None:
    asked = requests.parse(requests.CompletionRequest, body)
    generation.check_model(asked.model, self._model.name)
    generation.admit(asked, self._service, asked.logprobs, 'logprobs')
    if isinstance(asked.prompt, str):
      encode = self._model.tokenizer.encode
      prompt_T = await self._encoded(encode, asked.prompt)
    else:
      prompt_T = token_ids(asked.prompt)
    await self._respond(
      to,
      asked,
      prompt_T,
      answers.TextAnswer(self._model.name, self._service.version),
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
    max_tokens: int | None,
    top: int | None,
    form: chat_format.AnyFormat | None = None,
    tools: Sequence[requests.ToolSpec] = (),
  ) -> None:
    """Samples and answers; `top` is None where no log-probabilities go out."""
    if len(asked.stops) > _MAX_STOPS or not all(asked.stops):
      raise errors.invalid(
        f'stop must be at most {_MAX_STOPS} texts that are not empty.', 'stop'
      )
    if asked.stream_options and not asked.stream:
      raise errors.invalid(
        'stream_options needs stream to be true.', 'stream_options'
      )
    sampled = generation.sample_requests(
      asked,
      prompt_T,
      self._service,
      stop_tokens=self._model.stop_tokens,
      max_tokens=max_tokens,
      param='messages' if form else 'prompt',
    )
    ends, tokenizer = sampled[0].stop_tokens, self._model.tokenizer
    choices = [
      generation.GrowingAnswer(i, tokenizer, ends, asked.stops, form, tools)
      for i in range(len(sampled))
    ]

    def usage() -> dict[str, Any]:
      known = [c.num_cached for c in choices if c.num_cached is not None]
      num_sampled = sum(choice.num_tokens for choice in choices)
      return answers.usage(len(prompt_T), num_sampled, min(known, default=0))

    async with self._service.open(sampled) as job:
      self._figures.prompt_tokens.inc(len(prompt_T))
      events = generation.play(job, choices, self._figures)
      if not asked.stream:
        await to.answer(
          answer.whole(await _gathered(answer, events, choices, top), usage())
        )
        return
      options = asked.stream_options or requests.StreamOptions()
      # With usage asked for, OpenAI's chunks but the last say that it is null.
      none = {'usage': None} if options.include_usage else {}
      await to.begin_events()
      for choice in choices:
        if opening := answer.opening(choice.index):
          await to.event(answer.chunk([opening], **none))
      async for part in _parts(answer, events, top):
        await to.event(answer.chunk([part], **none))
      if options.include_usage:
        await to.event(answer.chunk([], usage=usage()))
      await to.end_events()


def token_ids(prompt: list[int]) -> np.ndarray:
  """Returns int32 ids; `generation.sample_requests` checks the vocabulary."""
  if any(not 0 <= token < 2**31 for token in prompt):
    raise errors.invalid('prompt holds a number that is no token.', 'prompt')
  return np.array(prompt, np.int32)


async def _gathered(
  answer: answers.ChatAnswer,
  events: _Events,
  choices: Sequence[generation.GrowingAnswer],
  top: int | None,
) -> list[dict[str, Any]]:
  parts: list[list[str]] = [[] for _ in choices]
  pieces: list[list[texts.TextPiece]] = [[] for _ in choices]
  async for choice, delta in events:
    parts[choice.index].append(delta.text)
    pieces[choice.index] += delta.pieces
  return [
    answer.choice(
      choice.index,
      ''.join(parts[choice.index]),
      choice.calls,
      None if top is None else answer.logprobs(pieces[choice.index], top),
      choice.finish,
    )
    for choice in choices
  ]


async def _parts(
  answer: answers.ChatAnswer, events: _Events, top: int | None
) -> AsyncIterator[dict[str, Any]]:
  async for choice, delta in events:
    logprobs = None
    if top is not None and any(piece.tokens for piece in delta.pieces):
      logprobs = answer.logprobs(delta.pieces, top)
    if delta.text or logprobs:
      yield answer.delta(choice.index, delta.text, logprobs)
    if choice.finish:
      for part in answer.closing(choice.index, choice.calls, choice.finish):
        yield part
