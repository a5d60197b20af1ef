"""Orthogonalises matrices by a fixed number of Newton-Schulz steps.

Maps X = U S V^T to about U V^T with matrix products only, the step that makes
Muon out of momentum. Pure: knows nothing of parameters, roles or meshes.
"""

import dataclasses

import jax
import jax.numpy as jnp

# KellerJordan/Muon: steepest slope at zero; singular values end in 0.68-1.20,
# not at 1.
KELLER = ((3.4445, -4.7750, 2.0315),) * 5

# YouJiacheng's quintics, optax's 'dion' preset: singular values end in
# 0.98-1.15.
QUINTIC = (
  (4.0848, -6.8946, 2.9270),
  (3.9505, -6.3029, 2.6377),
  (3.7418, -5.5913, 2.3037),
  (2.8769, -3.1427, 1.2046),
  (2.8366, -3.0525, 1.2012),
)

_PRESETS = {'keller': KELLER, 'quintic': QUINTIC}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
  """How to orthogonalise.

  Attributes:
    preset: 'keller' or 'quintic'; one (a, b, c) per step of
      X <- a X + (b A + c A^2) X with A = X X^T.
    eps: added to the Frobenius norm, after scaling by the largest entry.
  """

  preset: str = 'keller'
  eps: float = 1e-8

  def __post_init__(self):
    if self.preset not in _PRESETS:
      raise ValueError(
        f'Newton-Schulz preset {self.preset!r} is not one of '
        f'{sorted(_PRESETS)}.'
      )

  @property
  def coefficients(self) -> tuple[tuple[float, float, float], ...]:
    return _PRESETS[self.preset]


def orthogonalize(x: jax.Array, options: NewtonSchulz) -> jax.Array:
  """Orthogonalises each matrix of a stack.

  Zero stays zero and NaN stays NaN. Dividing by the largest entry first makes
  the result independent of the gradient's scale down to the smallest floats;
  with the norm alone it fades below about 1e-8.

  Args:
    x: [..., rows, columns]; every leading axis is a batch axis.
    options: preset and eps.

  Returns:
    float32 of the same shape.
  """
  # float32: bfloat16 operands move the singular values by a per cent.
  x = x.astype(jnp.float32)
  is_tall = x.shape[-2] > x.shape[-1]
  if is_tall:  # f(X^T) = f(X)^T, and A is smaller on the short side.
    x = x.swapaxes(-1, -2)
  largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
  x = x / jnp.where(largest == 0, 1.0, largest)
  x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + options.eps)
  for a, b, c in options.coefficients:
    gram = x @ x.swapaxes(-1, -2)
    x = a * x + (b * gram + c * (gram @ gram)) @ x
  return x.swapaxes(-1, -2) if is_tall else x
