"""/v1/chat/completions, /v1/completions and /v1/responses, as OpenAI has them.

Log-probabilities are those of the model's own distribution: at temperature 1
and without truncation, whatever distribution was sampled from.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from composer_jax.serve import (
  exchange,
  generation,
  metrics,
  recording,
  service,
)
from composer_jax.serve.api import (
  answers,
  chat_format,
  errors,
  grammars,
  guides,
  requests,
  responses,
  texts,
)

_MAX_STOPS = 16
AnyAnswer = answers.ChatAnswer | responses.ResponseAnswer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """The served model; `form` is None where it has no chat template."""

  name: str
  tokenizer: Any
  stop_tokens: tuple[int, ...]
  form: chat_format.AnyFormat | None


class OpenAI:
  def __init__(
    self,
    served: service.Service,
    figures: metrics.Metrics,
    model: Model,
    recorder: recording.AnswerRecorder | None = None,
  ):
    self._recorder = recorder
    self._service, self._figures, self._model = served, figures, model
    self._started = int(time.time())
    self._grammars = guides.Grammars(
      model.tokenizer, served.config.vocab_size, model.stop_tokens
    )
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
    answer = answers.ChatAnswer(self._model.name, self._service.version)
    await self._chat(to, asked, answer)

  async def respond(self, to: exchange.Exchange, body: Any) -> None:
    """Answers a request of the Responses API."""
    asked, chat = responses.parse(body)
    answer = responses.ResponseAnswer(
      self._model.name, self._service.version, asked
    )
    with responses.own_names():
      await self._chat(to, chat, answer)

  async def _chat(
    self, to: exchange.Exchange, asked: requests.ChatRequest, answer: AnyAnswer
  ) -> None:
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
    tools = [] if asked.tool_choice.mode == 'none' else asked.tools
    await self._respond(
      to,
      asked,
      [await self._encoded(form.encode, asked.messages, tools)],
      answer,
      form=form,
      tools=tools,
      grammar=_grammar(asked, form, tools),
      max_tokens=asked.max_completion_tokens or asked.max_tokens,
      top=(asked.top_logprobs or 0) if asked.logprobs else None,
    )

  async def complete(self, to: exchange.Exchange, body: Any) -> None:
    asked = requests.parse(requests.CompletionRequest, body)
    generation.check_model(asked.model, self._model.name)
    prompts = asked.prompts
    generation.admit(
      asked, self._service, asked.logprobs, 'logprobs', len(prompts)
    )
    encode = self._model.tokenizer.encode
    await self._respond(
      to,
      asked,
      [
        token_ids(p) if isinstance(p, list) else await self._encoded(encode, p)
        for p in prompts
      ],
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
    prompts: Sequence[np.ndarray],
    answer: AnyAnswer,
    *,
    max_tokens: int | None,
    top: int | None,
    form: chat_format.AnyFormat | None = None,
    tools: Sequence[requests.ToolSpec] = (),
    grammar: str = '',
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
    sampled = [
      request
      for prompt_T in prompts
      for request in generation.sample_requests(
        asked,
        prompt_T,
        self._service,
        stop_tokens=self._model.stop_tokens,
        max_tokens=max_tokens,
        param='messages' if form else 'prompt',
      )
    ]
    made_guides = await self._guides(asked, grammar, len(sampled))
    on_end = None
    if self._recorder is not None:
      changed = ['a constraint or penalty'] * bool(made_guides)
      # The engine samples on where a stop string cuts the answer.
      changed += ['stop'] * bool(asked.stops)
      on_end = self._recorder.keeper(asked.metadata, sampled, changed)
    ends, tokenizer = sampled[0].stop_tokens, self._model.tokenizer
    choices = [
      generation.GrowingAnswer(i, tokenizer, ends, asked.stops, form, tools)
      for i in range(len(sampled))
    ]
    num_prompt = sum(map(len, prompts))

    def usage() -> dict[str, Any]:
      num_sampled = sum(choice.num_tokens for choice in choices)
      each = len(choices) // len(prompts)
      cached = sum(
        min((c.num_cached or 0 for c in choices[i : i + each]), default=0)
        for i in range(0, len(choices), each)
      )
      return answer.usage(num_prompt, num_sampled, cached)

    opened = self._service.open(sampled, guides=made_guides, on_end=on_end)
    async with opened as job:
      self._figures.prompt_tokens.inc(num_prompt)
      events = _held(generation.play(job, choices, self._figures), made_guides)
      if not asked.stream:
        parts = await _gathered(answer, events, choices, top)
        await to.answer(answer.whole(parts, usage()))
        return
      options = asked.stream_options or requests.StreamOptions()
      await to.begin_events()
      await answer.stream(
        to, events, choices, top, usage, options.include_usage
      )

  async def _guides(
    self, asked: requests.GenerationRequest, grammar: str, count: int
  ) -> list[guides.RequestGuide]:
    """Returns a guide for each choice; [] where nothing is to be changed."""
    bias = {int(token): term for token, term in asked.logit_bias.items()}
    penalties = (asked.frequency_penalty, asked.presence_penalty)
    vocab_size = self._service.config.vocab_size
    if bias and max(bias) >= vocab_size:
      raise errors.invalid(
        f'logit_bias names token {max(bias)}; the vocabulary is '
        f'0..{vocab_size - 1}.',
        'logit_bias',
      )
    if not (grammar or bias or any(penalties)):
      return []
    # In a thread: streams go on while a grammar is compiled.
    run = asyncio.get_running_loop().run_in_executor
    grammars = self._grammars
    matchers = [
      await run(grammars.waiting, grammars.matcher, grammar)
      if grammar
      else None
      for _ in range(count)
    ]
    return [
      guides.RequestGuide(
        vocab_size=vocab_size,
        ends=self._model.stop_tokens,
        logit_bias=bias,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        matcher=matcher,
      )
      for matcher in matchers
    ]


def _grammar(
  asked: requests.ChatRequest,
  form: chat_format.AnyFormat,
  tools: Sequence[requests.ToolSpec],
) -> str:
  """Returns the grammar of an answer; '' where it may be any text."""
  choice, several = asked.tool_choice, asked.parallel_tool_calls
  if choice.mode == 'required':
    called = [t for t in tools if choice.name in ('', t.function.name)]
    if not called:
      raise errors.invalid(
        f'tool_choice demands a call of {choice.name or "a tool"!r}, which is '
        'not among the tools of the request.',
        'tool_choice',
      )
    return grammars.whole('calls', form.rules(called, several))
  if asked.response_format is not None:
    rules = [f'value: {grammars.of_schema(asked.response_format)}']
    if not tools:
      return grammars.whole('value', rules)
    rules += form.rules(tools, several)
    return grammars.whole('value | calls', rules)
  held = form.held_text(tools, several) if tools else None
  return grammars.whole('text marked?', held) if held else ''


def token_ids(prompt: list[int]) -> np.ndarray:
  """Returns int32 ids; `generation.sample_requests` checks the vocabulary."""
  if any(not 0 <= token < 2**31 for token in prompt):
    raise errors.invalid('prompt holds a number that is no token.', 'prompt')
  return np.array(prompt, np.int32)


async def _held(
  events: answers.Events, made: Sequence[guides.RequestGuide]
) -> answers.Events:
  """Passes events on; an error for an answer that left its grammar."""
  async for choice, delta in events:
    if choice.finish and made and made[choice.index].failed:
      raise errors.invalid(
        'The answer left its grammar, which takes more work for a token than '
        'this server spends; ask for a simpler schema.',
        None,
        'grammar_too_complex',
      )
    yield choice, delta


async def _gathered(
  answer: AnyAnswer,
  events: answers.Events,
  choices: Sequence[generation.GrowingAnswer],
  top: int | None,
) -> list[Any]:
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
