"""The report's sections about episodes: what was judged, and some to read.

The demonstrations that SFT trained on are scripted. They are shown to be read,
apart, and count for nothing.
"""

import collections
import math
from typing import Any

from composer_jax.report import html, run_data

# Shown of each kind: of those that passed and of those that did not.
_SHOWN = 6
_MAX_TEXT = 20_000  # characters of one turn


def _verdict(row: dict[str, Any]) -> dict[str, Any]:
  verdict = row.get('verdict')
  return verdict if isinstance(verdict, dict) else {}


def _is_played(row: dict[str, Any]) -> bool:
  """Returns whether a policy played it, and no script."""
  return row.get('stage') != 'sft'


def levels(run: run_data.RunData) -> list[str]:
  """Returns the isolation levels that verdicts came from."""
  found = {
    _verdict(row).get('sandbox_level')
    for row in run.episodes
    if _is_played(row)
  }
  return sorted(str(level) for level in found if level)


def _outcome(row: dict[str, Any]) -> str:
  verdict = _verdict(row)
  if verdict.get('passed') is True:
    return 'failed' if _flags(row) else 'passed'
  status = str(verdict.get('status', 'not judged'))
  return 'failed' if status == 'graded' else status


_KINDS = {'passed': 'good', 'failed': 'bad', 'infrastructure': 'warn'}

_MEANINGS = {
  'passed': 'finished, and every hidden test passed',
  'failed': 'finished, and a hidden test failed or a monitor raised alarm',
  'unfinished': 'the policy never called finish',
  'infrastructure': 'the sandbox failed; says nothing about the policy',
}

OUTCOMES = tuple(_MEANINGS)


def _of_evaluation(row: dict[str, Any]) -> list[int] | None:
  """Returns the count of each of OUTCOMES, None where the line lacks one."""
  names = ('episodes', 'passed', 'unfinished_rate', 'infrastructure')
  found = [run_data.number(row.get(name)) for name in names]
  known = [v for v in found if v is not None and math.isfinite(v)]
  if len(known) < len(names):
    return None
  episodes, passed, rate, broken = known
  unfinished = round(rate * episodes)
  counts = (passed, episodes - passed - unfinished, unfinished, broken)
  return [int(count) for count in counts]


def _all_verdicts(run: run_data.RunData) -> html.Markup:
  """Counts every episode of RL and of the evaluations."""
  rows: list[list[Any]] = []
  steps = run.series('rl', OUTCOMES[0])[0]
  if steps:
    values = [run.series('rl', name)[1] for name in OUTCOMES]
    sums = [int(sum(filter(math.isfinite, v))) for v in values]
    rows.append([f'RL, {len(steps)} steps', *sums])
  for row in run.evaluations():
    counts = _of_evaluation(row)
    if counts is not None:
      rows.append([f'Evaluation of {row.get("name", "")}', *counts])
  if not rows:
    return html.not_yet('Verdicts')
  return html.table(rows, ('', *OUTCOMES))


def verdicts(run: run_data.RunData) -> html.Markup:
  """Counts episodes by outcome, and those recorded also by sandbox level."""
  title = 'Sandbox verdicts'
  played = [row for row in run.episodes if _is_played(row)]
  return html.section(
    title,
    _all_verdicts(run),
    html.element('h3', 'Of the episodes that were recorded to be read'),
    _recorded(played) if played else html.not_yet('Episodes'),
    note='Of every episode that a policy played.',
  )


def _recorded(episodes: list[dict[str, Any]]) -> html.Markup:
  counts = collections.Counter(
    (str(_verdict(row).get('sandbox_level', '')), _outcome(row))
    for row in episodes
  )
  rows = [
    (
      level,
      html.chip(outcome, _KINDS.get(outcome, '')),
      count,
      f'{100 * count / len(episodes):.1f} %',
      _MEANINGS.get(outcome, ''),
    )
    for (level, outcome), count in sorted(counts.items())
  ]
  head = ('level', 'outcome', 'episodes', 'share', 'meaning')
  return html.table(rows, head)


def _flags(row: dict[str, Any]) -> list[Any]:
  found = row.get('flags')
  return found if isinstance(found, list) else []


def _turn(turn: Any) -> html.Markup:
  if not isinstance(turn, dict):
    turn = {'role': '?', 'text': turn}
  role, text = str(turn.get('role', '?')), str(turn.get('text', ''))
  if len(text) > _MAX_TEXT:
    cut = len(text) - _MAX_TEXT
    text = f'{text[:_MAX_TEXT]}\n[{cut} more characters]'
  names = {'call': 'policy', 'user': 'task', 'tool': 'tool'}
  kind = role if role in names else ''
  return html.element(
    'div',
    html.element('div', names.get(role, role), class_='role'),
    html.element('pre', text),
    class_=f'turn {kind}'.strip(),
  )


def _episode(row: dict[str, Any], is_open: bool) -> html.Markup:
  verdict, outcome = _verdict(row), _outcome(row)
  turns = row.get('turns')
  turns = turns if isinstance(turns, list) else []
  where = ' '.join(str(row[k]) for k in ('stage', 'name') if k in row)
  calls = sum(isinstance(t, dict) and t.get('role') == 'call' for t in turns)
  words = [
    f'{where} step {row.get("step", "?")}'.strip(),
    f'reward {row.get("reward", "?")}',
    f'{calls} calls',
  ]
  summary = html.join([
    html.element('b', row.get('task_id', '?')),
    html.chip(outcome, _KINDS.get(outcome, '')),
    *[html.chip(w) for w in words],
    *[html.chip(str(f), 'bad') for f in _flags(row)],
  ])  # fmt: skip
  tests = f'{verdict.get("num_passed", "?")} of {verdict.get("num_tests", "?")}'
  note = html.element(
    'p',
    f'Hidden tests passed: {tests}. {verdict.get("detail", "")}',
    class_='note',
  )
  return html.details(
    summary, note, *[_turn(turn) for turn in turns], is_open=is_open
  )


def episodes(run: run_data.RunData) -> html.Markup:
  """Shows the latest episodes that passed and that did not, turn by turn."""
  title = 'Episodes'
  if not run.episodes:
    return html.section(title, html.not_yet('Episodes'))

  played = [row for row in run.episodes if _is_played(row)]
  found = {
    'Passed': [r for r in played if _outcome(r) == 'passed'],
    'Not passed': [r for r in played if _outcome(r) != 'passed'],
    'Scripted, for SFT to imitate': [
      r for r in run.episodes if not _is_played(r)
    ],
  }
  groups = {name: rows[-_SHOWN:][::-1] for name, rows in found.items()}
  parts = []
  for heading, rows in groups.items():
    parts.append(html.element('h3', heading))
    parts += [_episode(row, i == 0) for i, row in enumerate(rows)]
    if not rows:
      parts.append(html.element('p', 'None recorded.', class_='absent'))
  return html.section(
    title,
    *parts,
    note=(
      f'The latest {sum(map(len, groups.values()))} of {len(run.episodes)} '
      'recorded. Select one to read it turn by turn.'
    ),
  )
