"""The report tells of cycles of live learning, whatever is damaged."""

import json

from composer_jax.report import document, live, run_data


def result(workdir, number, **fields):
  folder = workdir / 'live' / 'cycles' / f'{number:04d}'
  folder.mkdir(parents=True)
  (folder / 'result.json').write_text(json.dumps({'cycle': number, **fields}))


def test_each_cycle_has_a_line_with_its_seconds(tmp_path):
  times = dict(collect_s=1.04, train_s=2.0, gate_s=3.0, cycle_s=9.0)
  result(tmp_path, 1, episodes=256, satisfied=0.5, reward=-0.25, version=4,
         decision='promote', trial_s=3.0, **times)  # fmt: skip
  said = dict(reason='web: lost <b>.', fates={'late': 2, 'counted': 9})
  refused = dict(episodes=64, satisfied='x', decision='roll_back')
  result(tmp_path, 2, **refused, **said, **times)
  (tmp_path / 'live' / 'cycles' / '0003').mkdir()
  (tmp_path / 'live' / 'cycles' / '0003' / 'result.json').write_text('{"cy')
  run = run_data.load(tmp_path)
  first, second = live.cycles(run)
  assert len(first) == len(live.HEAD)
  assert first == (1, 256, 50.0, -0.25, 'promote', 4, 1.0, 2.0, 3.0, 3.0, 9.0)
  assert second[2] == '' and second[-2] == ''  # No trial was held.
  assert live.sentences(run) == [
    'Cycle 2: web: lost <b>.',
    'Events and episodes by fate: counted 9, late 2.',
  ]
  page = document.build(run)
  assert 'Learning from live use' in page and 'lost &lt;b&gt;' in page


def test_a_run_without_cycles_has_no_such_section(tmp_path):
  assert 'live use' not in document.build(run_data.load(tmp_path))
