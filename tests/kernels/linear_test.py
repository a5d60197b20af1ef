"""The product of activations with weights whose contracted axes lead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import linear


@pytest.fixture(scope='module')
def arrays():
  rng = np.random.default_rng(0)
  x_BTD = rng.standard_normal((2, 3, 8)).astype(np.float32)
  weight_DNH = rng.standard_normal((8, 2, 4)).astype(np.float32)
  return x_BTD, weight_DNH


def test_equals_the_sum_over_the_contracted_axes(arrays):
  x_BTD, weight_DNH = arrays
  out_BTNH = linear.linear(x_BTD, weight_DNH)
  expected = (x_BTD[..., None, None].astype(float) * weight_DNH).sum(2)
  np.testing.assert_allclose(out_BTNH, expected, rtol=1e-5, atol=1e-6)
  weight_NHD = weight_DNH.transpose(1, 2, 0)
  back_BTD = linear.linear(out_BTNH, weight_NHD, num_contracted=2)
  expected = np.einsum('BTNH,NHD->BTD', np.asarray(out_BTNH, float), weight_NHD)
  np.testing.assert_allclose(back_BTD, expected, rtol=1e-5, atol=1e-5)


def test_gradient_is_that_of_the_einsum(arrays):
  def ours(x, w):
    return jnp.sin(linear.linear(x, w)).sum()

  def plain(x, w):
    return jnp.sin(jnp.einsum('BTD,DNH->BTNH', x, w)).sum()

  for gradient, expected in zip(
    jax.grad(ours, (0, 1))(*arrays),
    jax.grad(plain, (0, 1))(*arrays),
    strict=True,
  ):
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_gradient_of_two_contracted_axes_is_that_of_the_einsum(arrays):
  _, weight_DNH = arrays
  weight_NHD = weight_DNH.transpose(1, 2, 0)
  x_BTNH = np.random.default_rng(1).standard_normal((2, 3, 2, 4))
  x_BTNH = x_BTNH.astype(np.float32)

  def ours(x, w):
    return jnp.sin(linear.linear(x, w, num_contracted=2)).sum()

  def plain(x, w):
    return jnp.sin(jnp.einsum('BTNH,NHD->BTD', x, w)).sum()

  for gradient, expected in zip(
    jax.grad(ours, (0, 1))(x_BTNH, weight_NHD),
    jax.grad(plain, (0, 1))(x_BTNH, weight_NHD),
    strict=True,
  ):
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_no_product_of_a_step_contracts_the_rows_of_its_left_operand():
  # The slow kind on CPU; XLA folds a plain transposition into the product.
  def loss(x_ZD, weight_DF):
    return jnp.sin(linear.linear(x_ZD, weight_DF)).sum()

  # Of a size that XLA does not copy for anyway.
  arrays = (jnp.ones((1024, 256)), jnp.ones((256, 256)))
  text = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile().as_text()
  products = [line for line in text.splitlines() if ' dot(' in line]
  assert len(products) == 3
  assert all('lhs_contracting_dims={1}' in line for line in products)


def test_weight_gradient_is_the_sum_over_rows(arrays):
  x_BTD, _ = arrays
  x_ZD = x_BTD.reshape(6, 8)
  d_ZF = np.random.default_rng(2).standard_normal((6, 5)).astype(np.float32)
  expected = (x_ZD[:, :, None].astype(float) * d_ZF[:, None]).sum(0)
  np.testing.assert_allclose(
    linear.weight_gradient(x_ZD, d_ZF), expected, rtol=1e-5, atol=1e-6
  )


def test_bfloat16_is_summed_in_float32_and_rounded_once():
  # 256 + 1 + 1 + ... : every partial sum in bfloat16 would stay at 256.
  x_1D = jnp.concatenate([jnp.full(1, 256), jnp.ones(255)])[None]
  ones_D1 = jnp.ones((256, 1), jnp.bfloat16)
  out = linear.linear(x_1D.astype(jnp.bfloat16), ones_D1)
  assert out.dtype == jnp.bfloat16
  assert float(out[0, 0]) == float(jnp.bfloat16(511))
