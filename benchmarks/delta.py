"""Delta bundles beside other ways to send a step, and beside their bounds.

  python -m benchmarks.delta [--quick] [--recordings=DIR] [--only=PARTS]

One run measures:
- bytes of our bundles (`small` and `fast`), of XOR with zstd and of lists of
  indices and gaps, beside the entropy bounds of a coder that knows the base's
  exponents (E) or nothing of it (M);
- rates of one core, hashes included, beside its memcpy; the gain of a second
  thread; the pause of a real engine;
- a world of 4, 16 and 64 clusters behind simulated links;
- how many weights change, beside the law that predicts it; quantised receivers;
- the time that 1 TB would take by these figures.

The policies are synthetic (`delta_data`), and with --recordings also those of
real training, which `python -m experiments.studies.delta.record` makes in
twenty minutes of a core. A line's case says dtype, learning rate and the share
changed. Bundle bytes include the manifest and its hashes; the peers' are of
their payload alone. Figures are medians. Six minutes on a quiet machine.
"""

import argparse
import os
import pathlib
from collections.abc import Callable

import numpy as np

from benchmarks import (
  delta_data,
  delta_pause,
  delta_recordings,
  delta_sizes,
  delta_speed,
  delta_terabyte,
  delta_world,
  interleaved,
)

# Label, generator, rate, least full bytes over bundle bytes (0 for no goal).
SYNTHETIC = (
  ('AdamW at 1e-6', delta_data.adamw, 1e-6, 165.0),
  ('AdamW at 3e-6', delta_data.adamw, 3e-6, 0.0),
  ('AdamW at 1e-5', delta_data.adamw, 1e-5, 0.0),
  ('AdamW at 1e-3', delta_data.adamw, 1e-3, 0.0),
  ('Muon of rms 1e-6', delta_data.muon, 1e-6, 0.0),
)
TIMED = ('AdamW at 1e-6', 'AdamW at 3e-6')  # synthetic cases
QUANTISED = ('AdamW at 1e-6', 'AdamW at 1e-5')
PARTS = ('sizes', 'law', 'speed', 'threads', 'world', 'pause')


def _parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true')
  parser.add_argument('--recordings', type=pathlib.Path, default=None)
  parser.add_argument('--only', default=','.join(PARTS))
  args = parser.parse_args()
  args.only = set(args.only.split(','))
  if unknown := args.only - set(PARTS):
    parser.error(f'--only takes parts of {PARTS}; got {sorted(unknown)}.')
  if args.recordings and not delta_recordings.names(args.recordings):
    parser.error(
      f'{args.recordings} holds no recordings; make them with `python -m '
      'experiments.studies.delta.record --out=FOLDER`.'
    )
  return args


def _synthetic(
  args: argparse.Namespace,
  name: str,
  make: Callable[..., Callable[[], np.ndarray]],
  rate: float,
) -> delta_data.Case:
  return delta_data.synthetic(
    f'bf16, synthetic {name}',
    make,
    rate,
    experts=1 if args.quick else 8,
    policies=4 if args.quick else delta_data.POLICIES,
  )


def main() -> None:
  args = _parse()
  cores = os.sched_getaffinity(0)
  interleaved.pin_to_one_core()
  rounds = 3 if args.quick else 7
  rates, sizes = {}, {}
  for name, make, rate, goal in SYNTHETIC:
    if args.only <= {'world', 'pause'}:
      break
    case = _synthetic(args, name, make, rate)
    if 'sizes' in args.only:
      # A bundle's constant part weighs eight times as much in --quick.
      goal = 0.0 if args.quick else goal
      sizes[name] = delta_sizes.measure(case, peers_on=3, full_goal=goal)
    if 'law' in args.only:
      delta_sizes.law(case)
      if name in QUANTISED:
        delta_sizes.quantised(case)
    if name in TIMED:
      label, chunks, share = delta_speed.described(case)
      if 'speed' in args.only:
        rates[name] = delta_speed.measure(label, chunks, rounds, share=share)
      if 'threads' in args.only:
        delta_speed.threads(label, chunks, rounds, cores)
  if args.recordings:
    _recorded(args, rounds)
  elif args.only & {'sizes', 'law', 'speed'}:
    print(
      'No --recordings: real training is left out; make them with `python -m '
      'experiments.studies.delta.record`.'
    )
  if 'world' in args.only:
    delta_world.measure(cores, quick=args.quick)
  if TIMED[0] in rates and TIMED[0] in sizes:
    delta_terabyte.tell(TIMED[0], sizes[TIMED[0]], rates[TIMED[0]])
  if 'pause' in args.only:
    delta_pause.measure(rounds, quick=args.quick)  # Last, as it loads jax.


def _recorded(args: argparse.Namespace, rounds: int) -> None:
  for case in delta_data.recorded(args.recordings):
    if 'sizes' in args.only:
      delta_sizes.measure(case, peers_on=3, full_goal=0.0)
    if 'law' in args.only:
      delta_sizes.law(case)
    if 'speed' in args.only:
      label, chunks, share = delta_speed.described(case)
      delta_speed.measure(label, chunks, rounds, share=share)


if __name__ == '__main__':
  main()
