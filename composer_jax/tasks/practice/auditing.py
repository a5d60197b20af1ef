"""Audits of an evaluation's transcripts, blind to their verdicts.

A judge reads what was said and called in each episode of a folder that
`experiments.evaluate` made. Its findings stand beside the verdict in
`audit.jsonl`; they decide nothing.
"""

import collections
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
    audited = writer.read(folder / AUDIT)
    done = {(r['task_id'], r['sample']) for r in audited}
    missing = [row for which, row in rows.items() if which not in done]
    with progress.Progress('audit', len(rows), start=len(done)) as bar:
      for number, line in enumerate(pool.map(read, missing), len(done) + 1):
        if line is not None:
          kept.add(line)
        bar.update(number)
  counts = collections.Counter(
    read=0, found=0, passed=0, passed_found=0, flagged=0, flagged_found=0
  )
  for row in writer.read(folder / AUDIT):
    counts['read'] += 1
    for name in ('passed', 'flags', 'findings'):
      is_found = bool(row[name]) and bool(row['findings'])
      short = {'flags': 'flagged', 'findings': 'found'}.get(name, name)
      counts[short] += bool(row[name])
      counts[f'{short}_found'] += is_found
  del counts['found_found']
  counts['failed'] = len(rows) - counts['read']
  return dict(counts)
