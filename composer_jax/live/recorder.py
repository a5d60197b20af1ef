"""What a server that records adds: consent, events and withdrawal over HTTP.

  POST /v1/live/episodes    {"user", "consent": true, "domain"}
                            -> {"episode", "arm", "withdrawal"}
  POST /v1/live/events      {"episode", "id", "kind", ...} -> {"fate"}
  POST /v1/live/withdrawal  {"withdrawal"} -> {"episodes"}

An answer is kept if its request names an episode: `metadata.episode` is the
token of that episode. A request without one is answered as ever, and nothing of
it is kept. An episode is trained on as a whole, so a request in it whose
log-probabilities a trainer could not recompute is refused, not left out.
"""

import asyncio
import contextlib
import logging
import pathlib
import queue
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pydantic

from composer_jax.agent import window as windows_lib
from composer_jax.core import records
from composer_jax.live import episodes as episodes_lib
from composer_jax.live import events, tokens, trial
from composer_jax.serve import exchange, recording
from composer_jax.serve.api import errors
from composer_jax.serve.api import requests as bodies

_log = logging.getLogger(__name__)
# Answers that wait to be written; more are dropped, and counted.
_MAX_WAITING = 1000
_SETTLE_S = 30.0  # longest wait of an event for the answer that it is about


class _Consent(pydantic.BaseModel):
  """Body that opens an episode."""

  model_config = bodies.FORBID
  user: str = pydantic.Field(min_length=1, max_length=200)
  consent: Any = None
  domain: str = pydantic.Field(default='all', min_length=1, max_length=200)


class _Withdrawal(pydantic.BaseModel):
  model_config = bodies.FORBID
  withdrawal: Any = None


class Recorder:
  """A server's door to a folder of episodes.

  Consumes: answers of the engine, as they end.
  Waits for: the disk.
  Woken by: the engine's thread, which never waits for it.
  Produces: files of the folder; a fate for every answer that is not kept.
  """

  def __init__(
    self,
    episodes: episodes_lib.Episodes,
    *,
    arm: str = trial.CONTROL,
    now: Callable[[], float] = time.time,
  ):
    """Makes a recorder of a server whose weights are those of `arm`."""
    self._episodes, self._arm, self._now = episodes, arm, now
    self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(
      _MAX_WAITING
    )
    self._thread = threading.Thread(
      target=self._write, name='recorder', daemon=True
    )
    self._thread.start()

  def routes(
    self,
  ) -> dict[str, Callable[[exchange.Exchange, Any], Awaitable[None]]]:
    """Returns what answers a POST to each path."""
    return {
      '/v1/live/episodes': self.open,
      '/v1/live/events': self.note,
      '/v1/live/withdrawal': self.withdraw,
    }

  async def open(self, to: exchange.Exchange, body: Any) -> None:
    asked = bodies.parse(_Consent, body)
    if asked.consent is not True:
      raise errors.invalid(
        'consent must be true: an episode is only opened for a user who agreed '
        'that it is kept and trained on. Without consent, send requests as '
        'ever, without metadata.episode.',
        'consent',
        'no_consent',
      )
    made = self._episodes.tokens
    pseudonym = made.pseudonym(asked.user)
    running = trial.running(self._episodes.folder)
    claim = tokens.Claim(
      episode=secrets.token_hex(12),
      user=pseudonym,
      domain=asked.domain,
      arm=trial.arm_of(pseudonym, running),
      trial=running.name if running else '',
    )
    await asyncio.to_thread(self._episodes.open, claim)
    await to.answer(
      {
        'episode': made.sign(claim),
        'arm': claim.arm,
        'withdrawal': made.withdrawal(pseudonym),
      }
    )

  async def note(self, to: exchange.Exchange, body: Any) -> None:
    fields = errors.fields_of(body)
    token, kind = fields.pop('episode', None), str(fields.get('kind'))[:20]
    claim = self._claim(token, kind)
    try:
      event = events.parse(fields, self._now())
      fate = await asyncio.to_thread(self._note, claim, event)
    except ValueError as error:
      raise errors.invalid(str(error), None, 'invalid_event') from error
    await to.answer({'fate': fate})

  def _note(self, claim: tokens.Claim, event: events.Event) -> str:
    # The answer that it is about may not be written yet.
    self.settle()
    return self._episodes.note(claim, event)

  async def withdraw(self, to: exchange.Exchange, body: Any) -> None:
    token = bodies.parse(_Withdrawal, body).withdrawal
    try:
      user = self._episodes.tokens.withdrawing(str(token))
    except tokens.Forged as error:
      self._episodes.count(episodes_lib.FORGED, 'withdrawal')
      raise _forbidden(error) from error
    count = await asyncio.to_thread(self._episodes.withdraw, user)
    await to.answer({'episodes': count})

  def keeper(
    self,
    metadata: Mapping[str, Any],
    requests: Sequence[records.SampleRequest],
    changed: Sequence[str],
  ) -> recording.OnEnd | None:
    """Returns what keeps an answer, as `recording.AnswerRecorder` says.

    Raises:
      errors.ApiError: the token is forged, of another arm, or the answer could
        not be trained on.
    """
    token = metadata.get('episode')
    if token is None:
      return None
    claim = self._claim(token, events.ANSWERED)
    if claim.arm != self._arm:
      raise errors.ApiError(
        421,
        f'The episode belongs to the arm {claim.arm!r} and this server has the '
        f'weights of {self._arm!r}; send its requests to the other one.',
        code='other_arm',
        param='metadata',
      )
    request = requests[0]
    untrained = [*changed]
    untrained += ['n'] * (len(requests) > 1)
    untrained += ['temperature'] * (request.temperature == 0)
    untrained += ['top_p, top_k or min_p'] * request.truncates
    if untrained:
      raise errors.invalid(
        f'An episode is trained on, and a trainer could not recompute the '
        f'log-probabilities of an answer with {", ".join(untrained)}. Leave '
        'that out, or send the request without metadata.episode.',
        'metadata',
        'untrained_parameter',
      )

    def keep(
      request: records.SampleRequest,
      completion: records.Completion,
      seconds: float,
      policies: Mapping[int, str],
    ) -> None:
      # An event that comes next is after it, whenever this is written.
      now = self._now()
      job = lambda: self._keep(
        claim, request, completion, policies, seconds=seconds, now=now
      )
      try:
        self._waiting.put_nowait(job)
      except queue.Full:
        self._episodes.count('dropped', events.ANSWERED)

    return keep

  def settle(self) -> None:
    """Returns once every answer that ended by now is written.

    Raises:
      errors.ApiError: the disk is too slow; 503.
    """
    written = threading.Event()
    with contextlib.suppress(queue.Full):
      self._waiting.put(written.set, timeout=_SETTLE_S)
      if written.wait(_SETTLE_S):
        return
    raise errors.ApiError(
      503,
      f'Answers before this event are not written after {_SETTLE_S:g} s: the '
      'disk is too slow. Send the event again, with the same id.',
      code='disk',
    )

  def close(self) -> None:
    """Writes what is waiting, and ends the thread."""
    self._waiting.put(None)
    self._thread.join()

  def _claim(self, token: Any, kind: str) -> tokens.Claim:
    try:
      return self._episodes.tokens.claim(str(token))
    except tokens.Forged as error:
      self._episodes.count(episodes_lib.FORGED, kind)
      raise _forbidden(error) from error

  def _keep(
    self,
    claim: tokens.Claim,
    request: records.SampleRequest,
    completion: records.Completion,
    policies: Mapping[int, str],
    *,
    seconds: float,
    now: float,
  ) -> None:
    window = windows_lib.Window()
    window.append(request.context_T, completion)
    trajectory = window.trajectory(request.temperature)
    versions = {
      int(v) for n in records.VERSIONS for v in getattr(trajectory, n)
    }
    is_kept = self._episodes.keep(
      claim,
      trajectory,
      {v: policies.get(v, '') for v in versions},
      seconds=seconds,
      now=now,
    )
    if not is_kept:
      self._episodes.count(events.UNKNOWN, events.ANSWERED)

  def _write(self) -> None:
    while (job := self._waiting.get()) is not None:
      try:
        job()
      except (OSError, ValueError) as error:
        # An answer that cannot be kept must not end the service.
        _log.warning('An answer is not kept: %s', error)
        self._episodes.count('failed', events.ANSWERED)


def _forbidden(error: tokens.Forged) -> errors.ApiError:
  return errors.ApiError(403, str(error), code='forged', param='episode')


def recorder_of(
  folder: pathlib.Path, fields: Mapping[str, Any], arm: str
) -> Recorder:
  """Opens the recorder of a server; the folder is made if it is new.

  Args:
    fields: section `record` of the server's config.
    arm: arm whose weights the server has.
  """
  episodes = episodes_lib.Episodes(folder, events.WindowOptions(**fields))
  return Recorder(episodes, arm=arm)
