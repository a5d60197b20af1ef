"""Matrices split over devices equal whole ones, by the collectives stated."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.optim.muon import newton_schulz
from composer_jax.plan.hlo import overlap
from tests.models import hlo_flops

AXES = ('replica', 'fsdp')
# Rows that no subgroup divides, columns that each does.
NUM, ROWS, COLUMNS = 2, 13, 24
OPTIONS = newton_schulz.NewtonSchulz(
  coefficients='keller', method='standard', dtype='float32'
)


def _mesh(axis_type=AxisType.Auto):
  return jax.make_mesh((4, 2), AXES, axis_types=(axis_type,) * 2)


@pytest.fixture(scope='module')
def matrices():
  """Subgroups of any k <= 8 get NUM matrices each."""
  x = np.random.default_rng(0).normal(size=(4 * NUM, ROWS, COLUMNS))
  x = x.astype(np.float32)
  x[1] = 0
  x[2] *= 1e-30
  return x


def _whole(matrices, options=OPTIONS):
  run = jax.jit(lambda x: newton_schulz.orthogonalize_together(x, options))
  return np.asarray(run(matrices), np.float32)


def _pieces(matrices, k):
  """[subgroup, n, p, k, q/k] -> [device, n, p, q/k], all on one axis."""
  used = matrices[: 8 // k * NUM]
  x = used.reshape(8 // k, NUM, ROWS, k, -1).transpose(0, 3, 1, 2, 4)
  return x.reshape(8, NUM, ROWS, -1)


def _joined(pieces, k):
  x = np.asarray(pieces, np.float32).reshape(8 // k, k, NUM, ROWS, -1)
  return x.transpose(0, 2, 3, 1, 4).reshape(8 // k * NUM, ROWS, -1)


@functools.cache
def _program(k, options=OPTIONS, axis_type=AxisType.Auto):
  mesh = _mesh(axis_type)
  groups = newton_schulz.index_groups(8, k)
  body = functools.partial(
    newton_schulz.orthogonalize_split,
    options=options,
    axes=AXES,
    index_groups=groups,
  )
  run = jax.jit(
    jax.shard_map(
      lambda x: body(x[0])[None],
      mesh=mesh,
      in_specs=P(AXES),
      out_specs=P(AXES),
      check_vma=False,
    )
  )
  shape = jax.ShapeDtypeStruct(
    (8, NUM, ROWS, COLUMNS // k),
    jnp.float32,
    sharding=NamedSharding(mesh, P(AXES)),
  )
  lowered = run.lower(shape)
  return lowered, lowered.compile(), shape.sharding


def _run(matrices, k, *arguments):
  _, compiled, sharding = _program(k, *arguments)
  pieces = jax.device_put(_pieces(matrices, k), sharding)
  return _joined(compiled(pieces), k)


@pytest.mark.parametrize('k', [2, 4, 8])
def test_split_equals_whole(matrices, k):
  # Two orders of the same sums, amplified by the slope at zero.
  used = matrices[: 8 // k * NUM]
  np.testing.assert_allclose(_run(used, k), _whole(used), rtol=0, atol=2e-6)


def test_split_equals_whole_on_explicit_axes(matrices):
  split = _run(matrices, 4, OPTIONS, AxisType.Explicit)
  np.testing.assert_array_equal(split, _run(matrices, 4))


def test_columns_may_be_padded_and_dealt_in_any_order(matrices):
  padded = matrices.copy()
  padded[..., -3:] = 0
  order = np.random.default_rng(1).permutation(COLUMNS)
  split = _run(padded[..., order], 4)
  np.testing.assert_allclose(
    split[..., np.argsort(order)], _whole(padded)[:4], rtol=0, atol=2e-6
  )


def test_nan_stays_in_its_matrix(matrices):
  poisoned = matrices.copy()
  poisoned[0, 3, 5] = np.nan
  split = _run(poisoned, 4)
  assert np.isnan(split[0]).all()
  np.testing.assert_array_equal(split[1:], _run(matrices, 4)[1:])


BFLOAT16 = newton_schulz.NewtonSchulz(dtype='bfloat16')


def test_bfloat16_brings_singular_values_near_one(matrices):
  values = np.linalg.svd(
    _run(matrices, 8, BFLOAT16).astype(np.float64), compute_uv=False
  )
  assert np.all(values[0] > 0.80) and np.all(values[0] <= 1.13)
  np.testing.assert_array_equal(values[1], 0)


@pytest.mark.parametrize(
  'k,options', [(2, OPTIONS), (4, OPTIONS), (8, OPTIONS), (8, BFLOAT16)]
)
def test_collectives_are_those_stated(k, options):
  program = overlap.read(_program(k, options)[1].as_text())
  assert newton_schulz.split_collectives(ROWS, k, options, num=NUM) == tuple(
    (c.kind, c.bytes) for c in program.collectives
  )
  wanted = newton_schulz.index_groups(8, k)
  for collective in program.collectives:
    assert collective.groups == frozenset(map(frozenset, wanted))
    assert collective.count == 1 and not collective.loops


def test_gram_matrices_are_added_in_float32_along_a_leading_dimension():
  # Along an inner one TPUs would add whole matrices in the rounded dtype.
  text = _program(8, BFLOAT16)[0].as_text()
  scatters = re.findall(
    r'reduce_scatter"?\(.*?scatter_dimension = (\d).*?\}\) : \(tensor<(\S+)>\)',
    text,
    re.DOTALL,
  )
  assert scatters == [('0', f'8x{NUM}x2x{ROWS}xf32')] * 5


@pytest.mark.parametrize('k', [2, 4, 8])
def test_flops_are_those_of_the_program(k):
  text = _program(k)[0].as_text('hlo')
  one = newton_schulz.split_flops(ROWS, COLUMNS, k, OPTIONS)
  assert hlo_flops.count(text, dynamic_trips=0) == NUM * one
  # Shared evenly but for the padding of rows and columns.
  even = newton_schulz.flops(ROWS, COLUMNS, OPTIONS) / k
  assert even <= one <= 1.2 * even


def test_collectives_in_closed_form():
  # Three rows on each of four devices, one of padding: three quarters of
  # 12 x 11 entries arrive in each collective.
  stated = newton_schulz.split_collectives(11, 4, BFLOAT16)
  assert stated[:2] == (('all-reduce', 6),) * 2
  assert stated[2:5] == (
    ('reduce-scatter', 4 * 99),
    ('all-gather', 2 * 99),
    ('all-gather', 2 * 99),
  )
  assert len(stated) == 2 + 3 * 5
