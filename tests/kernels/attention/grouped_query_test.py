"""Implementations of attention agree and visit only visible blocks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core

from composer_jax.kernels.attention import blocked, blocks, grouped_query, tpu
from composer_jax.models import attention as model_attention
from tests import compiling
from tests.kernels.attention import reference

_MASKED = np.float32(-1e30)
_jit = functools.partial(jax.jit, compiler_options=compiling.QUICKLY)
_attend_measured = _jit(
  grouped_query.attend, static_argnames=('scale', 'backend')
)
_executed = _jit(blocks.executed, static_argnums=(1, 2))
_visible_of = _jit(model_attention.visible_of)


def _attend(*arrays, **options):
  out, _ = _attend_measured(*arrays, **options)
  return out


def visible(lengths, total):
  """Returns the visible keys of packed causal documents and padding."""
  lengths = [*lengths, total - sum(lengths)]
  ids = np.repeat([*range(1, len(lengths)), 0], lengths)
  return _visible_of(jnp.asarray(ids, jnp.int32)[None])


def causal(length, num_keys=None):
  """Returns the visible keys of the last queries of a causal row."""
  first = (num_keys or length) - length
  end_BT = first + 1 + jnp.arange(length, dtype=jnp.int32)[None]
  return grouped_query.Visible(jnp.zeros_like(end_BT), end_BT)


def normal(seed, *shape):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def test_what_a_token_sees_of_packed_documents():
  ids = jnp.asarray([[1, 1, 2, 2, 2, 0, 0], [0, 3, 1, 1, 0, 0, 0]])
  seen = _visible_of(ids)
  np.testing.assert_array_equal(
    seen.start_BT, [[0, 0, 2, 2, 2, 5, 5], [0, 1, 2, 2, 4, 4, 4]]
  )
  np.testing.assert_array_equal(
    seen.end_BT, [[1, 2, 3, 4, 5, 5, 5], [0, 2, 3, 4, 4, 4, 4]]
  )
  assert seen.start_BT.dtype == seen.end_BT.dtype == jnp.int32


# A row of several tiles and blocks, none of them whole; values narrower than
# keys and a scale of their own, as latent attention has; one head per key.
@pytest.mark.parametrize(
  'backend,heads,width,scale',
  [
    ('blocked', (4, 2), 8, None),
    ('blocked', (3, 3), 5, 0.2),
    # Interpreted.
    ('pallas_gpu', (4, 2), 5, 0.2),
    ('pallas_tpu', (4, 2), 5, 0.2),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ('blocked', (4, 1), 8, 0.3),
        ('pallas_gpu', (3, 3), 8, None),
        ('pallas_tpu', (3, 3), 8, None),
      )
    ),
  ],
)
def test_backends_are_the_whole_softmax_in_value_and_gradient(
  backend, heads, width, scale, monkeypatch
):
  monkeypatch.setattr(tpu, 'BLOCK', 128)
  length, (num_heads, num_kv_heads) = 300, heads
  seen = [visible([9, 200, 70], length), visible([300], length)]
  seen = jax.tree.map(lambda *x: jnp.concatenate(x), *seen)
  q = normal(0, 2, length, num_heads, 8)
  k = normal(1, 2, length, num_kv_heads, 8)
  v = normal(2, 2, length, num_kv_heads, width)
  d_out = normal(3, 2, length, num_heads, width)

  @functools.partial(_jit, static_argnums=0)
  def run(backend, *arrays):
    (out, tops), pull = jax.vjp(
      lambda *a: grouped_query.attend(*a, seen, scale=scale, backend=backend),
      *arrays,
    )
    # A cotangent of the tops reaches nothing.
    return out, tops, *pull((d_out, jnp.ones_like(tops)))

  have, want = (run(name, q, k, v) for name in (backend, reference.whole))
  for a, b in zip(have, want, strict=True):
    # A few roundings of the largest term; sums in another order.
    largest = np.abs(np.where(b == _MASKED, 0, b)).max()
    np.testing.assert_allclose(a, b, atol=1e-6 * largest)
  out, tops, d_q, d_k, d_v = have
  # Padding sees nothing, gets nothing and gives nothing.
  assert (tops[0, 279:] == _MASKED).all() and (tops[0, :279] > _MASKED).all()
  for padded in (out, d_q, d_k, d_v):
    assert not padded[0, 279:].any()


def test_values_in_bfloat16_are_rounded_once():
  q, k, v = (normal(i, 1, 200, 2, 16).astype(jnp.bfloat16) for i in range(3))
  seen = causal(200)

  def run(dtype, backend):
    arrays = (x.astype(dtype) for x in (q, k, v))
    return _attend(*arrays, seen, scale=0.25, backend=backend)

  have = run(jnp.bfloat16, 'blocked')
  assert have.dtype == jnp.bfloat16
  want = run(jnp.float32, reference.whole).astype(jnp.bfloat16)
  # All but near-ties of the one rounding.
  assert (have == want).mean() > 0.999


def test_scale_multiplies_scores():
  q, k, v = (normal(i, 1, 3, 1, 4) for i in range(3))
  scaled = _attend(q, k, v, causal(3), scale=1.5)
  np.testing.assert_allclose(scaled, _attend(3 * q, k, v, causal(3)), rtol=1e-5)


def test_unknown_backend_is_named():
  x = jnp.zeros((1, 1, 1, 2))
  with pytest.raises(ValueError, match="'flash' is not in"):
    grouped_query.attend(x, x, x, causal(1), backend='flash')


# ---------------------------------------------------------------- blocks


def test_executed_blocks_are_those_that_somebody_sees():
  # Tiles of 4 queries, blocks of 8 keys: tile i of a causal row ends in block
  # (4 i + 3) // 8.
  assert _executed(causal(32), 4, 8).tolist() == [
    sum((4 * i + 3) // 8 + 1 for i in range(8))
  ]
  # Queries at the end of a longer row.
  assert _executed(causal(4, 32), 4, 8).tolist() == [4]
  # Documents that begin with tiles and blocks, then a tile of padding.
  seen = visible([8, 16, 4], 32)
  assert _executed(seen, 4, 8).tolist() == [2 + (1 + 1 + 2 + 2) + 1]
  # A tile that two documents share visits the blocks of both.
  assert _executed(visible([10], 10), 4, 8).tolist() == [4]


def test_pairs_are_the_visited_and_one_for_each_that_visits_none():
  table = jnp.asarray([[[1, 1, 0], [0, 0, 0]], [[0, 0, 1], [0, 1, 1]]], bool)
  pairs, count = blocks.pairs(table)
  assert count == 6
  np.testing.assert_array_equal(
    jnp.stack(pairs)[:, :6],
    [
      [0, 0, 0, 1, 1, 1],
      [0, 0, 1, 0, 1, 1],
      [0, 1, 0, 2, 1, 2],
      [1, 0, 1, 1, 1, 0],
      [0, 1, 1, 1, 0, 1],
    ],
  )
  # All of one group, which begins and ends nevertheless.
  pairs, count = blocks.pairs(jnp.ones((1, 1, 2), bool))
  assert (count, *pairs.is_first, *pairs.is_last) == (2, 1, 0, 0, 1)


def _loops(seen, num_keys, poisoned):
  """Returns true for queries that visit a key block, by putting NaN in it."""
  length = seen.start_BT.shape[1]
  q, k = jnp.ones((1, length, 1, 4)), jnp.ones((1, num_keys, 1, 4))
  keys = blocked.KEYS
  # Where a weight is zero, its product is NaN all the same.
  v = k.at[:, poisoned * keys : (poisoned + 1) * keys].set(jnp.nan)
  out = _attend(q, k, v, seen, backend='blocked')
  return np.isnan(out[0, :, 0, 0])


def test_loops_visit_the_executed_blocks_and_no_others():
  tile, block = blocked.QUERIES, blocked.KEYS
  length = 4 * block
  seen = visible([block + tile, block], length)
  visits = 0
  for poisoned in range(4):
    by_tile = _loops(seen, length, poisoned).reshape(-1, tile)
    np.testing.assert_array_equal(by_tile.any(1), by_tile.all(1))
    visits += by_tile.all(1).sum()
  assert visits == _executed(seen, tile, block).sum()
  assert visits < (length // tile) * (length // block) / 2


def _shapes(jaxpr):
  for equation in jaxpr.eqns:
    for variable in (*equation.invars, *equation.outvars):
      yield getattr(variable.aval, 'shape', ())
    for inner in jax_core.jaxprs_in_params(equation.params):
      yield from _shapes(getattr(inner, 'jaxpr', inner))


def test_nothing_of_the_size_of_all_scores_exists():
  length, seen = 4096, causal(4096)
  q, k = (
    jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (4, 2)
  )

  def gradients(backend, q, k, v):
    def loss(*arrays):
      return grouped_query.attend(*arrays, seen, backend=backend)[0].sum()

    return jax.grad(loss, (0, 1, 2))(q, k, v)

  def largest(backend):
    closed = jax.make_jaxpr(functools.partial(gradients, backend))(q, k, k)
    return max(math.prod(shape) for shape in _shapes(closed.jaxpr))

  # The queries themselves; the reference has all scores of 4 heads.
  assert largest('auto') == 4 * length * 8
  assert largest(reference.whole) == 4 * length * length
  memory = (
    jax.jit(functools.partial(gradients, 'auto'))
    .lower(q, k, k)
    .compile(compiler_options={'xla_backend_optimization_level': 0})
    .memory_analysis()
  )
  assert memory.temp_size_in_bytes < 20 * 4 * length * 8 * 4 < 4 * length**2


@pytest.mark.parametrize('backend', ['blocked', 'pallas_gpu', 'pallas_tpu'])
def test_what_is_kept_of_attention_spares_another_forward_pass(backend):
  q = jnp.ones((1, 128, 1, 16))

  def count(what, *saves):
    policy = jax.checkpoint_policies.save_only_these_names(*saves)

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(q):
      out, _ = grouped_query.attend(q, q, q, causal(128), backend=backend)
      return jnp.sin(out).sum()

    return str(jax.make_jaxpr(jax.grad(loss))(q)).count(what)

  # The outputs and the logarithms.
  assert count('name=attention_out', 'attention_out') == 2
  if backend == 'blocked':
    # Of kernels that nobody reads the compilers rid a program themselves.
    product = 'dot_general['
    assert count(product) - count(product, 'attention_out') == 2
