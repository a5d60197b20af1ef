"""Muon as a plain optax transform over labelled matrices.

Momentum orthogonalised at each parameter's natural granularity (per layer, per
expert, per head), K. Jordan 2024, with the update scale of Moonlight
(arXiv 2502.16982). Equal to `optax.contrib.muon` on unsharded matrices. It
leaves the sharding of Newton-Schulz to the compiler: experts sharded over
their own axis stay local, a matrix that is itself sharded is gathered.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from composer_jax.optim import newton_schulz


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
  """Which dimensions of a parameter form the matrix; the others are batch.

  Attributes:
    rows: dimensions merged, in order, into the input side.
    columns: dimensions merged, in order, into the output side.
  """

  rows: tuple[int, ...]
  columns: tuple[int, ...]


class MuonState(NamedTuple):
  """Steps taken and the momentum; the coefficients are not state."""

  count: jax.Array
  momentum: Any


def _orthogonalize_parameter(
  x: jax.Array, matrix: Matrix, options: newton_schulz.NewtonSchulz
) -> jax.Array:
  """Orthogonalises a parameter along its matrix dimensions."""
  sides = matrix.rows + matrix.columns
  # Batch dimensions are never merged: the compiler keeps their sharding.
  batch = tuple(d for d in range(x.ndim) if d not in sides)
  order = batch + sides
  moved = x.transpose(order)
  split = len(batch) + len(matrix.rows)
  stack = moved.reshape(
    moved.shape[: len(batch)]
    + (
      math.prod(moved.shape[len(batch) : split]),
      math.prod(moved.shape[split:]),
    )
  )
  result = newton_schulz.orthogonalize(stack, options).reshape(moved.shape)
  inverse = tuple(order.index(d) for d in range(x.ndim))
  return result.transpose(inverse).astype(x.dtype)


def update_scale(
  shape: tuple[int, ...], matrix: Matrix, rms: float | None
) -> float:
  """Returns the factor on the orthogonal matrix.

  Args:
    shape: of the whole parameter.
    matrix: its matrix dimensions.
    rms: root mean square aimed at, as AdamW's (Moonlight uses 0.2): the factor
      is rms * sqrt(max(rows, columns)), as an orthogonal matrix has an RMS of
      1 / sqrt(max(rows, columns)). None: sqrt(max(1, columns / rows)).
  """
  rows = math.prod(shape[d] for d in matrix.rows)
  columns = math.prod(shape[d] for d in matrix.columns)
  if rms is None:
    return math.sqrt(max(1.0, columns / rows))
  return rms * math.sqrt(max(rows, columns))


def scale_by_muon(
  matrices: Any,
  *,
  beta: float = 0.95,
  rms: float | None = None,
  options: newton_schulz.NewtonSchulz | None = None,
) -> optax.GradientTransformation:
  """Replaces gradients by scaled orthogonal Nesterov momentum.

  Args:
    matrices: tree of the parameters' structure with a `Matrix` at each leaf
      (and `optax.MaskedNode()` where another transform owns the parameter).
    beta: decay of the momentum.
    rms: see `update_scale`.
    options: of Newton-Schulz.
  """
  options = options or newton_schulz.NewtonSchulz()

  def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return MuonState(count=jnp.zeros([], jnp.int32), momentum=zeros)

  def update(updates, state, params=None):
    del params
    count = jnp.asarray(optax.safe_increment(state.count))
    momentum = jax.tree.map(
      lambda m, g: beta * m + (1 - beta) * g, state.momentum, updates
    )
    # Bias corrections only change the ratio of momentum to gradient in the
    # look-ahead; Newton-Schulz drops any common factor.
    ahead = 1 - beta ** (count + 1).astype(jnp.float32)
    here = 1 - beta ** count.astype(jnp.float32)

    def direction(m, g, matrix):
      nesterov = beta * m / ahead + (1 - beta) * g / here
      scale = update_scale(nesterov.shape, matrix, rms)
      return scale * _orthogonalize_parameter(nesterov, matrix, options)

    with jax.named_scope('muon'):
      updates = jax.tree.map(direction, momentum, updates, matrices)
    return updates, MuonState(count=count, momentum=momentum)

  return optax.GradientTransformation(init, update)
