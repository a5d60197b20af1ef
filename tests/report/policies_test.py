"""The report tells how policies reached the engine that samples."""

import contextlib

import pytest

from composer_jax.delta.device import received
from composer_jax.report import document, run_data
from composer_jax.telemetry import writer

ID = 'a' * 64


def published(version, **changes):
  row = dict(target_id=ID, kind='delta', bytes=1000, full_bytes=40_000)
  row |= dict(changed=0.02, encode_s=0.1, upload_s=0.01, skip_bytes=0)
  return version, row | {'keyframe_bytes': 0, **changes}


def taken(version, route, **changes):
  row = dict(target_id=ID, route=route, bytes=1000, fetch_s=0.1, decode_s=0.2)
  return version, row | {'swap_s': 0.002, **changes}


def section(workdir, sent, got):
  with writer.Writer(workdir, tensorboard=False) as out:
    for version, row in sent:
      out.write('delta', version, **row)
  with contextlib.closing(received.Received(workdir)) as lines:
    for version, row in got:
      lines.write(version, **row)
  page = document.build(run_data.load(workdir))
  return page[page.index('>Delta bundles<') : page.index('>Expert load<')]


def test_both_ends_are_told_in_numbers(tmp_path):
  sent = [published(0, kind='key', bytes=40_000, keyframe_bytes=0)]
  sent += [published(1), published(2, skip_bytes=3000), published(3)]
  sent += [published(4, bytes=3000, keyframe_bytes=20_000)]
  got = [taken(0, ['key 0'], swap_s=None)]
  got += [taken(1, ['delta 0-1']), taken(3, ['delta 1-3'], swap_s=0.004)]
  got += [taken(4, ['key 2', 'delta 2-3', 'delta 3-4'], swap_s=0.003)]
  text = section(tmp_path, sent, got)
  assert text.count('data:image/svg+xml') == 4
  # Keyframes are none of the mean: 6000 bytes in four deltas.
  assert '4 deltas of 1500B on average, 26.7 times smaller' in text
  assert '2.00 % of weights changed' in text
  assert 'Beside them 20.0kB of keyframes and 3000B of skip deltas.' in text
  assert (
    '4 versions were received: 1 by key, 1 by delta, 1 by skip delta, 1 by '
    'key + delta.'
  ) in text
  assert 'A swap took 3 ms in the median, 4 ms at most.' in text
  assert 'All 4 received versions equal those published.' in text


def test_other_weights_at_the_other_end_are_a_problem(tmp_path):
  got = [taken(1, ['delta 0-1']), taken(2, ['delta 1-2'], target_id='b' * 64)]
  text = section(tmp_path, [published(1), published(2)], got)
  assert (
    '1 versions were received with other weights than were published, the '
    'last of them 2.'
  ) in text
  assert 'class="problem"' in text and 'equal those' not in text


def test_a_version_that_came_again_counts_once(tmp_path):
  got = [taken(2, ['delta 1-2']), taken(3, ['delta 2-3']), taken(2, ['key 2'])]
  text = section(tmp_path, [], got)
  assert '2 versions were received: 1 by key, 1 by delta.' in text


def test_a_torn_line_is_cut_off_before_the_next(tmp_path):
  section(tmp_path, [], [taken(1, ['delta 0-1'])])
  path = tmp_path / received.RECEIVED
  path.write_bytes(path.read_bytes() + b'{"stage": "rec')
  section(tmp_path, [], [taken(2, ['delta 1-2'])])
  assert [row['step'] for row in writer.read(path)] == [1, 2]


@pytest.mark.parametrize('route', [None, 7, [], ['delta x-y'], ['<b>']])
def test_what_was_not_measured_or_is_damaged_hides_nothing(tmp_path, route):
  assert section(tmp_path, [], []).count('not yet') == 4
  odd = {'kind': 7, 'bytes': 'x', 'changed': None}
  text = section(tmp_path, [(1, odd)], [(1, {'route': route})])
  assert '1 versions were received' in text and '<b>' not in text


def test_what_was_received_of_void_versions_counts_no_more(tmp_path):
  """A resumed run publishes them anew, and no engine need receive each one."""
  received.truncate(tmp_path, 1)  # There is nothing yet.
  got = [taken(v, ['delta 0-1'], target_id='b' * 64) for v in (2, 3)]
  section(tmp_path, [published(1)], [taken(1, ['key 1']), *got])
  received.truncate(tmp_path, 1)
  sent = [published(v) for v in (2, 3)]
  text = section(tmp_path, sent, [taken(3, ['delta 2-3'])])
  assert 'All 2 received versions equal those published.' in text
  assert 'class="problem"' not in text
