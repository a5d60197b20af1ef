"""MuonBP: whole matrices are orthogonalised only every so many steps.

arXiv 2510.16981. Between those steps each device orthogonalises what it holds
of a matrix by itself, which needs no communication. The result depends on the
mesh: a block is as large as a shard, and a matrix that is not sharded is whole
at every step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from composer_jax.core import trees
from composer_jax.optim.muon import transform


def every(
  period: int,
  full: optax.GradientTransformation,
  between: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Runs `full` at the first step and each `period` steps after, else another.

  Args:
    period: steps from one run of `full` to the next; 1 is `full` itself.
    full: keeps a state with one `count` of steps in it, which decides.
    between: of the same state.

  Raises:
    ValueError: a period that is no number of steps.
  """
  if period < 1:
    raise ValueError(f'period must be at least 1 step, not {period}.')
  if period == 1:
    return full

  def update(updates, state, params=None):
    count = optax.tree.get(state, 'count')
    return jax.lax.cond(
      count % period == 0, full.update, between.update, updates, state, params
    )

  return optax.GradientTransformation(full.init, update)


def orthogonalize_momentum(
  matrices: Any,
  *,
  period: int,
  shardings: Any = None,
  options: transform.MuonOptions | None = None,
  ratio: float = 1.0,
) -> optax.GradientTransformation:
  """Like `muon.orthogonalize_momentum`, in blocks between full steps.

  The state is the same, so a run may change its period. Blocks are scaled such
  that `muon.scale_by_shape` with the same `rms` after this scales each by its
  own sides: every update then has one root mean square, whether of whole
  matrices or of blocks (unless `rms` is None).

  Args:
    matrices: see there.
    period: see `every`.
    shardings: see there.
    options: see there.
    ratio: of the step size of blocks to that of whole matrices (MuonBP has
      two), beside that scaling.
  """
  options = options or transform.MuonOptions()
  full, blocks = (
    transform.orthogonalize_momentum(
      matrices, shardings=shardings, options=options, blocks=is_blocks
    )
    for is_blocks in (False, True)
  )
  named = trees.flatten_names(matrices)
  placed = {} if shardings is None else trees.flatten_names(shardings)

  def scale(name, u):
    local = placed[name].shard_shape(u.shape) if placed else u.shape
    of_block, of_whole = (
      transform.update_scale(shape, named[name], options.rms)
      for shape in (local, u.shape)
    )
    factor = ratio * of_block / of_whole
    return (factor * u.astype(jnp.float32)).astype(u.dtype)

  def between(updates, state, params=None):
    updates, state = blocks.update(updates, state, params)
    return trees.map_names(scale, updates), state

  return every(period, full, optax.GradientTransformation(blocks.init, between))
