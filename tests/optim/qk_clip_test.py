"""QK-clip bounds the logits of heads above tau, and touches no other head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import attention, decoder
from composer_jax.models import config as model_config
from composer_jax.models import layer as layer_stages
from composer_jax.optim import qk_clip
from tests import compiling
from tests.models import decoder_test

B, T = 2, 7


def _config(change):
  fields = decoder_test.FIELDS
  base = (
    decoder_test.MLA if change.get('kind') == 'mla' else fields['attention']
  )
  return model_config.ModelConfig.from_dict(
    fields | dict(attention=base | change)
  )


CONFIGS = {
  'own_keys_with_biases': _config(dict(num_kv_heads=4, qkv_bias=True)),
  'shared_keys': _config(dict(qkv_bias=True)),
  'own_scales': _config(dict(num_kv_heads=4, qk_norm='projection')),
  'own_scales_of_shared_keys': _config(dict(qk_norm='projection')),
  'shared_scales': _config(dict(qk_norm='head')),
  'latent': _config(dict(kind='mla')),
  'latent_of_whole_queries': _config(dict(kind='mla', q_lora_dim=None)),
}


@functools.cache
def _shapes(config):
  """Shapes of clipped and other parameters, by the decoder's names."""
  stacks = decoder.abstract(config)[0]['params']
  layer = {
    'attention': jax.tree.map(
      lambda s: np.empty(s.shape[1:]), stacks['moe_layers']['attention']
    ),
    'attention_norm': {'scale': np.empty(config.embed_dim)},
  }
  stacks = {
    stack: jax.tree.map(lambda s, n=n: np.empty((n, *s.shape)), layer)
    for stack, n in (('dense_layers', 1), ('moe_layers', 2))
  }
  return {**stacks, 'embedding': np.empty((3, config.embed_dim))}


def _draw(seed, shapes):
  """Draws parameters of order one."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: rng.normal(size=s.shape).astype(np.float32), shapes
  )


@functools.partial(
  jax.jit, static_argnums=0, compiler_options=compiling.QUICKLY
)
def _max_logits(config, params):
  """Returns max_logits_LN of layers that all get the same input."""
  x_BTD = jnp.asarray(
    np.random.default_rng(7).normal(size=(B, T, config.embed_dim)), jnp.float32
  )
  positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
  segment_ids_BT = jnp.ones((B, T), jnp.int32)

  def layer(params):
    params = layer_stages.prepare({'params': params}, config)
    query, kept = layer_stages.attention_inputs(
      params, x_BTD, layer_stages.angles(positions_BT, config), config
    )
    visible = attention.visible_of(segment_ids_BT)
    _, max_logits_N = layer_stages.attend(
      params,
      query,
      kept,
      (visible, segment_ids_BT),
      config,
      None,
      is_measured=True,
    )
    return max_logits_N

  names = ('attention', 'attention_norm')
  stacks = [{n: params[s][n] for n in names} for s in qk_clip.STACKS]
  layers = jax.tree.map(lambda *stack: jnp.concatenate(stack), *stacks)
  return jax.lax.map(layer, layers)


@pytest.fixture(scope='module', params=CONFIGS)
def case(request):
  """Returns name, parameters, their logits, and a tau between those."""
  config = CONFIGS[request.param]
  params = _draw(0, _shapes(config))
  logits_LN = np.asarray(_max_logits(config, params))
  if request.param == 'shared_scales':
    # Between layers: two are clipped, one is not.
    tau = 1.02 * float(logits_LN.max(1).min())
  else:
    tau = float(np.median(logits_LN))
  return request.param, params, logits_LN, tau


@functools.partial(
  jax.jit, static_argnames='tau', compiler_options=compiling.QUICKLY
)
def _clip(params, updates, logits_LN, tau):
  clip = qk_clip.qk_clip(tau)
  after, state = clip.update(
    updates, clip.init(params), params, max_logits=logits_LN
  )
  assert state == optax.EmptyState()
  return after


def test_bounds_the_logits_of_the_same_input(case):
  name, params, logits_LN, tau = case
  zero = jax.tree.map(np.zeros_like, params)
  clipped = optax.apply_updates(params, _clip(params, zero, logits_LN, tau))
  have_LN = np.asarray(_max_logits(CONFIGS[name], clipped))
  assert (logits_LN > 1.5 * tau).any() and (logits_LN < tau).any()
  assert have_LN.max() <= tau * (1 + 1e-5)
  gamma_LN = np.minimum(1, tau / logits_LN)
  if name == 'shared_scales':
    gamma_LN = gamma_LN.min(1, keepdims=True)
  # All logits of a head shrink alike: the largest is tau, or unchanged.
  np.testing.assert_allclose(have_LN, gamma_LN * logits_LN, rtol=1e-5)
  np.testing.assert_array_equal(
    have_LN[(gamma_LN == 1) & (logits_LN > 0)],
    logits_LN[(gamma_LN == 1) & (logits_LN > 0)],
  )


# Exponents of gamma in the factor of each parameter.
_POWERS = {
  'own_keys_with_biases': dict(
    query=0.5, key=0.5, query_bias=0.5, key_bias=0.5
  ),
  'shared_keys': dict(query=1, query_bias=1),
  'own_scales': dict(query_norm=0.5, key_norm=0.5),
  'own_scales_of_shared_keys': dict(query_norm=1),
  'shared_scales': {'query_norm/scale': 0.5, 'key_norm/scale': 0.5},
  'latent': dict(query_up=[0.5] * 4 + [1] * 2, key_up=0.5),
  'latent_of_whole_queries': dict(query=[0.5] * 4 + [1] * 2, key_up=0.5),
}


def test_scales_parameters_after_the_step_head_by_head(case):
  name, params, logits_LN, tau = case
  updates = _draw(1, _shapes(CONFIGS[name]))
  after = trees.flatten_names(_clip(params, updates, logits_LN, tau))
  params, updates = map(trees.flatten_names, (params, updates))
  powers = {
    f'{stack}/attention/{leaf}': power
    for leaf, power in _POWERS[name].items()
    for stack in qk_clip.STACKS
  }
  assert set(powers) <= set(after)
  for leaf, update in updates.items():
    if leaf not in powers:
      np.testing.assert_array_equal(after[leaf], update, err_msg=leaf)
      continue
    gamma_LN = np.minimum(1, tau / logits_LN)
    is_dense = leaf.startswith('dense')
    gamma_LN = gamma_LN[:1] if is_dense else gamma_LN[1:]
    if leaf.endswith('scale'):
      factor = gamma_LN.min(1, keepdims=True) ** powers[leaf]
    else:
      factor = gamma_LN[:, :, None] ** np.asarray(powers[leaf])
      if update.ndim == 4:
        factor = factor[:, None]
    factor = np.broadcast_to(factor, update.shape)
    np.testing.assert_allclose(
      params[leaf] + after[leaf],
      (params[leaf] + update) * factor,
      rtol=1e-5,
      atol=1e-6,
      err_msg=leaf,
    )
    # Bit for bit where no head is over tau.
    np.testing.assert_array_equal(
      after[leaf][factor == 1], update[factor == 1], err_msg=leaf
    )


def test_parameters_in_bfloat16_are_rounded_once():
  """After a strong clip most of a weight is removed."""
  shapes = _shapes(CONFIGS['shared_keys'])['dense_layers']['attention']
  shapes = {name: shapes[name] for name in ('query', 'key', 'out')}
  params, updates = (
    {
      'dense_layers': {
        'attention': jax.tree.map(jnp.bfloat16, _draw(seed, shapes))
      }
    }
    for seed in (0, 1)
  )
  logits_LN = np.float32([[50, 0.5, 50, 50]])
  after = optax.apply_updates(params, _clip(params, updates, logits_LN, 1.0))
  have, param, update = (
    tree['dense_layers']['attention']['query']
    for tree in (after, params, updates)
  )
  assert have.dtype == jnp.bfloat16
  factor_N1 = 1 / np.maximum(logits_LN[0], 1)[:, None]
  want = factor_N1 * (np.float32(param) + np.float32(update))
  # Half the distance of neighbours.
  np.testing.assert_allclose(np.float32(have), want, rtol=2**-7.9)


def test_extra_arguments_pass_through_a_chain_on_a_mesh():
  # All parameters of a decoder.
  shapes = decoder.abstract(CONFIGS['latent'])[0]['params']
  params, gradients = _draw(0, shapes), _draw(1, shapes)
  logits_LN = np.random.default_rng(2).uniform(0, 9, (3, 3)).astype(np.float32)
  chain = optax.chain(
    optax.partition(
      {'all': optax.scale(-0.5)}, jax.tree.map(lambda _: 'all', params)
    ),
    qk_clip.qk_clip(4.0),
  )

  @jax.jit
  def step(params, gradients, logits_LN):
    state = chain.init(params)
    updates, _ = chain.update(gradients, state, params, max_logits=logits_LN)
    return optax.apply_updates(params, updates)

  want = step(params, gradients, logits_LN)
  mesh = jax.make_mesh((4, 2), ('a', 'b'), axis_types=(AxisType.Explicit,) * 2)

  def place(x):
    spec = [None] * x.ndim
    for dim in range(x.ndim - 1, 0, -1):
      if x.shape[dim] % 4 == 0:
        spec[dim] = 'a'
        break
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))

  with jax.set_mesh(mesh):
    have = step(*jax.tree.map(place, (params, gradients)), logits_LN)
  assert have['moe_layers']['attention']['key_up'].sharding.spec[3] == 'a'
  jax.tree.map(np.testing.assert_array_equal, have, want)


def test_errors_name_what_is_missing():
  params = _draw(0, _shapes(CONFIGS['latent']))
  clip = qk_clip.qk_clip(100.0)
  with pytest.raises(ValueError, match='with_max_logits=True'):
    clip.update(params, optax.EmptyState(), params)
  with pytest.raises(ValueError, match=r'\(2, 3\).*dense_layers.*\(1, 3\)'):
    _clip(params, params, np.ones((2, 3)), 1.0)
