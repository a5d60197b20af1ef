"""One episode: policy and tools take turns until `finish` or a limit.

Guided path, 3 of 10: makes the records of `core.records`; `rl.collect` plays a
group of episodes. Sampled tokens are kept as sampled (`agent.window`); only
text that the host adds is encoded. With summaries on, an episode is a chain of
windows (`agent.summarize`): one Trajectory for each, one reward for all.
"""

import contextlib
import dataclasses
from typing import Any

from composer_jax.agent import environment, rewards, summarize, window
from composer_jax.core import checks, records
from composer_jax.core import turns as turns_lib
from composer_jax.text import chat

# Ends an answer after which there may be no room for more than one call, so
# that a policy in doubt can finish.
LAST_CALL = '\nlast call'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOptions:
  """Limits of an episode.

  Attributes:
    max_tokens: most tokens of one window.
    max_turns: most tool calls, invalid ones included.
    max_call_tokens: most tokens of one call, its end token included.
    max_sampled_tokens: most sampled tokens of all windows, summaries included.
    temperature: sampling temperature, above 0.
  """

  max_tokens: int = 320
  max_turns: int = 10
  max_call_tokens: int = 64
  max_sampled_tokens: int = 10_000
  temperature: float = 1.0

  def __post_init__(self):
    names = ('max_tokens', 'max_turns', 'max_call_tokens', 'max_sampled_tokens')
    checks.at_least(self, 1, *names)
    checks.positive(self, 'temperature')


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
  the window has no room for the next answer and a token of a call and may not
  be summarised. A call that a limit cut off is invalid.

  Args:
    env: environment of this episode alone; closed at the end.
    group, member, seed: numbers that, with the task, decide all random draws.
    hints: writer of hints on mistakes; None for no hints.

  Returns:
    A Rollout with one Trajectory for each window. With status INFRASTRUCTURE,
    of a sandbox that failed twice, it says nothing about the policy.
  """
  chain = window.Chain(
    policy=policy,
    name=f'{env.task_id}/{seed}/{group}/{member}',
    seed=(seed, group, member),
    temperature=options.temperature,
    ends=chat.language_of(tokenizer).ends,
  )
  with contextlib.closing(env):
    moments: list[environment.Moment] = []
    with contextlib.closing(chain):
      if not env.drive(chain, options):
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
    # A failure of the sandbox is no mistake of the policy.
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
      open_todos=env.open_todos,
    )


def _interact(
  env: environment.Environment,
  chain: window.Chain,
  tokenizer: Any,
  options: EpisodeOptions,
  summary: summarize.SummaryOptions,
) -> list[environment.Moment]:
  """Lets policy and tools take turns; returns one Moment for each, in order."""
  summarizer = summarize.Summarizer(
    tokenizer,
    env.prompt,
    summary,
    max_tokens=options.max_tokens,
    max_call_tokens=options.max_call_tokens,
    protocol=env.protocol,
  )
  context_T = summarizer.opening(env.history)
  if len(context_T) >= options.max_tokens:
    raise ValueError(
      f'The prompt of task {env.task_id!r} has {len(context_T)} tokens; '
      f'max_tokens ({options.max_tokens}) must exceed that.'
    )
  moments: list[environment.Moment] = []
  num_calls = 0
  while num_calls < options.max_turns:
    budget = options.max_sampled_tokens - chain.num_sampled
    if summarizer.is_due(chain, context_T):
      # A summary is of no use if no call can follow it.
      budget -= summary.max_tokens
      if budget < 1:
        break
      context_T = summarizer.restart(chain, env.state(), moments[-1].answer)
      moments.append(
        environment.Moment(turn=chain.turns[-1], call='', answer='')
      )
    room = summarizer.limit - chain.length - len(context_T)
    room = min(options.max_call_tokens, room, budget)
    if room < 1:
      break
    completion = chain.sample(context_T, room)
    said = summarizer.dialogue.read(completion.tokens_T, completion.stopped)
    results = _carry_out(env, said)
    # A turn is as bad as its first bad call.
    result = next((r for r in results if not r.is_valid), results[-1])
    chain.note(completion, result.tool, result.outcome)
    num_calls += 1
    answers = [r.text for r in results]
    moments.append(
      environment.Moment(
        turn=chain.turns[-1],
        call='\n'.join(said.calls),
        answer='\n'.join(answers),
        is_final=results[-1].is_final,
        open_todos=env.open_todos,
      )
    )
    if results[-1].is_final or env.is_broken or env.single_turn:
      break
    context_T = summarizer.dialogue.answer(answers)
    # Without the start of the next call, and the end of one that was cut off.
    room = summarizer.limit - chain.length - len(context_T)
    room += 1 + (not completion.stopped)
    # Half a call more, for the next answer; calls may be as long as a window.
    least = min(3 * options.max_call_tokens // 2, options.max_tokens // 4)
    is_short = room < least and not summary.trigger
    if is_short or num_calls + 1 == options.max_turns:
      answers[-1] += LAST_CALL
      context_T = summarizer.dialogue.answer(answers)
  return moments


def _carry_out(
  env: environment.Environment, said: chat.Said
) -> list[environment.ToolResult]:
  """Returns the answers to a turn's calls, or to its fault."""
  if not said.calls:
    fault = dict(text=said.fault, outcome=turns_lib.NOT_A_CALL)
    return [environment.ToolResult(tool='', **fault)]
  results = []
  for call in said.calls:
    results.append(env.call(call))
    if results[-1].is_final or env.is_broken:
      break
  return results


def turns(rollout: records.Rollout, tokenizer: Any) -> list[dict[str, str]]:
  """Returns the rollout's windows as readable `{'role', 'text'}` messages."""
  speech = chat.language_of(tokenizer)
  return [
    message
    for trajectory in rollout.trajectories
    for message in speech.messages(trajectory.tokens_T, trajectory.loss_mask_T)
  ]
