"""NorMuon: equal step sizes for the neurons of an orthogonalised update.

arXiv 2510.05491. Orthogonal matrices have singular values of one, but the rows
or columns that belong to single neurons differ in size when there are more of
them than inputs. Each neuron, one output unit of a matrix, keeps a running mean
of its update's squares over the inputs and is divided by the root of it; the
matrix is then brought back to the Frobenius norm it came with.

Works on updates in any layout: means over a sharded side are reductions of one
number per neuron, so a mesh changes nothing but their rounding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from composer_jax.core import trees
from composer_jax.optim import roles


class NeuronNormState(NamedTuple):
  """Mean squares, float32, of size 1 along each matrix's input side."""

  second_moment: Any


def scale_by_neuron_norm(
  matrices: Any, *, beta: float = 0.95, eps: float = 1e-8
) -> optax.GradientTransformation:
  """Normalises each neuron; goes after `muon.orthogonalize_momentum`.

  Before or after `muon.scale_by_shape` makes no difference. Zero stays zero,
  and NaN stays in its matrix.

  Args:
    matrices: tree of the parameters' structure with a `roles.Matrix` at each
      leaf (and `optax.MaskedNode()` where another transform owns it).
    beta: decay of the mean squares. They are not corrected for starting at
      zero: a factor common to a matrix cancels.
    eps: added to their roots.
  """
  named = trees.flatten_names(matrices)

  def init(params):
    def zeros(name, p):
      # Of the parameter, so that it is sharded as that is elsewhere.
      return jnp.zeros_like(
        p.sum(named[name].rows, keepdims=True), dtype=jnp.float32
      )

    return NeuronNormState(second_moment=trees.map_names(zeros, params))

  def update(updates, state, params=None):
    del params

    def mean_square(name, u):
      square = jnp.square(u.astype(jnp.float32))
      return square.mean(named[name].rows, keepdims=True)

    with jax.named_scope('neuron_norm'):
      means = trees.map_names(mean_square, updates)
      moments = jax.tree.map(
        lambda moment, mean: beta * moment + (1 - beta) * mean,
        state.second_moment,
        means,
      )
      factors = {
        name: _factor(mean, moment, named[name], eps)
        for (name, mean), moment in zip(
          trees.flatten_names(means).items(),
          jax.tree.leaves(moments),
          strict=True,
        )
      }
      updates = trees.map_names(
        lambda name, u: (u * factors[name]).astype(u.dtype), updates
      )
    return updates, NeuronNormState(second_moment=moments)

  return optax.GradientTransformation(init, update)


def _factor(
  mean: jax.Array, moment: jax.Array, matrix: roles.Matrix, eps: float
) -> jax.Array:
  """Returns each neuron's factor, from numbers per neuron alone."""
  factor = 1 / (jnp.sqrt(moment) + eps)
  # Squares of the matrix's Frobenius norm, over the length of its inputs.
  before, after = (
    x.sum(matrix.columns, keepdims=True) for x in (mean, mean * factor**2)
  )
  return factor * jnp.sqrt(before / jnp.where(after == 0, 1, after))
