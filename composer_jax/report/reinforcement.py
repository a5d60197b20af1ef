"""The report's section about reinforcement learning."""

import collections
from typing import Any

import numpy as np

from composer_jax.report import episodes as episode_sections
from composer_jax.report import figures, html, run_data

# Terms of the reward: the success, and the most usual of what takes away.
_TERMS = ('success', 'invalid', 'effort', 'flagged')
# Steps named of those that left the bands of the gate.
_SHOWN = 8


_FROM_ZERO = {'bounds': (0, None)}
_SHARE = {'bounds': (-0.03, 1.03)}
_FRESH = 'routed afresh'
# Of each figure: title, {metric: what its curve is called}, how it is drawn.
_FIGURES: tuple[tuple[str, dict[str, str], dict[str, Any]], ...] = (
  ('Reward', {'reward': ''}, {}),
  ('Pass rate in training', {'pass_rate': ''}, _SHARE),
  (
    'Sandbox verdicts',
    {name: name for name in episode_sections.OUTCOMES},
    {'unit': 'episodes of a step', **_FROM_ZERO},
  ),
  ('Invalid tool calls', {'invalid_rate': ''}, _SHARE),
  ('Entropy', {'entropy': ''}, {'unit': 'nats', **_FROM_ZERO}),
  (
    'Mismatch of rollout and trainer (KL)',
    {'mismatch_kl_no_replay': _FRESH, 'mismatch_kl': 'routes replayed'},
    {'unit': 'nats per token', 'is_log': True},
  ),
  (
    'Mismatch, 99th percentile of tokens',
    {'mismatch_p99_no_replay': _FRESH, 'mismatch_p99': 'routes replayed'},
    {'unit': 'nats', 'is_log': True},
  ),
  (
    'Staleness',
    {'staleness': ''},
    {'unit': 'policy versions', 'bounds': (-0.1, None)},
  ),
  ('Tool calls per episode', {'turns': ''}, {}),
  (
    'What the reward is made of',
    {f'reward_{name}': name for name in _TERMS},
    {},
  ),
  (
    'Rollouts with alarms of monitors',
    {'flags': ''},
    {'unit': 'of a step', **_FROM_ZERO},
  ),
  (
    'Hinted turns',
    {'hints': 'used', 'hints_dropped': 'too long'},
    {'unit': 'of a step', **_FROM_ZERO},
  ),
  (
    'Distance of policy and hinted teacher',
    {'hint_divergence': ''},
    {'unit': 'nats per token of hinted turns', **_FROM_ZERO},
  ),
  (
    'Tokens at the bounds of the loss',
    {'truncated': 'ratio met', 'dropped': 'no gradient'},
    _SHARE,
  ),
  ('Weight of the tasks drawn', {'difficulty': ''}, {}),
  (
    'Sandbox time per episode',
    {'sandbox_ms': ''},
    {'unit': 'ms', **_FROM_ZERO},
  ),
)


def reinforcement(run: run_data.RunData, title: str) -> html.Markup:
  """Returns the section of RL: rewards, verdicts, mismatch, cost."""
  parts = [
    figures.curve(
      run, name, [('rl', *item) for item in metrics.items()], **options
    )
    for name, metrics, options in _FIGURES
  ]
  agreement = figures.layers(
    run,
    'Recorded routes that the trainer would take',
    'rl',
    'route_agreement_layers',
    unit='share of tokens',
  )
  return html.section(
    title,
    html.element('div', *parts, agreement, class_='grid'),
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
  return html.join([html.notes(words), _alarms(run), _gate(run)])


def _alarms(run: run_data.RunData) -> html.Markup | str:
  """Says which alarms of monitors there were, and how many rollouts had one."""
  totals: collections.Counter[str] = collections.Counter()
  for row in run.metrics:
    kinds = row.get('flag_kinds')
    for item in kinds if isinstance(kinds, list) else ():
      if isinstance(item, list) and len(item) == 2 and run_data.number(item[1]):
        totals[str(item[0])] += int(item[1])
  told = ', '.join(f'{kind} {n}' for kind, n in totals.most_common())
  return (
    html.element('p', f'Rollouts that were flagged: {told}.') if told else ''
  )


def _gate(run: run_data.RunData) -> html.Markup | str:
  """Names the steps whose mismatch left its band, and what the last said."""
  rows = [
    row
    for row in run.metrics
    if row['stage'] == 'rl' and run_data.number(row.get('gate_breaches'))
  ]
  if not rows:
    return ''
  steps = ', '.join(str(row['step']) for row in rows[-_SHOWN:])
  said = rows[-1].get('gate')
  words = [
    f'The mismatch left its band in {len(rows)} steps, the last of them '
    f'{steps}.',
    *(map(str, said) if isinstance(said, list) else ()),
  ]
  return html.notes(words, 'problem')
