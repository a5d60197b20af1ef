"""The report's sections about episodes: what was judged, and some to read."""

import collections
from collections.abc import Callable
from typing import Any

from composer_jax.telemetry import page, run_data

# Shown of each kind: of those that passed and of those that did not.
_SHOWN = 6
_MAX_TEXT = 20_000  # characters of one turn


def _verdict(row: dict[str, Any]) -> dict[str, Any]:
  verdict = row.get('verdict')
  return verdict if isinstance(verdict, dict) else {}


def levels(run: run_data.RunData) -> list[str]:
  """Returns the isolation levels that verdicts came from."""
  found = {_verdict(row).get('sandbox_level') for row in run.episodes}
  return sorted(str(level) for level in found if level)


def _outcome(row: dict[str, Any]) -> str:
  verdict = _verdict(row)
  if verdict.get('passed') is True:
    return 'passed'
  status = str(verdict.get('status', 'not judged'))
  return 'failed' if status == 'graded' else status


_KINDS = {'passed': 'good', 'failed': 'bad', 'infrastructure': 'warn'}

_MEANINGS = {
  'passed': 'finished, and every hidden test passed',
  'failed': 'finished, and a hidden test failed',
  'unfinished': 'the policy never called finish',
  'infrastructure': 'the sandbox failed; says nothing about the policy',
}


def verdicts(run: run_data.RunData) -> page.Markup:
  """Counts the recorded episodes by outcome and by sandbox level."""
  title = 'Sandbox verdicts'
  if not run.episodes:
    return page.section(title, page.not_yet('Episodes'))
  counts = collections.Counter(
    (str(_verdict(row).get('sandbox_level', '')), _outcome(row))
    for row in run.episodes
  )
  rows = [
    (
      level,
      page.chip(outcome, _KINDS.get(outcome, '')),
      count,
      f'{100 * count / len(run.episodes):.1f} %',
      _MEANINGS.get(outcome, ''),
    )
    for (level, outcome), count in sorted(counts.items())
  ]
  head = ('level', 'outcome', 'episodes', 'share', 'meaning')
  return page.section(
    title,
    page.table(rows, head),
    note='Of the episodes that the run recorded to be read.',
  )


def _turn(turn: Any) -> page.Markup:
  if not isinstance(turn, dict):
    turn = {'role': '?', 'text': turn}
  role, text = str(turn.get('role', '?')), str(turn.get('text', ''))
  if len(text) > _MAX_TEXT:
    cut = len(text) - _MAX_TEXT
    text = f'{text[:_MAX_TEXT]}\n[{cut} more characters]'
  names = {'call': 'policy', 'user': 'task', 'tool': 'tool'}
  kind = role if role in names else ''
  return page.element(
    'div',
    page.element('div', names.get(role, role), class_='role'),
    page.element('pre', text),
    class_=f'turn {kind}'.strip(),
  )


def _episode(row: dict[str, Any], is_open: bool) -> page.Markup:
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
  summary = page.join([
    page.element('b', row.get('task_id', '?')),
    page.chip(outcome, _KINDS.get(outcome, '')),
    *[page.chip(w) for w in words],
  ])  # fmt: skip
  tests = f'{verdict.get("num_passed", "?")} of {verdict.get("num_tests", "?")}'
  note = page.element(
    'p',
    f'Hidden tests passed: {tests}. {verdict.get("detail", "")}',
    class_='note',
  )
  return page.details(
    summary, note, *[_turn(turn) for turn in turns], is_open=is_open
  )


def episodes(run: run_data.RunData) -> page.Markup:
  """Shows the latest episodes that passed and that did not, turn by turn."""
  title = 'Episodes'
  if not run.episodes:
    return page.section(title, page.not_yet('Episodes'))

  def latest(test: Callable[[str], bool]) -> list[dict[str, Any]]:
    return [row for row in run.episodes if test(_outcome(row))][-_SHOWN:][::-1]

  passed = latest(lambda outcome: outcome == 'passed')
  others = latest(lambda outcome: outcome != 'passed')
  parts = []
  for heading, rows in (('Passed', passed), ('Not passed', others)):
    parts.append(page.element('h3', heading))
    parts += [_episode(row, i == 0) for i, row in enumerate(rows)]
    if not rows:
      parts.append(page.element('p', 'None recorded.', class_='absent'))
  return page.section(
    title,
    *parts,
    note=(
      f'The latest {len(passed) + len(others)} of {len(run.episodes)} '
      'recorded. Select one to read it turn by turn.'
    ),
  )
