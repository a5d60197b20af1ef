"""Runs loss and gradients of a decoder on one device and on a mesh of 8."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models import decoder, head, placement
from composer_jax.parallel import layouts, sequence, shardings, topology
from tests import compiling
from tests.parallel import collectives, muon_meshes

# For configs of at least this many tokens of vocabulary.
B, T, V = 8, 8, 18
# Affects only machine code; the program and its collectives are the same.
_OPTIONS = compiling.QUICKLY


def batch():
  """Returns two documents per row and so much padding that shards are empty."""
  tokens_BT = jax.random.randint(jax.random.key(1), (B, T), 0, V)
  segments = jnp.ones((B, T), jnp.int32).at[:, 3:].set(2)
  segments = segments.at[3:, 4:].set(0).at[6:].set(0)
  positions = jnp.where(jnp.arange(T) < 3, jnp.arange(T), jnp.arange(T) - 3)
  return tokens_BT, segments, jnp.broadcast_to(positions, (B, T))


@functools.cache
def initial(config):
  """Returns variables with biases and norms that have an effect."""
  init = jax.jit(
    functools.partial(decoder.init, config),
    compiler_options=compiling.INIT,
  )
  leaves, tree = jax.tree.flatten(init(jax.random.key(0)))
  random = np.random.default_rng(0)
  return tree.unflatten(
    [
      (leaf + 0.05 * random.normal(size=leaf.shape)).astype(leaf.dtype)
      for leaf in leaves
    ]
  )


def to_row(array, context, axis=1):
  """Returns tokens in zigzag order in the order of the row."""
  places = np.argsort(sequence.order(array.shape[axis], context))
  return np.take(array, places, axis=axis)


def _step(config, plan):
  """Returns (variables, batch, ids) -> ((loss, (load, ids)), gradients)."""
  # Uses both forms of the head; here four chunks of words, the last shorter.
  chunk = 5 if plan is not None and config.remat else None

  def loss(params, variables, batch, expert_ids_MBTA):
    variables = {**variables, decoder.trained(variables): params}
    out = decoder.Decoder(config, plan).apply(
      variables, *batch, expert_ids_MBTA=expert_ids_MBTA
    )
    logprobs_BT, _ = head.target_logprobs(
      variables,
      out.hidden_BTD,
      batch[0],
      batch[1],
      None,
      config,
      plan,
      chunk=chunk,
    )
    routers = out.stats.aux_loss_M.sum() + out.stats.z_loss_M.sum()
    # Weights differ by token, so that a token at a wrong place is noticed.
    weights_BT = 1 + jnp.sin(batch[0] + 3.0 * batch[2]) / 4
    value = 0.01 * routers - (weights_BT * logprobs_BT).sum() / 30
    return value, (out.stats.load_ME, out.expert_ids_MBTA)

  def step(variables, batch, expert_ids_MBTA):
    return jax.value_and_grad(loss, has_aux=True)(
      variables[decoder.trained(variables)],
      variables,
      batch,
      expert_ids_MBTA,
    )

  return step


@functools.cache
def single(config):
  """Returns ((loss, (load, ids)), gradients) of one device."""
  step = jax.jit(_step(config, None), compiler_options=_OPTIONS)
  return step(initial(config), batch(), None)


def compiled(
  config,
  shape,
  *,
  layout=layouts.TRAIN,
  is_replayed=False,
  sequence_order='contiguous',
  chunks=1,
):
  """Returns the plan, the program on a mesh, and its arguments' shardings.

  Raises:
    AssertionError: the compiler gathers a whole array to reshard it.
  """
  mesh = topology.make_mesh(*shape)
  where = dict(layout=layout, mesh=mesh)
  plan = placement.exchange_plan(config, **where, sequence_order=sequence_order)
  plan = dataclasses.replace(plan, chunks=chunks)
  places = placement.variable_shardings(config, **where)
  variables, _ = decoder.abstract(config)
  arguments = [variables, jax.eval_shape(batch), None]
  arguments_places = [places, shardings.tokens(layout, mesh), None]
  if is_replayed:
    ids_MBTA = (config.num_moe_layers, B, T, config.moe.num_active)
    arguments[2] = jax.ShapeDtypeStruct(ids_MBTA, jnp.uint16)
    arguments_places[2] = shardings.routes(layout, mesh)
  step = jax.jit(
    _step(config, plan),
    in_shardings=arguments_places,
    out_shardings=(None, places[decoder.trained(places)]),
  )
  program, warnings = muon_meshes.watched(
    lambda: step.lower(*arguments).compile(compiler_options=_OPTIONS)
  )
  assert 'rematerialization' not in warnings, warnings
  return plan, program, arguments_places


def sharded(config, shape, expert_ids_MBTA=None, **how):
  """Returns the plan, the results of `single`, and the collectives."""
  is_replayed = expert_ids_MBTA is not None
  plan, program, places = compiled(
    config, shape, **how, is_replayed=is_replayed
  )
  is_zigzag = plan.sequence_order == 'zigzag'

  def in_order(put, tree, axis):
    return jax.tree.map(
      lambda x: put(np.asarray(x), shape[2], axis) if is_zigzag else x, tree
    )

  arguments = [
    initial(config),
    in_order(sequence.to_device, batch(), 1),
    in_order(sequence.to_device, expert_ids_MBTA, 2),
  ]
  arguments = [
    x if place is None else jax.device_put(x, place)
    for x, place in zip(arguments, places, strict=True)
  ]
  (loss, (load_ME, ids_MBTA)), gradients = program(*arguments)
  ids_MBTA = in_order(to_row, ids_MBTA, 2)
  result = (loss, (load_ME, ids_MBTA)), gradients
  return plan, result, collectives.read(program.as_text())


def assert_equal(have, want):
  """Compares losses and gradients up to rounding, loads and routes exactly."""
  (loss, aux), grads = have
  (want_loss, want_aux), want_grads = want
  np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
  jax.tree.map(np.testing.assert_array_equal, aux, want_aux)
  # Another order of summation: a few units in the largest term's last place.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=5e-6 * np.abs(b).max() + 1e-9
    ),
    grads,
    want_grads,
  )
