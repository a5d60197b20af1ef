"""Runs what the study compares, and keeps a line of each run.

  python -m experiments.studies.muon.run --workdir=runs/muon

Muon and AdamW are trained at the same learning rates, then at the best rate of
each with three other seeds, together with AdamW for as many steps as fit into
Muon's CPU time. This happens under two rules: one rate for all parameters; and,
in both arms, a fixed rate for parameters that are no matrices ('rest').
Controls swap the rates of the rest. Compared runs take turns of a few seconds
in one process, pinned to one core. A run in results/ is not repeated.
"""

import os
import pathlib
from typing import Any

from absl import flags

from experiments import start

_WORKDIR = flags.DEFINE_string('workdir', 'runs/muon', 'Folder of the corpus.')
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder to append to.',
)
_CORE = flags.DEFINE_integer('core', 0, 'Core to which the process is pinned.')

SOURCES = ('stdlib', 'experiments/studies/muon/packages.sources')
MAX_BYTES = 8_000_000
OPTIMIZERS = ('adam', 'muon')
RATES = (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2)
SWEEP_SEED = 0
# Rate of the rest under the second rule: that of Muon's best run under the
# first, which is better for both arms.
REST_RATE = 1e-2
SEEDS = (1, 2, 3)  # without the seed that chose the rates


def _pin_to(core: int) -> None:
  """Pins the process; call it before JAX starts threads, which stay put."""
  xla_flags = os.environ.get('XLA_FLAGS', '')
  os.environ['XLA_FLAGS'] = f'{xla_flags} --xla_cpu_multi_thread_eigen=false'
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {core})


def main() -> None:
  _pin_to(_CORE.value)
  from composer_jax.telemetry import machine, writer
  from experiments.studies.muon import analyze, training

  results = pathlib.Path(_RESULTS.value)
  data = training.data(f'{_WORKDIR.value}/corpus', SOURCES, MAX_BYTES)

  def rows(stage: str) -> list[dict[str, Any]]:
    return [r for r in writer.read(results) if r['stage'] == stage]

  with writer.Writer(results, tensorboard=False) as out:
    if not rows('setup'):
      about = training.describe(data)
      out.write('setup', 0, machine=machine.describe(), **about)

    def run(stage: str, arms: list[training.Arm]) -> None:
      finished = {analyze.key(r) for r in rows(stage)}
      missing = [a for a in dict.fromkeys(arms) if a.key not in finished]
      print(stage, *missing, sep='\n  ', flush=True)
      lines = training.in_turns([training.turns(a, data) for a in missing])
      for arm, line in zip(missing, lines, strict=True):
        out.write(stage, arm.steps, **line)

    def compare(rule: str, rest_rate: float | None) -> None:
      """Sweeps both optimizers alike, then runs both at their best rates."""
      stage = 'sweep' + rule
      rates: tuple[float, ...] = RATES
      while rates:
        for rate in rates:
          arms = [
            training.Arm(
              optimizer=optimizer,
              learning_rate=rate,
              rest_rate=rest_rate,
              seed=SWEEP_SEED,
              steps=training.STEPS,
            )
            for optimizer in OPTIMIZERS
          ]
          # With one rate for all, it is a run of the other rule.
          if rate != rest_rate:
            run(stage, arms)
        # Extend both grids until neither optimizer has its best rate at an end.
        rates = analyze.beyond(analyze.sweep_of(writer.read(results), rule))
      sweep = analyze.sweep_of(writer.read(results), rule)
      longer = round(training.STEPS * analyze.step_ratio(rows('sweep')))
      for seed in SEEDS:
        arms = [
          training.Arm(
            optimizer=optimizer,
            learning_rate=analyze.best_rate(sweep, optimizer),
            rest_rate=rest_rate,
            seed=seed,
            steps=steps,
          )
          for optimizer, steps in (
            ('adam', training.STEPS),
            ('muon', training.STEPS),
            ('adam', longer),
          )
        ]
        run('seeds' + rule, arms)

    compare('', None)
    best = {o: analyze.best_rate(rows('sweep'), o) for o in OPTIMIZERS}
    # The rest at the other arm's rate, to see which of the two rates helps.
    for seed in SEEDS:
      run(
        'controls',
        [
          training.Arm(
            optimizer=optimizer,
            learning_rate=best[optimizer],
            rest_rate=best[rest_optimizer],
            seed=seed,
            steps=training.STEPS,
          )
          for optimizer, rest_optimizer in (OPTIMIZERS, OPTIMIZERS[::-1])
        ],
      )
    compare('_fixed', REST_RATE)
    if not rows('cost'):
      for line in training.costs(data, rounds=9):
        out.write('cost', 0, **line)


if __name__ == '__main__':
  start.run(main)
