"""POST /inference/v1/generate: the token route of vLLM, for its trainers.

The client of `renderers`, and so environments of `verifiers`, speak it: prompts
and answers are token ids, with log-probabilities and routed experts.

  {"model", "token_ids": [...], "sampling_params": {"max_tokens", "temperature",
   "top_p", "top_k", "min_p", "seed", "n", "stop_token_ids",
   "routed_experts_prompt_start"}}

  {"request_id", "choices": [{"index", "finish_reason", "token_ids",
     "logprobs": {"content": [{"token": "token_id:7", "logprob", ...}]},
     "routed_experts": {"data", "dtype", "shape", "start"}}], "usage", ...}

Log-probabilities are those of the distribution that was sampled from. Routed
experts are base64 of an array [tokens, MoE layers, active experts] from token
`start` of the window up to the last but one: no pass consumed the last one. A
token without a record has 65535 for every expert, in an array of uint16.
"""

import asyncio
import json
import secrets
from typing import Any

import pydantic

from composer_jax.core import records
from composer_jax.core.routes import vllm
from composer_jax.serve import exchange, generation, metrics, service
from composer_jax.serve.api import answers, errors, openai, requests

# Parameters with an effect that is not to be had here, by the values that ask
# for nothing; beside them those that only say how text is made of tokens.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'stop': ([], ''),
  'ignore_eos': (False,),
  'bad_words': ([],),
  'allowed_token_ids': (),
  'prompt_logprobs': (),
  'logits_processors': (),
  'features': (),
  'content_parts': (),
  'stream': (False,),
}
_IGNORED = (
  'skip_special_tokens',
  'spaces_between_special_tokens',
  'include_stop_str_in_output',
  'detokenize',
  # Of the request: prefixes are shared in any case, first come first served.
  'cache_salt',
  'priority',
  'request_id',
)


class VllmSampling(requests.Sampling):
  """The field `sampling_params` of vLLM."""

  top_k: int | None = pydantic.Field(default=None, ge=-1, lt=2**31)
  logprobs: int | None = pydantic.Field(default=None, ge=0)
  routed_experts_prompt_start: int = pydantic.Field(default=0, ge=0)


class GenerateRequest(pydantic.BaseModel):
  """POST /inference/v1/generate."""

  model_config = pydantic.ConfigDict(extra='forbid', strict=True)
  model: str | None = None
  token_ids: list[int]
  sampling_params: dict[str, Any] = {}


class GenerateApi:
  """The endpoint for the trainers of vLLM."""

  def __init__(
    self, served: service.Service, figures: metrics.Metrics, name: str
  ):
    self._service, self._figures, self._name = served, figures, name

  async def sample(self, to: exchange.Exchange, body: Any) -> None:
    asked = requests.parse(GenerateRequest, _without_neutral(body))
    params = requests.parse(
      VllmSampling, _without_neutral(asked.sampling_params)
    )
    generation.check_model(asked.model, self._name)
    top = max((params.logprobs or 0) - 1, 0)
    generation.admit(params, self._service, top, 'logprobs')
    if params.top_k == -1:
      params = params.model_copy(update={'top_k': 0})
    prompt_T = openai.token_ids(asked.token_ids)
    sampled = generation.sample_requests(
      params,
      prompt_T,
      self._service,
      max_tokens=params.max_tokens,
      param='token_ids',
    )
    async with self._service.open(sampled) as job:
      self._figures.prompt_tokens.inc(len(prompt_T))
      ends = await generation.ends_of(job, self._figures, len(sampled))
    # In a thread: the routes of long windows are megabytes.
    answer = await asyncio.to_thread(
      lambda: self._answer(len(prompt_T), ends, params)
    )
    await to.answer(answer)

  def _answer(
    self,
    num_prompt: int,
    ends: dict[int, records.Completion],
    params: VllmSampling,
  ) -> bytes:
    answer = {
      'request_id': f'generate-{secrets.token_hex(12)}',
      'choices': [self._choice(i, ends[i], params) for i in sorted(ends)],
      'prompt_logprobs': None,
      'kv_transfer_params': None,
      'usage': answers.chat_usage(
        num_prompt,
        sum(len(end.tokens_T) for end in ends.values()),
        min(end.num_cached for end in ends.values()),
      ),
    }
    # The client cuts routes out of the bytes, which it looks for as vLLM, and
    # JSON without spaces, has them.
    return json.dumps(answer, separators=(',', ':'), allow_nan=False).encode()

  def _choice(
    self, index: int, end: records.Completion, params: VllmSampling
  ) -> dict[str, Any]:
    logprobs = None
    if params.logprobs is not None:
      pairs = zip(end.tokens_T.tolist(), end.logprobs_T.tolist(), strict=True)
      content = [vllm.entry(token, logprob) for token, logprob in pairs]
      logprobs = {'content': content}
    routes = None
    # Models without experts, and engines that keep no record, have none.
    if (end.consumed_expert_ids_TMA != records.NO_ROUTE).any():
      start = params.routed_experts_prompt_start
      routes = vllm.routed_experts(end.consumed_expert_ids_TMA, start)
    return {
      'index': index,
      'logprobs': logprobs,
      'finish_reason': 'stop' if end.stopped else 'length',
      'token_ids': end.tokens_T.tolist(),
      'routed_experts': routes,
    }


def _without_neutral(fields: Any) -> Any:
  """Leaves out what asks for nothing; refuses by name what is not to be had."""
  if not isinstance(fields, dict):
    return fields
  fields = {k: v for k, v in fields.items() if k not in _IGNORED}
  for name, neutral in _NEUTRAL.items():
    value = fields.pop(name, None)
    if value is not None and value not in neutral:
      raise errors.invalid(
        f'{name} is not supported here; leave it out.',
        name,
        'unsupported_parameter',
      )
  return fields
