"""Operations that stay float32 in a model that computes in bfloat16."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.kernels.attention import grouped_query
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head, layer, norm, rope
from tests.kernels.attention import reference
from tests.models import decoder_test, routing

BF16 = ml_dtypes.bfloat16
FAST = {'xla_backend_optimization_level': 0}  # to compile


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(BF16)


def test_norm_is_rounded_once():
  x, scale = normal(0, 7, 96), normal(1, 96)
  wide, wide_scale = x.astype(np.float64), scale.astype(np.float64)
  want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * wide_scale
  have = norm.rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-6)
  assert have.dtype == jnp.bfloat16
  # All but ties and near-ties of the one rounding.
  assert (np.asarray(have) == want.astype(BF16)).mean() > 0.99


def test_rotation_is_rounded_once_at_far_positions():
  x = normal(2, 1, 5, 8, 8)
  positions_BT = jnp.array([[0, 1, 77, 1000, 9999]])
  config = model_config.RopeConfig(theta=1e4, interleaved=False, yarn=None)
  have = rope.rotate(
    jnp.asarray(x), rope.angles(positions_BT, 8, config), config
  )
  angle = np.asarray(positions_BT)[0, :, None] / 1e4 ** (np.arange(4) / 4)
  turned = (
    x[..., :4].astype(np.float64) + 1j * x[..., 4:].astype(np.float64)
  ) * np.exp(1j * angle)[:, None]
  want = np.concatenate([turned.real, turned.imag], -1)
  assert have.dtype == jnp.bfloat16
  # A float32 angle of 9,999 is 5e-4 off, an eighth of a rounding.
  assert (np.asarray(have) == want.astype(BF16)).mean() > 0.95


@pytest.mark.parametrize('backend', [reference.whole, 'blocked'])
def test_softmax_sees_float32_scores(backend):
  # Scores of 256 and 257 are one number in bfloat16.
  q = jnp.asarray([[[[16.0, 1.0]]]], jnp.bfloat16)
  k = jnp.asarray([[[[16.0, 0.0]], [[16.0, 1.0]]]], jnp.bfloat16)
  v = jnp.asarray([[[[1.0]], [[0.0]]]], jnp.bfloat16)
  visible = grouped_query.Visible(
    jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 2, jnp.int32)
  )
  share, _ = grouped_query.attend(q, k, v, visible, scale=1.0, backend=backend)
  np.testing.assert_allclose(float(share[0, 0, 0, 0]), 0.2689, rtol=0.01)


@pytest.fixture(scope='module', params=sorted(decoder_test.CONFIGS))
def config(request):
  plain = decoder_test.CONFIGS[request.param]
  return dataclasses.replace(plain, compute_dtype='bfloat16')


def test_logits_and_hidden_states_have_their_dtypes(config):
  shapes, _ = decoder.abstract(config)
  ints_BT = jax.ShapeDtypeStruct((2, 3), jnp.int32)
  out = jax.eval_shape(decoder.Decoder(config).apply, shapes, *[ints_BT] * 3)
  assert out.hidden_BTD.dtype == jnp.bfloat16
  logits = jax.eval_shape(
    lambda variables, hidden: head.logits(variables, hidden, config),
    shapes,
    out.hidden_BTD,
  )
  assert logits.dtype == jnp.float32


def test_norms_and_the_router_multiply_with_float32(config):
  for stack in ('dense_layers', 'moe_layers'):
    params = decoder.abstract(config)[0]['params'][stack]
    prepared = jax.eval_shape(
      functools.partial(layer.prepare, config=config), {'params': params}
    )
    for name, x in trees.flatten_names(prepared).items():
      is_wide = 'norm' in name or name.endswith('router')
      assert x.dtype == (jnp.float32 if is_wide else jnp.bfloat16), name


def mixture_shapes(config):
  """Returns the parameters of a layer of experts as shapes."""
  layers = decoder.abstract(config)[0]['params']['moe_layers']
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layers
  )


def mixture(params, x_BTD, config):
  bias_E = None
  if config.moe.router == 'sigmoid':
    bias_E = jnp.zeros(config.moe.num_experts)
  params = layer.prepare({'params': params}, config)
  a = config.attention
  width = getattr(a, 'value_dim', None) or a.head_dim
  shape = (*x_BTD.shape[:2], a.num_heads, width)
  out_BTNH = jnp.zeros(shape, x_BTD.dtype)
  valid_BT = jnp.ones(x_BTD.shape[:2], bool)
  return layer.mixture(
    params, bias_E, (x_BTD, out_BTNH, valid_BT, None), config
  )


def test_router_logits_are_float32_products_of_bfloat16_values(config):
  groups = config.moe.num_groups
  moe = dataclasses.replace(
    config.moe, router='softmax', num_active_groups=groups
  )
  config = dataclasses.replace(config, moe=moe)
  x_BTD = normal(3, 1, 64, config.embed_dim)
  router_DE = normal(4, config.embed_dim, moe.num_experts)
  params = jax.tree.map(
    lambda a: np.zeros(a.shape, a.dtype), mixture_shapes(config)
  )
  # Without attention, and with a norm of scale one.
  norm_of = np.asarray(x_BTD, np.float32)
  x_BTD = (norm_of / np.sqrt((norm_of**2).mean(-1, keepdims=True))).astype(BF16)
  params['ffw_norm']['scale'] = np.ones(config.embed_dim, np.float32)
  params['moe']['router'] = router_DE.astype(np.float32)
  *_, stats = jax.jit(
    functools.partial(mixture, config=config), compiler_options=FAST
  )(params, jnp.asarray(x_BTD))
  h_BTD = norm.rms_norm(
    jnp.asarray(x_BTD), jnp.ones(config.embed_dim), config.norm_eps
  )
  exact_ZE = np.asarray(h_BTD[0], np.float64) @ router_DE.astype(np.float64)
  z_loss = (np.log(np.exp(exact_ZE).sum(-1)) ** 2).mean()
  # Logits rounded to bfloat16 are 1e-4 off in this mean.
  stats = routing.statistics(stats.router, moe)
  np.testing.assert_allclose(stats.z_loss, z_loss, rtol=1e-6)


def test_discrete_choices_ask_accelerators_for_whole_float32(config):
  x_BTD = jnp.zeros((1, 4, config.embed_dim), jnp.bfloat16)
  lowered = jax.jit(functools.partial(mixture, config=config)).lower(
    mixture_shapes(config), x_BTD
  )
  dots = [
    line
    for line in lowered.as_text().splitlines()
    if 'dot_general' in line and re.search(r'f32>, tensor<[^>]*f32>\)', line)
  ]
  # The router and the weights of the chosen.
  assert len(dots) == 2
  for dot in dots:
    assert 'precision = [HIGHEST, HIGHEST]' in dot, dot
