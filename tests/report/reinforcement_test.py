"""What the report says of the mismatch of rollout and trainer."""

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


def test_steps_out_of_their_bands_are_named(tmp_path):
  healthy = {'gate_breaches': 0, 'gate': []}
  assert 'left its band' not in section(tmp_path, healthy)
  broken = {'gate_breaches': 1, 'gate': ['mismatch_kl is <b>0.5</b>']}
  text = section(tmp_path, healthy, broken, healthy, broken)
  assert 'left its band in 2 steps, the last of them 2, 4.' in text
  assert 'mismatch_kl is &lt;b&gt;0.5&lt;/b&gt;' in text
