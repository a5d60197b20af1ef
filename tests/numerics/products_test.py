"""Products of experts in formats equal those of rounded operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import swiglu
from composer_jax.numerics import formats, grids, products

SIZES = (5, 0, 40, 1, 33)
E, D, F = len(SIZES), 48, 32
Y = sum(SIZES) + 6  # Six rows belong to no expert.

# Op by op it would take seconds to compile.
_rounded = jax.jit(formats.rounded, static_argnames=('name', 'axes'))


def _arrays(name):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  rounded = functools.partial(_rounded, name=name)
  weights = {
    'gate_up': rounded(
      jnp.asarray(draw(E, D, 2, F) / 7), axes=formats.Axes((1,), (1, 2))
    ),
    'down': rounded(
      jnp.asarray(draw(E, F, D) / 6), axes=formats.Axes((1,), (1,))
    ),
  }
  sizes_E = jnp.array(SIZES, jnp.int32)
  return weights, draw(Y, D), draw(Y, D), sizes_E


def _reference(name, weights, rows_YD):
  """Returns outputs expert by expert, through rounding with gradient 1."""

  def rounded(x):
    return _rounded(x, name, formats.last(x))

  parts, start = [], 0
  for e, size in enumerate(SIZES):
    x_YD = rounded(rows_YD[start : start + size])
    both = x_YD @ weights['gate_up'][e].reshape(D, -1)
    parts.append(rounded(swiglu.swiglu(both)) @ weights['down'][e])
    start += size
  return jnp.concatenate([*parts, jnp.zeros((Y - start, D))])


@pytest.mark.parametrize(
  'name', ['nvfp4', pytest.param('mxfp8', marks=pytest.mark.slow)]
)
def test_outputs_and_gradients_are_those_of_rounded_operands(name):
  weights, rows_YD, d_out_YD, sizes_E = _arrays(name)
  config = products.Formats(name, 'dequantised')

  def pulled(function):
    out_YD, pull = jax.vjp(function, weights, rows_YD)
    return out_YD, pull(jnp.asarray(d_out_YD))

  run = lambda w, x: products.mlp(config, w, x, sizes_E)
  have = jax.jit(lambda: pulled(run))()
  want = jax.jit(lambda: pulled(functools.partial(_reference, name)))()
  close = functools.partial(np.testing.assert_allclose, atol=5e-5)
  jax.tree.map(close, have, want)
  # Tiles, and one expert at a time, are the same function.
  tiled = jax.jit(functools.partial(products.tiled, config))
  close(tiled(weights, rows_YD, sizes_E), want[0])
  stop = sum(SIZES)
  last = slice(stop - SIZES[-1], stop)
  single = jax.jit(functools.partial(products.single, config))
  weights_of_last = jax.tree.map(lambda w: w[-1], weights)
  close(single(weights_of_last, rows_YD[last]), want[0][last])


def _by_hand(x_YD):
  """Rounds to MXFP8 in blocks of 32 rows of each expert."""
  parts, start = [], 0
  for size in SIZES:
    for first in range(start, start + size, 32):
      block = x_YD[first : min(first + 32, start + size)]
      scale = grids.scale_up(np.abs(block).max(0), 448.0)
      parts.append(np.asarray(grids.e4m3(block / scale) * scale))
    start += size
  return np.concatenate([*parts, np.zeros((len(x_YD) - start, x_YD.shape[1]))])


def test_rows_are_rounded_within_their_expert():
  _, rows_YD, _, sizes_E = _arrays('mxfp8')
  # Far smaller than those of the expert before: a common scale would lose them.
  rows_YD[: sum(SIZES)] *= np.exp2(-25.0 * np.repeat(np.arange(E), SIZES))[
    :, None
  ]
  rows_YD[-1] = np.nan
  got_YD = jax.jit(products.by_rows)(rows_YD, sizes_E)
  np.testing.assert_array_equal(got_YD, _by_hand(rows_YD))


def test_the_backward_pass_in_mxfp8_rounds_what_each_product_contracts():
  weights, rows_YD, d_out_YD, sizes_E = _arrays('nvfp4')
  config = products.Formats('nvfp4', 'mxfp8')
  gates_Y = np.random.default_rng(1).random(Y).astype(np.float32)
  flat = weights | {'gate_up': weights['gate_up'].reshape(E, D, -1)}
  d_rows_YD, d_gates_Y, sums = jax.jit(
    functools.partial(products.mlp_gradient, config)
  )(flat, (rows_YD, d_out_YD, gates_Y), sizes_E, None)
  last = lambda x: np.asarray(
    _rounded(jnp.asarray(x), 'mxfp8', formats.last(x))
  )
  group_Y = np.repeat(np.arange(E), SIZES)
  real = slice(0, len(group_Y))
  rows = lambda x_YX, w_EDX: np.einsum(
    'YX,YDX->YD', last(x_YX)[real], last(w_EDX)[group_Y]
  )

  def columns(x_YD, d_YX):
    x_YD, d_YX = _by_hand(x_YD), _by_hand(d_YX)
    ends = np.cumsum(SIZES)
    return np.stack(
      [
        x_YD[b - n : b].T @ d_YX[b - n : b]
        for b, n in zip(ends, SIZES, strict=True)
      ]
    )

  narrow = lambda x: np.asarray(
    _rounded(jnp.asarray(x), 'nvfp4', formats.last(x))
  )
  x_YD = narrow(rows_YD)
  both_YX = np.zeros((Y, 2 * F), np.float32)
  both_YX[real] = np.einsum('YD,YDX->YX', x_YD[real], flat['gate_up'][group_Y])
  hidden_YF = narrow(swiglu.swiglu(jnp.asarray(both_YX)))
  d_hidden_YF = np.zeros((Y, F), np.float32)
  d_hidden_YF[real] = rows(d_out_YD, weights['down'])
  np.testing.assert_allclose(
    d_gates_Y, (hidden_YF * d_hidden_YF).sum(-1), atol=1e-4
  )
  gate_Y1 = gates_Y[:, None]
  np.testing.assert_allclose(
    sums['down'], columns(gate_Y1 * hidden_YF, d_out_YD), atol=1e-4
  )
  d_both_YX = np.asarray(swiglu.gradient(both_YX, gate_Y1 * d_hidden_YF))
  np.testing.assert_allclose(
    d_rows_YD[real], rows(d_both_YX, flat['gate_up']), atol=1e-4
  )
  np.testing.assert_allclose(
    sums['gate_up'], columns(x_YD, d_both_YX), atol=1e-4
  )


def test_int4_rounds_no_activation():
  weights, rows_YD, _, sizes_E = _arrays('int4')
  config = products.Formats('int4', 'dequantised')
  last = jax.tree.map(lambda w: w[-1], weights)
  stop = sum(SIZES)
  x_YD = jnp.asarray(rows_YD[stop - 3 : stop])
  both = x_YD @ last['gate_up'].reshape(D, -1)
  run = jax.jit(functools.partial(products.mlp, config))
  np.testing.assert_allclose(
    run(weights, rows_YD, sizes_E)[stop - 3 : stop],
    swiglu.swiglu(both) @ last['down'],
    atol=2e-5,
  )
