"""The report tells how policies reached the engine that samples."""

import json

from composer_jax.core import seams
from composer_jax.delta import transport
from composer_jax.report import document, run_data
from composer_jax.telemetry import writer

ID = 'a' * 64


def published(version, **changes):
  row = dict(target_id=ID, kind='delta', bytes=1000, full_bytes=40_000)
  row |= dict(changed=0.02, encode_s=0.1, upload_s=0.01)
  return version, row | {'keyframe_bytes': 0, **changes}


def taken(version, route, **changes):
  row = dict(target_id=ID, route=route, bytes=1000)
  return version, row | {'swap_s': 0.002, **changes}


def section(workdir, sent, got):
  with writer.Writer(workdir, tensorboard=False) as out:
    for version, row in sent:
      out.write('delta', version, **row)
  receiver = transport.Placing(None)
  with (workdir / writer.RECEIVED).open('a') as lines:
    for version, row in got:
      row = {name: value for name, value in row.items() if value is not None}
      policy = seams.ReceivedPolicy(
        version=version, target_id=ID, variables=None, received=row
      )
      lines.write(json.dumps(receiver.served(policy)) + '\n')
  page = document.build(run_data.load(workdir))
  return page[page.index('>Delta bundles<') : page.index('>Fleet<')]


def test_both_ends_are_drawn(tmp_path):
  sent = [published(0, kind='key', bytes=40_000), published(1)]
  got = [taken(0, ['key 0'], swap_s=None), taken(1, ['delta 0-1'])]
  assert section(tmp_path, sent, got).count('<svg ') == 4


def test_a_version_that_came_again_counts_once(tmp_path):
  got = [taken(2, ['delta 1-2']), taken(3, ['delta 2-3']), taken(2, ['key 2'])]
  section(tmp_path, [], got)
  rows = run_data.load(tmp_path).rows('received')
  assert [(row['step'], row['route']) for row in rows] == [
    (2, ['key 2']),
    (3, ['delta 2-3']),
  ]


def test_what_was_not_measured_or_is_damaged_hides_nothing(tmp_path):
  assert section(tmp_path, [], []).count('not yet') == 4
  odd = {'kind': 7, 'bytes': 'x', 'changed': None}
  assert (
    section(tmp_path, [(1, odd)], [(1, {'bytes': 1})]).count('not yet') == 3
  )


def test_what_was_received_of_void_versions_counts_no_more(tmp_path):
  """A resumed run publishes them anew, and no engine need receive each one."""
  got = [taken(v, ['delta 0-1'], target_id='b' * 64) for v in (2, 3)]
  section(tmp_path, [published(1)], [taken(1, ['key 1']), *got])
  writer.keep(tmp_path / writer.RECEIVED, lambda row: row['step'] <= 1)
  sent = [published(v) for v in (2, 3)]
  section(tmp_path, sent, [taken(3, ['delta 2-3'])])
  rows = run_data.load(tmp_path).rows('received')
  assert [(row['step'], row['target_id']) for row in rows] == [(1, ID), (3, ID)]
