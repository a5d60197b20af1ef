"""Laws of the study of Muon; its README shows the table of its results."""

import math

import pytest

from composer_jax.telemetry import writer
from experiments.studies.muon import analyze, training


def row(optimizer, rate, losses, seconds, seed=0):
  return {
    'optimizer': optimizer,
    'learning_rate': rate,
    'seed': seed,
    'step': 10 * (len(losses) - 1),
    'eval_steps': [10 * i for i in range(len(losses))],
    'heldout_loss': losses,
    'cpu_s': seconds,
  }


def test_grids_grow_at_an_end_that_is_best_and_diverged_runs_are_worst():
  sweep = [
    row('adam', rate, [7.0, end], [0, 1])
    for rate, end in ((0.1, 3.0), (0.2, 2.0), (0.4, 'nan'))
  ]
  sweep += [
    row('muon', rate, [7.0, end], [0, 1])
    for rate, end in ((0.1, 1.0), (0.2, 2.0), (0.4, 3.0))
  ]
  assert analyze.best_rate(sweep, 'adam') == 0.2
  assert analyze.best_rate(sweep, 'muon') == 0.1
  assert analyze.beyond(sweep) == (0.05,)
  assert analyze.last(sweep[2]) == math.inf


def test_a_run_passes_a_loss_between_two_measurements():
  muon = row('muon', 0.1, [7.0, 5.0, 3.0], [0.0, 2.0, 6.0])
  assert analyze.passes(muon, 4.5) == (12.5, 3.0)
  assert analyze.passes(muon, 2.0) == (math.inf, math.inf)


def test_the_ratio_of_steps_is_of_turns_side_by_side():
  sweep = []
  # The second pair ran while something else did, which slowed both.
  for rate, slow in ((0.1, 1.0), (0.2, 3.0)):
    for optimizer, cost in (('adam', 2.0), ('muon', 2.5)):
      times = [0.0, cost * slow, 2 * cost * slow]
      sweep.append(row(optimizer, rate, [7.0, 6.0, 5.0], times))
  assert analyze.step_ratio(sweep) == pytest.approx(1.25)


def test_runs_change_turns_and_keep_their_results_apart():
  order = []

  def run(name, turns):
    for _ in range(turns):
      order.append(name)
      yield
    return {'name': name}

  found = training.in_turns([run('a', 1), run('b', 3)])
  assert found == [{'name': 'a'}, {'name': 'b'}]
  assert order == ['a', 'b', 'b', 'b']


@pytest.mark.parametrize('rule', list(analyze.RULES))
def test_both_had_the_same_sweep_and_the_same_seeds(rule):
  rows = writer.read(analyze.ROOT / 'results')
  sweep = analyze.sweep_of(rows, rule)
  rates = {r['learning_rate'] for r in sweep}
  assert len(rates) >= 5 and len(sweep) == 2 * len(rates)
  assert {analyze.key(r)[:2] for r in sweep} == {
    (optimizer, rate) for optimizer in analyze.NAMES for rate in rates
  }
  assert not analyze.beyond(sweep)
  best = {o: analyze.best_rate(sweep, o) for o in analyze.NAMES}
  seeds = [r for r in rows if r['stage'] == 'seeds' + rule]
  assert len({r['seed'] for r in seeds}) == 3 and len(seeds) == 9
  assert all(r['learning_rate'] == best[r['optimizer']] for r in seeds)


def test_table_and_readme_are_those_of_the_results():
  rows = writer.read(analyze.ROOT / 'results')
  table = (analyze.ROOT / 'table.md').read_text()
  assert table == analyze.table(rows)
  assert table in (analyze.ROOT / 'README.md').read_text()
