"""Intervals, utilisation and the words of progress, against closed forms."""

import io
import math
import subprocess
import sys

import numpy as np
import pytest

from composer_jax.report import figures
from composer_jax.telemetry import intervals, machine, mfu, progress


def test_wilson_matches_published_values():
  # Newcombe (1998), table I, score method without continuity correction.
  cases = {
    (81, 263): (0.2553, 0.3662),
    (15, 148): (0.0624, 0.1605),
    (0, 20): (0.0, 0.1611),
    (1, 29): (0.0061, 0.1718),
  }
  for (passed, episodes), expected in cases.items():
    interval = intervals.wilson(passed, episodes)
    np.testing.assert_allclose(interval, expected, atol=5e-5)


def test_wilson_solves_its_equation():
  # Both bounds p satisfy |share - p| = z sqrt(p (1 - p) / n).
  for passed, episodes in ((3, 10), (200, 400), (399, 400)):
    for bound in intervals.wilson(passed, episodes):
      spread = math.sqrt(bound * (1 - bound) / episodes)
      distance = abs(passed / episodes - bound)
      assert distance == pytest.approx(intervals.Z_95 * spread, rel=1e-9)


def test_wilson_is_symmetric_and_bounded():
  assert intervals.wilson(0, 0) == (0.0, 1.0)
  assert intervals.wilson(0, 7)[0] == 0.0
  assert intervals.wilson(7, 7)[1] == 1.0
  low, high = intervals.wilson(2, 9)
  np.testing.assert_allclose(intervals.wilson(7, 9), (1 - high, 1 - low))


def test_wilson_refuses_impossible_counts():
  with pytest.raises(ValueError, match=r'passed \(5\).*0\.\.episodes \(4\)'):
    intervals.wilson(5, 4)


def test_difference_matches_published_values():
  # Newcombe (1998), Statistics in Medicine 17:873, table II, method 10.
  interval = intervals.difference((48, 80), (56, 70))
  np.testing.assert_allclose(interval, (0.0524, 0.3339), atol=5e-5)
  with pytest.raises(ValueError, match='got 0 and 4'):
    intervals.difference((0, 0), (1, 4))


@pytest.mark.parametrize(
  'kind, tflops',
  [
    ('NVIDIA H200', 989),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA A100-SXM4-80GB', 312),
    ('NVIDIA L4', 121),
    ('TPU v5 lite', 197),
    ('TPU v5p', 459),
    ('TPU v5', 459),
    ('TPU v6 lite', 918),
  ],
)
def test_peaks_are_found_by_the_whole_name(kind, tflops):
  assert mfu.peak_flops(kind) == tflops * 1e12


@pytest.mark.parametrize(
  'kind',
  [
    'cpu',
    'NVIDIA L40',
    'NVIDIA L40S',
    'NVIDIA H100 NVL',
    'NVIDIA A100-SXM4-80GB MIG 1g.10gb',
    'TPU v4 lite',
  ],
)
def test_unknown_devices_have_no_peak(kind):
  assert mfu.peak_flops(kind) is None


@pytest.mark.slow
def test_the_peak_of_a_busy_machine_is_that_of_an_idle_one():
  measure = mfu.measure_peak.__wrapped__
  idle = measure()
  busy_loop = [sys.executable, '-c', 'while True: pass']
  others = [
    subprocess.Popen(busy_loop) for _ in range(2 * machine.usable_cores())
  ]
  try:
    busy = measure()
  finally:
    for process in others:
      process.kill()
      process.wait()
  # Threads that wait for one another would make it several times smaller.
  assert idle / 2 < busy < 2 * idle


def test_words_of_numbers():
  texts = {
    0: '0',
    250: '250',
    12345: '12.35k',
    3.14159: '3.142',
    4.1e-5: '4.1e-05',
    2.5e6: '2.5M',
  }
  for value, text in texts.items():
    assert progress.number(value) == text
  assert progress.number('sft') == 'sft'
  for value in [*np.geomspace(1e-12, 1e18, 997), 999_960.0, 9_999, 10_000]:
    digits = progress.number(value).partition('e')[0].strip('0.kMGT')
    assert len(digits.replace('.', '')) <= 4, value
  seconds = {8.4: '8s', 200: '3m20s', 7500: '2h05m', -1: '0s'}
  for value, text in seconds.items():
    assert progress.duration(value) == text


class Clock:
  """A clock that only the test moves."""

  def __init__(self):
    self.now = 100.0

  def __call__(self) -> float:
    return self.now


def play(total, start, seconds_per_step, every_s):
  stream, clock = io.StringIO(), Clock()
  with progress.Progress(
    'cpt', total, start=start, every_s=every_s, stream=stream, clock=clock
  ) as bar:
    for step in range(start + 1, total + 1):
      clock.now += seconds_per_step
      bar.update(step, loss=2.5)
  return stream.getvalue().splitlines()


def test_lines_are_thinned_and_the_last_step_is_always_shown():
  lines = play(total=10, start=0, seconds_per_step=2.0, every_s=6.0)
  assert [line.split()[1] for line in lines] == [
    '1/10',
    '4/10',
    '7/10',
    '10/10',
  ]
  assert lines[2] == '[cpt] 7/10  loss 2.5  0.5 steps/s  6s left'
  lines = play(total=9, start=0, seconds_per_step=2.0, every_s=6.0)
  assert lines[-1].startswith('[cpt] 9/9')


def test_rate_leaves_out_the_steps_of_an_earlier_run():
  lines = play(total=100, start=90, seconds_per_step=2.0, every_s=1.0)
  assert lines[0] == '[cpt] 91/100  loss 2.5'
  assert lines[3] == '[cpt] 94/100  loss 2.5'
  assert lines[4] == '[cpt] 95/100  loss 2.5  0.5 steps/s  10s left'


def test_time_left_forgets_the_steps_that_compile():
  stream, clock = io.StringIO(), Clock()
  with progress.Progress('rl', 50, stream=stream, clock=clock) as bar:
    # Programs compile in the first three.
    steps = (1, 600.0), (2, 70.0), (3, 60.0), (4, 7.0), (5, 5.0), (6, 7.0)
    for step, seconds in steps:
      clock.now += seconds
      bar.update(step)
  assert stream.getvalue().splitlines() == [
    '[rl] 1/50',
    '[rl] 2/50',
    '[rl] 3/50',
    '[rl] 4/50',
    '[rl] 5/50  0.1667 steps/s  4m30s left',
    '[rl] 6/50  0.1579 steps/s  4m39s left',
  ]


def test_time_left_follows_a_change_of_speed():
  stream, clock = io.StringIO(), Clock()
  with progress.Progress('sft', 400, stream=stream, clock=clock) as bar:
    for step in range(1, 301):
      clock.now += 20.0 if step <= 100 else 2.0
      bar.update(step)
  # Of 300 steps the slow first 100 count no more.
  assert stream.getvalue().splitlines()[-1].endswith('0.5 steps/s  3m20s left')


def test_reports_of_the_same_step_are_no_steps():
  stream, clock = io.StringIO(), Clock()
  with progress.Progress('eval', 40, stream=stream, clock=clock) as bar:
    for call in range(81):
      bar.update(call // 4)
      clock.now += 1.0
  line = stream.getvalue().splitlines()[-1]
  assert line == '[eval] 20/40  0.25 steps/s  1m20s left'


def test_plain_output_is_text_without_styles():
  stream, clock = io.StringIO(), Clock()
  with progress.Progress('rl', 2, stream=stream, clock=clock) as bar:
    bar.update(1, reward=0.25)
    bar.message('[bold] is text, not a style')
  assert stream.getvalue() == (
    '[rl] 1/2  reward 0.25\n[rl] [bold] is text, not a style\n'
  )


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_terminal_gets_a_bar():
  stream = Terminal()
  with progress.Progress('rl', 2, stream=stream) as bar:
    bar.update(2, reward=0.25)
    bar.message('[bold] is text, not a style')
  text = stream.getvalue()
  assert '2/2' in text
  assert 'reward 0.25' in text
  assert '[rl] [bold] is text, not a style' in text


def test_running_mean_looks_back_over_its_window():
  values = np.array([1.0, 3.0, np.nan, 5.0, 7.0])
  expected = [1.0, 2.0, 3.0, 5.0, 6.0]
  np.testing.assert_array_equal(figures.running_mean(values, 2), expected)
  assert np.isnan(figures.running_mean(np.array([np.nan, 1.0]), 2)[0])


def test_thinning_keeps_the_ends():
  short = np.arange(700)
  np.testing.assert_array_equal(figures.thin(short), short)
  thinned = figures.thin(np.arange(100_001))
  assert len(thinned) <= 802
  assert (thinned[0], thinned[-1]) == (0, 100_000)
