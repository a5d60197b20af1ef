"""The grouped matmul of each backend equals a loop over dense products."""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import sharding

from benchmarks import grouped_cases
from composer_jax.core import platforms
from composer_jax.kernels.grouped import blocked, schedule
from composer_jax.kernels.grouped import matmul as gm

# Affects only machine code; the program is the same.
jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)
LOADS = {
  'mixed': (7, 1, 20, 5),
  'empty': (0, 30, 0, 0),
  'all to one': (0, 0, 0, 40),
  'none': (0, 0, 0, 0),
  'all': (10, 10, 10, 10),
}
NUM_ROWS, DIM, WIDTH = 40, 32, 16


def _arrays(num_rows=NUM_ROWS, num_groups=4):
  keys = jax.random.split(jax.random.key(0), 3)
  lhs_YD = jax.random.normal(keys[0], (num_rows, DIM))
  rhs_EDF = jax.random.normal(keys[1], (num_groups, DIM, WIDTH))
  d_out_YF = jax.random.normal(keys[2], (num_rows, WIDTH))
  return lhs_YD, rhs_EDF, d_out_YF


def _dense(lhs_YD, rhs_EDF, d_out_YF, sizes):
  """Returns output and both gradients, group by group, in float64."""
  lhs, rhs, d_out = (np.asarray(x, float) for x in (lhs_YD, rhs_EDF, d_out_YF))
  out, d_lhs = np.zeros_like(d_out), np.zeros_like(lhs)
  d_rhs = np.zeros_like(rhs)
  stops = np.cumsum(sizes)
  for e, (size, stop) in enumerate(zip(sizes, stops, strict=True)):
    rows = slice(stop - size, stop)
    out[rows] = lhs[rows] @ rhs[e]
    d_lhs[rows] = d_out[rows] @ rhs[e].T
    d_rhs[e] = lhs[rows].T @ d_out[rows]
  return out, d_lhs, d_rhs


def _loads(num_rows, num_groups, count):
  """Yields sizes, from even ones to one group with nearly all rows."""
  rng = np.random.default_rng(num_groups)
  for i in range(count):
    spread = rng.dirichlet(np.full(num_groups, 10.0 ** (1 - i % 4)))
    yield rng.multinomial(num_rows, spread).astype(np.int32)


@functools.cache
def _program(backend):
  @jit
  def run(lhs_YD, rhs_EDF, d_out_YF, sizes):
    multiply = functools.partial(gm.grouped_matmul, backend=backend)
    out, pull = jax.vjp(lambda a, b: multiply(a, b, sizes), lhs_YD, rhs_EDF)
    return out, *pull(d_out_YF)

  return run


def _check(run, arrays, sizes, message):
  have = run(*arrays, jnp.array(sizes, jnp.int32))
  summands = DIM, WIDTH, max(sizes)
  for x, y, n in zip(have, _dense(*arrays, sizes), summands, strict=True):
    # A unit in the last place of the largest sum for each of n roundings,
    # which are independent.
    atol = np.finfo(np.float32).eps * n**0.5 * np.abs(y).max()
    np.testing.assert_allclose(x, y, atol=atol, err_msg=message)


@pytest.mark.parametrize('backend', gm.BACKENDS)
def test_values_and_gradients_equal_dense_reference(backend):
  for name, sizes in LOADS.items():
    _check(_program(backend), _arrays(), sizes, name)


def test_every_size_of_piece_equals_dense_reference():
  # Enough rows for tails and bulks: each loop of the ladder runs.
  arrays = _arrays(1024, 4)
  ran = set()
  for sizes in (
    (1, 700, 0, 323),
    (1024, 0, 0, 0),
    (0, 0, 40, 600),
    (512, 256, 256, 0),
    (70, 100, 97, 650),
    (200, 0, 0, 824),
  ):
    _check(_program('blocked'), arrays, sizes, str(sizes))
    pieces = _schedule(sizes, 1024)
    ran |= {(p.rows, p.is_full) for p in pieces if p.last > p.first}
  assert ran == {(p.rows, p.is_full) for p in pieces}


def _schedule(sizes, num_rows):
  return schedule.schedule(jnp.array(sizes), num_rows)


@pytest.mark.parametrize('backend', ['megablox', 'triton'])
def test_kernels_equal_dense_reference_when_interpreted(backend):
  for name, sizes in LOADS.items():
    _check(_program(backend), _arrays(), sizes, name)


@pytest.mark.parametrize('backend', gm.BACKENDS)
def test_rows_past_the_groups_are_zero_and_move_nothing(backend):
  lhs_YD, rhs_EDF, d_out_YF = _arrays()
  sizes = jnp.array([3, 0, 9, 1])
  run = _program(backend)
  out, d_lhs, d_rhs = run(lhs_YD, rhs_EDF, d_out_YF, sizes)
  assert not np.any(out[13:]) and not np.any(d_lhs[13:])
  # 'ragged' multiplies them by zero; the blocks do not even do that.
  other = np.nan if backend == 'blocked' else 1e3
  *_, same = run(
    lhs_YD.at[13:].set(other), rhs_EDF, d_out_YF.at[13:].set(other), sizes
  )
  np.testing.assert_array_equal(same, d_rhs)


def test_no_rows_make_no_output_and_a_gradient_of_zero():
  lhs_YD, rhs_EDF, d_out_YF = _arrays(0)
  sizes = jnp.zeros(4, jnp.int32)
  out, d_lhs, d_rhs = _program('blocked')(lhs_YD, rhs_EDF, d_out_YF, sizes)
  assert out.shape == (0, WIDTH) and d_lhs.shape == (0, DIM)
  assert not np.any(d_rhs)


def test_products_are_added_in_float32_and_rounded_once():
  lhs_YD, rhs_EDF, d_out_YF = (x.astype(jnp.bfloat16) for x in _arrays())
  sizes = (7, 1, 20, 5)
  have = _program('blocked')(lhs_YD, rhs_EDF, d_out_YF, jnp.array(sizes))
  for x, y in zip(have, _dense(lhs_YD, rhs_EDF, d_out_YF, sizes), strict=True):
    assert x.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(x, float), y, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
  ('mean', 'num_groups', 'most'),
  [(64, 8, 1.25), (64, 384, 1.25), (100, 64, 1.25), (512, 8, 1.10)],
)
def test_executed_rows_exceed_routed_rows_by_little(mean, num_groups, most):
  num_rows = mean * num_groups
  count = jax.jit(lambda sizes: grouped_cases.executed_rows(sizes, num_rows))
  worst = grouped_cases.worst_case_rows(num_rows, num_groups)
  # The bound holds for whatever load, so the static worst case keeps it too.
  assert worst <= most * num_rows
  for sizes in _loads(num_rows, num_groups, 40):
    assert num_rows <= count(sizes) <= worst
  ones = np.ones(num_groups, np.int32)
  ones[0] += num_rows - num_groups
  assert worst - 2 * (worst - num_rows) / num_groups <= count(ones) <= worst


@pytest.mark.parametrize('num_rows', [600, 60])
def test_loops_multiply_as_many_rows_as_are_counted(num_rows):
  executed = []

  def body(pieces, i, carry):
    # From inside of the loops that the kernel runs.
    jax.debug.callback(lambda: executed.append(pieces.rows))
    return carry + pieces.rows

  @jit
  def loops(sizes):
    return blocked.run(body, _schedule(sizes, num_rows), 0)

  for sizes in _loads(num_rows, 7, 4):
    executed.clear()
    jax.block_until_ready(loops(sizes))
    jax.effects_barrier()
    count = int(grouped_cases.executed_rows(jnp.array(sizes), num_rows))
    assert sum(executed) == count <= grouped_cases.worst_case_rows(num_rows, 7)


def test_pieces_cover_each_row_of_a_group_once():
  for sizes in _loads(600, 7, 8):
    owner = np.full(600, -1)
    for pieces in _schedule(sizes, 600):
      for i in range(int(pieces.first), int(pieces.last)):
        rows = slice(int(pieces.start_P[i]), int(pieces.stop_P[i]))
        assert rows.stop - rows.start <= pieces.rows
        assert (owner[rows] == -1).all()
        owner[rows] = pieces.group_P[i]
    np.testing.assert_array_equal(owner, np.repeat(np.arange(7), sizes))


def test_blocks_of_one_size_follow_the_data():
  sizes = jnp.array([0, 17, 0, 1])
  group, start, rows, total = schedule.blocks(sizes, NUM_ROWS, 8)
  assert int(total) == 4
  np.testing.assert_array_equal(group[:4], [1, 1, 1, 3])
  np.testing.assert_array_equal(start[:4], [0, 8, 16, 17])
  np.testing.assert_array_equal(rows[:4], [8, 8, 1, 1])
  assert len(rows) == 9


def _lowered(platform, backend):
  lhs_YD, rhs_EDF, _ = (x.astype(jnp.bfloat16) for x in _arrays())

  def loss(lhs_YD, rhs_EDF, sizes):
    out_YF = gm.grouped_matmul(lhs_YD, rhs_EDF, sizes, backend=backend)
    return out_YF.astype(jnp.float32).sum()

  # JAX 0.12 asks of a kernel for Triton which GPU it is for.
  device = sharding.AbstractDevice(
    device_kind='NVIDIA H100 80GB HBM3', num_cores=132, platform='gpu'
  )
  mesh = sharding.AbstractMesh((), (), abstract_device=device)
  with (
    platforms.targeting({'cuda': 'gpu'}.get(platform, platform)),
    sharding.use_abstract_mesh(mesh)
    if platform == 'cuda'
    else contextlib.nullcontext(),
  ):
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(
      lhs_YD, rhs_EDF, jnp.zeros(4, jnp.int32)
    )
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
  ('platform', 'call'),
  [('cuda', '__gpu$xla.gpu.triton'), ('tpu', 'tpu_custom_call')],
)
def test_both_gradients_lower_to_the_platforms_kernel(platform, call):
  text = _lowered(platform, 'auto')
  # The forward product is not needed for these gradients of a sum.
  assert text.count(call) == 2
  assert 'ragged_dot' not in text


def test_ragged_dot_is_refused_on_a_gpu():
  with pytest.raises(ValueError, match='4 times the work.*54 GiB.*kernels'):
    _lowered('cuda', 'ragged')


def test_a_missing_package_names_the_extra(monkeypatch):
  monkeypatch.setattr(gm, '_has_tokamax', lambda: False)
  lhs_YD, rhs_EDF, _ = _arrays()
  with pytest.raises(ValueError, match=r"pip install -e '\.\[kernels\]'"):
    gm.grouped_matmul(lhs_YD, rhs_EDF, jnp.zeros(4, int), backend='tokamax')


def test_widths_that_no_tile_divides_are_refused_on_a_gpu():
  with pytest.raises(ValueError, match='16 divides, not 40; the next is 48'):
    importlib.import_module('composer_jax.kernels.grouped.triton')._tile(40, 64)


def test_the_platform_traced_for_decides():
  assert gm.chosen() == 'blocked'
  with platforms.targeting('tpu'):
    assert gm.chosen() == 'megablox'
  with platforms.targeting('gpu'):
    assert gm.chosen() == 'triton'
  with gm.using('ragged'):
    assert gm.chosen() == 'ragged'


def test_unknown_backend_is_named():
  lhs_YD, rhs_EDF, _ = _arrays()
  with pytest.raises(ValueError, match="'dense' is not in"):
    gm.grouped_matmul(lhs_YD, rhs_EDF, jnp.zeros(4, int), backend='dense')


@pytest.mark.parametrize('backend', [*gm.BACKENDS, 'megablox', 'triton'])
def test_gradients_of_rounds_are_added_to_sums(backend):
  lhs_YD, rhs_EDF, d_out_YF = _arrays()
  sums_EDF = jnp.full(rhs_EDF.shape, 3.0)

  @jit
  def run(sizes):
    with gm.using(backend):
      return gm.gradient(lhs_YD, rhs_EDF, d_out_YF, sizes, sums_EDF)

  for name, sizes in LOADS.items():
    d_lhs, total = run(jnp.array(sizes, jnp.int32))
    _, want, d_rhs = _dense(lhs_YD, rhs_EDF, d_out_YF, sizes)
    atol = 1e-6 * max(1.0, np.abs(want).max(), np.abs(d_rhs).max())
    np.testing.assert_allclose(d_lhs, want, atol=atol, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(
      total, d_rhs + 3, atol=atol, rtol=1e-6, err_msg=name
    )
