"""Counts the operations of matrix products in unoptimised HLO."""

from collections.abc import Callable

from composer_jax.plan.hlo import overlap


def count(
  text: str,
  dynamic_trips: float,
  *,
  of: Callable[[list[int], list[int], list[int]], bool] = lambda *_: True,
) -> float:
  """Returns the operations of the program, two per multiply and add.

  Args:
    text: unoptimised HLO.
    dynamic_trips: of loops whose end the data decide; others count to a
      constant, which is read from their condition.
    of: which products count, by the dimensions of both sides and the result.
  """
  return overlap.read(text, dynamic_trips=dynamic_trips, of=of).flops
