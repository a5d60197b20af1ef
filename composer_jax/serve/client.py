"""Policies behind HTTP: this project's own server, or any chat endpoint.

`TokenPolicy` speaks to `/v1/tokens` (serve.tokens_api): tokens are never
spelled out, log-probabilities and routes come along, and the server keeps the
cache of a window between its turns. `ChatPolicy` speaks to an endpoint of
OpenAI's form: only text goes over, so its rollouts can be judged and not
trained on.

A request that finds no one, or a server that is busy, is tried again; so is a
window that the server has forgotten, from its first token.
"""

import base64
import dataclasses
import hashlib
import http.client
import json
import logging
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.core.routes import codec
from composer_jax.tasks.repository import scripts
from composer_jax.text import chat, tool_calls

_BUSY = (429, 502, 503)
_log = logging.getLogger(__name__)


class EndpointError(RuntimeError):
  """An endpoint that cannot be used; the message names it and says why."""

  def __init__(self, message: str, code: str = ''):
    super().__init__(message)
    self.code = code


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
  """Where a policy is.

  Attributes:
    url: of the API, up to and including its version: http://host:8000/v1.
    model: its name there; '' for the only one.
    api_key: sent as a bearer token; '' for none.
    timeout_s: of one request.
    attempts: of a request that finds the server busy or not at all.
    wait_s: before the second attempt; doubled before each that follows.
  """

  url: str
  model: str = ''
  # Not shown: representations end up in logs.
  api_key: str = dataclasses.field(default='', repr=False)
  timeout_s: float = 300.0
  attempts: int = 5
  wait_s: float = 1.0

  def __post_init__(self):
    if not self.url.startswith(('http://', 'https://')):
      raise ValueError(
        f'url {self.url!r} must begin with http:// or https://, such as '
        'http://localhost:8000/v1.'
      )
    if not self.timeout_s > 0 or self.attempts < 1 or self.wait_s < 0:
      raise ValueError(
        f'timeout_s ({self.timeout_s}) must be positive, attempts '
        f'({self.attempts}) at least 1 and wait_s ({self.wait_s}) not negative.'
      )

  def send(
    self, path: str, body: Mapping[str, Any] | None, method: str = 'POST'
  ) -> Any:
    """The JSON that the endpoint answers.

    Raises:
      EndpointError: it refused (with its own `code`), or every attempt failed.
    """
    wait, error = self.wait_s, None
    for attempt in range(1, self.attempts + 1):
      try:
        return self._send(path, body, method)
      except urllib.error.HTTPError as refusal:
        error = _refusal(self.url + path, refusal)
        if refusal.code not in _BUSY:
          raise error from refusal
      except (OSError, http.client.HTTPException, ValueError) as failure:
        # No connection, one that broke, or no JSON.
        error = EndpointError(f'{self.url}{path}: {failure}')
      if attempt < self.attempts:
        _log.warning('Attempt %d failed: %s', attempt, error)
        time.sleep(wait)
        wait *= 2
    raise EndpointError(f'{error} (after {self.attempts} attempts)') from error

  def _send(
    self, path: str, body: Mapping[str, Any] | None, method: str
  ) -> Any:
    request = urllib.request.Request(
      self.url + path,
      data=None if body is None else json.dumps(body).encode(),
      headers={'content-type': 'application/json'},
      method=method,
    )
    if self.api_key:
      # For this host alone, wherever it may redirect to.
      request.add_unredirected_header('authorization', f'Bearer {self.api_key}')
    with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
      return json.loads(answer.read())


def _refusal(place: str, refusal: urllib.error.HTTPError) -> EndpointError:
  """Reads the error object of OpenAI's form, where there is one."""
  text = refusal.read(100_000).decode('utf-8', 'replace')
  code, message = '', text[:500]
  try:
    error = json.loads(text)['error']
    code, message = str(error.get('code') or ''), str(error['message'])
  except (ValueError, TypeError, KeyError, AttributeError):
    pass  # A proxy's page: shown as it is.
  return EndpointError(f'{place}: {refusal.code}: {message}', code)


def seed_of(request: records.SampleRequest) -> int:
  """One number for the request's several, which endpoints want as one."""
  digest = hashlib.sha256(repr(tuple(map(int, request.seed))).encode())
  return int.from_bytes(digest.digest()[:7], 'big')


@dataclasses.dataclass
class _Session:
  """A window here: its tokens, and what the server holds of them."""

  name: str
  tokens: list[int] = dataclasses.field(default_factory=list)
  held: int = 0


def _name() -> str:
  # Not the episode's: two evaluations may share a server.
  return f'http-{secrets.token_hex(16)}'


class TokenPolicy:
  """Implements `policy.Policy` over this project's `/v1/tokens`."""

  def __init__(self, endpoint: Endpoint):
    self._endpoint = endpoint
    self._sessions: dict[str, _Session] = {}
    self._lock = threading.Lock()

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Goes on with `request.session`; blocks until sampling ended."""
    session = self._session(request.session)
    context = request.context_T.tolist()
    try:
      answer = self._ask(session, context, request)
    except EndpointError as error:
      if error.code not in ('session_mismatch', 'session_busy'):
        raise
      # It was idle for too long, or an attempt before was cut off midway.
      _log.warning('The server lost a window of %d.', len(session.tokens))
      self._forget(session)
      session.name, session.held = _name(), 0
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
      consumed_expert_ids_TMA=tape.ids_TMA,
      routes_start=tape.start,
      stopped=choice['finish_reason'] == 'stop',
      num_cached=choice['cached_tokens'],
    )

  def close(self, session: str) -> None:
    with self._lock:
      known = self._sessions.pop(session, None)
    if known is not None and known.held:
      self._forget(known)

  def _session(self, name: str) -> _Session:
    with self._lock:
      if name not in self._sessions:
        self._sessions[name] = _Session(name=_name())
      return self._sessions[name]

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
  """Implements `policy.Policy` over `/chat/completions`.

  Log-probabilities are zero and there are no routes. `max_new_tokens` counts
  tokens of the endpoint there and of `tokenizer` here, where a longer text is
  cut off.
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
      endpoint: any of OpenAI's form.
      tokenizer: of the episode.
      functions: `tasks.repository.schemas.Tool.function()` of the environment's
        JSON tools, for models that were trained to call tools by the endpoint's
        own means; the first call of an answer counts. () has calls written as
        text.
      answer_role: of the messages that tell what a tool answered, where the
        call was text. This project's server takes 'tool', most others 'user'.
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
    # Many endpoints refuse what they do not know, whatever it says.
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
        f'{self._endpoint.url}/chat/completions answered what is no chat '
        f'completion: {json.dumps(answer)[:200]}'
      ) from error
    made = scripts.completion(self._tokenizer, request, text, is_first=is_first)
    if not stopped and made.stopped and len(made.tokens_T) > 1:
      # The endpoint cut the text: its end must not look like the policy's.
      made = dataclasses.replace(
        made,
        tokens_T=made.tokens_T[:-1],
        logprobs_T=made.logprobs_T[:-1],
        policy_version_T=made.policy_version_T[:-1],
        consumed_expert_ids_TMA=made.consumed_expert_ids_TMA[:-1],
        stopped=False,
      )
    parts_T += [request.context_T, made.tokens_T]
    return made

  def close(self, session: str) -> None:
    self._sessions.pop(session, None)

  def _messages(self, tokens_T: np.ndarray) -> list[dict[str, Any]]:
    """The window as messages, without the call that is to be written."""
    messages: list[dict[str, Any]] = []
    call_id = ''
    for turn in chat.turns(self._tokenizer, tokens_T)[:-1]:
      role, text = turn['role'], turn['text']
      if role == 'call':
        call_id = f'call_{len(messages)}'
        call = _native(text, call_id) if self._functions else None
        call_id = call_id if call else ''
        messages.append(call or {'role': 'assistant', 'content': text})
      elif role == 'tool' and call_id:
        messages.append(
          {'role': 'tool', 'tool_call_id': call_id, 'content': text}
        )
      else:
        role = self._answer_role if role == 'tool' else 'user'
        messages.append({'role': role, 'content': text})
    return messages

  def _text(self, message: Mapping[str, Any]) -> str:
    calls = message.get('tool_calls')
    if not calls:
      return _whole(message.get('content') or '')
    function = calls[0]['function']
    try:
      arguments = json.loads(function['arguments'] or '{}')
    except (ValueError, RecursionError):
      arguments = None
    if not isinstance(arguments, dict):
      # No call, which the environment answers with an error.
      return _whole(f'{function["name"]} {function["arguments"]}')
    return _whole(
      tool_calls.render_json(
        tool_calls.JsonCall(name=function['name'], arguments=arguments)
      )
    )


def _whole(text: str) -> str:
  """Without halves of surrogate pairs, which JSON has and no token spells."""
  return text.encode('utf-8', 'replace').decode()


def _native(text: str, call_id: str) -> dict[str, Any] | None:
  """A call as endpoints write theirs; None for a text that is none."""
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
  """The policy behind an endpoint; episodes in many threads may share it.

  Args:
    options: with url, model, api_key, and policy 'tokens' or 'chat'.
    tokenizer: of the episodes.
    functions: that a chat endpoint calls by its own means; () has calls
      written as text.
  """
  endpoint = Endpoint(
    url=options.url, model=options.model, api_key=options.api_key
  )
  if options.policy == 'tokens':
    return TokenPolicy(endpoint)
  return ChatPolicy(endpoint, tokenizer, functions=functions)
