"""What the report says of the mismatch of rollout and trainer."""

import json
import re

from composer_jax.report import document, run_data
from composer_jax.telemetry import writer


def section(workdir, *rows):
  with writer.Writer(workdir, tensorboard=False) as out:
    for step, row in enumerate(rows, 1):
      out.write('rl', step, **row)
  page = document.build(run_data.load(workdir))
  start = page.index('<section><h2>Reinforcement learning')
  return page[start : page.index('>Delta bundles<')]


def test_what_was_not_measured_is_not_yet(tmp_path):
  text = section(tmp_path, {'reward': 1.0})
  assert text.count('not yet') > 5
  # No curriculum: it will not come.
  assert 'Weight of the tasks drawn' not in text


def test_a_mismatch_of_zero_or_of_nothing_finite_is_drawn(tmp_path):
  rows = [
    {'mismatch_kl': value, 'mismatch_p99': value, 'mismatch_p99_no_replay': 0.0}
    for value in (0.0, float('inf'), float('nan'), 0.0)
  ]
  assert 'Mismatch of rollout and trainer (KL)" ' in section(tmp_path, *rows)


def test_the_shares_of_waiting_are_those_of_all_seconds(tmp_path):
  trainer = [
    {'wait_s': 9.0, 'train_s': 1.0, 'publish_s': 0.0},
    {'reward': 1.0},
    {'wait_s': 0.0, 'train_s': 28.0, 'publish_s': 2.0},
  ]
  path = tmp_path / writer.RECEIVED
  lines = [{'sample_s': 1.0, 'wait_s': 3.0}, {'swap_s': 1.0}]
  path.write_text(
    ''.join(
      json.dumps({'stage': 'received', 'step': n, 'time': 0.0} | line) + '\n'
      for n, line in enumerate(lines, 1)
    )
  )
  text = section(tmp_path, *trainer)
  assert 'trainer 22.5 % for groups, rollouts 75.0 % for policies' in text
  start = text.index('aria-label="Share of time spent waiting"')
  drawing = text[start : text.index('</svg>', start)]
  titles = re.findall('(?s)<title>(.*?)</title>', drawing)
  assert titles == [
    'step 1\ntrainer: 0.9\nrollouts: 0.75',
    'step 3\ntrainer: 0\nrollouts: 0.75 (step 1)',
  ]


def test_a_run_that_measured_no_waiting_says_nothing_of_it(tmp_path):
  text = section(tmp_path, {'reward': 1.0}, {'wait_s': 'nan', 'train_s': 1.0})
  assert 'Share of time spent waiting: not yet' in text
  assert 'time spent waiting, ' not in text


def test_steps_out_of_their_bands_are_named(tmp_path):
  healthy = {'gate_breaches': 0, 'gate': []}
  assert 'left its band' not in section(tmp_path, healthy)
  broken = {'gate_breaches': 1, 'gate': ['mismatch_kl is <b>0.5</b>']}
  text = section(tmp_path, healthy, broken, healthy, broken)
  assert 'left its band in 2 steps, the last of them 2, 4.' in text
  assert 'mismatch_kl is &lt;b&gt;0.5&lt;/b&gt;' in text
