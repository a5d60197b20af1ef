"""Batch-invariant numerics: the same bits, whatever else is in the batch.

Three sessions are scored in every way that consumes tokens: packed training in
several packings, with and without gradient and recomputation; prefill whole and
in random chunks; decode token by token. Slots, neighbours, padding, page tables
and batch sizes differ. Where bits are compared no compiler option is set.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import rows
from composer_jax.kernels.attention import grouped_query
from composer_jax.models import decoder, head, placement
from composer_jax.parallel import layouts
from composer_jax.rollout import forward
from tests.rollout import forward_test

LENGTHS = (37, 70, 33)
TEMPERATURES = (1.0, 0.7, 1.3)
# A row long enough that fast numerics do not take it for a decode step.
LONG = 523
GROUPED, LATENT = forward_test.GROUPED, forward_test.LATENT
MOE = forward_test.MOE | {'ffw_dim': 75}
CONFIGS = {
  'grouped': dict(
    attention=GROUPED,
    moe=MOE | {'router': 'softmax'},
    tie_embeddings=True,
    num_layers=3,
  ),
  'latent': dict(
    attention=LATENT,
    moe=MOE
    | {
      'router': 'sigmoid',
      'num_experts': 6,
      'num_groups': 3,
      'num_active_groups': 2,
    },
    rope={'theta': 100.0, 'interleaved': True, 'yarn': forward_test.YARN},
    tie_embeddings=False,
    num_layers=2,
    num_dense_layers=0,
  ),
}
SLOW = pytest.mark.slow
# By default tests/rl/zero_mismatch_test.py holds a model to the same law.
MODELS_TO_TRY = [
  pytest.param('grouped-float32', marks=SLOW),
  pytest.param('latent-bfloat16', marks=SLOW),
  pytest.param('grouped-bfloat16', marks=SLOW),
  pytest.param('latent-float32', marks=SLOW),
]


@pytest.fixture(
  scope='module',
  params=MODELS_TO_TRY,
)
def model(request, make_config, make_variables):
  config = _config(request.param, make_config)
  return config, make_variables(config, 0)


def _config(name, make_config):
  name, dtype = name.split('-')
  return make_config(
    # Wide enough that a product's bits depend on how many rows it has, and a
    # width that no vector register divides.
    embed_dim=261,
    dense_ffw_dim=150,
    compute_dtype=dtype,
    numerics='batch_invariant',
    **CONFIGS[name],
  )


@pytest.fixture(scope='module')
def tokens():
  random = np.random.default_rng(0)
  return [random.integers(0, 40, n) for n in LENGTHS]


def pack(tokens, rows_of, length):
  """Lays sessions into rows, each at a multiple of a key block."""
  arrays = np.zeros((4, len(rows_of), length))
  arrays[3] = 1
  places = {}
  for row, sessions in enumerate(rows_of):
    start = 0
    for i, s in enumerate(sessions):
      n = LENGTHS[s]
      parts = (tokens[s], i + 1, np.arange(n), TEMPERATURES[s])
      for array, part in zip(arrays, parts, strict=True):
        array[row, start : start + n] = part
      places[s] = row, start
      start += -(-n // grouped_query.KEY_BLOCK) * grouped_query.KEY_BLOCK
  batch = *(a.astype(np.int32) for a in arrays[:3]), arrays[3].astype('f4')
  return batch, places


def score(config, variables, batch):
  tokens_BT, segments_BT, positions_BT, temperatures_BT = batch
  out = decoder.Decoder(config).apply(
    variables, tokens_BT, segments_BT, positions_BT
  )
  logprobs_BT, _ = head.target_logprobs(
    variables, out.hidden_BTD, tokens_BT, segments_BT, temperatures_BT, config
  )
  return logprobs_BT, out.expert_ids_MBTA


@functools.cache
def _trained(config):
  """Returns the jitted (params, rest, batch) -> ((sum, score), gradients)."""

  def loss(params, constants, batch):
    scores = score(config, {**constants, 'params': params}, batch)
    return scores[0].sum(), scores

  options = {}
  if config.numerics == 'fast':
    # Compiling takes a third of the time; these bits are compared with nothing.
    options = forward_test.OPTIONS
  gradient = jax.value_and_grad(loss, has_aux=True)
  return jax.jit(gradient, compiler_options=options)


def train(config, variables, batch):
  constants = {k: tree for k, tree in variables.items() if k != 'params'}
  (_, scores), grads = _trained(config)(variables['params'], constants, batch)
  return scores, grads


def of_sessions(scores, places):
  logprobs_BT, ids_MBTA = (np.asarray(a) for a in scores)
  return {
    s: (
      logprobs_BT[row, start : start + LENGTHS[s]],
      ids_MBTA[:, row, start : start + LENGTHS[s]],
    )
    for s, (row, start) in places.items()
  }


@pytest.fixture(scope='module')
def reference(model, tokens):
  batch, places = pack(tokens, [[0, 1], [2]], 160)
  scores = jax.jit(functools.partial(score, model[0]))(model[1], batch)
  return of_sessions(scores, places)


def check(have, want):
  for s, (logprobs_T, ids_MTA) in have.items():
    np.testing.assert_array_equal(ids_MTA, want[s][1], err_msg=f'session {s}')
    np.testing.assert_array_equal(
      logprobs_T, want[s][0], err_msg=f'session {s}'
    )


@pytest.mark.parametrize(
  'model',
  MODELS_TO_TRY,
  indirect=True,
)
@SLOW
@pytest.mark.parametrize('remat', [True, False])
def test_packing_gradient_and_recomputation_keep_every_bit(
  model, tokens, reference, remat
):
  config = dataclasses.replace(model[0], remat=remat)
  for rows_of in ([[2, 0, 1]], [[1, 0, 2]]):
    batch, places = pack(tokens, rows_of, LONG)
    scores, _ = train(config, model[1], batch)
    check(of_sessions(scores, places), reference)


# In bfloat16 the two differ as much as each differs from exact arithmetic.
@SLOW
@pytest.mark.parametrize('name', ['grouped-float32', 'latent-float32'])
def test_gradients_equal_those_of_fast_numerics(
  name, tokens, make_config, make_variables
):
  config = dataclasses.replace(_config(name, make_config), remat=True)
  variables = make_variables(config, 0)
  fast = dataclasses.replace(config, numerics='fast')
  batch, _ = pack(tokens, [[2, 0, 1]], LONG)
  (logprobs, _), grads = train(config, variables, batch)
  (fast_logprobs, _), fast_grads = train(fast, variables, batch)
  np.testing.assert_allclose(logprobs, fast_logprobs, atol=1e-5)
  for have, want in zip(
    jax.tree.leaves(grads), jax.tree.leaves(fast_grads), strict=True
  ):
    np.testing.assert_allclose(have, want, atol=1e-5 * np.abs(want).max())


class Server:
  """Consumes sessions as the engine does, in chunks of any size."""

  def __init__(self, config, variables):
    self.config = config
    self.weights = forward.unstack(variables, config)
    self._step = jax.jit(self._consume)

  def _consume(self, weights, cache, chunk, tables_BP, following):
    hidden_BTD, ids_MBTA, cache = forward.forward(
      weights, cache, *chunk, tables_BP, config=self.config
    )
    logprobs_BT, _ = head.token_logprobs(
      forward.logits(weights, hidden_BTD, self.config),
      *following,
      numerics=self.config.numerics,
    )
    return logprobs_BT, ids_MBTA, cache

  def run(self, tokens, slots, width, page_size, seed, take=None):
    """Scores the sessions in `slots` (None is an empty one).

    Args:
      tokens: token ids of every session.
      slots: session of each row.
      width: tokens of a row in one step.
      page_size: tokens in a page of the cache.
      seed: seed of page tables, padding and chunks.
      take: 'random' for random chunks; None for the longest that fit.
    """
    random = np.random.default_rng(seed)
    num_pages = -(-max(LENGTHS) // page_size)
    tables_BP = random.permutation(len(slots) * num_pages + 3)
    tables_BP = tables_BP[: len(slots) * num_pages].reshape(-1, num_pages)
    cache = forward.empty_cache(
      self.config, len(slots) * num_pages + 3, page_size
    )
    shape = (len(slots), width)
    num_consumed = [0 if s is not None else None for s in slots]
    logprobs = {s: [np.zeros(1, np.float32)] for s in slots if s is not None}
    routes = {s: [] for s in logprobs}
    while any(
      n is not None and n < LENGTHS[s] for s, n in zip(slots, num_consumed)
    ):
      chunk = random.integers(0, 40, shape), np.zeros(shape, bool)
      chunk += (random.integers(0, 30, shape),)
      following = random.integers(0, 40, shape), np.ones(shape, np.float32)
      counts = [0] * len(slots)
      for row, s in enumerate(slots):
        if s is None:
          continue
        chunk_limit = (
          random.integers(0, width + 1) if take == 'random' else width
        )
        start = num_consumed[row]
        stop = min(start + chunk_limit, LENGTHS[s])
        counts[row] = n = stop - start
        chunk[0][row, :n] = tokens[s][start:stop]
        chunk[1][row, :n] = True
        chunk[2][row, :n] = np.arange(start, stop)
        nexts = tokens[s][start + 1 : stop + 1]
        following[0][row, : len(nexts)] = nexts
        following[1][row] = TEMPERATURES[s]
      logprobs_BT, ids_MBTA, cache = self._step(
        self.weights, cache, chunk, tables_BP.astype(np.int32), following
      )
      for row, s in enumerate(slots):
        if s is not None:
          logprobs[s].append(np.asarray(logprobs_BT)[row, : counts[row]])
          routes[s].append(np.asarray(ids_MBTA)[:, row, : counts[row]])
          num_consumed[row] += counts[row]
    return {
      s: (
        np.concatenate(logprobs[s])[: LENGTHS[s]],
        np.concatenate(routes[s], 1),
      )
      for s in logprobs
    }


@pytest.fixture(scope='module')
def server(model):
  return Server(*model)


def test_decode_in_any_slot_equals_training(server, tokens, reference):
  for seed, slots in enumerate([(0, None, 1, 2, None), (2, 1, 0, None, None)]):
    check(server.run(tokens, slots, 1, 32, seed), reference)


def test_prefill_in_random_chunks_equals_training(server, tokens, reference):
  for seed, slots in enumerate([(1, 2, 0), (0, None, 1), (2, 0, 1)]):
    have = server.run(tokens, slots, 21, 64, seed, take='random')
    check(have, reference)


@SLOW
def test_other_batch_sizes_equal_training(server, tokens, reference):
  check(server.run(tokens, (1,), 1, 64, 0), reference)
  check(server.run(tokens, (2, 0, 1), 80, 96, 1), reference)
  slots = (None, 0, None, 2, 1, *[None] * 15)
  check(server.run(tokens, slots, 1, 64, 2), reference)
  check(server.run(tokens, (0, 1), 7, 32, 3, take='random'), reference)


@SLOW
def test_fast_numerics_promise_less(model, tokens, reference):
  """Otherwise the laws above would hold for any numerics and prove nothing."""
  fast = dataclasses.replace(model[0], numerics='fast')
  batch, places = pack(tokens, [[2, 0, 1]], LONG)
  scores = jax.jit(functools.partial(score, fast))(model[1], batch)
  have = of_sessions(scores, places)
  assert any((have[s][0] != reference[s][0]).any() for s in have)


def test_one_device_and_pages_of_whole_blocks_are_asked_for(
  make_config, make_variables
):
  config = make_config(numerics='batch_invariant')
  mesh = jax.make_mesh(
    (2,), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  with pytest.raises(ValueError, match="one device, not a mesh of 2 .*'fast'"):
    placement.exchange_plan(config, layout=layouts.DECODE, mesh=mesh)
  ints_BT = jnp.zeros((1, 4), jnp.int32)
  weights = forward.unstack(make_variables(config, 0), config)
  with pytest.raises(ValueError, match=r'page_size \(48\) must be a multiple'):
    jax.eval_shape(
      functools.partial(forward.forward, config=config),
      weights,
      forward.empty_cache(config, 2, 48),
      ints_BT,
      ints_BT == 0,
      ints_BT,
      ints_BT[:, :1],
    )


def test_tiles_compute_what_the_function_computes():
  params = jnp.arange(12.0).reshape(3, 4)
  x_BTD = jax.random.normal(jax.random.key(0), (2, 11, 3))
  ids_BT = jnp.arange(22).reshape(2, 11)

  def fn(params, rows_BT):
    x_BTD, ids_BT = rows_BT
    return jnp.sin(x_BTD @ params), ids_BT + 1

  def outputs(numerics):
    (y, ids), pull = jax.vjp(
      lambda p, x: rows.map_rows(fn, p, (x, ids_BT), numerics=numerics),
      params,
      x_BTD,
    )
    zeros = np.zeros(ids.shape, jax.dtypes.float0)
    return y, ids, *pull((jnp.cos(y), zeros))

  for have, want in zip(
    jax.jit(outputs, static_argnums=0)('batch_invariant'),
    jax.jit(outputs, static_argnums=0)('fast'),
    strict=True,
  ):
    np.testing.assert_allclose(have, want, atol=1e-5)
