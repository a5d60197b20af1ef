"""Rows per second of the grouped matmul: products that each row needs once.

  python -m benchmarks.grouped_matmul [--quick]
  python -m benchmarks.grouped_matmul --gpu [--tiny]

Uneven loads, one core. The peers, in turns with ours:
- from 64 rows per expert on, a dense product of as many useful operations,
  which is what a grouped matmul without overhead would reach;
- below 16 rows per expert, where reading is the work, a pass that reads the
  matrices of experts with rows;
- `jax.lax.ragged_dot`, which multiplies every row by every expert on a CPU.
Each line says how many rows the loops execute, counted from their schedule, and
the most that they can. --gpu is `benchmarks.grouped_gpu`.
"""

import argparse

from benchmarks import grouped_cases, grouped_gpu, interleaved
from benchmarks.grouped_cases import Case

# Beside a dense product, with the goal for the ratio by rows per expert.
DENSE = (
  Case(8 * 64, 8, 256, 512, True),
  Case(8 * 256, 8, 256, 512, True),
  Case(64 * 64, 64, 256, 512, True),
  Case(64 * 256, 64, 256, 512, True),
  Case(384 * 64, 384, 256, 512, True),
)
DENSE_LONG = (
  Case(8 * 512, 8, 256, 512, True),
  Case(384 * 256, 384, 256, 512, True),
  Case(64 * 64, 64, 768, 1024, True),
  Case(64 * 256, 64, 768, 1024, True),
)
# Beside reading the matrices of experts with rows.
BYTES = (
  Case(64 * 2, 64, 256, 512, False),
  Case(64 * 8, 64, 256, 512, False),
  Case(384 * 8, 384, 256, 512, False),
)
# Beside ragged_dot, with the goal for the ratio.

RAGGED = (
  (Case(2048, 8, 256, 512, False), 3.0),
  (Case(2048, 8, 256, 512, True), 4.0),
  (Case(2048, 64, 256, 512, True), 12.0),
)


def _beside_dense(case: Case, rounds: int, peak: float) -> None:
  arrays = grouped_cases.arrays(case)
  repeats = max(1, 4096 // case.rows)
  rates = interleaved.rates(
    grouped_cases.runner(case, grouped_cases.grouped('auto'), arrays, repeats),
    grouped_cases.runner(
      case,
      grouped_cases.dense(case),
      grouped_cases.of_one_expert(arrays),
      repeats,
    ),
    rounds,
  )
  goal = 0.7 if case.rows >= 256 * case.num_experts else 0.5
  interleaved.report(
    'grouped_matmul',
    str(case),
    rates,
    against='a dense product',
    limit=peak / (case.flops() / case.rows),
    goal=f'ratio >= {goal}',
    met=lambda _, ratio: ratio >= goal,
    unit='rows/s',
    note=case.waste(),
  )


def _beside_bytes(case: Case, rounds: int) -> None:
  import jax

  arrays = grouped_cases.arrays(case)
  touched_E = case.sizes() > 0
  matrices = arrays.rhs_EDF[touched_E]
  run = grouped_cases.runner(case, grouped_cases.grouped('auto'), arrays)
  read_all = jax.jit(lambda x: x.sum())

  def ours() -> float:
    run()
    return float(matrices.nbytes)

  def read() -> float:
    jax.block_until_ready(read_all(matrices))
    return float(matrices.nbytes)

  interleaved.report(
    'grouped_matmul',
    str(case),
    interleaved.rates(ours, read, rounds),
    against='reading the experts with rows',
    limit=None,
    goal='ratio >= 0.5',
    met=lambda _, ratio: ratio >= 0.5,
    unit='bytes/s',
    note=f'{touched_E.sum()} experts with rows; {case.waste()}',
  )


def _beside_ragged(case: Case, rounds: int, peak: float, goal: float) -> None:
  arrays = grouped_cases.arrays(case)
  interleaved.report(
    'grouped_matmul',
    str(case),
    interleaved.rates(
      grouped_cases.runner(case, grouped_cases.grouped('auto'), arrays),
      grouped_cases.runner(case, grouped_cases.grouped('ragged'), arrays),
      rounds,
    ),
    against='jax.lax.ragged_dot',
    limit=peak / (case.flops() / case.rows),
    goal=f'ratio >= {goal}',
    met=lambda _, ratio: ratio >= goal,
    unit='rows/s',
    note=case.waste(),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='under a minute')
  parser.add_argument('--gpu', action='store_true', help='on an accelerator')
  parser.add_argument(
    '--tiny', action='store_true', help='with --gpu: sizes that a CPU can do'
  )
  options = parser.parse_args()
  if options.gpu:
    grouped_gpu.run(is_tiny=options.tiny)
    return
  interleaved.set_allocator()
  interleaved.pin_to_one_core()
  peak = interleaved.peak()
  rounds = 5 if options.quick else 11
  for case in DENSE if options.quick else (*DENSE, *DENSE_LONG):
    _beside_dense(case, rounds, peak)
  for case in BYTES:
    _beside_bytes(case, rounds)
  for case, goal in RAGGED[: 2 if options.quick else None]:
    _beside_ragged(case, max(3, rounds // 2), peak, goal)


if __name__ == '__main__':
  main()
