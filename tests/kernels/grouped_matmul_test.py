"""Laws of the grouped matmul: it is a loop over dense products, per backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import grouped_matmul as gm

NUM_ROWS, DIM, WIDTH = 40, 12, 10
SIZES = {
  'mixed': (7, 1, 20, 5),
  'empty': (0, 30, 0, 0),
  'one': (0, 0, 0, 40),
  'none': (0, 0, 0, 0),
}


def _arrays():
  keys = jax.random.split(jax.random.key(0), 3)
  lhs_YD = jax.random.normal(keys[0], (NUM_ROWS, DIM))
  rhs_EDF = jax.random.normal(keys[1], (4, DIM, WIDTH))
  d_out_YF = jax.random.normal(keys[2], (NUM_ROWS, WIDTH))
  return lhs_YD, rhs_EDF, d_out_YF


def _dense(lhs_YD, rhs_EDF, sizes):
  ends = np.cumsum(sizes)
  group_Y = (np.arange(NUM_ROWS)[:, None] >= ends).sum(1)
  inside_YE = group_Y[:, None] == np.arange(len(sizes))
  return jnp.einsum('YD,EDF,YE->YF', lhs_YD, rhs_EDF, inside_YE)


@pytest.mark.parametrize('backend', gm.BACKENDS)
def test_values_and_gradients_equal_dense_reference(backend):
  lhs_YD, rhs_EDF, d_out_YF = _arrays()

  @jax.jit
  def ours(sizes):
    out, pull = jax.vjp(
      lambda a, b: gm.grouped_matmul(a, b, sizes, backend=backend, block=8),
      lhs_YD,
      rhs_EDF,
    )
    return out, *pull(d_out_YF)

  for name, sizes in SIZES.items():
    out, pull = jax.vjp(lambda a, b, s=sizes: _dense(a, b, s), lhs_YD, rhs_EDF)
    for have, want in zip(
      ours(jnp.array(sizes)), (out, *pull(d_out_YF)), strict=True
    ):
      np.testing.assert_allclose(have, want, atol=2e-5, err_msg=name)


@pytest.mark.parametrize('backend', gm.BACKENDS)
def test_rows_past_the_groups_are_zero_and_move_nothing(backend):
  lhs_YD, rhs_EDF, d_out_YF = _arrays()
  sizes = jnp.array([3, 0, 9, 1])

  @jax.jit
  def ours(lhs_YD, d_out_YF):
    out, pull = jax.vjp(
      lambda a, b: gm.grouped_matmul(a, b, sizes, backend=backend, block=8),
      lhs_YD,
      rhs_EDF,
    )
    return out, *pull(d_out_YF)

  out, d_lhs, d_rhs = ours(lhs_YD, d_out_YF)
  assert not np.any(out[13:]) and not np.any(d_lhs[13:])
  _, _, same = ours(lhs_YD.at[13:].set(1e3), d_out_YF.at[13:].set(1e3))
  np.testing.assert_array_equal(same, d_rhs)


def test_bits_of_a_row_ignore_its_neighbours():
  lhs_YD, rhs_EDF, _ = _arrays()
  row_D = lhs_YD[5]

  @jax.jit
  def ours(lhs_YD, sizes):
    return gm.grouped_matmul(lhs_YD, rhs_EDF, sizes, block=16)

  alone = ours(jnp.zeros_like(lhs_YD).at[0].set(row_D), jnp.array([0, 0, 1, 0]))
  for place, sizes in ((12, (9, 0, 30, 1)), (25, (2, 23, 15, 0))):
    crowd = ours(lhs_YD.at[place].set(row_D), jnp.array(sizes))
    np.testing.assert_array_equal(crowd[place], alone[0])


def test_trip_count_follows_the_data():
  sizes = jnp.array([0, 17, 0, 1])
  _, _, rows, total = gm.schedule(sizes, NUM_ROWS, 8)
  assert int(total) == 4
  np.testing.assert_array_equal(rows[:4], [8, 8, 1, 1])
  assert len(rows) == gm.num_blocks(NUM_ROWS, 4, 8) == 9


@pytest.mark.parametrize(
  'platform,backend', [('cuda', 'gathered'), ('tpu', 'ragged')]
)
def test_forward_and_gradients_lower_for_accelerators(platform, backend):
  lhs_YD, rhs_EDF, _ = _arrays()

  def loss(lhs_YD, rhs_EDF, sizes):
    return gm.grouped_matmul(lhs_YD, rhs_EDF, sizes, backend=backend).sum()

  exported = jax.export.export(
    jax.jit(jax.grad(loss, argnums=(0, 1))), platforms=[platform]
  )(lhs_YD, rhs_EDF, jnp.zeros(4, jnp.int32))
  ragged = 'ragged_dot' in exported.mlir_module()
  assert ragged == (platform == 'tpu')


def test_unknown_backend_is_named():
  lhs_YD, rhs_EDF, _ = _arrays()
  with pytest.raises(ValueError, match="'dense' is not one of"):
    gm.grouped_matmul(lhs_YD, rhs_EDF, jnp.zeros(4, int), backend='dense')
