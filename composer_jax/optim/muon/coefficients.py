"""Published coefficient lists of Newton-Schulz, as literals with their source.

One (a, b, c) per step of X <- a X + (b A + c A^2) X with A = X X^T, which maps
each singular value s to a s + b s^3 + c s^5. A list is here only if its
composed polynomial stays above zero on (0, 1.02], is finite at 1.02 (rounding
lifts singular values of a normalised matrix above 1) and exceeds 0.5 at 1 (the
response to a rank-1 momentum). Lists that fail this: Emerging-Optimizers'
'aol' (-0.99 at 1: an expert that saw one token would climb its gradient), the
cubic of arXiv 2606.00371, CANS (arXiv 2506.10935) and Polar Express with a
safety below 1.02, which diverge above 1.
"""

from typing import NamedTuple

Triple = tuple[float, float, float]

# Polar Express at a smaller safety diverges at 1.02.
LEAST_SAFETY = 1.02


class _List(NamedTuple):
  """One published list.

  Attributes:
    triples: of as many steps as the list can give.
    steps: taken unless another number is asked for.
    fewest: steps it can be cut to; most lists only work as a whole.
  """

  triples: tuple[Triple, ...]
  steps: int
  fewest: int


# KellerJordan/Muon: one triple for ever, steepest slope at zero for its cost;
# singular values end in 0.68-1.20, not at 1.
_KELLER = (3.4445, -4.7750, 2.0315)

_LISTS = {
  # Amsel et al., arXiv 2505.16932: each step is optimal after those before it,
  # so it can be cut short. Five end in 0.86-1.12 (safety 1.02), six
  # in 0.996-1.001.
  'polar_express': _List(
    triples=(
      (8.28721201814563, -23.595886519098837, 17.300387312530933),
      (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
      (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
      (3.3184196573706015, -2.488488024314874, 0.51004894012372),
      (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
      (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
      (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
      (1.875, -1.25, 0.375),
    ),
    steps=5,
    fewest=4,
  ),
  # YouJiacheng's and leloykun's, optax's 'dion' preset: ends in 0.98-1.15.
  'quintic': _List(
    triples=(
      (4.0848, -6.8946, 2.9270),
      (3.9505, -6.3029, 2.6377),
      (3.7418, -5.5913, 2.3037),
      (2.8769, -3.1427, 1.2046),
      (2.8366, -3.0525, 1.2012),
    ),
    steps=5,
    fewest=5,
  ),
  'keller': _List(triples=(_KELLER,) * 10, steps=5, fewest=1),
  # DeepSeek-V4, by way of Emerging-Optimizers: ends in 0.999-1.001.
  'deepseek_v4': _List(
    triples=(_KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2, steps=10, fewest=10
  ),
  # thib-s/flash-newton-schulz; ends in 0.94-1.05 from singular values above
  # 0.1, as its slope at zero is a third of the others'.
  'flash_aol': _List(
    triples=(
      (4.6051, -9.6552, 5.6769),
      (4.7505, -6.0861, 2.1790),
      (2.7763, -2.3190, 0.5523),
      (2.4231, -2.2861, 0.8193),
    ),
    steps=4,
    fewest=4,
  ),
}

NAMES = tuple(_LISTS)


def triples(
  name: str, steps: int | None = None, safety: float = LEAST_SAFETY
) -> tuple[Triple, ...]:
  """Returns the (a, b, c) of each step.

  Args:
    name: of NAMES.
    steps: None for the list's own number.
    safety: Polar Express is fitted to singular values up to 1; its polynomials
      are stretched to cover those up to this.

  Raises:
    ValueError: an unknown list, or one that cannot give this.
  """
  if name not in _LISTS:
    raise ValueError(
      f'Newton-Schulz coefficients {name!r} are not one of {list(NAMES)}.'
    )
  found = _LISTS[name]
  steps = found.steps if steps is None else steps
  if not found.fewest <= steps <= len(found.triples):
    raise ValueError(
      f'Newton-Schulz coefficients {name!r} cannot give {steps} steps, only '
      f'{found.fewest} to {len(found.triples)}; leave steps unset (None, or 0 '
      f'in the config of a run) for its {found.steps}.'
    )
  if name != 'polar_express':
    if safety != LEAST_SAFETY:
      raise ValueError(
        f'safety {safety} stretches polar_express only, not {name!r}; leave '
        f'it at {LEAST_SAFETY}.'
      )
    return found.triples[:steps]
  if not LEAST_SAFETY <= safety <= 1.1:
    raise ValueError(
      f'safety {safety} must lie in [{LEAST_SAFETY}, 1.1]: below, singular '
      'values that rounding lifts above 1 diverge; above, all end too low.'
    )
  # The last triple is the fixed point that 1 -> 1 needs unstretched.
  return tuple(
    t if t is found.triples[-1] else _stretched(t, safety)
    for t in found.triples[:steps]
  )


def _stretched(triple: Triple, by: float) -> Triple:
  a, b, c = triple
  return a / by, b / by**3, c / by**5
