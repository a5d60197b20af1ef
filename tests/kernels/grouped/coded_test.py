"""The product of codes equals that of their values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import params  # Not public yet.

from composer_jax.core import platforms
from composer_jax.kernels.grouped import coded, matmul
from composer_jax.numerics import formats
from composer_jax.plan import topologies

E, D, F = 4, 384, 256
SIZES = {
  'uneven': (70, 0, 1, 99),
  'none': (0, 0, 0, 0),
  'all': (40, 60, 60, 40),
}
Y = 200


def _emulated(lhs_RB, rhs_BB):
  operands = (ref[...].astype(jnp.float32) for ref in (lhs_RB, rhs_BB))
  return jax.lax.dot_general(
    *operands,
    (((1,), (1,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST,
  )


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['tpu7x', 'h200'])
def test_interpreted_it_is_the_product_of_values(kind, monkeypatch):
  """Scales far apart within a row; groups that end within a tile."""
  # jax's interpreter knows no wgmma of a transposed matrix.
  monkeypatch.setattr(coded, '_hopper_product', _emulated)
  keys = jax.random.split(jax.random.key(0), 3)
  spread = lambda x, axis: (
    x * jnp.exp2(jnp.expand_dims(jnp.arange(D) // 128 * 5.0, axis))
  )
  x_YD = spread(jax.random.normal(keys[0], (Y, D)), 0)
  w_EDF = spread(jax.random.normal(keys[1], (E, D, F)), 1)
  axes = formats.last(x_YD), formats.Axes((1, 2), ())
  pairs = [
    formats.quantise(x, 'fp8', a)
    for x, a in zip((x_YD, w_EDF), axes, strict=True)
  ]
  values = [
    formats.dequantise(pair, 'fp8', a)
    for pair, a in zip(pairs, axes, strict=True)
  ]
  multiply = jax.jit(coded.multiply, static_argnames='dtype')

  def product(sizes_E):
    codes = (pair[:2] for pair in pairs)
    if kind == 'tpu7x':  # On a CPU.
      return multiply(*codes, sizes_E, dtype=jnp.float32)
    with platforms.targeting('gpu', kind), params.force_gpu_interpret_mode():
      return np.asarray(multiply(*codes, sizes_E, dtype=jnp.float32))

  for sizes in SIZES.values():
    sizes_E = jnp.array(sizes, jnp.int32)
    have, want = product(sizes_E), matmul.grouped_matmul(*values, sizes_E)
    atol = 1e-6 * max(1.0, np.abs(want).max())
    np.testing.assert_allclose(have, want, atol=atol)
    assert not np.any(have[sum(sizes) :])


def test_devices_that_would_widen_codes_are_refused():
  """Of all machines that the plan compiles for, and of kinds that jax tells."""
  kinds = {
    *topologies.MACHINES,
    'tpu v5',
    'nvidia h100 80gb hbm3',
    'nvidia b200',
  }
  taken = {kind for kind in kinds if re.search('tpu7x|h100|h200', kind)}
  for kind in taken:
    with platforms.targeting('gpu', kind):
      coded.check()
  assert len(taken) == 4
  for kind in kinds - taken:
    with (
      platforms.targeting('gpu', kind),
      pytest.raises(ValueError, match=f"alone; on '{kind}'.*='values'"),
    ):
      coded.check()
