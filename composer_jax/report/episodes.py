"""What the report shows of episodes: some to read, and where they were judged.

The demonstrations that SFT trained on are written by a script. The report shows
them apart.
"""

from typing import Any

from composer_jax.report import run_data

# Episodes shown of each kind.
_SHOWN = 6
_MAX_TEXT = 20_000  # characters of one turn


def _verdict(row: dict[str, Any]) -> dict[str, Any]:
  verdict = row.get('verdict')
  return verdict if isinstance(verdict, dict) else {}


def _list(row: dict[str, Any], name: str) -> list[Any]:
  value = row.get(name)
  return value if isinstance(value, list) else []


def _played(run: run_data.RunData) -> list[dict[str, Any]]:
  """Returns the episodes that a policy played, without demonstrations."""
  return [row for row in run.episodes if row.get('stage') != 'sft']


def _outcome(row: dict[str, Any]) -> str:
  verdict = _verdict(row)
  if verdict.get('passed') is True:
    return 'failed' if _list(row, 'flags') else 'passed'
  status = str(verdict.get('status', 'not judged'))
  return 'failed' if status == 'graded' else status


def levels(run: run_data.RunData) -> list[str]:
  """Returns the isolation levels of the sandboxes that gave the verdicts."""
  names = {_verdict(row).get('sandbox_level') for row in _played(run)}
  return sorted(map(str, (names | {run.run.get('sandbox_level')}) - {None, ''}))


def shown(run: run_data.RunData) -> dict[str, list[dict[str, Any]]]:
  """Returns the latest episodes of each kind, the latest first."""
  played = [_episode(row) for row in _played(run)]
  scripted = [_episode(r) for r in run.episodes if r.get('stage') == 'sft']
  kinds = {
    'Passed': [e for e in played if e['outcome'] == 'passed'],
    'Not passed': [e for e in played if e['outcome'] != 'passed'],
    'Scripted, for SFT to imitate': scripted,
  }
  return {kind: rows[-_SHOWN:][::-1] for kind, rows in kinds.items()}


def _episode(row: dict[str, Any]) -> dict[str, Any]:
  """Returns what the page shows of an episode."""
  turns = [_turn(turn) for turn in _list(row, 'turns')]
  where = ' '.join(str(row[k]) for k in ('stage', 'name') if k in row)
  reward = run_data.number(row.get('reward'))
  return {
    'task': row.get('task_id', '?'),
    'outcome': _outcome(row),
    'facts': (
      f'{where} step {row.get("step", "?")}'.strip(),
      f'reward {"?" if reward is None else f"{reward:.3g}"}',
      f'{sum(role == "call" for role, _ in turns)} calls',
    ),
    'flags': _list(row, 'flags'),
    'verdict': {'num_passed': '?', 'num_tests': '?', **_verdict(row)},
    'turns': turns,
  }


def _turn(turn: Any) -> tuple[str, str]:
  if not isinstance(turn, dict):
    turn = {'text': turn}
  role, text = str(turn.get('role', '?')), str(turn.get('text', ''))
  if len(text) > _MAX_TEXT:
    text = f'{text[:_MAX_TEXT]}\n[{len(text) - _MAX_TEXT} more characters]'
  return role, text
