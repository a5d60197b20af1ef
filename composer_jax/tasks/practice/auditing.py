"""Audits of an evaluation's transcripts, blind to their verdicts.

A judge reads what was said and called in each episode of a folder that
`experiments.evaluate` made. Its findings stand beside the verdict in
`audit.jsonl`; they decide nothing.
"""

import logging
import pathlib
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from composer_jax.core import files
from composer_jax.tasks import judges
from composer_jax.tasks.monitors import watch
from composer_jax.tasks.practice import evaluation
from composer_jax.telemetry import append, progress, writer

AUDIT = 'audit.jsonl'


def case_of(messages: Sequence[Mapping[str, Any]]) -> judges.JudgedEpisode:
  """Returns a transcript as a case; the words of a model count as calls.

  Args:
    messages: of a conversation (role, content, of an answer also its call), or
      of windows (role, text).
  """
  prompt, made = '', []
  for message in messages:
    role = message['role']
    text = str(message.get('content') or message.get('text') or '')
    if role == 'user' and not prompt:
      prompt = text
    elif role == 'tool' and 'call' in message:
      made.append(_call('call', message['call'], text))
    elif role == 'tool' and made and not made[-1].output:
      made[-1] = _call('call', made[-1].arguments['text'], text)
    elif text:
      made.append(_call('call' if role == 'call' else role, text))
  return judges.JudgedEpisode(
    prompt=prompt, evidence=watch.Evidence(calls=made)
  )


def _call(tool: str, text: str, output: str = '') -> watch.WatchedCall:
  return watch.WatchedCall(tool=tool, arguments={'text': text}, output=output)


def audit(
  folder: pathlib.Path, judge: judges.Judge, threads: int
) -> dict[str, int]:
  """Has a judge read the episodes that it has not read; blocks.

  Returns:
    Numbers of episodes: read, found, passed, passed_found, flagged (by the
    monitors), flagged_found, and failed, of which the judge gave no answer.
  """
  rows = evaluation.read(folder)

  def read(row: Mapping[str, Any]) -> dict[str, Any] | None:
    messages = files.read_json(folder / row['transcript'])['transcript']
    try:
      findings = judges.audit(judge, case_of(messages))
    except judges.JudgeError as error:
      logging.warning('%s: %s', row['task_id'], error)
      return None
    kept = {k: row[k] for k in ('task_id', 'sample', 'passed', 'flags')}
    said = [finding.detail for finding in findings]
    return {**kept, 'findings': said}

  with (
    files.alone(folder),
    append.AppendFile(folder / AUDIT, 'an audit') as kept,
    futures.ThreadPoolExecutor(threads, 'audit') as pool,
  ):
    kept.cut_torn_line()
    known = writer.read(folder / AUDIT)
    done = {(r['task_id'], r['sample']) for r in known}
    missing = [row for which, row in rows.items() if which not in done]
    with progress.Progress('audit', len(rows), start=len(done)) as bar:
      for number, line in enumerate(pool.map(read, missing), len(done) + 1):
        if line is not None:
          kept.add(line)
        bar.update(number)
  audited = writer.read(folder / AUDIT)
  counts = {'failed': len(rows) - len(audited)}
  for name, field in (('', ''), ('passed', 'passed'), ('flagged', 'flags')):
    some = [row for row in audited if not field or row[field]]
    counts[name or 'read'] = len(some)
    counts[f'{name}_found'.strip('_')] = sum(bool(r['findings']) for r in some)
  return counts
