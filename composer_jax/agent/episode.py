"""One episode: policy and tools take turns until finish, or a limit.

Guided path, 3 of 10: what `core.records` holds is made here, and `rl.collect`
plays a group of it. The tokens that the policy sampled are kept as sampled
(`agent.window`); only text that the host adds is ever encoded. Where summaries
are on, an episode is a chain of windows (`agent.summarize`): one Trajectory
each, one reward for all.
"""

import contextlib
import dataclasses
import time
from typing import Any

import numpy as np

from composer_jax.agent import environment, rewards, summarize, window
from composer_jax.core import checks, records
from composer_jax.core import turns as turns_lib
from composer_jax.text import chat


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOptions:
  """Limits of an episode.

  Attributes:
    max_tokens: most tokens of one window.
    max_turns: most calls, invalid ones included.
    max_call_tokens: most tokens of one call, its end token included.
    max_sampled_tokens: most sampled tokens of all windows, summaries included.
    max_seconds: seconds after which no call begins. It ends episodes that hang;
      one that it ends depends on the machine, so it should be far away.
    temperature: of sampling, never 0: the policy is not maximised over.
  """

  max_tokens: int = 320
  max_turns: int = 10
  max_call_tokens: int = 64
  max_sampled_tokens: int = 10_000
  max_seconds: float = 3600.0
  temperature: float = 1.0

  def __post_init__(self):
    checks.at_least(self, 1, 'max_tokens', 'max_turns', 'max_call_tokens')
    checks.at_least(self, 1, 'max_sampled_tokens')
    checks.positive(self, 'max_seconds', 'temperature')


def run(
  env: environment.Environment,
  policy: environment.Policy,
  tokenizer: Any,
  options: EpisodeOptions,
  *,
  group: int,
  member: int,
  seed: int,
  reward: rewards.RewardOptions = rewards.UNPRICED,
  hints: environment.HintWriter | None = None,
  summary: summarize.SummaryOptions = summarize.OFF,
) -> records.Rollout:
  """Runs one episode to its verdict; blocks.

  It ends at a valid `finish`, when a budget of `options` is used up, or when
  the next answer with one token of a call would exceed the window and no
  summary may be made of it. A call that a limit cut off is invalid.

  Args:
    env: of this episode alone; closed at the end, as the policy's sessions are.
    group, member, seed: what decides the random numbers.
    hints: writes them on mistakes; None for no hints.

  Returns:
    A Rollout of one Trajectory a window. Status INFRASTRUCTURE when the sandbox
    failed twice in a row; such rollouts say nothing about the policy.
  """
  chain = window.Chain(
    policy=policy,
    name=f'{env.task_id}/{seed}/{group}/{member}',
    seed=(seed, group, member),
    temperature=options.temperature,
    end=tokenizer.END,
  )
  with contextlib.closing(env):
    with contextlib.closing(chain):
      moments = _interact(env, chain, tokenizer, options, summary)
    verdict = env.verdict(bool(moments) and moments[-1].is_final)
    flags = env.flags
    earned, terms = rewards.score(
      verdict,
      chain.turns,
      flags,
      reward,
      num_sampled=chain.num_sampled,
      open_todos=env.open_todos,
    )
    trajectories = chain.trajectories()
    advice: tuple[turns_lib.Hint, ...] = ()
    # What the sandbox failed at is no mistake of the policy.
    if hints is not None and verdict.status != records.INFRASTRUCTURE:
      windows = [t.tokens_T for t in trajectories]
      advice = hints(env, tokenizer, moments, windows)
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
      hints=advice,
      reward_version=reward.version,
      reward_terms=terms,
      summary_trigger=summary.trigger or None,
    )


def _interact(
  env: environment.Environment,
  chain: window.Chain,
  tokenizer: Any,
  options: EpisodeOptions,
  summary: summarize.SummaryOptions,
) -> list[environment.Moment]:
  """Lets policy and tools take turns; returns what came of each, in order."""
  summarizer = summarize.Summarizer(
    tokenizer,
    env.prompt,
    summary,
    max_tokens=options.max_tokens,
    max_call_tokens=options.max_call_tokens,
  )
  context_T = summarizer.opening_T
  if len(context_T) >= options.max_tokens:
    raise ValueError(
      f'The prompt of task {env.task_id!r} has {len(context_T)} tokens; '
      f'max_tokens ({options.max_tokens}) must exceed that.'
    )
  moments: list[environment.Moment] = []
  num_calls = 0
  deadline = time.monotonic() + options.max_seconds
  while num_calls < options.max_turns and time.monotonic() < deadline:
    left = options.max_sampled_tokens - chain.num_sampled
    if summarizer.is_due(chain, context_T):
      # A summary that no call follows would be of no use.
      left -= summary.max_tokens
      if left < 1:
        break
      context_T = summarizer.restart(chain, env.state(), moments[-1].answer)
      moments.append(
        environment.Moment(turn=chain.turns[-1], call='', answer='')
      )
    room = summarizer.limit - chain.length - len(context_T)
    room = min(options.max_call_tokens, room, left)
    if room < 1:
      break
    completion = chain.sample(context_T, room)
    call, result = _carry_out(env, tokenizer, completion)
    chain.note(completion, result.tool, result.outcome)
    num_calls += 1
    moments.append(
      environment.Moment(
        turn=chain.turns[-1],
        call=call,
        answer=result.text,
        is_final=result.is_final,
        open_todos=env.open_todos,
      )
    )
    if result.is_final or env.is_broken:
      break
    # The end of the call if it lacks one, the answer, a new call.
    end = [tokenizer.END] if chain.is_open else []
    answer_T = chat.tool(tokenizer, result.text)
    context_T = np.concatenate(
      [np.array(end, np.int32), answer_T, chat.call_prefix(tokenizer)]
    )
  return moments


def _carry_out(
  env: environment.Environment,
  tokenizer: Any,
  completion: records.Completion,
) -> tuple[str, environment.ToolResult]:
  """The sampled call and its answer; one that is no call is invalid."""
  text = 'error: call too long'
  if completion.stopped:
    ids = completion.tokens_T[:-1]
    if chat.is_text(tokenizer, ids):
      call = tokenizer.decode(ids)
      return call, env.call(call)
    text = 'error: not a call'
  return '', environment.ToolResult(
    text=text, tool='', outcome=turns_lib.NOT_A_CALL
  )


def turns(rollout: records.Rollout, tokenizer: Any) -> list[dict[str, str]]:
  """The rollout's windows as readable `{'role', 'text'}` messages."""
  return [
    message
    for trajectory in rollout.trajectories
    for message in chat.turns(tokenizer, trajectory.tokens_T)
  ]
