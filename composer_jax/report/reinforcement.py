"""The report's section about reinforcement learning."""

import collections

import numpy as np

from composer_jax.report import curves, html, run_data
from composer_jax.report import episodes as episode_sections

# Terms of the reward: the success, and the most usual of what takes away.
_TERMS = ('success', 'invalid', 'effort', 'flagged')
# Steps named of those that left the bands of the gate.
_SHOWN = 8


def reinforcement(run: run_data.RunData, title: str) -> html.Markup:
  """Returns the section of RL: rewards, verdicts, mismatch, cost."""
  share = {'bounds': (-0.03, 1.03)}
  parts = [
    curves.curve(run, 'Reward', [('rl', 'reward', '')]),
    curves.curve(
      run, 'Pass rate in training', [('rl', 'pass_rate', '')], **share
    ),
    curves.curve(
      run,
      'Sandbox verdicts',
      [('rl', name, name) for name in episode_sections.OUTCOMES],
      unit='episodes of a step',
      bounds=(0, None),
    ),
    curves.curve(
      run, 'Invalid tool calls', [('rl', 'invalid_rate', '')], **share
    ),
    curves.curve(
      run, 'Entropy', [('rl', 'entropy', '')], unit='nats', bounds=(0, None)
    ),
    curves.curve(
      run,
      'Mismatch of rollout and trainer (KL)',
      [
        ('rl', 'mismatch_kl_no_replay', 'routed afresh'),
        ('rl', 'mismatch_kl', 'routes replayed'),
      ],
      is_log=True,
      unit='nats per token',
    ),
    curves.curve(
      run,
      'Mismatch, 99th percentile of tokens',
      [
        ('rl', 'mismatch_p99_no_replay', 'routed afresh'),
        ('rl', 'mismatch_p99', 'routes replayed'),
      ],
      is_log=True,
      unit='nats',
    ),
    curves.layers(
      run,
      'Recorded routes that the trainer would take',
      'rl',
      'route_agreement_layers',
      unit='share of tokens',
    ),
    curves.curve(
      run,
      'Staleness',
      [('rl', 'staleness', '')],
      unit='policy versions',
      bounds=(-0.1, None),
    ),
    curves.curve(run, 'Tool calls per episode', [('rl', 'turns', '')]),
    curves.curve(
      run,
      'What the reward is made of',
      [('rl', f'reward_{name}', name) for name in _TERMS],
    ),
    curves.curve(
      run,
      'Rollouts with alarms of monitors',
      [('rl', 'flags', '')],
      unit='of a step',
      bounds=(0, None),
    ),
    curves.curve(
      run,
      'Hinted turns',
      [('rl', 'hints', 'used'), ('rl', 'hints_dropped', 'too long')],
      unit='of a step',
      bounds=(0, None),
    ),
    curves.curve(
      run,
      'Distance of policy and hinted teacher',
      [('rl', 'hint_divergence', '')],
      unit='nats per token of hinted turns',
      bounds=(0, None),
    ),
    curves.curve(
      run,
      'Tokens at the bounds of the loss',
      [('rl', 'truncated', 'ratio met'), ('rl', 'dropped', 'no gradient')],
      **share,
    ),
    curves.curve(run, 'Weight of the tasks drawn', [('rl', 'difficulty', '')]),
    curves.curve(
      run,
      'Sandbox time per episode',
      [('rl', 'sandbox_ms', '')],
      unit='ms',
      bounds=(0, None),
    ),
  ]
  return html.section(
    title,
    html.element('div', *parts, class_='grid'),
    _rl_totals(run),
    note='Faint: each step. Strong: mean of the steps before it.',
  )


def _rl_totals(run: run_data.RunData) -> html.Markup:
  """Says in numbers what a figure shows."""
  words = []
  _, replayed = run.series('rl', 'mismatch_kl')
  _, afresh = run.series('rl', 'mismatch_kl_no_replay')
  if replayed and afresh:
    with_replay, without = np.nanmedian(replayed), np.nanmedian(afresh)
    words.append(
      f'Median mismatch KL: {with_replay:.2g} with routes replayed, '
      f'{without:.2g} routed afresh.'
    )
  notes = [html.element('p', w, class_='note') for w in words]
  return html.join([*notes, *_alarms(run), *_gate(run)])


def _alarms(run: run_data.RunData) -> list[html.Markup]:
  """Says which alarms of monitors there were, and how many rollouts had one."""
  totals: collections.Counter[str] = collections.Counter()
  for row in run.metrics:
    kinds = row.get('flag_kinds')
    for item in kinds if isinstance(kinds, list) else ():
      if isinstance(item, list) and len(item) == 2 and run_data.number(item[1]):
        totals[str(item[0])] += int(item[1])
  if not totals:
    return []
  told = ', '.join(f'{kind} {n}' for kind, n in totals.most_common())
  return [html.element('p', f'Rollouts that were flagged: {told}.')]


def _gate(run: run_data.RunData) -> list[html.Markup]:
  """Names the steps whose mismatch left its band, and what the last said."""
  rows = [
    row
    for row in run.metrics
    if row['stage'] == 'rl' and run_data.number(row.get('gate_breaches'))
  ]
  if not rows:
    return []
  steps = ', '.join(str(row['step']) for row in rows[-_SHOWN:])
  said = rows[-1].get('gate')
  words = [
    f'The mismatch left its band in {len(rows)} steps, the last of them '
    f'{steps}.',
    *(map(str, said) if isinstance(said, list) else ()),
  ]
  return [html.element('p', w, class_='problem') for w in words]
