"""Turns results/ into table.md and plots; computes nothing else.

python -m experiments.studies.first_loop.analyze
"""

import json
import pathlib
from typing import Any

from composer_jax.rl import evaluate
from composer_jax.telemetry import intervals, writer

ROOT = pathlib.Path(__file__).parent
RESULTS = ROOT / 'results'


def _rate(arm: str, stage: str) -> evaluate.PassRate | None:
  path = RESULTS / arm / f'evaluation_{stage}.json'
  if not path.exists():
    return None
  return evaluate.PassRate(**json.loads(path.read_text()))


def _shown(rate: evaluate.PassRate | None) -> str:
  if rate is None:
    return 'not run'
  return f'{rate.rate:.3f} [{rate.low:.3f}, {rate.high:.3f}]'


def _gain(old: evaluate.PassRate, new: evaluate.PassRate) -> str:
  low, high = intervals.difference(
    (old.passed, old.episodes), (new.passed, new.episodes)
  )
  return f'{new.rate - old.rate:+.3f} [{low:+.3f}, {high:+.3f}]'


def decompose(
  old: evaluate.PassRate, new: evaluate.PassRate
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
    others = rate.episodes - rate.valid_episodes
    d = (rate.passed - rate.passed_valid) / max(others, 1)
    return v, c, d

  (v0, c0, d0), (v1, c1, d1) = parts(old), parts(new)
  calls = (v1 - v0) * ((c0 - d0) + (c1 - d1)) / 2
  return calls, (new.rate - old.rate) - calls


def _audited(audit: dict[str, Any]) -> str:
  """Counts of an audit; one without parts saw two of the four."""
  counts = [audit[n] for n in ('solved', 'distinct', 'verbatim_in_shown')]
  partial = '' if 'verbatim_in' in audit else ' (corpus and transcripts only)'
  return ', '.join(map(str, counts)) + partial


def table(seeds: list[int]) -> str:
  """The results as Markdown, one row a seed."""
  lines = [
    '| seed | SFT | RL | gain | of it valid calls | of it correct code '
    '| flawless SFT | shuffled rewards, gain | solved, distinct, verbatim in '
    'anything shown |',
    '|---|---|---|---|---|---|---|---|---|',
  ]
  for seed in seeds:
    sft, rl = _rate(f'{seed}_main', 'sft'), _rate(f'{seed}_main', 'rl')
    if sft is None or rl is None:
      continue
    calls, code = decompose(sft, rl)
    shuffled = _rate(f'{seed}_shuffled', 'rl')
    audit = json.loads((RESULTS / f'{seed}_main/audit.json').read_text())['rl']
    cells = [
      str(seed),
      _shown(sft),
      _shown(rl),
      _gain(sft, rl),
      f'{calls:+.3f}',
      f'{code:+.3f}',
      _shown(_rate(f'{seed}_flawless', 'sft')),
      'not run' if shuffled is None else _gain(sft, shuffled),
      _audited(audit),
    ]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines) + '\n'


def _plot_curves(seeds: list[int]) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout='constrained')
  for arm, style in (('main', '-'), ('shuffled', ':')):
    for seed in seeds:
      path = RESULTS / f'{seed}_{arm}' / 'metrics.jsonl'
      if not path.exists():
        continue
      rows = [r for r in writer.read(path) if r['stage'] == 'rl']
      steps = [r['step'] for r in rows]
      for axis, name in zip(
        axes, ('pass_rate', 'invalid_rate', 'entropy'), strict=True
      ):
        values = [r[name] for r in rows]
        smooth = [
          sum(values[max(0, i - 4) : i + 1])
          / len(values[max(0, i - 4) : i + 1])
          for i in range(len(values))
        ]
        axis.plot(
          steps, smooth, style, color=f'C{seed}', label=f'{arm}, seed {seed}'
        )
        axis.set_title(f'{name} of training rollouts, mean of 5 steps')
        axis.set_xlabel('optimizer step of RL')
  axes[0].legend(fontsize=7)
  figure.savefig(ROOT / 'curves.png', dpi=110)
  plt.close(figure)


def main() -> None:
  seeds = sorted({int(p.name.split('_')[0]) for p in RESULTS.glob('*_main')})
  (ROOT / 'table.md').write_text(table(seeds))
  print(table(seeds))
  _plot_curves(seeds)


if __name__ == '__main__':
  main()
