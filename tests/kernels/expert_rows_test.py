"""Experts of few rows: the gated sum, and only active experts are read."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import expert_rows

NUM_EXPERTS, NUM_ACTIVE, DIM, HIDDEN = 6, 2, 8, 4


def mlp(weights, rows):
  return jax.nn.silu(rows @ weights['up']) @ weights['down']


@functools.partial(jax.jit, static_argnames='block')
def run(experts, x_ZD, ids_ZA, gates_ZA, valid_Z, block=None):
  return expert_rows.expert_rows(
    mlp, experts, x_ZD, ids_ZA, gates_ZA, valid_Z, block=block
  )


@pytest.fixture(scope='module')
def experts():
  rng = np.random.default_rng(0)
  return tuple(
    {
      'up': rng.standard_normal((DIM, HIDDEN)).astype(np.float32),
      'down': rng.standard_normal((HIDDEN, DIM)).astype(np.float32),
    }
    for _ in range(NUM_EXPERTS)
  )


def tokens(num_tokens, seed=1):
  rng = np.random.default_rng(seed)
  x_ZD = rng.standard_normal((num_tokens, DIM)).astype(np.float32)
  order_ZE = rng.random((num_tokens, NUM_EXPERTS)).argsort(-1)
  gates_ZA = rng.random((num_tokens, NUM_ACTIVE)).astype(np.float32)
  valid_Z = np.ones(num_tokens, bool)
  return x_ZD, order_ZE[:, :NUM_ACTIVE].astype(np.int32), gates_ZA, valid_Z


def dense(experts, x_ZD, ids_ZA, gates_ZA, valid_Z):
  """Returns the sum over all experts, weighted by gate or zero."""
  y_ZD = np.zeros_like(x_ZD)
  for e, weights in enumerate(experts):
    gate_Z = np.where(ids_ZA == e, gates_ZA, 0).sum(1) * valid_Z
    y_ZD += gate_Z[:, None] * np.asarray(mlp(weights, x_ZD))
  return y_ZD


@pytest.mark.parametrize(('num_tokens', 'block'), [(1, None), (5, 1), (13, 4)])
def test_equals_every_expert_weighted_by_its_gate(experts, num_tokens, block):
  arrays = tokens(num_tokens)
  np.testing.assert_allclose(
    run(experts, *arrays, block=block),
    dense(experts, *arrays),
    rtol=1e-4,
    atol=1e-5,
  )


def test_all_tokens_but_one_may_choose_the_same_experts(experts):
  x_ZD, _, gates_ZA, valid_Z = tokens(13)
  ids_ZA = np.tile(np.array([4, 0], np.int32), (13, 1))
  # The last expert's only block reaches past the last row.
  ids_ZA[6, 0] = 5
  arrays = x_ZD, ids_ZA, gates_ZA, valid_Z
  np.testing.assert_allclose(
    run(experts, *arrays, block=4),
    dense(experts, *arrays),
    rtol=1e-4,
    atol=1e-5,
  )


@pytest.mark.parametrize(('num_tokens', 'block'), [(5, 1), (13, 4)])
def test_inactive_experts_and_padding_reach_nothing(experts, num_tokens, block):
  x_ZD, ids_ZA, gates_ZA, valid_Z = tokens(num_tokens)
  valid_Z[1::3] = False
  # Experts 3.. are NaN and chosen by padding alone, which is NaN itself.
  ids_ZA = ids_ZA % 3
  ids_ZA[:, 1] = (ids_ZA[:, 0] + 1) % 3
  ids_ZA[~valid_Z] = [3, 4]
  broken = tuple(
    w if e < 3 else jax.tree.map(lambda a: np.full_like(a, np.nan), w)
    for e, w in enumerate(experts)
  )
  clean = run(experts, x_ZD, ids_ZA, gates_ZA, valid_Z, block=block)
  x_ZD = np.where(valid_Z[:, None], x_ZD, np.nan)
  y_ZD = run(broken, x_ZD, ids_ZA, gates_ZA, valid_Z, block=block)
  np.testing.assert_array_equal(y_ZD, clean)
  assert not np.asarray(y_ZD)[~valid_Z].any()


def test_rows_of_no_valid_token_are_zero(experts):
  x_ZD, ids_ZA, gates_ZA, valid_Z = tokens(5)
  y_ZD = run(experts, x_ZD, ids_ZA, gates_ZA, ~valid_Z, block=1)
  np.testing.assert_array_equal(y_ZD, np.zeros_like(x_ZD))


def test_order_of_tokens_changes_none_of_their_bits(experts):
  x_ZD, ids_ZA, gates_ZA, valid_Z = tokens(5)
  order_Z = np.random.default_rng(2).permutation(5)
  y_ZD = run(experts, x_ZD, ids_ZA, gates_ZA, valid_Z, block=1)
  shuffled_ZD = run(
    experts,
    *(a[order_Z] for a in (x_ZD, ids_ZA, gates_ZA, valid_Z)),
    block=1,
  )
  np.testing.assert_array_equal(shuffled_ZD, np.asarray(y_ZD)[order_Z])


def test_no_matrix_is_copied(experts):
  # The reason for the module. A slice of stacked weights is copied before it
  # is multiplied with; a branch's own array must go into its product as is.
  arrays = jax.tree.map(jnp.asarray, (experts, *tokens(1)))
  text = run.lower(*arrays).compile().as_text()
  matrix = rf'(?:\d+,)?(?:{DIM},{HIDDEN}|{HIDDEN},{DIM})'
  made_by = set(re.findall(rf'= f32\[{matrix}\]\S* ([\w-]+)\(', text))
  assert 'parameter' in made_by
  assert made_by <= {'parameter', 'get-tuple-element', 'bitcast'}


def test_each_active_expert_runs_once_per_block_of_its_rows():
  calls = []

  def counted(weights, rows):
    jax.debug.callback(lambda e: calls.append(int(e)), weights)
    return rows

  x_ZD, ids_ZA, gates_ZA, valid_Z = tokens(5)
  ids_ZA[:] = [[3, 1], [3, 0], [3, 1], [2, 4], [5, 3]]
  valid_Z[3] = False
  expert_rows.expert_rows(
    counted,
    [jnp.int32(e) for e in range(NUM_EXPERTS)],
    *(jnp.asarray(a) for a in (x_ZD, ids_ZA, gates_ZA, valid_Z)),
    block=2,
  ).block_until_ready()
  jax.effects_barrier()
  # Of expert 3 four rows; 2 and 4 are the choice of padding.
  assert sorted(calls) == [0, 1, 3, 3, 5]


def test_rows_per_product_grow_with_the_rows_of_an_expert():
  def blocks(num_bytes):
    rows = (1, 2, 4, 8, 16, 64, 1024)
    return [expert_rows.block_of(2 * z, 8, num_bytes) for z in rows]

  assert blocks(2**19) == [1, 1, 1, 1, 4, 8, 16]
  # An expert that no cache holds is read once for two rows.
  assert blocks(2**21) == [1, 1, 1, 4, 4, 8, 16]


def test_bfloat16_rows_are_added_in_float32(experts):
  cast = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
  x_ZD, ids_ZA, gates_ZA, valid_Z = tokens(5)
  low = jax.tree.map(cast, experts)
  y_ZD = run(low, cast(x_ZD), ids_ZA, gates_ZA, valid_Z, block=1)
  assert y_ZD.dtype == jnp.bfloat16
  expected_ZD = np.stack(
    [
      sum(
        np.asarray(mlp(low[e], cast(x_ZD[z : z + 1]))[0], np.float32) * gate
        for e, gate in zip(ids_ZA[z], gates_ZA[z], strict=True)
      )
      for z in range(5)
    ]
  )
  np.testing.assert_allclose(
    np.asarray(y_ZD, np.float32), expected_ZD, rtol=2**-6, atol=1e-3
  )
