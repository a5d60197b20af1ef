"""Products of experts in formats equal those of rounded operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import swiglu
from composer_jax.kernels.grouped import schedule
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


def test_blocks_have_rows_of_one_expert():
  """Else a scale would lose the rows of an expert beside far larger ones."""
  group_N, place_Nb = schedule.places(jnp.array(SIZES, jnp.int32), Y, 32)
  owner_Y = np.append(np.repeat(np.arange(E), SIZES), np.full(Y, E))
  for group, place_b in zip(group_N, np.asarray(place_Nb), strict=True):
    assert {*owner_Y[place_b[place_b < Y]]} <= {int(group)}
  places = np.asarray(place_Nb).ravel()
  # Each row once, and in order.
  np.testing.assert_array_equal(places[places < Y], np.arange(sum(SIZES)))


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
  gated_YD = gates_Y[:, None] * d_out_YD
  d_hidden_YF = np.zeros((Y, F), np.float32)
  d_hidden_YF[real] = rows(gated_YD, weights['down'])
  # The gradient of a gate is that of the forward pass.
  out_YD = np.einsum('YF,YFD->YD', hidden_YF[real], weights['down'][group_Y])
  np.testing.assert_allclose(
    d_gates_Y[real], (out_YD * d_out_YD[real]).sum(-1), atol=1e-4
  )
  np.testing.assert_allclose(
    sums['down'], columns(hidden_YF, gated_YD), atol=1e-4
  )
  d_both_YX = np.asarray(swiglu.gradient(both_YX, d_hidden_YF))
  np.testing.assert_allclose(
    d_rows_YD[real], rows(d_both_YX, flat['gate_up']), atol=1e-4
  )
  np.testing.assert_allclose(
    sums['gate_up'], columns(x_YD, d_both_YX), atol=1e-4
  )


def test_the_backward_pass_in_bf16_has_operands_from_before_the_rounding():
  """And is the plain one where rounding changes nothing."""
  _, rows_YD, d_out_YD, sizes_E = _arrays('mxfp8')
  rng = np.random.default_rng(2)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  exact = {'gate_up': draw(E, D, 2 * F) / 7, 'down': draw(E, F, D) / 6}
  weights = {
    name: _rounded(w, name='nvfp4', axes=formats.Axes((1,), (1,)))
    for name, w in exact.items()
  }
  gates_Y = rng.random(Y).astype(np.float32)

  @functools.partial(jax.jit, static_argnums=0)
  def run(config, weights, exact):
    arrays = rows_YD, d_out_YD, gates_Y
    given = {**weights, 'exact': exact}
    return products.mlp_gradient(config, given, arrays, sizes_E, None)

  d_rows_YD, d_gates_Y, sums = run(
    products.Formats('nvfp4', 'bf16'), weights, exact
  )
  narrow = lambda x: _rounded(jnp.asarray(x), 'nvfp4', formats.last(x))
  group_Y = np.repeat(np.arange(E), SIZES)
  real = slice(0, len(group_Y))
  pick = lambda w: np.asarray(w)[group_Y]
  both_YX = np.einsum(
    'YD,YDX->YX', narrow(rows_YD[real]), pick(weights['gate_up'])
  )
  hidden_YF = np.asarray(swiglu.swiglu(both_YX))
  out_YD = np.einsum('YF,YFD->YD', narrow(hidden_YF), pick(weights['down']))
  np.testing.assert_allclose(
    d_gates_Y[real], (out_YD * d_out_YD[real]).sum(-1), atol=1e-4
  )
  gate_Y1 = gates_Y[real, None]
  d_hidden_YF = np.einsum('YD,YFD->YF', d_out_YD[real], pick(exact['down']))
  d_both_YX = np.asarray(swiglu.gradient(both_YX, gate_Y1 * d_hidden_YF))
  np.testing.assert_allclose(
    d_rows_YD[real],
    np.einsum('YX,YDX->YD', d_both_YX, pick(exact['gate_up'])),
    atol=1e-4,
  )
  one_YE = (group_Y[:, None] == np.arange(E)).astype(np.float32)
  for name, left, right in (
    ('gate_up', rows_YD[real], d_both_YX),
    ('down', gate_Y1 * hidden_YF, d_out_YD[real]),
  ):
    want = np.einsum('YE,YD,YF->EDF', one_YE, left, right)
    np.testing.assert_allclose(sums[name], want, atol=1e-4)
  assert sums['exact'] is None
  # INT4 rounds no activation: with its weights for both nothing is rounded.
  same = run(products.Formats('int4', 'bf16'), weights, weights)
  plain = run(products.PLAIN, weights, weights)
  close = functools.partial(np.testing.assert_allclose, atol=1e-4)
  jax.tree.map(close, same, plain)


def test_a_hadamard_matrix_changes_no_exact_product():
  """Of whole numbers, whose sums are exact; the mixed rows differ."""
  _, _, _, sizes_E = _arrays('mxfp8')
  rng = np.random.default_rng(3)
  lhs_YD, d_YF = (
    jnp.asarray(rng.integers(-8, 9, (Y, width)), jnp.float32)
    for width in (D, F)
  )
  draws_Y = jnp.asarray(rng.integers(0, 2**32, Y), jnp.uint32)

  @jax.jit
  def run():
    _, place_Nb = schedule.places(sizes_E, Y, 32)
    blocks = lambda x: x.at[place_Nb].get(mode='fill', fill_value=0)
    draws_Nb = draws_Y.at[place_Nb].get(mode='clip')
    pair = [blocks(x) for x in (lhs_YD, d_YF)]
    mixes = [products.mixed(x, draws_Nb) for x in pair]
    gram = lambda x, y: jnp.einsum('NbD,NbF->NDF', x, y, precision='highest')
    return pair[0], mixes[0], gram(*pair), gram(*mixes)

  plain, mixes, before, after = run()
  np.testing.assert_array_equal(after, 32 * before)
  assert (mixes != plain).mean() > 0.5


def _with_draws(config, weights, sizes_E, draws_Y, arrays):
  given = {**weights, 'draws': draws_Y}
  return products.mlp_gradient(config, given, arrays, sizes_E, None)


@pytest.mark.slow
def test_gradients_that_are_rounded_by_chance_are_right_on_average():
  """With and without the mixing of rows; twice the same draws are the same."""
  weights, rows_YD, d_out_YD, sizes_E = _arrays('mxfp8')
  weights |= {'gate_up': weights['gate_up'].reshape(E, D, -1)}
  arrays = jnp.asarray(rows_YD), jnp.asarray(d_out_YD), jnp.ones(Y)
  count = 64
  draws_SY = np.random.default_rng(4).integers(0, 2**32, (count, Y))
  for hadamard in (False, True):
    config = products.Formats('mxfp8', 'mxfp8', True, hadamard)
    run = jax.jit(
      functools.partial(_with_draws, config, weights, sizes_E, arrays=arrays)
    )
    down = lambda draws_Y, run=run: np.asarray(run(draws_Y)[2]['down'])
    drawn = np.stack([down(draws_Y.astype(np.uint32)) for draws_Y in draws_SY])
    # The gradient of `down` has d_out as it is: of other operands the mean of
    # the forward pass alone is rounded to nearest.
    nearest = down_of_exact_gradient(weights, rows_YD, d_out_YD, hadamard)
    spread = drawn.std(0, ddof=1) / count**0.5
    if not hadamard:
      off = np.abs(drawn.mean(0) - nearest)
      # The expert of one row has two values a sum, of which some came once.
      assert (off <= 4 * spread + 1e-4).mean() > 0.99
    else:
      # Rows of the other side are rounded once mixed, to nearest.
      assert (
        np.abs(drawn.mean(0) - nearest).max() < 0.05 * np.abs(nearest).max()
      )
    again = down(draws_SY[0].astype(np.uint32))
    np.testing.assert_array_equal(again, drawn[0])
    assert (drawn[1] != drawn[0]).any()


def down_of_exact_gradient(weights, rows_YD, d_out_YD, hadamard):
  """Returns hidden^T d_out of each expert; hidden is rounded if not mixed."""
  narrow = lambda x: _rounded(jnp.asarray(x), 'mxfp8', formats.last(x))
  group_Y = np.repeat(np.arange(E), SIZES)
  real = slice(0, len(group_Y))
  both_YX = np.einsum(
    'YD,YDX->YX', narrow(rows_YD[real]), np.asarray(weights['gate_up'])[group_Y]
  )
  hidden_YF = np.asarray(narrow(swiglu.swiglu(both_YX)))
  if not hadamard:
    hidden_YF = _by_hand(hidden_YF)
  one_YE = (group_Y[:, None] == np.arange(E)).astype(np.float32)
  return np.einsum('YE,YF,YD->EFD', one_YE, hidden_YF, d_out_YD[real])


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


@pytest.mark.slow
def test_gradients_of_rounded_operands_are_finite_differences():
  """INT4 rounds no activation: outputs are smooth in weights and rows."""
  weights, rows_YD, d_out_YD, sizes_E = _arrays('int4')
  config = products.Formats('int4', 'dequantised')

  @jax.jit
  def value(weights, rows_YD):
    return (products.mlp(config, weights, rows_YD, sizes_E) * d_out_YD).sum()

  point = (weights, jnp.asarray(rows_YD))
  keys = iter(jax.random.split(jax.random.key(0), 3))
  along = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), point)
  step = 1e-3
  moved = [
    value(*jax.tree.map(lambda x, d, s=s: x + s * d, point, along))
    for s in (step, -step)
  ]
  slope = (moved[0] - moved[1]) / (2 * step)
  grads = jax.grad(value, argnums=(0, 1))(*point)
  want = sum(
    jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, along))
  )
  np.testing.assert_allclose(slope, want, rtol=2e-3)
