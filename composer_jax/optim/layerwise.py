"""Updates masters and moments a layer at a time, in place.

What an update computes with is then as large as one layer. Arrays in the memory
of the host are moved to the device for it, and back (Ren et al. 2021).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from composer_jax.core import trees


class Moved(NamedTuple):
  """Parameters with the updates added, and the updates."""

  params: Any
  updates: Any


def by_layer(
  make: Callable[[str], optax.GradientTransformationExtraArgs],
  axes: Any,
  add: Callable[..., Any],
) -> optax.GradientTransformationExtraArgs:
  """Makes a transform whose `update` returns `Moved`.

  Args:
    make: elementwise transform of the parameters under a first key; its
      `update` takes `place`, another number for each layer.
    axes: tree of logical axes; parameters without layers are moved at once.
    add: function of parameters, updates, the number of the step, and a place.
  """

  def init(params):
    return {name: make(name).init({name: params[name]}) for name in axes}

  def update(updates, state, params: Any = None, *, step=0, **_):
    after = {}, {}, {}
    for number, (name, tree) in enumerate(params.items()):
      whole = {name: updates[name]}, state[name], {name: tree}
      is_layered = 'layer' in jax.tree.leaves(axes[name])[0]
      count = jax.tree.leaves(tree)[0].shape[0] if is_layered else 0
      function = functools.partial(_layer, make(name), add, step, number << 16)
      moves, kept, masters = _moved(function, count, whole)
      for all_of, part in zip(after, (moves, {name: kept}, masters)):
        all_of.update(part)
    return Moved(after[2], after[0]), after[1]

  return optax.GradientTransformationExtraArgs(init, update)


def _layer(transform, add, step, first, updates, state, params, layer):
  place = first + layer
  moves, kept = transform.update(updates, state, params, place=place)
  return moves, kept, add(params, moves, step, place)


def _moved(function: Any, count: int, whole: Any) -> Any:
  """Returns what `function` makes of all layers."""

  def step(layer, whole):
    take = jax.lax.dynamic_index_in_dim
    part = lambda x: take(x, layer, 0, False) if count and x.ndim else x
    # Without the barrier XLA reads them where it writes, and copies the whole.
    old = trees.on_device(jax.tree.map(part, whole))
    old = jax.lax.optimization_barrier(old)

    def put(whole, old, new):
      # Numbers of steps change once.
      is_due = bool(whole.ndim) | (layer == max(0, count - 1))
      new = jnp.where(is_due, new, old)
      if trees.is_on_host(whole):
        new = jax.device_put(new, jax.memory.Space.Host)
      if not count or not whole.ndim:
        return new
      return jax.lax.dynamic_update_index_in_dim(whole, new, layer, 0)

    return jax.tree.map(put, whole, old, function(*old, layer))

  return jax.lax.fori_loop(0, count, step, whole) if count else step(0, whole)
