"""The experts' MLP and the blocks of equal size in `blocked`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import swiglu
from composer_jax.kernels.grouped import blocked, matmul

DIM, HIDDEN = 12, 10


def _two_products(gate_up_EDX, down_EFD, rows_YD, sizes):
  multiply = lambda x, w: matmul.grouped_matmul(x, w, sizes, backend='ragged')
  return multiply(swiglu.swiglu(multiply(rows_YD, gate_up_EDX)), down_EFD)


def _arrays(num_rows, num_groups, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (
    (num_groups, DIM, 2 * HIDDEN),
    (num_groups, HIDDEN, DIM),
    (num_rows, DIM),
    (num_rows, DIM),
  )
  return [
    jax.random.normal(k, s).astype(dtype)
    for k, s in zip(keys, shapes, strict=True)
  ]


def _value_and_gradients(function):
  # Affects only machine code; the program is the same.
  @functools.partial(
    jax.jit, compiler_options={'xla_backend_optimization_level': 0}
  )
  def run(*arrays_and_sizes):
    *arrays, d_out_YD, sizes = arrays_and_sizes
    out_YD, pull = jax.vjp(lambda *a: function(*a, sizes), *arrays)
    return out_YD, *pull(d_out_YD)

  return run


@pytest.mark.parametrize('num_rows', [40, 600])
def test_equals_two_products(num_rows):
  arrays = _arrays(num_rows, 4)
  ours = _value_and_gradients(blocked.grouped_mlp)
  reference = _value_and_gradients(_two_products)
  for sizes in (
    (num_rows - 21, 1, 0, 20),
    (0, num_rows, 0, 0),
    (5, 0, 9, 1),
    (0, 0, 0, 0),
  ):
    sizes = jnp.array(sizes)
    have, want = ours(*arrays, sizes), reference(*arrays, sizes)
    for x, y in zip(have, want, strict=True):
      atol = 1e-6 * max(1.0, float(jnp.abs(y).max()))
      np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5)
    assert not np.any(have[0][sizes.sum() :])
    assert not np.any(have[3][sizes.sum() :])


def test_rows_of_others_reach_nothing_whatever_they_hold():
  gate_up_EDX, down_EFD, rows_YD, d_out_YD = _arrays(40, 4)
  run = _value_and_gradients(blocked.grouped_mlp)
  sizes = jnp.array([3, 0, 9, 1])
  clean = run(gate_up_EDX, down_EFD, rows_YD, d_out_YD, sizes)
  rows_YD, d_out_YD = (x.at[13:].set(jnp.nan) for x in (rows_YD, d_out_YD))
  broken = run(gate_up_EDX, down_EFD, rows_YD, d_out_YD, sizes)
  jax.tree.map(np.testing.assert_array_equal, broken, clean)


def test_rematerialisation_may_keep_the_hidden_rows():
  *arrays, d_out_YD = _arrays(40, 4)
  sizes = jnp.array([7, 1, 20, 5])
  policies = jax.checkpoint_policies

  def loops(policy):
    function = lambda *a: blocked.grouped_mlp(*a, sizes)
    pull = lambda *a: jax.vjp(jax.checkpoint(function, policy=policy), *a)[1](
      d_out_YD
    )
    return str(jax.make_jaxpr(pull)(*arrays)).count('while[')

  kept = loops(policies.save_only_these_names(blocked.HIDDEN))
  again = loops(policies.nothing_saveable)
  # Forward and backward; or forward twice.
  assert (kept, again) == (2, 3)


def test_bits_of_a_row_ignore_its_neighbours_in_blocks_of_one_size():
  weights_EDX, _, rows_YD, _ = _arrays(40, 4)

  @jax.jit
  def run(rows_YD, sizes):
    square = lambda weight_DX, rows_bD: rows_bD @ weight_DX @ weight_DX.T
    return blocked.map_blocks(square, weights_EDX, rows_YD, sizes, block=8)

  row_D = rows_YD[5]
  alone_YD = jnp.zeros_like(rows_YD).at[0].set(row_D)
  alone_D = run(alone_YD, jnp.array([0, 0, 1, 0]))[0]
  want_D = row_D @ weights_EDX[2] @ weights_EDX[2].T
  np.testing.assert_allclose(alone_D, want_D, rtol=1e-5, atol=1e-4)
  for place, sizes in ((12, (9, 0, 30, 1)), (25, (2, 23, 13, 0))):
    crowd_YD = rows_YD.at[place].set(row_D)
    crowd = run(crowd_YD, jnp.array(sizes))
    np.testing.assert_array_equal(crowd[place], alone_D)
    # Rows past the groups are zero.
    assert not np.any(crowd[sum(sizes) :])
