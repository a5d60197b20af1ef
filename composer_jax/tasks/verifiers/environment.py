"""An environment whose harness, behind an env server, plays the episode."""

import dataclasses
import json
from typing import Any

from composer_jax.agent import environment, episode, window
from composer_jax.core import records
from composer_jax.tasks.verifiers import (
  client,
  endpoint,
  options,
  process,
  traces,
)

_TRIES = 3
_MAX_DETAIL = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvService:
  """What plays episodes: an env server, and the token route that it asks.

  Attributes:
    tokenizer: folder from which the renderer loads tokenizer and template.
    vocab_size: number of ids of the policy's vocabulary.
    max_stops: most ids that may end a turn of the policy.
  """

  program: process.EnvProgram
  route: endpoint.TokenRoute
  options: options.VerifiersOptions
  tokenizer: str
  vocab_size: int
  max_stops: int

  def request(
    self, task: process.ListedTask, name: str, limits: episode.EpisodeOptions
  ) -> dict[str, Any]:
    """Returns the request of an episode, known to the route by a name."""
    return {
      'task_data': task.data,
      'model': endpoint.MODEL,
      'sampling': {
        'temperature': limits.temperature,
        'max_tokens': limits.max_call_tokens,
      },
      'client': {
        'type': 'train',
        'base_url': self.route.url,
        'api_key_var': process.KEY,
        'headers': {endpoint.EPISODE: name},
        'renderer': json.loads(self.options.renderer or 'null'),
        'renderer_model_name': self.tokenizer,
      },
    }

  def close(self) -> None:
    self.program.close()
    self.route.close()


class HarnessedEnvironment(environment.Environment):
  """One episode of a task of verifiers."""

  tools = ()

  def __init__(self, task: process.ListedTask, service: EnvService):
    self.task_id, self.prompt = task.task_id, task.prompt
    self._task, self._service = task, service
    self._verdict: records.Verdict | None = None

  def call(self, text: str) -> environment.ToolResult:
    raise ValueError(
      "Family 'verifiers' plays by harnesses of its own: evaluate it with "
      '--policy=tokens.'
    )

  def drive(self, chain: window.Chain, limits: episode.EpisodeOptions) -> bool:
    """Has the env server play, until the policy was asked at least once.

    Raises:
      ValueError: the environment failed each time before it asked anything, or
        its traces are not those of this policy.
    """
    for _ in range(_TRIES):
      played, policy = self._play(chain, limits)
      if chain.turns:
        self._verdict = self._judge(played, policy, chain)
        return True
      if policy.refusal:
        break
    said = policy.refusal or _error(played) or 'it asked the policy nothing'
    raise ValueError(
      f'Task {self.task_id!r} of verifiers cannot be played: {said}'
    )

  def _play(
    self, chain: window.Chain, limits: episode.EpisodeOptions
  ) -> tuple[dict[str, Any], endpoint.EpisodePolicy]:
    service = self._service
    most, limit_s = service.options.max_windows, service.options.timeout_s
    policy = endpoint.EpisodePolicy(
      chain, limits, most, service.vocab_size, service.max_stops
    )

    def check() -> None:
      if policy.failure is not None:
        raise policy.failure
      if service.program.process.poll() is not None:
        raise ValueError(service.program.fault())

    with service.route.playing(policy) as name:
      request = service.request(self._task, name, limits)
      address = service.program.address
      try:
        played = client.play(address, request, limit_s, check)
      except TimeoutError as error:
        errors = [{'type': 'TimeoutError', 'message': str(error)}]
        played = {'ok': False, 'errors': errors, 'traces': []}
      check()
    return played, policy

  def _judge(
    self,
    played: dict[str, Any],
    policy: endpoint.EpisodePolicy,
    chain: window.Chain,
  ) -> records.Verdict:
    """Keeps the windows that train, and grades them."""
    ours = [t for t in played['traces'] if t['agent']['trainable']]
    if not played['ok'] and not policy.refusal:
      return records.broken(0, 'none', _error(played)[:_MAX_DETAIL])
    if played['ok'] and len(ours) != 1:
      raise ValueError(
        f'An episode of task {self.task_id!r} has {len(ours)} trainable '
        'agents; a rollout has one reward, so one may be.'
      )
    kept = traces.trained(ours, chain.trajectories())
    if played['ok'] and not kept:
      raise ValueError(
        f'The trainable agent of task {self.task_id!r} asked another model '
        'than the policy of this run: its config must name none.'
      )
    # A harness that the limits ended may not have had its last turn.
    chain.keep(kept or range(chain.index + 1))
    if not played['ok']:
      return self._graded(0.0, records.UNFINISHED, policy.refusal)
    (trace,) = ours
    status = records.UNFINISHED if traces.is_cut(trace) else records.GRADED
    given = {k: r and r['score'] for k, r in trace['rewards'].items()}
    try:
      score = traces.reward_of(trace)
    except ValueError as error:
      said = f'{error} Rewards: {given}'
      return records.broken(0, 'none', said[:_MAX_DETAIL])
    detail = f'{trace["stop_condition"]}, rewards {given}'
    return self._graded(score, status, detail)

  def _graded(self, score: float, status: str, detail: str) -> records.Verdict:
    is_enough = score >= self._service.options.pass_reward
    passed = is_enough and status == records.GRADED
    return records.Verdict(
      passed=passed,
      num_passed=int(passed),
      num_tests=1,
      status=status,
      sandbox_level='none',
      detail=detail[:_MAX_DETAIL],
      score=score,
    )

  def verdict(self, finished: bool) -> records.Verdict:
    assert self._verdict is not None
    return self._verdict


def _error(played: dict[str, Any]) -> str:
  """Returns the last error of an episode, or of its traces."""
  errors = [e for t in played['traces'] for e in t['errors']]
  errors += played['errors']
  return f'{errors[-1]["type"]}: {errors[-1]["message"]}' if errors else ''
