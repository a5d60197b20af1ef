"""Bodies of requests, and the parameters of OpenAI that they may hold.

An unknown parameter is an error that names it; for one of OpenAI's the error
says what this server has instead. Only names of the user or of the request are
ignored.
"""

from typing import Any, Literal

import pydantic
import pydantic_core

from composer_jax.serve.api import errors

_SAMPLE = 'only 0; sample with temperature, top_p, top_k, min_p'
_UNCONSTRAINED = 'nothing constrains the sampling'
# Parameters of OpenAI without an effect here: the values that ask for nothing,
# which are accepted beside null, and the text of the error for others.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
  'frequency_penalty': ((0,), _SAMPLE),
  'presence_penalty': ((0,), _SAMPLE),
  'logit_bias': (({},), 'only {}; sample with top_p, top_k, min_p'),
  'best_of': ((1,), 'only 1; ask for n choices and compare their logprobs'),
  'suffix': (('',), 'write fill-in-the-middle as tokens, to /v1/tokens'),
  'echo': ((False,), 'only false; a prompt is not scored'),
  'store': ((False,), 'only false; nothing is kept'),
  'modalities': ((['text'],), "only ['text']"),
  'response_format': (
    ({'type': 'text'},),
    f"only {{'type': 'text'}}; {_UNCONSTRAINED}",
  ),
  'service_tier': (('auto', 'default'), "only 'auto'"),
  'parallel_tool_calls': ((True,), 'only true; a model calls what it calls'),
  'tool_choice': (('auto', 'none'), f"'auto' or 'none'; {_UNCONSTRAINED}"),
  'functions': ((), 'tools'),
  'function_call': ((), 'tools'),
}
# Codes of errors by pydantic's types of them.
_CODES = {
  'extra_forbidden': 'unknown_parameter',
  'missing': 'missing_required_parameter',
}
# Parameters that change no answer.
_IGNORED = ('user', 'metadata', 'safety_identifier', 'prompt_cache_key')

_FORBID = pydantic.ConfigDict(extra='forbid', strict=True)


class StreamOptions(pydantic.BaseModel):
  model_config = _FORBID
  include_usage: bool = False


class Sampling(pydantic.BaseModel):
  """Parameters of all three endpoints."""

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
  """Parameters of the two endpoints of OpenAI."""

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
    """Takes a list of one prompt, which many clients send."""
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
  """Returns a checked request; errors.ApiError 400 names the parameter."""
  if not isinstance(body, dict):
    raise errors.invalid('The body must be a JSON object.', None)
  fields = dict(body)
  if issubclass(kind, GenerationRequest):
    for name in _IGNORED:
      fields.pop(name, None)
    for name in [name for name in _NEUTRAL if name in fields]:
      _check_neutral(name, fields[name])
      if name not in kind.model_fields:
        del fields[name]
  # Absent and null mean the same.
  fields = {k: v for k, v in fields.items() if v is not None}
  try:
    return kind.model_validate(fields)
  except pydantic.ValidationError as error:
    raise _refused(error, kind) from error


def _check_neutral(name: str, value: Any) -> None:
  neutral, instead = _NEUTRAL[name]
  # In Python False equals 0.
  if value is not None and not any(
    value == v and isinstance(value, bool) == isinstance(v, bool)
    for v in neutral
  ):
    raise errors.invalid(
      f'{name} is not supported here; supported is: {instead}.',
      name,
      'unsupported_parameter',
    )


def _refused(
  error: pydantic.ValidationError, kind: type[Any]
) -> errors.ApiError:
  first = error.errors(include_url=False, include_context=False)[0]
  # For a union, pydantic appends the name of the branch.
  places = [str(p) for p in first['loc']]
  name = places[0] if places else None
  path = '.'.join(p for p in places if p not in ('str', 'list[int]'))
  path = path.replace('list[str]', '').strip('.')
  message = f'{path}: {first["msg"]}.'
  if first['type'] == 'extra_forbidden':
    known = ', '.join(sorted(kind.model_fields))
    message = f'Unknown parameter: {path}. Known are {known}.'
  code = _CODES.get(first['type'], 'invalid_value')
  return errors.invalid(message, path or name, code)
