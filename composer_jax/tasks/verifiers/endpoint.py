"""The token route of vLLM over the policy of a run, for harnesses that play it.

One request of an episode is answered at a time. A prompt that continues the
newest window grows it; any other opens a new window, so that what was sampled
is never encoded again. Only this machine can reach it, and with a key.
"""

import hmac
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import server
from typing import Any

import numpy as np

from composer_jax.agent import episode, window
from composer_jax.core import turns
from composer_jax.core.routes import vllm

MODEL = 'policy'
EPISODE = 'X-Composer-Jax-Episode'
_MAX_BODY = 1 << 28
# Parameters that change nothing here, and the values that ask for nothing.
_IGNORED = ('logprobs', 'skip_special_tokens', 'seed', 'cache_salt')
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'top_p': (1,),
  'top_k': (0, -1),
  'min_p': (0,),
  'n': (1,),
}


class Refusal(ValueError):
  """What a harness asked for cannot be given."""


class EpisodePolicy:
  """Answers the requests of one episode from its chain of windows.

  Attributes:
    failure: error of the policy itself, which ends the episode.
    refusal: the first request that the limits of the run refused; '' for none.
  """

  def __init__(
    self,
    chain: window.Chain,
    limits: episode.EpisodeOptions,
    max_windows: int,
    vocab_size: int,
    max_stops: int,
  ):
    """Args: `max_stops` is the most ids that a request may end a turn by."""
    self.failure: BaseException | None = None
    self.refusal = ''
    self._chain, self._limits, self._max_windows = chain, limits, max_windows
    self._vocab_size, self._max_stops = vocab_size, max_stops
    self._lock, self._is_over = threading.Lock(), False

  def end(self) -> None:
    """Refuses all further requests; waits for the one being answered."""
    with self._lock:
      self._is_over = True

  def complete(self, body: Any) -> dict[str, Any]:
    """Answers a request, any JSON; raises `Refusal`."""
    given = body.get('sampling_params') or {} if isinstance(body, dict) else 0
    if not isinstance(given, dict):
      raise Refusal('A request, and its sampling_params, must be JSON objects.')
    params = {k: v for k, v in given.items() if k not in _IGNORED}
    asked = params.pop('temperature', None)
    most, first = params.pop('max_tokens', None), 'routed_experts_prompt_start'
    start = params.pop(first, None) or 0
    ends = params.pop('stop_token_ids', None) or []
    for name, value in params.items():
      if value is not None and value not in _NEUTRAL.get(name, ()):
        raise Refusal(
          f'{name} ({value!r:.100}) would change the distribution that is '
          'sampled from, and a run trains on that of its temperature alone.'
        )
    if asked not in (None, self._limits.temperature):
      raise Refusal(
        f'temperature ({asked!r:.100}) must be that of the run, '
        f'{self._limits.temperature}: leave it out of the environment.'
      )
    for name, value, least in (('max_tokens', most, 1), (first, start, 0)):
      if value is not None and not (type(value) is int and value >= least):
        raise Refusal(
          f'{name} ({value!r:.100}) must be an integer of at least {least}.'
        )
    prompt = self._ids('token_ids', body.get('token_ids'))
    if not prompt:
      raise Refusal('token_ids is empty: a prompt has at least one token.')
    if len(self._ids('stop_token_ids', ends)) > self._max_stops:
      raise Refusal(
        f'stop_token_ids has {len(ends)} ids; at most {self._max_stops} may be.'
      )
    with self._lock:
      return self._sample(np.array(prompt, np.int32), most, tuple(ends), start)

  def _ids(self, name: str, ids: Any) -> list[int]:
    """Returns what are ids of the vocabulary; raises `Refusal`."""
    if not isinstance(ids, list):
      raise Refusal(f'{name} ({ids!r:.100}) must be a list of ids.')
    for i in ids:
      if not (type(i) is int and 0 <= i < self._vocab_size):
        raise Refusal(
          f'{name} has {i!r:.100}, which is no id of the vocabulary, '
          f'0..{self._vocab_size - 1}.'
        )
    return ids

  def _sample(
    self, prompt_T: np.ndarray, most: int | None, ends: Any, start: int
  ) -> dict[str, Any]:
    chain = self._chain
    room = self._room(len(prompt_T))
    held_T = chain.tokens_T
    if not np.array_equal(prompt_T[: len(held_T)], held_T):
      if chain.index + 1 == self._max_windows:
        self._limit('tasks.verifiers.max_windows', self._max_windows)
      chain.restart()
      held_T = held_T[:0]
    chain.ends = ends
    try:
      done = chain.sample(prompt_T[len(held_T) :], min(room, most or room))
    # Of the policy or of who revoked it: the episode's thread raises it.
    except BaseException as error:
      self.failure = error
      raise Refusal(f'the policy failed: {error!r:.300}') from error
    chain.note(done, 'reply', turns.OK)
    ids_TMA = chain.trajectory().expert_ids_TMA[:-1]
    pairs = zip(done.tokens_T.tolist(), done.logprobs_T.tolist(), strict=True)
    choice = {
      'index': 0,
      'logprobs': {'content': [vllm.entry(*pair) for pair in pairs]},
      'finish_reason': 'stop' if done.stopped else 'length',
      'token_ids': done.tokens_T.tolist(),
      'routed_experts': (
        vllm.routed_experts(ids_TMA, start) if ids_TMA.size else None
      ),
    }
    return {'request_id': secrets.token_hex(12), 'choices': [choice]}

  def _room(self, length: int) -> int:
    """Returns the most tokens to sample behind a prompt; raises `Refusal`."""
    chain, limits = self._chain, self._limits
    if self._is_over:
      raise Refusal('the episode is over')
    if len(chain.turns) >= limits.max_turns:
      self._limit('episode.max_turns', limits.max_turns)
    budget = limits.max_sampled_tokens - chain.num_sampled
    if budget < 1:
      self._limit('episode.max_sampled_tokens', limits.max_sampled_tokens)
    if length >= limits.max_tokens:
      self._limit('episode.max_tokens', limits.max_tokens, f' of {length}')
    return min(limits.max_call_tokens, limits.max_tokens - length, budget)

  def _limit(self, name: str, value: int, more: str = '') -> None:
    said = f'--config.{name} ({value}) leaves no room for a request{more}.'
    self.refusal = self.refusal or said
    raise Refusal(said)


class TokenRoute:
  """An HTTP server on this machine, with the episodes that are being played."""

  def __init__(self, key: str, max_len: int):
    """Starts it; requests carry `key` as their bearer token.

    Args:
      max_len: tokens of a window, which clients ask for.
    """
    self._key, self._max_len = f'Bearer {key}'.encode(), max_len
    self._episodes: dict[str, EpisodePolicy] = {}
    route = self

    class Handler(server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def do_GET(self) -> None:
        route.answer(self, None)

      def do_POST(self) -> None:
        length = int(self.headers.get('content-length') or 0)
        if not 0 <= length <= _MAX_BODY:
          self.close_connection = True
          return route.send(self, 413, {'message': f'{length} bytes'})
        route.answer(self, self.rfile.read(length))

      def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a run's console has better lines."""

    self._server = server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self._server.daemon_threads = True
    self.url = f'http://127.0.0.1:{self._server.server_port}/v1'
    serve = self._server.serve_forever
    threading.Thread(target=serve, args=(0.05,), daemon=True).start()

  @contextmanager
  def playing(self, policy: EpisodePolicy) -> Iterator[str]:
    """Yields the name of an episode, under which requests are for it."""
    name = secrets.token_hex(16)
    self._episodes[name] = policy
    try:
      yield name
    finally:
      del self._episodes[name]
      policy.end()

  def answer(
    self, to: server.BaseHTTPRequestHandler, data: bytes | None
  ) -> None:
    given = to.headers.get('authorization', '').encode('latin-1')
    if not hmac.compare_digest(given, self._key):
      return self.send(to, 401, {'message': 'The key is missing or wrong.'})
    if data is None:
      card = {'id': MODEL, 'object': 'model', 'max_model_len': self._max_len}
      return self.send(to, 200, {'object': 'list', 'data': [card]})
    policy = self._episodes.get(to.headers.get(EPISODE, ''))
    if policy is None or to.path != '/inference/v1/generate':
      return self.send(to, 404, {'message': f'{to.path} of no open episode.'})
    try:
      answer = policy.complete(json.loads(data))
    except RecursionError:
      return self.send(to, 400, {'message': 'The JSON is nested too deeply.'})
    except ValueError as error:
      return self.send(to, 400, {'message': str(error)})
    return self.send(to, 200, answer)

  def send(
    self, to: server.BaseHTTPRequestHandler, status: int, body: dict[str, Any]
  ) -> None:
    if status >= 400:
      body = {'error': {'type': 'invalid_request_error', 'code': None, **body}}
    # The client cuts routes out of the bytes, as JSON without spaces has them.
    data = json.dumps(body, separators=(',', ':'), allow_nan=False).encode()
    try:
      to.send_response(status)
      to.send_header('content-type', 'application/json')
      to.send_header('content-length', str(len(data)))
      to.end_headers()
      to.wfile.write(data)
    except OSError:
      to.close_connection = True  # Its client left.

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()
