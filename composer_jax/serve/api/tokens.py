"""POST /v1/tokens: tokens in, tokens out, with all that a trainer records.

Request, a JSON object; everything but `prompt` may be left out:

  prompt              list of token ids; in a session only those it has not seen
  max_tokens, temperature, top_p, top_k, min_p, seed, n, model
                      as in /v1/completions
  stop_token_ids      ids that end an answer and are part of it; no others do
  min_policy_version  409 (code `policy_too_old`, with `policy_version`) while
                      older weights are served
  session             name under which the context window and its KV cache are
                      kept afterwards; a later request of that name goes on
  session_length      tokens the session holds so far, 0 to open it; 409 (code
                      `session_mismatch`, with `session_length`) if it does not
  routes              'packed' (default), 'plain' or 'none'
  top_logprobs        number of likeliest tokens to report at each place

Answer:

  {"id", "object": "tokens", "model", "policy_version",
   "session_length": length to send next time; null without a session,
   "choices": [{
     "index",
     "tokens":          sampled ids, the stop token included,
     "logprobs":        log-probs of the distribution that was sampled from,
     "raw_logprobs":    log-probs of the model at temperature 1, untruncated,
     "policy_versions": version of the weights that sampled each token,
     "context_versions": oldest version in the cache that each pass read,
     "consumed_versions": version that computed each route and cache entry, up
                         to the last token but one of the session,
     "finish_reason":   "stop" or "length",
     "cached_tokens":   number of context tokens that were in the cache already,
     "top_logprobs":    null, or for each token [[id, raw log-prob], ...],
     "routes":          null, or {"start", "data"}
   }], "usage"}

`routes.data` is base64 of a tape of `core.routes.codec`: the experts of every
token from position `start` of the window on, up to the last but one. If `start`
lies before the end of the tape that a client has, the new part replaces the old
one: the tokens were consumed anew, with other weights.

DELETE /v1/tokens/sessions/NAME closes a session; 404 if there is none. The
server closes one that stays idle, and one whose request is cut off.
"""

import asyncio
import base64
import secrets
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.core.routes import codec
from composer_jax.models import config as model_config
from composer_jax.serve import exchange, generation, metrics, service
from composer_jax.serve.api import answers, errors, openai, requests

# Keeps names of clients apart from those that the server makes.
_KEPT = 'kept/'


def scheme_of(config: model_config.ModelConfig) -> codec.RouteScheme:
  """Returns the meaning of the ids in the model's routes."""
  return codec.RouteScheme(
    num_experts=config.moe.num_experts,
    num_active=config.moe.num_active,
    layers=tuple(range(config.num_dense_layers, config.num_layers)),
  )


class TokensApi:
  """The endpoints for clients with a tokenizer of their own."""

  def __init__(
    self, served: service.Service, figures: metrics.Metrics, name: str
  ):
    self._service, self._figures, self._name = served, figures, name
    self._scheme = scheme_of(served.config)

  async def sample(self, to: exchange.Exchange, body: Any) -> None:
    asked = requests.parse(requests.TokensRequest, body)
    generation.check_model(asked.model, self._name)
    self._check(asked)
    generation.admit(asked, self._service, asked.top_logprobs, 'top_logprobs')
    session = f'{_KEPT}{asked.session}' if asked.session else ''
    prompt_T = openai.token_ids(asked.prompt)
    sampled = generation.sample_requests(
      asked,
      prompt_T,
      self._service,
      max_tokens=asked.max_tokens,
      session=session,
      held=asked.session_length,
    )
    opened = self._service.open(
      sampled,
      keep=bool(session),
      session_length=asked.session_length if session else None,
    )
    async with opened as job:
      self._figures.prompt_tokens.inc(len(prompt_T))
      ends = await generation.ends_of(job, self._figures, len(sampled))
    length = None
    if session:
      length = asked.session_length + len(prompt_T) + len(ends[0].tokens_T)
    # In a thread: encoding the tapes of long windows would stall streams.
    choices = await asyncio.to_thread(
      lambda: [self._choice(i, ends[i], asked) for i in sorted(ends)]
    )
    await to.answer(
      {
        'id': f'tok-{secrets.token_hex(12)}',
        'object': 'tokens',
        'model': self._name,
        'policy_version': self._service.version,
        'session_length': length,
        'choices': choices,
        'usage': answers.chat_usage(
          len(prompt_T),
          sum(len(end.tokens_T) for end in ends.values()),
          min(end.num_cached for end in ends.values()),
        ),
      }
    )

  async def close(self, to: exchange.Exchange, _: Any) -> None:
    name = to.path_params['name']
    missing = errors.ApiError(
      404,
      f'No session {name!r} is kept here, or it has a request under way.',
      code='session_not_found',
      param='session',
    )
    await self._service.close_session(f'{_KEPT}{name}', missing)
    await to.answer({'id': name, 'object': 'session.deleted', 'deleted': True})

  def _check(self, asked: requests.TokensRequest) -> None:
    if asked.session and (asked.n or 1) > 1:
      raise errors.invalid('A session has one choice: n must be 1.', 'n')
    if asked.session_length and not asked.session:
      raise errors.invalid(
        'session_length needs a session; name it.', 'session_length'
      )
    oldest, version = asked.min_policy_version, self._service.version
    if oldest is not None and version < oldest:
      raise errors.ApiError(
        409,
        f'Policy version {version} is served and {oldest} or later is asked '
        'for; try again when it has been published.',
        code='policy_too_old',
        param='min_policy_version',
        details={'policy_version': version},
      )

  def _choice(
    self, index: int, end: records.Completion, asked: requests.TokensRequest
  ) -> dict[str, Any]:
    assert end.raw_logprobs_T is not None
    assert end.context_version_T is not None
    assert end.consumed_version_T is not None
    top = routes = None
    if asked.top_logprobs:
      assert end.top_ids_TX is not None
      assert end.top_logprobs_TX is not None
      ids_TX = end.top_ids_TX[:, : asked.top_logprobs].tolist()
      least = generation.MIN_LOGPROB
      scores_TX = np.maximum(end.top_logprobs_TX, least).tolist()
      top = [
        list(zip(ids, scores, strict=True))
        for ids, scores in zip(ids_TX, scores_TX, strict=True)
      ]
    if asked.routes != 'none':
      assert end.routes_start is not None
      data = codec.encode(
        end.consumed_expert_ids_TMA,
        self._scheme,
        start=end.routes_start,
        form=asked.routes,
      )
      text = base64.b64encode(data).decode()
      routes = {'start': end.routes_start, 'data': text}
    return {
      'index': index,
      'tokens': end.tokens_T.tolist(),
      'logprobs': end.logprobs_T.tolist(),
      'raw_logprobs': end.raw_logprobs_T.tolist(),
      'policy_versions': end.policy_version_T.tolist(),
      'context_versions': end.context_version_T.tolist(),
      'consumed_versions': end.consumed_version_T.tolist(),
      'finish_reason': 'stop' if end.stopped else 'length',
      'cached_tokens': end.num_cached,
      'top_logprobs': top,
      'routes': routes,
    }
