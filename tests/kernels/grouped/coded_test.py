"""The product of codes equals that of their values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import platforms
from composer_jax.kernels.grouped import coded, matmul
from composer_jax.numerics import formats

E, D, F = 4, 384, 256
SIZES = {
  'uneven': (70, 0, 1, 99),
  'none': (0, 0, 0, 0),
  'all': (40, 60, 60, 40),
}
Y = 200


@pytest.mark.slow
def test_interpreted_it_is_the_product_of_values():
  """Scales far apart within a row; tiles with rows of several groups."""
  keys = jax.random.split(jax.random.key(0), 3)
  spread = lambda x, axis: (
    x * jnp.exp2(jnp.expand_dims(jnp.arange(D) // 128 * 5.0, axis))
  )
  x_YD = spread(jax.random.normal(keys[0], (Y, D)), 0)
  w_EDF = spread(jax.random.normal(keys[1], (E, D, F)), 1)

  @jax.jit
  def run(sizes_E):
    axes = formats.last(x_YD), formats.Axes((1, 2), ())
    pairs = [
      formats.quantise(x, 'fp8', a)
      for x, a in zip((x_YD, w_EDF), axes, strict=True)
    ]
    have = coded.multiply(
      *(pair[:2] for pair in pairs), sizes_E, dtype=jnp.float32
    )
    values = [
      formats.dequantise(pair, 'fp8', a)
      for pair, a in zip(pairs, axes, strict=True)
    ]
    return have, matmul.grouped_matmul(*values, sizes_E)

  for sizes in SIZES.values():
    have, want = run(jnp.array(sizes, jnp.int32))
    atol = 1e-6 * max(1.0, np.abs(want).max())
    np.testing.assert_allclose(have, want, atol=atol)
    assert not np.any(have[sum(sizes) :])


@pytest.mark.parametrize('kind', ['tpu v5', 'h200', 'b200', 'cpu'])
def test_devices_that_would_widen_codes_are_refused(kind):
  with (
    platforms.targeting('gpu', kind),
    pytest.raises(ValueError, match=f"TPU v7 alone; on '{kind}'.*='values'"),
  ):
    coded.check()
  with platforms.targeting('tpu', 'tpu7x'):
    coded.check()
