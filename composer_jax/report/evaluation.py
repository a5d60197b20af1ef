"""The page of an evaluation: rates, costs, and transcripts to read.

It reads what `experiments.evaluate` leaves in its folder, and shows episodes
that did not pass first. Beyond `_SHOWN`, transcripts are only named.
"""

import json
import pathlib
from typing import Any

from composer_jax.core import files
from composer_jax.report import document, episodes

_SHOWN = 200
_COLUMNS = (
  *('task_id', 'sample', 'status', 'reward', 'ended', 'num_turns'),
  *('num_invalid', 'tokens_in', 'tokens_out', 'cost_usd', 'attempts'),
)


def write(out: pathlib.Path) -> pathlib.Path:
  """Writes report.html into the folder of an evaluation; returns its path."""
  lines = (out / 'episodes.jsonl').read_text().splitlines()
  rows = {(r['task_id'], r['sample']): r for r in map(json.loads, lines)}
  ordered = sorted(rows.values(), key=lambda r: (r['passed'], r['task_id']))
  page = document.render(
    'evaluation.html',
    title=out.name,
    summary=files.read_json(out / 'summary.json'),
    head=[c for c in _COLUMNS if any(c in row for row in ordered)],
    rows=ordered,
    played=[_episode(out, row) for row in ordered[:_SHOWN]],
  )
  path = out / document.REPORT
  files.write_atomic(path, page.encode())
  return path


def _episode(out: pathlib.Path, row: dict[str, Any]) -> dict[str, Any]:
  kept = files.read_json(out / row['transcript'])
  turns = [t for entry in kept['transcript'] for t in _turns(entry)]
  return {**row, 'turns': turns}


def _turns(entry: dict[str, Any]) -> list[tuple[str, str]]:
  """Returns what the page shows of a message: (role, text) of its parts."""
  entry = dict(entry)
  role = entry.pop('role', '?')
  parts = [(role, entry.pop('text', None))]
  for name in ('reasoning_content', 'reasoning', 'refusal', 'call'):
    parts.append((name, entry.pop(name, None)))
  parts.append((role, entry.pop('content', None)))
  for call in entry.pop('tool_calls', None) or ():
    parts.append(('call', json.dumps(call, ensure_ascii=False)))
  facts = {k: v for k, v in entry.items() if v not in (None, '', {})}
  if facts:
    parts.append(('facts', json.dumps(facts, ensure_ascii=False)))
  return [episodes.turn({'role': r, 'text': t}) for r, t in parts if t]
