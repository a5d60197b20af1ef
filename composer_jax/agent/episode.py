"""One episode: policy and tools take turns until finish, or a limit.

The tokens that the policy sampled are kept as sampled. Only text that the
harness adds is ever encoded; re-encoding a policy's text could give other
tokens than those whose log-probabilities and routes were recorded.
"""

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.agent import effort, tools
from composer_jax.agent import policy as policy_lib
from composer_jax.core import records
from composer_jax.tasks import runners
from composer_jax.tasks import task as task_lib
from composer_jax.text import chat


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOptions:
  """Limits and costs of an episode.

  Attributes:
    max_tokens: of the whole window.
    max_turns: calls, invalid ones included.
    max_call_tokens: of one call, its end token included.
    temperature: of sampling.
    invalid_penalty: reward lost per invalid call.
    effort_coefficient: and three more, see `effort.EffortOptions`.
  """

  max_tokens: int = 512
  max_turns: int = 10
  max_call_tokens: int = 96
  temperature: float = 1.0
  invalid_penalty: float = 0.05
  effort_coefficient: float = 0.0
  effort_scale: float = 100.0
  effort_q: float = 0.5
  effort_turn_tokens: float = 0.0

  def __post_init__(self):
    for name in ('max_tokens', 'max_turns', 'max_call_tokens'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} must be at least 1, not {getattr(self, name)}.'
        )
    if not 0 < self.temperature < math.inf:
      raise ValueError(
        f'temperature ({self.temperature}) must be positive and finite: the '
        'policy is sampled from, never maximised over.'
      )
    if not self.invalid_penalty >= 0:
      raise ValueError(
        f'invalid_penalty ({self.invalid_penalty}) must not be negative: an '
        'invalid call would pay.'
      )
    self.effort()

  def effort(self) -> effort.EffortOptions:
    return effort.EffortOptions(
      coefficient=self.effort_coefficient,
      scale=self.effort_scale,
      q=self.effort_q,
      turn_tokens=self.effort_turn_tokens,
    )


class _Window:
  """The growing arrays of one context window."""

  def __init__(self):
    self._tokens: list[np.ndarray] = []
    self._sampled: list[np.ndarray] = []
    self._logprobs: list[np.ndarray] = []
    self._versions: list[np.ndarray] = []
    self._routes: list[np.ndarray] = []
    self._num_routed = 0
    self.length = 0

  def append(
    self, context_T: np.ndarray, completion: records.Completion
  ) -> None:
    """Adds what one request consumed and what it sampled."""
    sampled_T = completion.tokens_T
    num_context, num_sampled = len(context_T), len(sampled_T)
    # The engine may swap weights between chunks of context. The oldest version
    # is recorded: what follows reads the keys and values that it made. Context
    # consumed anew after some tokens were sampled is newer than those.
    first = completion.policy_version_T[:1]
    if completion.context_version is not None:
      first = np.minimum(first, completion.context_version)
    self._tokens += [context_T, sampled_T]
    self._sampled += [np.zeros(num_context, bool), np.ones(num_sampled, bool)]
    self._logprobs += [
      np.zeros(num_context, np.float32),
      completion.logprobs_T,
    ]
    self._versions += [
      np.repeat(first, num_context),
      completion.policy_version_T,
    ]
    self._append_routes(completion)
    self.length += num_context + num_sampled

  def _append_routes(self, completion: records.Completion) -> None:
    """Adds routes, or replaces those from `routes_start` on."""
    start = completion.routes_start
    if start is not None and start != self._num_routed:
      if start > self._num_routed:
        raise ValueError(
          f'The policy gave routes from token {start} on, but the window has '
          f'only those of {self._num_routed} tokens before.'
        )
      self._routes = [np.concatenate(self._routes)[:start]]
      self._num_routed = start
    self._routes.append(completion.consumed_expert_ids_TMA)
    self._num_routed += len(completion.consumed_expert_ids_TMA)

  def trajectory(self, temperature: float) -> records.Trajectory:
    routes_TMA = np.concatenate(self._routes)
    if len(routes_TMA) != self.length - 1:
      raise ValueError(
        f'The policy gave routes of {len(routes_TMA)} tokens for a window of '
        f'{self.length}; all but the last are required.'
      )
    last_1MA = np.full((1, *routes_TMA.shape[1:]), records.NO_ROUTE, np.uint16)
    return records.Trajectory(
      tokens_T=np.concatenate(self._tokens),
      loss_mask_T=np.concatenate(self._sampled),
      logprobs_T=np.concatenate(self._logprobs),
      expert_ids_TMA=np.concatenate([routes_TMA, last_1MA]),
      policy_version_T=np.concatenate(self._versions),
      temperature=temperature,
    )


def _carry_out(
  workspace: tools.Workspace, tokenizer: Any, completion: records.Completion
) -> tools.ToolResult:
  """Gives the sampled call to the tools; one that is no call is invalid."""
  if not completion.stopped:
    return tools.ToolResult(text='error: call too long', tool='')
  ids = completion.tokens_T[:-1]
  if not chat.is_text(tokenizer, ids):
    return tools.ToolResult(text='error: not a call', tool='')
  return workspace.run(tokenizer.decode(ids))


def _answer(
  tokenizer: Any, completion: records.Completion, text: str
) -> np.ndarray:
  """Context after a call: its end if it lacks one, the answer, a new call."""
  parts = [chat.tool(tokenizer, text), chat.call_prefix(tokenizer)]
  if not completion.stopped:
    parts.insert(0, np.asarray([tokenizer.END], np.int32))
  return np.concatenate(parts)


def run(
  task: task_lib.Task,
  policy: policy_lib.Policy,
  tokenizer: Any,
  runner: runners.Runner,
  options: EpisodeOptions,
  *,
  group: int,
  member: int,
  seed: int,
) -> records.Rollout:
  """Runs one episode to its verdict; blocks.

  It ends at a valid `finish`, after `max_turns` calls, or when the next answer
  with one token of a call would exceed `max_tokens`. A call that a limit cut
  off is invalid.

  Args:
    task: what to restore.
    policy: samples the calls; its session is closed at the end.
    tokenizer: a `text.tokenizer.Tokenizer`.
    runner: executes the code.
    options: limits.
    group: with `member` and `seed` decides the random numbers.
    member: index within the group.
    seed: of the run.

  Returns:
    A Rollout of one Trajectory. Status INFRASTRUCTURE when the sandbox failed
    twice in a row; such rollouts say nothing about the policy.
  """
  session = f'{task.task_id}/{seed}/{group}/{member}'
  workspace = tools.Workspace(task, runner)
  window = _Window()
  results: list[tools.ToolResult] = []
  context_T = np.concatenate(
    [chat.user(tokenizer, task.prompt), chat.call_prefix(tokenizer)]
  )
  if len(context_T) >= options.max_tokens:
    raise ValueError(
      f'The prompt of task {task.task_id!r} has {len(context_T)} tokens; '
      f'max_tokens ({options.max_tokens}) must exceed that.'
    )
  try:
    while len(results) < options.max_turns:
      room = options.max_tokens - window.length - len(context_T)
      if room < 1:
        break
      completion = policy.complete(
        records.SampleRequest(
          session=session,
          context_T=context_T,
          max_new_tokens=min(options.max_call_tokens, room),
          stop_tokens=(tokenizer.END,),
          seed=(seed, group, member),
          temperature=options.temperature,
        )
      )
      window.append(context_T, completion)
      result = _carry_out(workspace, tokenizer, completion)
      results.append(result)
      if result.is_final or workspace.is_broken:
        break
      context_T = _answer(tokenizer, completion, result.text)
  finally:
    policy.close(session)
  verdict = _verdict(task, workspace, runner, results)
  num_invalid = sum(not r.is_valid for r in results)
  trajectory = window.trajectory(options.temperature)
  lost = options.invalid_penalty * num_invalid + options.effort().penalty(
    int(trajectory.loss_mask_T.sum()), len(results)
  )
  return records.Rollout(
    task_id=task.task_id,
    group=group,
    member=member,
    trajectories=(trajectory,),
    verdict=verdict,
    reward=float(verdict.passed) - lost,
    num_turns=len(results),
    num_invalid=num_invalid,
    tools=tuple(r.tool for r in results),
    flags=workspace.flags,
    sandbox_seconds=workspace.sandbox_seconds,
  )


def _verdict(
  task: task_lib.Task,
  workspace: tools.Workspace,
  runner: runners.Runner,
  results: Sequence[tools.ToolResult],
) -> records.Verdict:
  finished = bool(results) and results[-1].is_final
  if workspace.is_broken:
    logging.warning('Episode of %s: tests could not run.', task.task_id)
    return records.Verdict(
      passed=False,
      num_passed=0,
      num_tests=len(task.hidden),
      status=records.INFRASTRUCTURE,
      sandbox_level=runner.level,
      detail='the test tool failed twice',
    )
  return workspace.verify(finished)


def turns(rollout: records.Rollout, tokenizer: Any) -> list[dict[str, str]]:
  """The rollout's windows as readable `{'role', 'text'}` messages."""
  return [
    message
    for trajectory in rollout.trajectories
    for message in chat.turns(tokenizer, trajectory.tokens_T)
  ]
