"""The fused MLP of experts is two grouped matmuls with SwiGLU between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import swiglu
from composer_jax.kernels.grouped import matmul, mlp

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
  # Of the machine code alone: the program is the same.
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
  ours = _value_and_gradients(mlp.grouped_mlp)
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
  run = _value_and_gradients(mlp.grouped_mlp)
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
    function = lambda *a: mlp.grouped_mlp(*a, sizes)
    pull = lambda *a: jax.vjp(jax.checkpoint(function, policy=policy), *a)[1](
      d_out_YD
    )
    return str(jax.make_jaxpr(pull)(*arrays)).count('while[')

  kept = loops(policies.save_only_these_names(mlp.HIDDEN))
  again = loops(policies.nothing_saveable)
  # Forward and backward; or forward twice.
  assert (kept, again) == (2, 3)
