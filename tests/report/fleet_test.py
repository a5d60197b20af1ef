"""The report tells of workers, leases and fates, whatever is damaged."""

import json

from composer_jax.report import document, fleet, run_data
from composer_jax.telemetry import writer


def line(worker, step, **fields):
  row = dict(stage='received', step=step, time=0.0, worker=worker)
  return json.dumps(row | fields) + '\n'


def section(workdir):
  page = document.build(run_data.load(workdir))
  return page[page.index('>Fleet<') : page.index('>Expert load<')]


def test_figures_of_a_worker_are_over_all_its_seconds(tmp_path):
  seconds = dict(wait_s=1.0, lease_wait_s=0.0)
  (tmp_path / writer.RECEIVED).write_text(
    line('b', 0)
    + line('b', 1, sample_s=3.0, tokens=100, occupancy=0.5, **seconds)
    + line('a', 1, sample_s=1.0, tokens=8, occupancy=1.0, wait_s=0.0)
    + line('b', 2, sample_s=10.0, tokens=60, occupancy=0.25, wait_s='nan')
    + line('b', 3, sample_s='x', lease_wait_s=2.0)
  )
  rows = fleet.workers(run_data.load(tmp_path))
  assert rows[0] == ('a', 1, 8, 8.0, 100.0, 0.0, 0.0)
  name, policies, tokens, rate, used, policy, lease = rows[1]
  assert (name, policies, tokens) == ('b', 4, 160)
  # Of 4, 10 and 2 seconds.
  assert (rate, used, lease) == (10.0, 100 * 4.5 / 16, 12.5)
  assert policy == 100 / 16


def test_fates_and_lost_leases_are_said(tmp_path):
  with writer.Writer(tmp_path, tensorboard=False) as out:
    fates = [['trained', 'deletion', 5], ['infrastructure', 'deletion', 1]]
    out.write('fleet', 1, workers=2, fates=fates, lost=[['silent', 3]], late=2)
  (tmp_path / writer.RECEIVED).write_text(
    line('a', 1, resumed=2, anew=1, tokens=30, drafted=9)
    + line('b', 1, resumed=3, tokens=10, drafted=1)
    + line('b', 2, tokens='x')
  )
  text = section(tmp_path)
  assert 'unfinished: 5 went on elsewhere' in text
  assert 'saved turn, 1 had to begin anew.' in text
  assert 'Of 40 sampled tokens drafts foresaw 25.0 %.' in text
  assert 'trained deletion 5, infrastructure deletion 1.' in text
  assert 'by reason: silent 3.' in text and 'after their lease: 2.' in text


def test_a_run_without_workers_says_so(tmp_path):
  (tmp_path / writer.RECEIVED).write_text('{"no": 1}\n[3]\n')
  assert 'Workers: not yet' in section(tmp_path)


def test_histograms_are_sums_over_steps_and_time_is_divided(tmp_path):
  seconds = dict(wait_s=1.0, train_s=2.0, publish_s=1.0)
  with writer.Writer(tmp_path, tensorboard=False) as out:
    out.write('rl', 1, ages=[[0, 5]], lengths=[[64, 3], [128, 2]], **seconds)
    out.write(
      'rl', 2, ages=[[0, 1], [3, 2]], lengths=[[64, 4], 'no'], **seconds
    )
    out.write('rl', 3, ages=7, lengths=[['x', 1]], wait_s='nan')
  text = section(tmp_path)
  trainer = '25.0 % waiting for groups, 50.0 % training, 25.0 % waiting for the'
  assert f'Where the trainer was: {trainer} publication before.' in text
  ages, lengths = fleet.histograms(run_data.load(tmp_path))
  assert ages.title in text and ages.svg in text and lengths.svg in text
  # Bars stand in order, with their numbers below.
  assert ages.svg.index('>0<') < ages.svg.index('>3<')
  assert lengths.svg.index('>64<') < lengths.svg.index('>128<')
  (tmp_path / writer.METRICS).unlink()
  assert [f.svg for f in fleet.histograms(run_data.load(tmp_path))] == ['', '']
