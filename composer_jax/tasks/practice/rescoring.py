"""Scores episodes of an evaluation by a rubric, from rows and transcripts."""

from collections.abc import Mapping
from typing import Any

from composer_jax.core import turns
from composer_jax.tasks import rules, scoring

_OF_SCORES = ('scores', 'agreement', 'reasons', 'rubric', 'not_judged')


def episode_of(row: Mapping[str, Any], transcript: Any) -> rules.Episode:
  """Returns an episode from its row and messages."""
  fixed = {
    'passed': row['passed'],
    'open_todos': row.get('open_todos', 0),
    'is_flagged': bool(row['flags']),
  }
  if 'turns' not in row:
    return scoring.episode_of_messages(transcript, **fixed)
  prompt = next((m['text'] for m in transcript if m['role'] == 'user'), '')
  said = [i for i, m in enumerate(transcript) if m['role'] == 'call']
  steps = []
  # A turn that a limit left without a message has no text.
  for place, (tool, outcome) in zip(said, row['turns'], strict=False):
    if outcome == turns.SUMMARY:
      continue
    after = transcript[place + 1 : place + 2]
    steps.append(
      rules.PlayedTurn(
        tool=tool,
        outcome=outcome,
        text=transcript[place]['text'],
        answer=''.join(m['text'] for m in after if m['role'] == 'tool'),
      )
    )
  return rules.Episode(prompt=prompt, steps=steps, **fixed)


def scored(
  row: Mapping[str, Any],
  transcript: Any,
  scorer: scoring.Scorer,
  judged_reward: float,
) -> dict[str, Any]:
  """Returns a row with scores and the reward that they give.

  Args:
    judged_reward: reward for a full score.

  Returns:
    The row with 'scores', 'agreement', 'reasons' and 'rubric', or, if the model
    gave no valid answer, with 'not_judged' and none of these.
  """
  (judgement,) = scorer.each([episode_of(row, transcript)])
  terms = {k: v for k, v in row['reward_terms'].items() if k != 'judged'}
  plain = {k: v for k, v in row.items() if k not in _OF_SCORES}
  if judgement.failure:
    reward = {'reward_terms': terms, 'reward': sum(terms.values())}
    return {**plain, **reward, 'not_judged': judgement.failure}
  total = 0.0 if row['flags'] else scorer.rubric.score(judgement.scores)
  if total and judged_reward:
    terms['judged'] = judged_reward * total
  return {
    **plain,
    'scores': dict(judgement.scores),
    'agreement': judgement.agreement,
    'reasons': dict(judgement.reasons),
    'rubric': scorer.identity,
    'reward_terms': terms,
    'reward': sum(terms.values()),
  }
