"""Which packages, or files, of a corpus are held out."""

from collections.abc import Mapping

from composer_jax.core import files


def choose(
  sizes: Mapping[str, int], quota: float, *, least: float, seed: int
) -> set[str]:
  """Picks packages, or files, by hash until their bytes reach the quota.

  None is larger than a quarter of it, so that the held-out loss is that of
  several; where these have no more than `least` bytes, none is larger than all
  of it; where neither do, it is the one of nearest size.
  """
  order = sorted(sizes, key=lambda u: files.sha256(f'{seed}/{u}'.encode()))
  for most in (quota / 4, quota):
    chosen, total = set(), 0
    for unit in order:
      if sizes[unit] <= most and total < quota:
        chosen.add(unit)
        total += sizes[unit]
    if total > least:
      return chosen
  return {min(order, key=lambda unit: (abs(sizes[unit] - quota), unit))}
