"""Policies behind HTTP: this project's own server, or any chat endpoint.

`TokenPolicy` speaks to `/v1/tokens` (`serve.api.tokens`): tokens stay tokens,
log-probabilities and routes come along, and the server keeps the cache of a
window between its turns. `ChatPolicy` speaks to an endpoint of OpenAI's form,
which passes only text: its rollouts can be judged and not trained on.

A request is sent again if the server is busy or cannot be reached, and with the
whole window if the server has dropped its session.
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.core import checks, records
from composer_jax.core.routes import codec
from composer_jax.tasks.repository import scripts
from composer_jax.text import chat, tool_calls

_log = logging.getLogger(__name__)


class EndpointError(RuntimeError):
  """An endpoint cannot be used; names it, the reason and the error's code."""

  def __init__(self, message: str, code: str = ''):
    super().__init__(message)
    self.code = code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
  """The address of a policy, which OpenAI's client speaks to.

  Attributes:
    url: URL of the API with its version, such as http://host:8000/v1.
    model: name of the model there; '' for the only one.
    api_key: bearer token to send; '' for none.
    timeout_s: time of one attempt.
    attempts: attempts while the server is busy or cannot be reached, with the
      client's waits between them.
  """

  url: str
  model: str = ''
  # Not shown: representations end up in logs.
  api_key: str = dataclasses.field(default='', repr=False)
  timeout_s: float = 300.0
  attempts: int = 5

  def __post_init__(self):
    if not self.url.startswith(('http://', 'https://')):
      raise ValueError(
        f'url {self.url!r} must begin with http:// or https://, such as '
        'http://localhost:8000/v1.'
      )
    checks.positive(self, 'timeout_s')
    checks.at_least(self, 1, 'attempts')

  @functools.cached_property
  def _client(self) -> Any:
    try:
      import openai  # An extra.
    except ModuleNotFoundError as error:
      raise ValueError(
        "A policy behind an endpoint needs the package 'openai': pip install "
        "-e '.[judge]' in the checkout."
      ) from error
    return openai.OpenAI(
      base_url=self.url,
      # The client takes no empty one.
      api_key=self.api_key or 'none',
      timeout=self.timeout_s,
      max_retries=self.attempts - 1,
    )

  def send(
    self, path: str, body: Mapping[str, Any] | None, method: str = 'POST'
  ) -> Any:
    """Returns the JSON that the endpoint answers.

    Raises:
      EndpointError: it refused (with its own `code`), or every attempt failed.
    """
    client = self._client
    import openai

    try:
      if method == 'DELETE':
        return client.delete(path, cast_to=object)
      return client.post(path, body=body, cast_to=object)
    except (openai.OpenAIError, ValueError) as error:
      raise EndpointError(
        f'{self.url}{path}: {error} (at most {self.attempts} attempts)',
        str(getattr(error, 'code', None) or ''),
      ) from error


def seed_of(request: records.SampleRequest) -> int:
  """Returns one number for the request's several, as endpoints take them."""
  digest = hashlib.sha256(repr(tuple(map(int, request.seed))).encode())
  return int.from_bytes(digest.digest()[:7], 'big')


def _session_name() -> str:
  # Not the episode's: two evaluations may share a server.
  return f'http-{secrets.token_hex(16)}'


@dataclasses.dataclass
class _Session:
  """A window: its tokens, and how many of them the server holds as `name`."""

  name: str = dataclasses.field(default_factory=_session_name)
  tokens: list[int] = dataclasses.field(default_factory=list)
  held: int = 0


class TokenPolicy:
  """Implements `agent.environment.Policy` over this project's `/v1/tokens`."""

  def __init__(self, endpoint: Endpoint):
    self._endpoint = endpoint
    self._sessions: dict[str, _Session] = {}
    self._lock = threading.Lock()

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Goes on with `request.session`; blocks until sampling ended."""
    with self._lock:
      session = self._sessions.setdefault(request.session, _Session())
    context = request.context_T.tolist()
    try:
      answer = self._ask(session, context, request)
    except EndpointError as error:
      if error.code not in ('session_mismatch', 'session_busy'):
        raise
      # It was idle for too long, or an earlier attempt was cut off midway.
      _log.warning('The server lost a window of %d.', len(session.tokens))
      self._forget(session)
      session.name, session.held = _session_name(), 0
      answer = self._ask(session, session.tokens + context, request)
    (choice,) = answer['choices']
    session.tokens += context + choice['tokens']
    session.held = answer['session_length']
    tape = codec.decode(base64.b64decode(choice['routes']['data']))
    return records.Completion(
      session=request.session,
      tokens_T=np.asarray(choice['tokens'], np.int32),
      logprobs_T=np.asarray(choice['logprobs'], np.float32),
      raw_logprobs_T=np.asarray(choice['raw_logprobs'], np.float32),
      policy_version_T=np.asarray(choice['policy_versions'], np.int32),
      context_version_T=np.asarray(choice['context_versions'], np.int32),
      consumed_expert_ids_TMA=tape.ids_TMA,
      consumed_version_T=np.asarray(choice['consumed_versions'], np.int32),
      routes_start=tape.start,
      stopped=choice['finish_reason'] == 'stop',
      num_cached=choice['cached_tokens'],
    )

  def close(self, session: str) -> None:
    with self._lock:
      known = self._sessions.pop(session, None)
    if known is not None and known.held:
      self._forget(known)

  def _ask(
    self,
    session: _Session,
    prompt: Sequence[int],
    request: records.SampleRequest,
  ) -> Any:
    body = {
      'prompt': list(prompt),
      'max_tokens': request.max_new_tokens,
      'stop_token_ids': list(request.stop_tokens),
      'seed': seed_of(request),
      'temperature': request.temperature,
      'top_p': request.top_p,
      'top_k': request.top_k,
      'min_p': request.min_p,
      'session': session.name,
      'session_length': session.held,
      'model': self._endpoint.model or None,
    }
    return self._endpoint.send('/tokens', body)

  def _forget(self, session: _Session) -> None:
    try:
      self._endpoint.send(f'/tokens/sessions/{session.name}', None, 'DELETE')
    except EndpointError as error:
      # The server closes it by itself once it is idle.
      _log.debug('Session %s stays open: %s', session.name, error)


class ChatPolicy:
  """Implements `agent.environment.Policy` over `/chat/completions`.

  Log-probabilities are zero and there are no routes. `max_new_tokens` limits
  the endpoint's tokens, and then those of `tokenizer`: a longer text is cut.
  """

  def __init__(
    self,
    endpoint: Endpoint,
    tokenizer: Any,
    *,
    functions: Sequence[Mapping[str, Any]] = (),
    answer_role: str = 'user',
  ):
    """Talks to one endpoint.

    Args:
      endpoint: address of any endpoint of OpenAI's form.
      tokenizer: tokenizer of the episodes.
      functions: descriptions of JSON tools
        (`tasks.repository.schemas.Tool.function()`) for a model that was
        trained on the endpoint's own tool calls, of which the first of an
        answer counts; () has calls written as text.
      answer_role: role of messages with a tool's answer to a call in text: this
        project's server takes 'tool', most others 'user'.
    """
    self._endpoint, self._tokenizer = endpoint, tokenizer
    self._functions = [dict(f) for f in functions]
    self._answer_role = answer_role
    self._sessions: dict[str, list[np.ndarray]] = {}

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Goes on with `request.session`; blocks until the endpoint answered."""
    parts_T = self._sessions.setdefault(request.session, [])
    is_first = not parts_T
    tokens_T = np.concatenate([*parts_T, request.context_T])
    body: dict[str, Any] = {
      'messages': self._messages(tokens_T),
      'max_tokens': request.max_new_tokens,
      'seed': seed_of(request),
      'temperature': request.temperature,
    }
    # Many endpoints refuse parameters that they do not know.
    if self._endpoint.model:
      body['model'] = self._endpoint.model
    if request.top_p < 1:
      body['top_p'] = request.top_p
    if self._functions:
      body['tools'] = self._functions
    answer = self._endpoint.send('/chat/completions', body)
    try:
      choice = answer['choices'][0]
      text = self._text(choice['message'])
      stopped = choice['finish_reason'] != 'length'
    except (
      AttributeError, IndexError, KeyError, TypeError, ValueError
    ) as error:  # fmt: skip
      raise EndpointError(
        f'{self._endpoint.url}/chat/completions gave an answer that is no chat '
        f'completion: {json.dumps(answer)[:200]}'
      ) from error
    if not stopped:
      # The endpoint cut the text, so it has no end token, unless it is empty.
      length = max(1, len(self._tokenizer.encode(text)))
      length = min(length, request.max_new_tokens)
      request = dataclasses.replace(request, max_new_tokens=length)
    completion = scripts.completion(
      self._tokenizer, request, text, is_first=is_first
    )
    parts_T += [request.context_T, completion.tokens_T]
    return completion

  def close(self, session: str) -> None:
    self._sessions.pop(session, None)

  def _messages(self, tokens_T: np.ndarray) -> list[dict[str, Any]]:
    """Returns the window as messages, without the call to be written."""
    messages: list[dict[str, Any]] = []
    call_id = ''
    for turn in chat.turns(self._tokenizer, tokens_T)[:-1]:
      role, text = turn['role'], turn['text']
      if role == 'call':
        call_id = f'call_{len(messages)}'
        call = _native(text, call_id) if self._functions else None
        call_id = call_id if call else ''
        messages.append(call or {'role': 'assistant', 'content': text})
      elif role == 'tool':
        link = {'role': 'tool', 'tool_call_id': call_id}
        head = link if call_id else {'role': self._answer_role}
        messages.append({**head, 'content': text})
      else:
        messages.append({'role': 'user', 'content': text})
    return messages

  def _text(self, message: Mapping[str, Any]) -> str:
    """Returns an answer as the text of a call."""
    text = message.get('content') or ''
    if calls := message.get('tool_calls'):
      name, arguments = (calls[0]['function'][k] for k in ('name', 'arguments'))
      # Arguments that are no object make no call; the environment says so.
      text = f'{name} {arguments}'
      with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(arguments or '{}')
        if isinstance(parsed, dict):
          call = tool_calls.JsonCall(name=name, arguments=parsed)
          text = tool_calls.render_json(call)
    # JSON has halves of surrogate pairs, which no token spells.
    return text.encode('utf-8', 'replace').decode()


def _native(text: str, call_id: str) -> dict[str, Any] | None:
  """Returns a call in the endpoint's own form; None for another text."""
  try:
    call = tool_calls.parse_json(text)
  except tool_calls.ToolCallError:
    return None
  function = {
    'name': call.name,
    'arguments': json.dumps(dict(call.arguments), ensure_ascii=False),
  }
  return {
    'role': 'assistant',
    'content': None,
    'tool_calls': [{'id': call_id, 'type': 'function', 'function': function}],
  }


def policy_for(
  options: Any, tokenizer: Any, functions: Sequence[Mapping[str, Any]]
) -> TokenPolicy | ChatPolicy:
  """Returns the policy behind an endpoint; threads may share it.

  Args:
    options: record with url, model, api_key, and policy 'tokens' or 'chat'.
    tokenizer: tokenizer of the episodes.
    functions: tools for the chat endpoint's own calls; () has calls written as
      text.
  """
  endpoint = Endpoint(
    url=options.url, model=options.model, api_key=options.api_key
  )
  if options.policy == 'tokens':
    return TokenPolicy(endpoint)
  return ChatPolicy(endpoint, tokenizer, functions=functions)
