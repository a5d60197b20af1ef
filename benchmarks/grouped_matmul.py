"""Rows per second of the grouped matmul, beside `jax.lax.ragged_dot`.

  python -m benchmarks.grouped_matmul [--quick]

Rows of random experts, forward alone and with both gradients, for few and for
many experts, and a decode step. The peer is the same function through
`jax.lax.ragged_dot`, which multiplies every row by every expert on a CPU and
on NVIDIA. The limit counts the useful operations (two per weight and row;
three times that with gradients) at the speed of the machine's own matrix
product, or at the data sheet's peak of an accelerator. On an accelerator
everything is bfloat16.
"""

import argparse

import numpy as np

from benchmarks import interleaved

DIM, WIDTH = 256, 512
# Rows, experts, with gradients, ratio to reach.
CASES = (
  (2048, 8, False, 2.5),
  (2048, 8, True, 3.0),
  (2048, 64, False, 8.0),
  (2048, 64, True, 8.0),
  (128, 8, False, 2.0),
  (128, 64, False, 4.0),
)


def _arrays(rows: int, num_experts: int):
  """Returns (lhs_YD, rhs_EDF, group_sizes_E); every row has an expert."""
  import jax
  import jax.numpy as jnp

  on_cpu = jax.default_backend() == 'cpu'
  dtype = jnp.float32 if on_cpu else jnp.bfloat16
  keys = jax.random.split(jax.random.key(0), 2)
  even = np.full(num_experts, 1 / num_experts)
  sizes_E = np.random.default_rng(0).multinomial(rows, even)
  return (
    jax.random.normal(keys[0], (rows, DIM), dtype),
    jax.random.normal(keys[1], (num_experts, DIM, WIDTH), dtype),
    jnp.asarray(sizes_E, jnp.int32),
  )


def _runner(arrays, backend: str, gradients: bool, repeats: int):
  """Returns a function that multiplies `repeats` times and counts rows."""
  import jax

  from composer_jax.kernels import grouped_matmul

  lhs_YD, rhs_EDF, sizes_E = arrays

  @jax.jit
  def multiply(lhs_YD, rhs_EDF, sizes_E):
    out_YF, pull = jax.vjp(
      lambda lhs, rhs: grouped_matmul.grouped_matmul(
        lhs, rhs, sizes_E, backend=backend
      ),
      lhs_YD,
      rhs_EDF,
    )
    return (out_YF, *pull(out_YF)) if gradients else out_YF

  def run() -> float:
    out = None
    for _ in range(repeats):
      out = multiply(lhs_YD, rhs_EDF, sizes_E)
    jax.block_until_ready(out)
    return float(repeats * len(lhs_YD))

  return run


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='under a minute')
  quick = parser.parse_args().quick
  interleaved.pin_to_one_core()
  peak = interleaved.peak()
  for rows, num_experts, gradients, goal in CASES:
    arrays = _arrays(rows, num_experts)
    # Short products are repeated within a round, so that the clock's own
    # resolution does not show.
    repeats = max(1, 2048 // rows // (4 if quick else 1))
    flops = 2 * DIM * WIDTH * (3 if gradients else 1)
    found = interleaved.rates(
      _runner(arrays, 'auto', gradients, repeats),
      _runner(arrays, 'ragged', gradients, repeats),
      3 if quick else 9,
    )
    what = 'forward and backward' if gradients else 'forward'
    interleaved.report(
      'grouped_matmul',
      f'{what}, {rows} rows of {num_experts} experts, {DIM} by {WIDTH}',
      found,
      limit=peak / flops,
      goal=f'ratio >= {goal}',
      met=lambda _, ratio, goal=goal: ratio >= goal,
      unit='rows/s',
    )


if __name__ == '__main__':
  main()
