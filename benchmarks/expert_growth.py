"""How the experts' time grows with their number, at fixed active experts.

  python -m benchmarks.expert_growth [--quick]

Forward and backward of the grouped matmul of 2,048 rows (1,024 tokens of two
experts), 256 by 512, for 8 to 256 experts, on one core. Beside each time stands
its bound, the greater of two times: useful operations at the measured speed of
a dense product, and the bytes that must move at the measured speed of memory.
These bytes are: the matrices of experts with rows, read forward and backward;
the gradient of all matrices, written; rows into and out of all three products.
`ratio` is bound over time.
"""

import argparse

from benchmarks import grouped_cases, interleaved
from benchmarks.grouped_cases import Case

EXPERTS = (8, 16, 32, 64, 128, 256)
ROWS, DIM, WIDTH = 2048, 256, 512
_GOAL = 1.5  # times the bound


def _bytes(case: Case) -> float:
  touched = int((case.sizes() > 0).sum())
  matrices = case.dim * case.width * (2 * touched + case.num_experts)
  # Forward reads lhs and writes out, d_lhs and d_rhs read d_out, d_rhs reads
  # lhs, d_lhs is written.
  rows = case.rows * 3 * (case.dim + case.width)
  return 4.0 * (matrices + rows)


def _bandwidth(case: Case, rounds: int) -> float:
  """Returns bytes/s of adding two arrays of the size of all matrices.

  The addition reads two arrays and writes one, as the case does.
  """
  import jax

  arrays = grouped_cases.arrays(case)
  other_EDF = arrays.rhs_EDF + 1
  add = jax.jit(lambda x, y: x + y)

  def run() -> float:
    jax.block_until_ready(add(arrays.rhs_EDF, other_EDF))
    return 3.0 * other_EDF.nbytes

  return max(interleaved.rates(run, run, rounds)[0])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='under a minute')
  quick = parser.parse_args().quick
  interleaved.set_allocator()
  interleaved.pin_to_one_core()
  rounds = 5 if quick else 15
  for num_experts in EXPERTS:
    case = Case(ROWS, num_experts, DIM, WIDTH, True)
    arrays = grouped_cases.arrays(case)
    ours = grouped_cases.runner(case, grouped_cases.grouped('auto'), arrays, 2)
    dense = grouped_cases.runner(
      case, grouped_cases.dense(case), grouped_cases.of_one_expert(arrays), 2
    )
    bandwidth = _bandwidth(case, rounds)
    # Takes turns with ours, so that a machine that slows down slows both.
    rates = interleaved.rates(ours, dense, rounds)
    by_bytes = case.rows * bandwidth / _bytes(case)
    bound = [min(rate, by_bytes) for rate in rates[1]]
    interleaved.report(
      'expert_growth',
      f'forward and backward of {ROWS} rows: {num_experts} experts',
      (rates[0], bound),
      against='the bound by products and bytes',
      limit=None,
      goal=f'ratio >= {1 / _GOAL:.3f}',
      met=lambda _, ratio: ratio >= 1 / _GOAL,
      unit='rows/s',
      note=f'{_bytes(case) / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s',
    )


if __name__ == '__main__':
  main()
