"""Cases of the grouped matmul's benchmarks, and functions that run them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
  """A grouped matmul: rows of `num_experts` experts, [dim] to [width]."""

  rows: int
  num_experts: int
  dim: int
  width: int
  gradients: bool

  def flops(self) -> float:
    """Useful operations: each row meets one matrix; backward is two more."""
    return 2.0 * self.rows * self.dim * self.width * (1 + 2 * self.gradients)

  def sizes(self) -> np.ndarray:
    """Returns uneven sizes; the busiest of 64 experts has 4 times the mean."""
    rng = np.random.default_rng(0)
    load_E = rng.dirichlet(np.full(self.num_experts, 2.0))
    return rng.multinomial(self.rows, load_E).astype(np.int32)

  def waste(self) -> str:
    """Says what rows the loops on a CPU execute, and the most that they can."""
    import jax.numpy as jnp

    sizes_E = jnp.asarray(self.sizes())
    executed = int(executed_rows(sizes_E, self.rows))
    bound = worst_case_rows(self.rows, self.num_experts)
    return (
      f'executed {executed / self.rows:.3f}x of the rows, '
      f'at worst {bound / self.rows:.3f}x'
    )

  def __str__(self) -> str:
    what = 'forward and backward' if self.gradients else 'forward'
    return (
      f'{what}, {self.rows // self.num_experts} rows an expert: '
      f'{self.num_experts} experts, {self.dim} by {self.width}'
    )


def executed_rows(group_sizes_E: Any, num_rows: int) -> Any:
  """Returns the number of rows that the loops of a `schedule` multiply."""
  from composer_jax.kernels.grouped import schedule

  loops = schedule.schedule(group_sizes_E, num_rows)
  return sum(p.rows * (p.last - p.first) for p in loops)


def worst_case_rows(num_rows: int, num_groups: int) -> int:
  """Returns a bound on `executed_rows` that no group sizes exceed."""
  from composer_jax.kernels.grouped import schedule

  (step, *_), _ = schedule.sizes(num_rows, num_groups)
  # A piece of one row wastes the most, and every group has one tail.
  return num_rows + min(num_groups, num_rows) * (step - 1)


class Arrays(NamedTuple):
  """The arrays of one case, on the device."""

  lhs_YD: Any
  rhs_EDF: Any
  sizes_E: Any
  d_out_YF: Any


def arrays(case: Case, dtype: str = 'float32') -> Arrays:
  import jax

  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (
    (case.rows, case.dim),
    (case.num_experts, case.dim, case.width),
    (case.rows, case.width),
  )
  lhs_YD, rhs_EDF, d_out_YF = (
    jax.random.normal(key, shape, dtype)
    for key, shape in zip(keys, shapes, strict=True)
  )
  return Arrays(lhs_YD, rhs_EDF, jax.numpy.asarray(case.sizes()), d_out_YF)


def runner(
  case: Case, multiply: Callable[..., Any], operands: Arrays, repeats: int = 1
) -> Callable[[], float]:
  """Returns a function that multiplies `repeats` times and counts rows.

  Args:
    case: grouped matmul to run.
    multiply: function (lhs_YD, rhs_EDF, sizes_E) -> out_YF.
    operands: arrays of the case.
    repeats: products of a round, so that the clock's resolution does not show.
  """
  import jax

  @jax.jit
  def run_once(lhs_YD, rhs_EDF, sizes_E, d_out_YF):
    if not case.gradients:
      return multiply(lhs_YD, rhs_EDF, sizes_E)
    out_YF, pull = jax.vjp(
      lambda lhs, rhs: multiply(lhs, rhs, sizes_E), lhs_YD, rhs_EDF
    )
    return out_YF, *pull(d_out_YF)

  def run() -> float:
    for _ in range(repeats):
      jax.block_until_ready(run_once(*operands))
    return float(repeats * case.rows)

  return run


def grouped(backend: str) -> Callable[..., Any]:
  def multiply(lhs_YD, rhs_EDF, sizes_E):
    from composer_jax.kernels.grouped import matmul

    return matmul.grouped_matmul(lhs_YD, rhs_EDF, sizes_E, backend=backend)

  return multiply


def dense(case: Case) -> Callable[..., Any]:
  """Returns a dense product with as many useful operations, by one matrix."""
  shape = (case.dim, case.width)

  def multiply(lhs_YD, rhs_DF, sizes_E):
    del sizes_E
    from composer_jax.kernels import linear

    assert rhs_DF.shape == shape
    return linear.linear(lhs_YD, rhs_DF)

  return multiply


def of_one_expert(operands: Arrays) -> Arrays:
  """Returns the arrays of `dense`."""
  return operands._replace(rhs_EDF=operands.rhs_EDF[0])
