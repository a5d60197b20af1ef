"""The page of an evaluation service: suites over the versions of a policy."""

import pathlib
from typing import Any

import numpy as np

from composer_jax.core import files
from composer_jax.report import document, figures
from composer_jax.telemetry import writer

_RATES = ('pass_rate', 'low', 'high', 'loose')
_COSTS = ('mean_tokens_out', 'mean_num_turns', 'mean_seconds', 'mean_cost_usd')


def _drawings(suite: str, rows: list[dict[str, Any]]) -> list[figures.Figure]:
  """Draws a suite over versions, and correctness against tokens."""
  known = [r for r in rows if r['suites'].get(suite, {}).get('episodes')]
  if not known:
    return []  # Nothing was measured yet.
  results = [r['suites'][suite] for r in known]
  steps = np.array([r['version'] for r in known])
  lines = [
    figures.Curve(
      label=label,
      steps=steps,
      values=np.array([r[name] for r in results]),
      has_marks=True,
    )
    for label, name in (
      ('passed', 'pass_rate'),
      ('95 %, low', 'low'),
      ('95 %, high', 'high'),
      ('hidden tests alone', 'loose'),
    )
  ]
  bounds = (-0.03, 1.03)
  drawn = [figures.curves(suite, lines, bounds=bounds, axis='version')]
  tokens = np.array([r.get('mean_tokens_out', np.nan) for r in results])
  if np.isfinite(tokens).any():
    order = np.argsort(tokens)
    rates = np.array([r['pass_rate'] for r in results])
    line = figures.Curve(
      label='passed', steps=tokens[order], values=rates[order], has_marks=True
    )
    title, axis = f'{suite}: passed against tokens', 'tokens written an episode'
    drawn.append(figures.curves(title, [line], bounds=bounds, axis=axis))
  return drawn


def write(out: pathlib.Path) -> pathlib.Path:
  """Writes report.html into the folder of a service; returns its path."""
  # The last line of a version that was played again counts.
  played = {r['version']: r for r in writer.read(out / 'versions.jsonl')}
  rows = sorted(played.values(), key=lambda r: r['version'])
  models = out / 'models.json'
  others = files.read_json(models) if models.exists() else {}
  suites = sorted({name for row in rows for name in row['suites']})
  players = [(f'version {r["version"]}', r['suites']) for r in rows]
  table = {
    suite: [
      [name, f'{r["passed"]} of {r["episodes"]}']
      + [r[k] if r['episodes'] else 'unknown' for k in _RATES]
      + [r.get(k, '') for k in _COSTS]
      + [r['infrastructure']]
      for name, results in [*players, *others.items()]
      if (r := results.get(suite))
    ]
    for suite in suites
  }
  # Older lines name one version for all of their changes.
  changes = [
    (c.get('before', r.get('before')), r['version'], c)
    for r in rows
    for c in r['changes']
  ]
  page = document.render(
    'versions.html',
    title=out.name,
    table=table,
    drawings=[d for suite in suites for d in _drawings(suite, rows)],
    changes=[
      [f'{before} to {version}', c['domain'], c['pairs'], c['missing']]
      + [round(c[k], 4) for k in ('change', 'low', 'high')]
      + [c['verdict']]
      for before, version, c in changes
    ],
    worse=[
      f'Version {version} is worse than {before} on {c["domain"]}: '
      f'{c["change"]:+.3f} [{c["low"]:+.3f}, {c["high"]:+.3f}].'
      for before, version, c in changes
      if c['verdict'] == 'worse'
    ],
  )
  path = out / document.REPORT
  files.write_atomic(path, page.encode())
  return path
