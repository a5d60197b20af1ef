"""The page of an evaluation: rates, costs, and transcripts to read.

It shows what `experiments.evaluate` leaves in its folder, episodes that did not
pass first. Beyond `_SHOWN`, transcripts are only named.
"""

import pathlib

from composer_jax.core import files
from composer_jax.report import document
from composer_jax.telemetry import writer

_SHOWN = 200


def write(out: pathlib.Path) -> pathlib.Path:
  """Writes report.html into the folder of an evaluation; returns its path."""
  played = writer.read(out / 'episodes.jsonl')
  last = {(r['task_id'], r['sample']): r for r in played}
  rows = sorted(last.values(), key=lambda r: (r['passed'], r['task_id']))
  summary = files.read_json(out / 'summary.json')
  page = document.render(
    'evaluation.html',
    title=out.name,
    summary=summary,
    scored=[*summary['overall'].get('scores', {})],
    rows=rows,
    played=[files.read_json(out / r['transcript']) for r in rows[:_SHOWN]],
  )
  path = out / document.REPORT
  files.write_atomic(path, page.encode())
  return path
