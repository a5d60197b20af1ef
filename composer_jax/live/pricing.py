"""The reward of a live episode: what its events are worth.

An episode without a word of its user is not judged, and teaches nothing: that
is a status, not a reward of 0. A call that no tool takes is one of the events
and has its price, so that it cannot be a way around the judgement of an edit;
so has an answer that only asks back. Prices have a version, which every rollout
records with its terms.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from composer_jax.core import checks, records, turns
from composer_jax.live import episodes as episodes_lib
from composer_jax.live import events, tokens
from composer_jax.tasks import judges, rules, scoring

# Begins the reason of an episode whose judge failed; it may be asked again.
FOLLOW_UP = 'follow-up: '


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriceOptions:
  """Prices of events, in units of the reward.

  Attributes:
    version: number of this price list; it must grow with each change.
    kept: reward for an edit that is kept whole, lost for one that is undone.
    follow_up: reward for a satisfied next message, lost for an angry one.
    thumb: reward for a thumb up, lost for one down.
    invalid: reward lost per call that no tool takes.
    failed: reward lost per call that a tool refuses.
    most_calls: calls of an episode that cost, of each of these two kinds; what
      one episode loses must not decide what its batch learns.
    asked: reward lost by an episode that asks back and edits nothing.
    slow: reward lost per second of answers beyond `free_s`.
    free_s: seconds of answers that cost nothing.
    edit_tools: tools that edit.
    ask_tools: tools that ask the user back.
  """

  version: int = 0
  kept: float = 1.0
  follow_up: float = 0.5
  thumb: float = 0.5
  invalid: float = 1.0
  failed: float = 0.1
  most_calls: int = 3
  asked: float = 0.5
  slow: float = 0.0
  free_s: float = 10.0
  edit_tools: tuple[str, ...] = ('edit', 'write')
  ask_tools: tuple[str, ...] = ('ask',)

  def __post_init__(self):
    checks.at_least(self, 0, 'version')
    checks.at_least(self, 1, 'most_calls')
    # A negative price would pay for the fault.
    prices = ('kept', 'follow_up', 'thumb', 'invalid', 'failed', 'asked')
    checks.number(self, 0, *prices, 'slow', 'free_s')


def _asks_back(calls: Sequence[events.Event], options: PriceOptions) -> bool:
  """Returns whether an episode asked the user and edited nothing.

  An edit that was refused is none; a question that a tool took is one, whatever
  became of it.
  """
  edits = any(e.tool in options.edit_tools for e in calls if e.outcome == 'ok')
  asked = (e.tool for e in calls if e.outcome != 'invalid')
  return not edits and any(tool in options.ask_tools for tool in asked)


def sounds(text: str, judge: scoring.Scorer) -> float:
  """Judges a user's next message, -1 to 1; a JudgeError if it cannot."""
  said = rules.PlayedTurn(tool='say', outcome=turns.OK, text=text)
  (made,) = judge.each([rules.Episode(prompt='', steps=[said])])
  if made.failure:
    raise judges.JudgeError(made.failure)
  return 2 * judge.rubric.score(made.scores) - 1


def terms_of(
  known: Sequence[events.Event],
  options: PriceOptions,
  judge: scoring.Scorer | None = None,
) -> dict[str, float]:
  """Returns the terms of the reward; {} if nothing was said of an episode.

  Of edits, follow-ups and thumbs the last one counts, of tool calls each.

  Raises:
    judges.JudgeError: a message has to be judged, and could not be.
  """
  last = {e.kind: e for e in known}
  calls = [e for e in known if e.kind == 'tool_call']
  terms: dict[str, float] = {}
  if 'edit_kept' in last:
    terms['kept'] = options.kept * (2 * last['edit_kept'].value - 1)
  if (said := last.get('follow_up')) is not None:
    value = said.value
    if said.text:
      if judge is None:
        raise judges.JudgeError('no model is named that judges follow-ups')
      value = sounds(said.text, judge)
    terms['follow_up'] = options.follow_up * value
  if 'thumb' in last:
    terms['thumb'] = options.thumb * last['thumb'].value
  priced = {'invalid': options.invalid, 'failed': options.failed}
  for outcome, price in priced.items():
    if count := sum(e.outcome == outcome for e in calls):
      terms[outcome] = -price * min(count, options.most_calls)
  if _asks_back(calls, options):
    terms['asked'] = -options.asked
  seconds = sum(e.value for e in known if e.kind == events.ANSWERED)
  if terms and options.slow and seconds > options.free_s:
    terms['slow'] = -options.slow * (seconds - options.free_s)
  return terms


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRollout:
  """A rollout with the claim of its episode and the weights that sampled it."""

  claim: tokens.Claim
  policies: Mapping[int, str]
  rollout: records.Rollout


def judged(
  episode: episodes_lib.LiveEpisode,
  options: PriceOptions,
  judge: scoring.Scorer | None = None,
  settled: Mapping[str, float] | None = None,
  settled_by: str = '',
) -> JudgedRollout:
  """Returns an episode with its reward, or with why it has none.

  Its verdict passes if the reward is positive, which is what "satisfied" means
  in trials and reports.

  Args:
    judge: judges follow-ups that came as texts.
    settled: terms that were settled before; None settles them now.
    settled_by: identity of the judge that settled them.
  """
  calls = [e for e in episode.events if e.kind == 'tool_call']
  invalid = [e.outcome == 'invalid' for e in calls]
  not_judged, terms = '', dict(settled or {})
  try:
    if settled is None:
      terms = terms_of(episode.events, options, judge)
    not_judged = '' if terms else 'no word of the user'
  except judges.JudgeError as error:
    not_judged = f'{FOLLOW_UP}{error}'
  said = [e.text for e in episode.events if e.kind == 'follow_up']
  by = settled_by if judge is None else judge.identity
  reward = sum(terms.values())
  rollout = episodes_lib.unjudged(episode.claim.episode, episode.windows)
  rollout = dataclasses.replace(
    rollout,
    verdict=dataclasses.replace(
      rollout.verdict,
      passed=reward > 0,
      status=records.UNFINISHED if not_judged else records.GRADED,
    ),
    reward=reward,
    num_turns=len(calls),
    num_invalid=sum(invalid),
    tools=tuple(
      '' if is_bad else e.tool for e, is_bad in zip(calls, invalid, strict=True)
    ),
    reward_version=options.version,
    reward_terms=terms,
    rubric=by if said and said[-1] else '',
    not_judged=not_judged,
  )
  return JudgedRollout(
    claim=episode.claim, policies=episode.policies, rollout=rollout
  )
