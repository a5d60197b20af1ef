"""Trains the arms of the study and keeps a row of every step.

  python -m experiments.studies.summary.run

For each seed one SFT policy, and from it two arms of RL: the chain, whose
summaries are trained with the reward of the episode, and the same with the loss
of summaries masked. A finished arm is not run again; results/ has only finished
ones.
"""

import pathlib
import time
from typing import Any

from absl import flags

from composer_jax.telemetry import machine
from experiments import start
from experiments.studies import results
from experiments.studies.summary import stream, training

_SEEDS = flags.DEFINE_list(
  'seeds',
  ['0', '1', '2'],
  'Seeds; each has one SFT policy, with which all its arms begin.',
)
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder to append to.',
)
_QUICK = flags.DEFINE_bool('quick', False, 'Small sizes, for tests.')

ARMS = ('chain', 'masked')
_KEPT = ('pass_rate', 'entropy', 'grad_norm', 'mismatch_kl', 'tokens')


def main() -> None:
  sizes = training.QUICK if _QUICK.value else training.Sizes()
  for seed in map(int, _SEEDS.value):
    rows = [r for r in results.read(_RESULTS.value) if r['seed'] == seed]
    if any(r['stage'] == 'end' for r in rows):
      continue
    finished = {r['arm'] for r in rows if r['stage'] == 'eval'}
    if not finished:
      about = {'machine': machine.describe(), **training.about(sizes)}
      _keep([{'stage': 'setup', 'seed': seed, 'step': 0, **about}])
    _run(seed, sizes, finished)
    end = {'stage': 'end', 'seed': seed, 'step': sizes.steps}
    _keep([{**end, 'cpu_s': time.process_time()}])


def _keep(rows: list[results.Row]) -> None:
  results.add(_RESULTS.value, rows, by=('stage', 'arm', 'seed'))


def _run(seed: int, sizes: training.Sizes, finished: set[str]) -> None:
  """Runs SFT and, from it, RL of both arms; skips finished arms."""

  def judged(variables: Any, arm: str, step: int) -> list[results.Row]:
    rows = []
    for name, pieces, episodes, amnesic in (
      ('short', stream.PIECES, sizes.episodes, False),
      ('amnesic', stream.PIECES, sizes.episodes, True),
      ('long', stream.LONG_PIECES, max(sizes.episodes // 4, 1), False),
    ):
      measured = training.evaluate(
        variables, seed=seed, pieces=pieces, episodes=episodes, amnesic=amnesic
      )
      print(seed, arm, step, name, measured, flush=True)
      row = {'stage': 'eval', 'seed': seed, 'step': step, 'name': name}
      rows.append({**row, 'arm': arm, **measured})
    return rows

  start = training.imitate(sizes, seed)
  if 'sft' not in finished:
    _keep(judged(start, 'sft', 0))
  for arm in ARMS:
    if arm in finished:
      continue
    end, rows = start, []
    for end, history in training.reinforce(  # noqa: B007
      start, sizes, seed=seed, masked=arm == 'masked'
    ):
      for metrics in history:
        row = {'stage': 'rl', 'seed': seed, 'step': len(rows) + 1, 'arm': arm}
        rows.append(row | {name: metrics[name] for name in _KEPT})
      rates = [m['pass_rate'] for m in history]
      print(seed, arm, len(rows), sum(rates) / len(rates), flush=True)
    _keep([*rows, *judged(end, arm, len(rows))])


if __name__ == '__main__':
  start.run(main)
