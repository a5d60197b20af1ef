"""One episode: policy and tools take turns until finish, or a limit.

The tokens that the policy sampled are kept as sampled (`agent.window`); only
text that the host adds is ever encoded. Where summaries are on, an episode is a
chain of windows (`agent.summarize`): one Trajectory each, one reward for all.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.agent import environment as environment_lib
from composer_jax.agent import mistakes, rewards, summarize, window
from composer_jax.agent import policy as policy_lib
from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.text import chat

# An episode earns 1 if it passed, else 0.
UNPRICED = rewards.RewardOptions()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOptions:
  """Limits of an episode.

  Attributes:
    max_tokens: of one window.
    max_turns: calls, invalid ones included.
    max_call_tokens: of one call, its end token included.
    max_sampled_tokens: of all windows, summaries included.
    max_seconds: after which no call begins. It ends episodes that hang; one
      that it ends depends on the machine, so it should be far away.
    temperature: of sampling.
  """

  max_tokens: int = 512
  max_turns: int = 10
  max_call_tokens: int = 96
  max_sampled_tokens: int = 100_000
  max_seconds: float = 3600.0
  temperature: float = 1.0

  def __post_init__(self):
    for name in (
      'max_tokens',
      'max_turns',
      'max_call_tokens',
      'max_sampled_tokens',
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} must be at least 1, not {getattr(self, name)}.'
        )
    if not self.max_seconds > 0:
      raise ValueError(
        f'max_seconds ({self.max_seconds}) must be positive: no episode would '
        'begin.'
      )
    if not 0 < self.temperature < math.inf:
      raise ValueError(
        f'temperature ({self.temperature}) must be positive and finite: the '
        'policy is sampled from, never maximised over.'
      )


def _carry_out(
  env: environment_lib.Environment,
  tokenizer: Any,
  completion: records.Completion,
) -> tuple[str, environment_lib.ToolResult]:
  """The sampled call and its answer; one that is no call is invalid."""
  text = 'error: call too long'
  if completion.stopped:
    ids = completion.tokens_T[:-1]
    if chat.is_text(tokenizer, ids):
      call = tokenizer.decode(ids)
      return call, env.call(call)
    text = 'error: not a call'
  return '', environment_lib.ToolResult(
    text=text, tool='', outcome=turns_lib.NOT_A_CALL
  )


def _answer(tokenizer: Any, text: str, is_open: bool) -> np.ndarray:
  """Context after a call: its end if it lacks one, the answer, a new call."""
  parts = [chat.tool(tokenizer, text), chat.call_prefix(tokenizer)]
  if is_open:
    parts.insert(0, np.asarray([tokenizer.END], np.int32))
  return np.concatenate(parts)


def _interact(
  env: environment_lib.Environment,
  chain: window.Chain,
  summarizer: summarize.Summarizer,
  tokenizer: Any,
  options: EpisodeOptions,
) -> tuple[list[mistakes.Moment], int]:
  """Lets policy and tools take turns.

  Returns:
    The turns and what came of them, summaries included, and how many tokens of
    answers the policy was given.
  """
  moments: list[mistakes.Moment] = []
  num_calls = num_answered = 0
  context_T = summarizer.opening_T
  deadline = time.monotonic() + options.max_seconds
  while num_calls < options.max_turns and time.monotonic() < deadline:
    left = options.max_sampled_tokens - chain.num_sampled
    if summarizer.is_due(chain, context_T):
      # A summary that no call follows would be of no use.
      left -= summarizer.options.max_tokens
      if left < 1:
        break
      context_T = summarizer.restart(chain, env.state(), moments[-1].answer)
      moments.append(mistakes.Moment(turn=chain.turns[-1], call='', answer=''))
    room = summarizer.limit - chain.length - len(context_T)
    room = min(options.max_call_tokens, room, left)
    if room < 1:
      break
    completion = chain.sample(context_T, room)
    call, result = _carry_out(env, tokenizer, completion)
    chain.note(completion, result.tool, result.outcome)
    num_calls += 1
    moments.append(
      mistakes.Moment(
        turn=chain.turns[-1],
        call=call,
        answer=result.text,
        is_final=result.is_final,
        open_todos=env.open_todos,
      )
    )
    if result.is_final or env.is_broken:
      break
    context_T = _answer(tokenizer, result.text, chain.is_open)
    num_answered += len(context_T)
  return moments, num_answered


def run(
  environment: environment_lib.Environment,
  policy: policy_lib.Policy,
  tokenizer: Any,
  options: EpisodeOptions,
  *,
  group: int,
  member: int,
  seed: int,
  reward: rewards.RewardOptions = UNPRICED,
  hints: mistakes.HintOptions | None = None,
  summary: summarize.SummaryOptions = summarize.OFF,
) -> records.Rollout:
  """Runs one episode to its verdict; blocks.

  It ends at a valid `finish`, when a budget of `options` is used up, or when
  the next answer with one token of a call would exceed the window and no
  summary may be made of it. A call that a limit cut off is invalid.

  Args:
    environment: of this episode alone; closed at the end.
    policy: samples the calls; its sessions are closed at the end.
    tokenizer: a `text.tokenizer.Tokenizer`.
    options: limits.
    group: with `member` and `seed` decides the random numbers.
    member: index within the group.
    seed: of the run.
    reward: prices of what was done.
    hints: which mistakes get one; None for no hints.
    summary: when windows restart from a summary.

  Returns:
    A Rollout of one Trajectory a window. Status INFRASTRUCTURE when the sandbox
    failed twice in a row; such rollouts say nothing about the policy.
  """
  env = environment
  chain = window.Chain(
    policy,
    name=f'{env.task_id}/{seed}/{group}/{member}',
    seed=(seed, group, member),
    temperature=options.temperature,
    end=tokenizer.END,
  )
  try:
    try:
      summarizer = _summarizer(env, tokenizer, options, summary)
      moments, num_answered = _interact(
        env, chain, summarizer, tokenizer, options
      )
    finally:
      chain.close()
    verdict = env.verdict(bool(moments) and moments[-1].is_final)
    facts = rewards.Facts(
      num_sampled=chain.num_sampled,
      num_answered=num_answered,
      open_todos=env.open_todos,
    )
    flags = env.flags
    earned, terms = rewards.score(verdict, chain.turns, facts, flags, reward)
    trajectories = chain.trajectories()
    calls = [t for t in chain.turns if t.outcome != turns_lib.SUMMARY]
    return records.Rollout(
      task_id=env.task_id,
      group=group,
      member=member,
      trajectories=trajectories,
      verdict=verdict,
      reward=earned,
      num_turns=len(calls),
      num_invalid=sum(not t.is_valid for t in calls),
      tools=tuple(t.tool for t in calls),
      flags=flags,
      sandbox_seconds=env.sandbox_seconds,
      turns=tuple(chain.turns),
      hints=_hints(env, verdict, moments, trajectories, tokenizer, hints),
      reward_version=reward.version,
      reward_terms=terms,
      summary_trigger=summary.trigger or None,
    )
  finally:
    env.close()


def _hints(
  env: environment_lib.Environment,
  verdict: records.Verdict,
  moments: Sequence[mistakes.Moment],
  trajectories: Sequence[records.Trajectory],
  tokenizer: Any,
  options: mistakes.HintOptions | None,
) -> tuple[turns_lib.Hint, ...]:
  """Hints on what went wrong, unless the sandbox did."""
  if options is None or verdict.status == records.INFRASTRUCTURE:
    return ()
  return mistakes.hints_of(
    moments,
    [t.tokens_T for t in trajectories],
    tokenizer,
    options,
    tools=env.tools,
    usage=env.usage,
  )


def _summarizer(
  env: environment_lib.Environment,
  tokenizer: Any,
  options: EpisodeOptions,
  summary: summarize.SummaryOptions,
) -> summarize.Summarizer:
  """Raises a ValueError for a prompt that leaves no room for an episode."""
  made = summarize.Summarizer(
    tokenizer,
    env.prompt,
    summary,
    max_tokens=options.max_tokens,
    max_call_tokens=options.max_call_tokens,
  )
  if len(made.opening_T) >= options.max_tokens:
    raise ValueError(
      f'The prompt of task {env.task_id!r} has {len(made.opening_T)} tokens; '
      f'max_tokens ({options.max_tokens}) must exceed that.'
    )
  return made


def turns(rollout: records.Rollout, tokenizer: Any) -> list[dict[str, str]]:
  """The rollout's windows as readable `{'role', 'text'}` messages."""
  return [
    message
    for trajectory in rollout.trajectories
    for message in chat.turns(tokenizer, trajectory.tokens_T)
  ]
