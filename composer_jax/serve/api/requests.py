"""Bodies of requests, and the parameters of OpenAI that they may hold.

An unknown parameter is an error that names it; for one of OpenAI's the error
says what this server has instead. Only names of the user or of the request are
ignored.
"""

import dataclasses
from typing import Annotated, Any, Literal

import pydantic
import pydantic_core

from composer_jax.serve.api import errors

# Parameters of OpenAI without an effect here: the values that ask for nothing,
# which are accepted beside null, and the text of the error for others.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
  'best_of': ((1,), 'only 1; ask for n choices and compare their logprobs'),
  'suffix': (('',), 'write fill-in-the-middle as tokens, to /v1/tokens'),
  'echo': ((False,), 'only false; a prompt is not scored'),
  'store': ((False,), 'only false; nothing is kept'),
  'modalities': ((['text'],), "only ['text']"),
  'reasoning_effort': ((), 'what the chat template decides'),
  'service_tier': (('auto', 'default'), "only 'auto'"),
  'functions': ((), 'tools'),
  'function_call': ((), 'tools'),
}
# What a trainer could not recompute the log-probabilities of: token routes
# refuse it by name, and take values that ask for nothing.
_UNTRAINED: dict[str, tuple[Any, ...]] = {
  'frequency_penalty': (0,),
  'presence_penalty': (0,),
  'repetition_penalty': (1,),
  'logit_bias': ({},),
  'response_format': ({'type': 'text'},),
  'structured_outputs': (),
  'min_tokens': (0,),
}
# Codes of errors by pydantic's types of them.
_CODES = {
  'extra_forbidden': 'unknown_parameter',
  'missing': 'missing_required_parameter',
}
# Parameters that change no answer.
IGNORED = ('user', 'safety_identifier', 'prompt_cache_key')

# Names of branches in unions.
_BRANCHES = ('str', 'list[int]', 'list[str]', 'list[list[int]]')
FORBID = pydantic.ConfigDict(extra='forbid', strict=True)


class StreamOptions(pydantic.BaseModel):
  model_config = FORBID
  include_usage: bool = False
  # Padding against eavesdroppers, of which there is none here.
  include_obfuscation: bool = False


class Sampling(pydantic.BaseModel):
  """Parameters of all three endpoints."""

  model_config = FORBID
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
  frequency_penalty: float = pydantic.Field(default=0, ge=-2, le=2)
  presence_penalty: float = pydantic.Field(default=0, ge=-2, le=2)
  logit_bias: dict[str, float] = {}
  # A server that records takes the name of an episode from it.
  metadata: dict[str, Any] = {}

  @property
  def stops(self) -> list[str]:
    return [self.stop] if isinstance(self.stop, str) else self.stop or []

  @pydantic.field_validator('logit_bias')
  @classmethod
  def _terms(cls, terms: dict[str, float]) -> dict[str, float]:
    for token, term in terms.items():
      is_id = token.isascii() and token.isdecimal() and len(token) < 10
      if not (is_id and abs(term) <= 100):
        raise _error(
          f'must give ids of tokens terms of -100 to 100: {token!r:.40}'
        )
    return terms


def _error(text: str) -> pydantic_core.PydanticCustomError:
  return pydantic_core.PydanticCustomError('rule', '{text}', {'text': text})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
  """What `tool_choice` asks for: a mode, and the name of a tool, or ''."""

  mode: str = 'auto'
  name: str = ''


def _tool_choice(value: Any) -> ToolChoice:
  """Reads the forms of chat completions and of responses."""
  if value in ('auto', 'none', 'required'):
    return ToolChoice(mode=value)
  if isinstance(value, dict) and value.get('type') == 'function':
    named = value.get('function', value)
    name = named.get('name') if isinstance(named, dict) else None
    if isinstance(name, str) and name:
      return ToolChoice(mode='required', name=name)
  raise _error(
    "must be 'auto', 'none', 'required' or "
    "{'type': 'function', 'function': {'name': NAME}}"
  )


def _schema(value: Any) -> dict[str, Any] | None:
  """Returns the JSON schema of a response format; None for any text."""
  kind = value.get('type') if isinstance(value, dict) else None
  if kind == 'text':
    return None
  if kind == 'json_object':
    return {'type': 'object'}
  if kind == 'json_schema':
    # Responses have the schema in the format itself.
    holder = value.get('json_schema', value)
    schema = holder.get('schema') if isinstance(holder, dict) else None
    if isinstance(schema, dict):
      return schema
    raise _error('has no schema; json_schema.schema must be an object')
  raise _error("must be of type 'text', 'json_object' or 'json_schema'")


_Choice = Annotated[ToolChoice, pydantic.PlainValidator(_tool_choice)]
_Format = Annotated[dict[str, Any] | None, pydantic.PlainValidator(_schema)]


class Function(pydantic.BaseModel):
  model_config = FORBID
  name: str = pydantic.Field(min_length=1, max_length=64)
  description: str | None = None
  parameters: dict[str, Any] = {}
  strict: bool | None = None


class ToolSpec(pydantic.BaseModel):
  model_config = FORBID
  type: Literal['function']
  function: Function


class ChatRequest(GenerationRequest):
  """POST /v1/chat/completions."""

  messages: list[dict[str, Any]]
  tools: list[ToolSpec] = []
  tool_choice: _Choice = ToolChoice()
  parallel_tool_calls: bool = True
  response_format: _Format = None
  logprobs: bool | None = None
  top_logprobs: int | None = pydantic.Field(default=None, ge=0)
  max_completion_tokens: int | None = pydantic.Field(default=None, ge=1)


class CompletionRequest(GenerationRequest):
  """POST /v1/completions."""

  prompt: str | list[int] | list[str] | list[list[int]]
  logprobs: int | None = pydantic.Field(default=None, ge=0)

  @property
  def prompts(self) -> list[str] | list[list[int]]:
    is_one = isinstance(self.prompt, str) or not (
      self.prompt and isinstance(self.prompt[0], str | list)
    )
    return [self.prompt] if is_one else self.prompt  # pyrefly: ignore


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
  fields = errors.fields_of(body)
  if issubclass(kind, GenerationRequest):
    for name in IGNORED:
      fields.pop(name, None)
    for name in [name for name in _NEUTRAL if name in fields]:
      _check_neutral(name, fields[name])
      if name not in kind.model_fields:
        del fields[name]
  elif issubclass(kind, Sampling):
    for name in [name for name in _UNTRAINED if name in fields]:
      _check_trained(name, fields.pop(name))
  # Absent and null mean the same.
  fields = {k: v for k, v in fields.items() if v is not None}
  try:
    return kind.model_validate(fields)
  except pydantic.ValidationError as error:
    raise _refused(error, kind) from error


def _check_neutral(name: str, value: Any) -> None:
  neutral, instead = _NEUTRAL[name]
  if not _is_among(value, neutral):
    raise errors.invalid(
      f'{name} is not supported here; supported is: {instead}.',
      name,
      'unsupported_parameter',
    )


def _check_trained(name: str, value: Any) -> None:
  if not _is_among(value, _UNTRAINED[name]):
    raise errors.invalid(
      f'{name} is not taken here: a trainer could not recompute the log-'
      'probabilities of such tokens. /v1/chat/completions takes what does not '
      'go into training.',
      name,
      'unsupported_parameter',
    )


def _is_among(value: Any, neutral: tuple[Any, ...]) -> bool:
  # In Python False equals 0.
  return value is None or any(
    value == v and isinstance(value, bool) == isinstance(v, bool)
    for v in neutral
  )


def _refused(
  error: pydantic.ValidationError, kind: type[Any]
) -> errors.ApiError:
  first = error.errors(include_url=False, include_context=False)[0]
  # For a union, pydantic appends the name of the branch.
  places = [str(p) for p in first['loc']]
  name = places[0] if places else None
  path = '.'.join(p for p in places if p not in _BRANCHES)
  message = f'{path}: {first["msg"]}.'
  if first['type'] == 'extra_forbidden':
    known = ', '.join(sorted(kind.model_fields))
    message = f'Unknown parameter: {path}. Known are {known}.'
  code = _CODES.get(first['type'], 'invalid_value')
  return errors.invalid(message, path or name, code)
