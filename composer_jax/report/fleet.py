"""What the report says of the rollout workers of RL and of their leases."""

import collections
import math
from typing import Any

from composer_jax.report import figures, run_data
from composer_jax.telemetry import writer

HEAD = (
  *('worker', 'policies', 'tokens', 'tokens/s', '% of slots in use'),
  *('% waiting for policies', '% waiting for leases'),
)
_SECONDS = ('sample_s', 'wait_s', 'lease_wait_s')
_OF_TRAINER = {
  'wait_s': 'waiting for groups',
  'train_s': 'training',
  'publish_s': 'waiting for the publication before',
}


def _received(run: run_data.RunData) -> list[dict[str, Any]]:
  """Returns the lines that workers sent."""
  try:
    rows = writer.read(run.workdir / writer.RECEIVED)
  except (ValueError, OSError):
    return []  # `run.problems` names it.
  return [row for row in rows if isinstance(row, dict)]


def workers(run: run_data.RunData) -> list[tuple[Any, ...]]:
  """Returns a row for each worker; `HEAD` names the columns."""
  by_name = collections.defaultdict[str, list[dict[str, Any]]](list)
  for row in _received(run):
    if isinstance(row.get('worker'), str):
      by_name[row['worker']].append(row)
  return [_row(name, lines) for name, lines in sorted(by_name.items())]


def _of(line: dict[str, Any], field: str) -> float:
  value = run_data.number(line.get(field))
  return value if value is not None and math.isfinite(value) else 0.0


def _row(name: str, lines: list[dict[str, Any]]) -> tuple[Any, ...]:
  def total(field: str) -> float:
    return sum(_of(line, field) for line in lines)

  spans = [sum(_of(line, field) for field in _SECONDS) for line in lines]
  seconds, tokens = max(sum(spans), 1e-9), int(total('tokens'))
  used = sum(
    _of(line, 'occupancy') * span
    for line, span in zip(lines, spans, strict=True)
  )
  shares = (used, total('wait_s'), total('lease_wait_s'))
  return (
    *(name, len(lines), tokens, tokens / seconds),
    *(100 * share / seconds for share in shares),
  )


def histograms(run: run_data.RunData) -> list[figures.Figure]:
  """Draws how stale and how long what was trained is, over the whole run."""
  drawings = []
  for field, title, axis, unit in (
    ('ages', 'Staleness', 'policy versions', 'trajectories'),
    ('lengths', 'Lengths', 'sampled tokens, at most', 'episodes'),
  ):
    counts = collections.Counter[int]()
    for row in run.rows('rl'):
      entries = row.get(field)
      for entry in entries if isinstance(entries, list) else ():
        match entry:
          case [int(value), int(count)]:
            counts[value] += count
    title = f'{title} of what was trained'
    drawings.append(figures.bars(title, counts, axis=axis, unit=unit))
  return drawings


def sentences(run: run_data.RunData) -> list[str]:
  """Says where time went, how groups ended, and why leases did."""
  texts = []
  rows = run.rows('rl')
  seconds = {n: sum(_of(row, n) for row in rows) for n in _OF_TRAINER}
  if total := sum(seconds.values()):
    shares = (
      f'{100 * seconds[n] / total:.1f} % {text}'
      for n, text in _OF_TRAINER.items()
    )
    texts.append(f'Where the trainer was: {", ".join(shares)}.')
  went_on, anew, sampled, drafted = (
    int(sum(_of(row, name) for row in _received(run)))
    for name in ('resumed', 'anew', 'tokens', 'drafted')
  )
  if drafted:
    share = 100 * drafted / max(sampled, drafted)
    texts.append(f'Of {sampled} sampled tokens drafts foresaw {share:.1f} %.')
  if went_on or anew:
    texts.append(
      f'Episodes that a worker left unfinished: {went_on} went on elsewhere '
      f'from their last saved turn, {anew} had to begin anew.'
    )
  rows = run.rows('fleet')
  if not rows:
    return texts
  last = rows[-1]
  for name, text in (
    ('fates', 'Groups by fate and task family'),
    ('lost', 'Leases that brought nothing, by reason'),
  ):
    items = last.get(name)
    if isinstance(items, list) and items:
      counts = (' '.join(map(str, i)) for i in items if isinstance(i, list))
      texts.append(f'{text}: {", ".join(counts)}.')
  if run_data.number(last.get('late')):
    texts.append(f'Results that came after their lease: {last["late"]}.')
  return texts
