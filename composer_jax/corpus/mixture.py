"""Shares of a budget among sources of different sizes."""

from collections.abc import Sequence


def allocate(
  sizes: Sequence[int], weights: Sequence[float], budget: int
) -> list[int]:
  """Divides a budget by weight; what one source cannot use goes to the rest.

  Args:
    sizes: what each source has.
    weights: relative shares, not negative; zero leaves a source out.
    budget: to be spent in all.

  Returns:
    One integer per source, at most its size, in all at most the budget. Where
    a source runs out, the shares of the others keep the ratio of their weights
    (water filling).

  Raises:
    ValueError: as many weights as sources are needed, one of them positive.
  """
  if len(weights) != len(sizes):
    raise ValueError(
      f'{len(weights)} mixture weights for {len(sizes)} sources; give one '
      'weight per source in data.weights, or none for equal shares.'
    )
  if any(w < 0 for w in weights) or not any(w > 0 for w in weights):
    raise ValueError(
      f'Mixture weights {list(weights)} must not be negative and one must be '
      'positive.'
    )
  spent = [0] * len(sizes)
  open_ = {i for i, w in enumerate(weights) if w > 0}
  left = budget
  while open_:
    total = sum(weights[i] for i in open_)
    full = [i for i in sorted(open_) if sizes[i] <= left * weights[i] / total]
    if not full:
      for i in sorted(open_):
        spent[i] = int(left * weights[i] / total)
      return spent
    for i in full:
      spent[i] = sizes[i]
    left -= sum(sizes[i] for i in full)
    open_ -= set(full)
  return spent
