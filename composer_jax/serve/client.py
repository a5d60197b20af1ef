"""The policy of this project's own server, over HTTP.

`TokenPolicy` speaks to `/v1/tokens` (`serve.api.tokens`): tokens stay tokens,
log-probabilities and routes come along, and the server keeps the cache of a
window between its turns. It sends the whole window again if the server has
dropped its session.
"""

import base64
import dataclasses
import hashlib
import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.core.routes import codec
from composer_jax.serve import endpoint
from composer_jax.tasks.practice import conversation

_log = logging.getLogger(__name__)


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

  def __init__(self, address: endpoint.Endpoint):
    self._address = address
    self._sessions: dict[str, _Session] = {}
    self._lock = threading.Lock()

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Goes on with `request.session`; blocks until sampling ended."""
    with self._lock:
      session = self._sessions.setdefault(request.session, _Session())
    context = request.context_T.tolist()
    try:
      answer = self._ask(session, context, request)
    except conversation.EndpointError as error:
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
      'model': self._address.model or None,
    }
    return self._address.send('/tokens', body)

  def _forget(self, session: _Session) -> None:
    try:
      self._address.send(f'/tokens/sessions/{session.name}', None, 'DELETE')
    except conversation.EndpointError as error:
      # The server closes it by itself once it is idle.
      _log.debug('Session %s stays open: %s', session.name, error)
