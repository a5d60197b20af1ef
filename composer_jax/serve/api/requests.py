"""Bodies of requests, and which of OpenAI's parameters they may hold.

Every parameter that is not known is an error that names it; one that OpenAI
has and this server has not says what there is instead. Nothing is ignored but
what names the user or the request.
"""

from typing import Any, Literal

import pydantic
import pydantic_core

from composer_jax.serve.api import errors

# Accepted where they ask for nothing: {parameter: values}.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'frequency_penalty': (None, 0),
  'presence_penalty': (None, 0),
  'logit_bias': (None, {}),
  'best_of': (None, 1),
  'suffix': (None, ''),
  'echo': (None, False),
  'store': (None, False),
  'modalities': (None, ['text']),
  'response_format': (None, {'type': 'text'}),
  'service_tier': (None, 'auto', 'default'),
  'parallel_tool_calls': (None, True),
  'tool_choice': (None, 'auto', 'none'),
}
_INSTEAD = {
  'frequency_penalty': 'only 0; sample with temperature, top_p, top_k, min_p',
  'presence_penalty': 'only 0; sample with temperature, top_p, top_k, min_p',
  'logit_bias': 'no token can be favoured; sample with top_p, top_k, min_p',
  'best_of': 'only 1; ask for n choices and compare their logprobs',
  'suffix': 'write the marks of fill-in-the-middle as tokens: /v1/tokens',
  'echo': 'only false; a prompt is not scored',
  'store': 'only false; nothing is kept',
  'modalities': "only ['text']",
  'response_format': "only {'type': 'text'}; nothing constrains the sampling",
  'service_tier': "only 'auto'",
  'parallel_tool_calls': 'only true; a model calls what it calls',
  'tool_choice': "'auto' or 'none'; nothing constrains the sampling",
  'functions': 'tools',
  'function_call': 'tools',
  'audio': 'text alone',
  'prediction': 'text alone, without a prediction',
  'reasoning_effort': 'nothing of the kind',
  'verbosity': 'nothing of the kind',
  'web_search_options': 'tools of your own',
  'moderation': 'nothing of the kind',
  'prompt_cache_options': 'nothing to set: prompts that begin alike are shared',
  'prompt_cache_retention': (
    'nothing to set: prompts that begin alike are shared'
  ),
}
# They change no answer.
_NAMES = ('user', 'metadata', 'safety_identifier', 'prompt_cache_key')

_FORBID = pydantic.ConfigDict(extra='forbid', strict=True)


class StreamOptions(pydantic.BaseModel):
  model_config = _FORBID
  include_usage: bool = False


class Sampling(pydantic.BaseModel):
  """What all three endpoints share."""

  model_config = _FORBID
  model: str | None = None
  temperature: float | None = pydantic.Field(default=None, ge=0, le=100)
  top_p: float | None = pydantic.Field(default=None, ge=1e-6, le=1)
  top_k: int | None = pydantic.Field(default=None, ge=0, lt=2**31)
  min_p: float | None = pydantic.Field(default=None, ge=0, lt=1)
  n: int | None = pydantic.Field(default=None, ge=1)
  seed: int | None = pydantic.Field(default=None, ge=-(2**63), lt=2**63)
  max_tokens: int | None = pydantic.Field(default=None, ge=1)
  stop_token_ids: list[int] = []


class GenerationRequest(Sampling):
  """What the two endpoints of OpenAI share."""

  stop: str | list[str] | None = None
  stream: bool | None = None
  stream_options: StreamOptions | None = None

  @property
  def stops(self) -> list[str]:
    return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Function(pydantic.BaseModel):
  model_config = _FORBID
  name: str = pydantic.Field(min_length=1, max_length=64)
  description: str | None = None
  parameters: dict[str, Any] = {}
  strict: Literal[False] | None = None


class ToolSpec(pydantic.BaseModel):
  model_config = _FORBID
  type: Literal['function']
  function: Function


class ChatRequest(GenerationRequest):
  """POST /v1/chat/completions."""

  messages: list[dict[str, Any]]
  tools: list[ToolSpec] = []
  tool_choice: Literal['auto', 'none'] | None = None
  logprobs: bool | None = None
  top_logprobs: int | None = pydantic.Field(default=None, ge=0)
  max_completion_tokens: int | None = pydantic.Field(default=None, ge=1)


class CompletionRequest(GenerationRequest):
  """POST /v1/completions."""

  prompt: str | list[int]
  logprobs: int | None = pydantic.Field(default=None, ge=0)

  @pydantic.field_validator('prompt', mode='before')
  @classmethod
  def _only_prompt(cls, prompt: Any) -> Any:
    """Takes a list of one prompt, as which many clients send it."""
    if (
      isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    ):
      if len(prompt) > 1:
        raise pydantic_core.PydanticCustomError(
          'several_prompts',
          '{num} prompts in one request are not supported here; send a '
          'request for each',
          {'num': len(prompt)},
        )
      return prompt[0]
    return prompt


class TokensRequest(Sampling):
  """POST /v1/tokens; see `serve.api.tokens`."""

  prompt: list[int]
  session: str | None = pydantic.Field(
    default=None, min_length=1, max_length=128
  )
  session_length: int = pydantic.Field(default=0, ge=0)
  min_policy_version: int | None = None
  routes: Literal['packed', 'plain', 'none'] = 'packed'
  top_logprobs: int = pydantic.Field(default=0, ge=0)


def parse(kind: type[Any], body: Any) -> Any:
  """Returns the request that a body is.

  Raises:
    errors.ApiError: 400, naming the parameter.
  """
  if not isinstance(body, dict):
    raise errors.invalid('The body must be a JSON object.', None)
  fields = dict(body)
  if issubclass(kind, GenerationRequest):
    for name in (*_NEUTRAL, *_INSTEAD, *_NAMES):
      if name in fields and name not in kind.model_fields:
        _check_neutral(name, fields.pop(name))
    if fields.get('tool_choice', 'auto') not in ('auto', 'none', None):
      _check_neutral('tool_choice', fields['tool_choice'])
  # Absent and null mean the same.
  fields = {k: v for k, v in fields.items() if v is not None}
  try:
    return kind.model_validate(fields)
  except pydantic.ValidationError as error:
    raise _refused(error, kind) from error


def _check_neutral(name: str, value: Any) -> None:
  if name in _NAMES or any(
    value == v and isinstance(value, bool) == isinstance(v, bool)
    for v in _NEUTRAL.get(name, (None,))
  ):
    return
  raise errors.invalid(
    f'{name} is not supported here; supported is: {_INSTEAD[name]}.',
    name,
    'unsupported_parameter',
  )


def _refused(error: pydantic.ValidationError, kind: type[Any]) -> Any:
  first = error.errors(include_url=False, include_context=False)[0]
  # Of a union, pydantic names the branch after the field.
  places = [str(p) for p in first['loc']]
  name = places[0] if places else None
  path = '.'.join(p for p in places if p not in ('str', 'list[int]'))
  path = path.replace('list[str]', '').strip('.')
  if first['type'] == 'extra_forbidden':
    known = ', '.join(sorted(kind.model_fields))
    return errors.invalid(
      f'Unknown parameter: {path}. Known are {known}.',
      path,
      'unknown_parameter',
    )
  if first['type'] == 'missing':
    return errors.invalid(
      f'Missing required parameter: {path}.',
      path,
      'missing_required_parameter',
    )
  return errors.invalid(f'{path}: {first["msg"]}.', path or name)
