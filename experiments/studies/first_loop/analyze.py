"""Turns results/ into table.md and plots; computes nothing else.

python -m experiments.studies.first_loop.analyze
"""

import pathlib

from composer_jax.rl import behaviour
from composer_jax.telemetry import intervals
from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent


def _abouts(rows: list[results.Row]) -> dict[str, results.Row]:
  return {row['arm']: row for row in rows if row['stage'] == 'arm'}


def _rate(about: results.Row, stage: str) -> behaviour.PassRate | None:
  evaluation = about.get(f'evaluation_{stage}')
  return None if evaluation is None else behaviour.PassRate(**evaluation)


def _shown(rate: behaviour.PassRate | None) -> str:
  if rate is None:
    return 'not run'
  return f'{rate.rate:.3f} [{rate.low:.3f}, {rate.high:.3f}]'


def _gain(old: behaviour.PassRate, new: behaviour.PassRate) -> str:
  low, high = intervals.difference(
    (old.passed, old.episodes), (new.passed, new.episodes)
  )
  return f'{new.rate - old.rate:+.3f} [{low:+.3f}, {high:+.3f}]'


def decompose(
  old: behaviour.PassRate, new: behaviour.PassRate
) -> tuple[float, float]:
  """Splits the gain in pass rate into (valid calls, correct code).

  With v the share of episodes that finished without an invalid call, c the
  pass rate among those and d among the others, pass = v c + (1 - v) d. The
  first part is the change of v at the average of c - d over both policies, the
  rest is the change of c and d; the two add up to the gain exactly.
  """

  def parts(rate):
    v = rate.valid_episodes / rate.episodes
    c = rate.passed_valid / max(rate.valid_episodes, 1)
    invalid_episodes = rate.episodes - rate.valid_episodes
    d = (rate.passed - rate.passed_valid) / max(invalid_episodes, 1)
    return v, c, d

  (v0, c0, d0), (v1, c1, d1) = parts(old), parts(new)
  calls = (v1 - v0) * ((c0 - d0) + (c1 - d1)) / 2
  return calls, (new.rate - old.rate) - calls


def _seeds(rows: list[results.Row]) -> list[int]:
  arms = {row['arm'] for row in rows}
  return sorted(int(a.split('_')[0]) for a in arms if a.endswith('_main'))


def table(rows: list[results.Row]) -> str:
  """The results as Markdown: one row a seed, then one row an axis."""
  lines = [
    '| seed | SFT | RL | gain | of it at the first edit | of it valid calls '
    '| RL without hints, gain | shuffled rewards, gain | flawless SFT '
    '| solved, forms, forms in anything shown | largest fall of probe '
    '| minutes |',
    '|' + '---|' * 12,
  ]
  abouts = _abouts(rows)
  for seed in _seeds(rows):
    main = abouts[f'{seed}_main']
    sft, rl = _rate(main, 'sft'), _rate(main, 'rl')
    if sft is None or rl is None:
      continue
    others = [
      _rate(abouts.get(f'{seed}_{arm}', {}), 'rl')
      for arm in ('no_hints', 'shuffled')
    ]
    audit = main['audit']['rl']
    counts = (audit[n] for n in ('solved', 'distinct', 'found_in_shown'))
    cells = [
      str(seed),
      _shown(sft),
      _shown(rl),
      _gain(sft, rl),
      f'{_first(rl) - _first(sft):+.3f}',
      f'{decompose(sft, rl)[0]:+.3f}',
      *('not run' if other is None else _gain(sft, other) for other in others),
      _shown(_rate(abouts.get(f'{seed}_flawless', {}), 'sft')),
      ', '.join(map(str, counts)),
      _fall(main.get('probe')),
      f'{_minutes(main):.1f}',
    ]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join([*lines, '', *_axes(rows)]) + '\n'


def _minutes(about: results.Row) -> float:
  """Returns those of the whole run, or else of its stages."""
  seconds = about.get('run', {}).get('wall_seconds')
  return (seconds or sum(about['stages'].values())) / 60


def _fall(probe: list[dict[str, float]] | None) -> str:
  """Returns the largest fall from an earlier pass rate.

  Also whether the later rate lies inside the earlier one's 95 % interval.
  """
  if not probe:
    return 'not run'
  pairs = [(a, b) for i, a in enumerate(probe) for b in probe[i:]]
  best, later = max(pairs, key=lambda p: p[0]['pass_rate'] - p[1]['pass_rate'])
  inside = 'inside' if later['pass_rate'] >= best['low'] else 'outside'
  return f'{best["pass_rate"] - later["pass_rate"]:.2f}, {inside}'


def _axes(rows: list[results.Row]) -> list[str]:
  """Returns a table of the mean [lowest, highest] over the seeds."""
  lines = [
    '| never seen in training | passed after SFT | after RL '
    '| first edits right after SFT | after RL | unfinished after RL |',
    '|' + '---|' * 6,
  ]
  abouts = _abouts(rows)
  mains = [abouts[f'{seed}_main'] for seed in _seeds(rows)]
  for suffix, name in (
    ('', 'compositions'),
    ('_unseen_names', 'names'),
    ('_unseen_wordings', 'wordings'),
    ('_unseen_all', 'all three'),
  ):
    sft, rl = (
      [r for a in mains if (r := _rate(a, stage + suffix))]
      for stage in ('sft', 'rl')
    )
    columns = [
      [r.rate for r in sft],
      [r.rate for r in rl],
      [*map(_first, sft)],
      [*map(_first, rl)],
      [r.unfinished_rate for r in rl],
    ]
    lines.append(f'| {name} | {" | ".join(map(_spread, columns))} |')
  return lines


def _first(rate: behaviour.PassRate) -> float:
  assert rate.first_edit_rate is not None
  return rate.first_edit_rate


def _spread(values: list[float]) -> str:
  mean = sum(values) / len(values)
  return f'{mean:.3f} [{min(values):.3f}, {max(values):.3f}]'


def _plot_curves(rows: list[results.Row]) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout='constrained')
  for arm, style in (('main', '-'), ('no_hints', '--'), ('shuffled', ':')):
    for seed in _seeds(rows):
      name = f'{seed}_{arm}'
      step_rows = [r for r in rows if (r['arm'], r['stage']) == (name, 'rl')]
      if not step_rows:
        continue
      steps = [r['step'] for r in step_rows]
      for axis, metric in zip(
        axes, ('pass_rate', 'invalid_rate', 'entropy'), strict=True
      ):
        values = [r[metric] for r in step_rows]
        smooth = [
          sum(values[max(0, i - 4) : i + 1])
          / len(values[max(0, i - 4) : i + 1])
          for i in range(len(values))
        ]
        axis.plot(
          steps, smooth, style, color=f'C{seed}', label=f'{arm}, seed {seed}'
        )
        axis.set_title(metric)
        axis.set_xlabel('optimizer step of RL')
  figure.suptitle('Training rollouts, mean of 5 steps')
  named = axes[0].get_legend_handles_labels()
  figure.legend(*named, loc='outside right center', fontsize=7)
  figure.savefig(ROOT / 'curves.png', dpi=110)
  plt.close(figure)


def main() -> None:
  _plot_curves(results.tabulate(ROOT, table))


if __name__ == '__main__':
  start.run(main)
