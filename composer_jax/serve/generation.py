"""From checked requests to requests of the engine, and from tokens to text."""

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.rollout import sessions
from composer_jax.serve import jobs, metrics, service
from composer_jax.serve.api import chat_format, errors, requests, texts

# Below it, logits over temperature leave the range of float32.
_MIN_TEMPERATURE = 1e-4
# OpenAI's value where a probability is zero: JSON has no infinity.
MIN_LOGPROB = -9999.0


def admit(
  body: requests.Sampling,
  served: service.Service,
  top: int | None,
  param: str,
  num_prompts: int = 1,
) -> None:
  """Refuses a request that has no room, before its text becomes tokens.

  `top` tokens are asked for at each place, by the parameter `param`.
  """
  most = served.engine_options.num_top
  if top and top > most:
    raise errors.invalid(
      f'{param} ({top}) exceeds the {most} alternatives that this server '
      'keeps; see --config.engine.num_top.',
      param,
    )
  num = (body.n or 1) * num_prompts
  most = min(served.options.max_choices, served.capacity)
  if num > most:
    each = f' for each of {num_prompts} prompts' if num_prompts > 1 else ''
    raise errors.invalid(
      f'n ({body.n or 1}){each} exceeds the {most} choices that this server '
      'gives at a time.',
      'prompt' if each else 'n',
    )
  served.check_room(num)


def sample_requests(
  body: requests.Sampling,
  prompt_T: np.ndarray,
  served: service.Service,
  *,
  stop_tokens: Sequence[int] = (),
  max_tokens: int | None = None,
  session: str = '',
  held: int = 0,
  param: str = 'prompt',
) -> list[records.SampleRequest]:
  """Returns one request of the engine for each choice.

  Args:
    prompt_T: int32 ids of the context.
    stop_tokens: ids that end an answer beside those of the body.
    max_tokens: tokens to sample for each choice; None for the server's default.
    session: session to go on with; '' makes one for each choice.
    held: tokens that the session holds.
    param: name of the parameter that the prompt comes from.

  Raises:
    errors.ApiError: 400, naming the parameter.
  """
  if body.temperature and body.temperature < _MIN_TEMPERATURE:
    raise errors.invalid(
      f'temperature ({body.temperature}) must be 0, which takes the likeliest '
      f'token, or at least {_MIN_TEMPERATURE}.',
      'temperature',
    )
  vocab_size = served.config.vocab_size
  if not all(0 <= token < vocab_size for token in body.stop_token_ids):
    raise errors.invalid(
      f'stop_token_ids must lie in the vocabulary, 0..{vocab_size - 1}.',
      'stop_token_ids',
    )
  stop_tokens = tuple(dict.fromkeys([*body.stop_token_ids, *stop_tokens]))
  most = served.engine_options.max_stop_tokens
  if len(stop_tokens) > most:
    raise errors.invalid(
      f'{len(stop_tokens)} stop tokens, those that end every answer included, '
      f'exceed {most}; name fewer.',
      'stop_token_ids',
    )
  room = _room(prompt_T, held, served, max_tokens, param)
  seed = secrets.randbits(62) if body.seed is None else body.seed
  try:
    return [
      records.SampleRequest(
        session=session or f'request/{secrets.token_hex(16)}',
        context_T=prompt_T,
        max_new_tokens=room,
        stop_tokens=stop_tokens,
        seed=(seed, index),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        min_p=body.min_p or 0.0,
      )
      for index in range(body.n or 1)
    ]
  except ValueError as error:
    raise errors.invalid(str(error), None) from error


def _room(
  prompt_T: np.ndarray,
  held: int,
  served: service.Service,
  max_tokens: int | None,
  param: str,
) -> int:
  """Returns the most tokens to sample; checks that the prompt fits."""
  max_len, length = served.engine_options.max_len, held + len(prompt_T)
  if not length:
    raise errors.invalid(
      'The prompt is empty; give at least one token.', param, 'empty_prompt'
    )
  wanted = max_tokens or 1
  if length + wanted > max_len:
    raise errors.invalid(
      f"This model's maximum context length is {max_len} tokens; you asked "
      f'for {length + wanted} ({length} of context, {wanted} to sample at '
      'least). Shorten the prompt or max_tokens.',
      param if length >= max_len else 'max_tokens',
      'context_length_exceeded',
    )
  last = served.config.vocab_size - 1
  if len(prompt_T) and (prompt_T.min() < 0 or prompt_T.max() > last):
    raise errors.invalid(
      f'The prompt holds tokens from {prompt_T.min()} to {prompt_T.max()}; the '
      f'vocabulary is 0..{last}.',
      param,
    )
  default = min(served.options.default_max_tokens, max_len - length)
  return default if max_tokens is None else max_tokens


def check_model(asked: str | None, name: str) -> None:
  if asked is not None and asked != name:
    raise errors.ApiError(
      404,
      f'The model {asked!r} does not exist here; this server serves {name!r}.',
      code='model_not_found',
      param='model',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerDelta:
  """The next part of a choice: text for the client, logprobs in pieces."""

  text: str
  pieces: tuple[texts.TextPiece, ...]


class GrowingAnswer:
  """One answer as it grows.

  Attributes:
    num_tokens: number of sampled tokens that were used.
    num_cached: context tokens that were in the cache; None while unknown.
    calls: tool calls, once the answer is finished.
    finish: finish reason; '' before the end.
  """

  def __init__(
    self,
    index: int,
    tokenizer: Any,
    stop_tokens: Sequence[int],
    stops: Sequence[str] = (),
    form: chat_format.AnyFormat | None = None,
    tools: Sequence[requests.ToolSpec] = (),
  ):
    self.index, self.num_tokens, self.finish = index, 0, ''
    self.num_cached: int | None = None
    self.calls: list[chat_format.ParsedCall] = []
    self._tokenizer, self._stop_tokens = tokenizer, frozenset(stop_tokens)
    self._text = texts.Text(stops)
    self._form, self._tools = form, tools
    # From the first mark of a call on, text is held back: it may be calls.
    marks = form.mark(tools) if form else ()
    self._scanner = texts.Scanner(marks or ())
    self._in_call, self._held = marks is None, ''

  def add(self, event: sessions.SampledTokens) -> AnswerDelta:
    """Takes tokens; sets `finish` at a stop string."""
    tokens = event.tokens_T.tolist()
    ends = [i for i, t in enumerate(tokens) if t in self._stop_tokens]
    before = tokens[: ends[0]] if ends else tokens
    piece, used = self._text.add(
      self._token(event, i, token) for i, token in enumerate(before)
    )
    self.num_tokens += used
    if self._text.stopped:
      self.finish = 'stop'
      return self._ended(piece)
    # The stop token was sampled, too.
    self.num_tokens += bool(ends)
    return AnswerDelta(text=self._content(piece.text), pieces=(piece,))

  def end(self, completion: records.Completion) -> AnswerDelta:
    """Takes the end that the engine made."""
    assert self.num_tokens == len(completion.tokens_T), (
      self.num_tokens,
      completion.tokens_T,
    )
    self.num_cached = completion.num_cached
    self.finish = 'stop' if completion.stopped else 'length'
    return self._ended()

  def _ended(self, *pieces: texts.TextPiece) -> AnswerDelta:
    pieces = (*pieces, self._text.finish())
    text = ''.join(self._content(piece.text) for piece in pieces)
    text += self._scanner.finish()
    if self._in_call and self.finish == 'stop' and self._form:
      self.calls = self._form.calls(self._held, self._tools) or []
    if self.calls:
      self.finish = 'tool_calls'
    else:
      text += self._held
    return AnswerDelta(text=text, pieces=pieces)

  def _content(self, text: str) -> str:
    """Returns the part of a text that is certainly no call; holds the rest."""
    if self._in_call:
      self._held += text
      return ''
    content = self._scanner.add(text)
    if self._scanner.mark:
      self._in_call = True
      self._held = self._scanner.mark + self._scanner.after
    return content

  def _token(
    self, event: sessions.SampledTokens, place: int, token: int
  ) -> texts.Token:
    top = zip(
      event.top_ids_TX[place].tolist(),
      event.top_logprobs_TX[place].tolist(),
      strict=True,
    )
    return texts.Token(
      data=texts.spelling(self._tokenizer, token),
      logprob=max(float(event.raw_logprobs_T[place]), MIN_LOGPROB),
      top=tuple(
        (texts.spelling(self._tokenizer, other), max(logprob, MIN_LOGPROB))
        for other, logprob in top
      ),
    )


async def timed(
  job: jobs.SampleJob, figures: metrics.Metrics, unfinished: set[int]
) -> AsyncIterator[tuple[int, sessions.SampledTokens | records.Completion]]:
  """Yields events with their indices; counts tokens and measures their times.

  Args:
    unfinished: indices of the requests whose events are wanted; the caller
      removes those that have ended.
  """
  last: dict[int, float] = {}
  while unfinished:
    index, event = await job.next()
    if index not in unfinished:
      continue  # Sampled after its stop string and before it was cancelled.
    if isinstance(event, sessions.SampledTokens) and len(event.tokens_T):
      now, count = time.monotonic(), len(event.tokens_T)
      if not last:
        figures.first_token_s.observe(now - job.opened)
      elif index in last:
        # Several tokens may come at a time.
        figures.token_s.observe((now - last[index]) / count)
      last[index] = now
      figures.sampled_tokens.inc(count)
    yield index, event


async def ends_of(
  job: jobs.SampleJob, figures: metrics.Metrics, count: int
) -> dict[int, records.Completion]:
  """Returns the completions of `count` requests by index, once all ended."""
  ends: dict[int, records.Completion] = {}
  unfinished = set(range(count))
  async for index, event in timed(job, figures, unfinished):
    if isinstance(event, records.Completion):
      ends[index] = event
      unfinished.discard(index)
  return ends


async def play(
  job: jobs.SampleJob,
  choices: Sequence[GrowingAnswer],
  figures: metrics.Metrics,
) -> AsyncIterator[tuple[GrowingAnswer, AnswerDelta]]:
  """Yields each choice and its next part, until all choices are finished."""
  unfinished = set(range(len(choices)))
  async for index, event in timed(job, figures, unfinished):
    choice = choices[index]
    if isinstance(event, records.Completion):
      delta = choice.end(event)
    else:
      delta = choice.add(event)
    if choice.finish:
      unfinished.discard(index)
      job.leave(index)
    yield choice, delta
