"""The largest attention logit of each head, however attention is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels.attention import grouped_query, tiled
from composer_jax.models import attention as model_attention
from composer_jax.models import config as model_config
from composer_jax.models import decoder, placement, rope
from composer_jax.models import layer as layer_stages
from composer_jax.parallel import layouts, shardings, topology
from tests import compiling
from tests.kernels.attention import reference
from tests.models import decoder_test
from tests.parallel import architectures_test, on_mesh

_OPTIONS = compiling.QUICKLY
_MASKED = -1e30


def _normal(seed, *shape):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def _tops_by_hand(q_BTNH, k_BSKH, mask_BTS, scale):
  q_BTNH, k_BSKH = np.float64(q_BTNH), np.float64(k_BSKH)
  k_BSNH = np.repeat(k_BSKH, q_BTNH.shape[2] // k_BSKH.shape[2], axis=2)
  scores_BTNS = scale * np.einsum('BTNH,BSNH->BTNS', q_BTNH, k_BSNH)
  return np.where(mask_BTS[:, :, None], scores_BTNS, _MASKED).max(-1)


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize('backend', [reference.whole, 'blocked'])
def test_kernels_return_what_softmax_subtracts(backend):
  # More keys than a block, and not a multiple; shared key heads; the last row
  # sees nothing in its first query.
  q, k, v = (
    _normal(0, 2, 3, 4, 8),
    _normal(1, 2, 300, 2, 8),
    _normal(2, 2, 300, 2, 5),
  )
  visible = grouped_query.Visible(
    jnp.asarray([[0, 7, 130], [300, 0, 299]], jnp.int32),
    jnp.asarray([[1, 250, 300], [300, 300, 300]], jnp.int32),
  )

  @jax.jit
  def run(q, k, v):
    return grouped_query.attend(q, k, v, visible, scale=0.3, backend=backend)

  _, tops = run(q, k, v)
  mask_BTS = np.asarray(reference.as_mask(visible, 300))
  by_hand = _tops_by_hand(q, k, mask_BTS, 0.3)
  np.testing.assert_allclose(tops, by_hand, rtol=1e-6, atol=1e-6)
  assert tops[1, 0, 0] == np.float32(_MASKED) and tops.dtype == jnp.float32


@pytest.mark.parametrize('kind', ['grouped', 'latent'])
def test_tiles_return_what_softmax_subtracts(kind):
  segments_BT = jnp.asarray([np.repeat([1, 2, 0], [40, 30, 5])], jnp.int32)
  visible = model_attention.visible_of(segments_BT)
  mask_BTS = np.asarray(reference.as_mask(visible, 75))
  if kind == 'grouped':
    query, kept = _normal(0, 1, 75, 4, 8), (_normal(1, 1, 75, 2, 8),) * 2
    by_hand = _tops_by_hand(query, kept[0], mask_BTS, 1.0)
  else:
    query = _normal(0, 1, 75, 4, 6), _normal(1, 1, 75, 4, 2)
    kept = _normal(2, 1, 75, 6), _normal(3, 1, 75, 2)
    whole = (jnp.concatenate(part, axis=-1) for part in (query, kept))
    q, k = whole
    by_hand = _tops_by_hand(q, k[:, :, None], mask_BTS, 1.0)
  arrays = (query, kept, visible)
  run = jax.jit(tiled.attend_packed, static_argnums=3)
  out, tops = run(*arrays, True)
  # Sums of a dozen float32 products of order one.
  np.testing.assert_allclose(tops, by_hand, rtol=1e-6, atol=1e-6)
  # In this mode no bit depends on whether logits are measured.
  np.testing.assert_array_equal(out, run(*arrays, False)[0])


# ---------------------------------------------------------------- the decoder

B, T = 2, 12
_TOKENS = (
  jax.random.randint(jax.random.key(1), (B, T), 0, decoder_test.V),
  # Documents that follow each other, and padding.
  jnp.asarray([np.repeat([1, 2, 0], [5, 4, 3]), np.repeat([1, 0], [7, 5])]),
  jnp.asarray([[*range(5), *range(4), *range(3)], [*range(7), *range(5)]]),
)


@functools.cache
def _variables(kind):
  """Draws variables in which biases and norms do something."""
  rng = np.random.default_rng(0)
  shapes, _ = decoder.abstract(_config(kind))
  return jax.tree.map(
    lambda s: 0.3 * rng.normal(size=s.shape).astype(np.float32), shapes
  )


def _config(kind, numerics='fast'):
  fields = decoder_test.CONFIGS[kind].to_dict()
  return model_config.ModelConfig.from_dict(
    fields | dict(remat=True, numerics=numerics)
  )


def _run(config, variables, with_max_logits):
  """Returns (loss, max_logits_LN), gradients."""

  def loss(params):
    out = decoder.Decoder(config).apply(
      {**variables, 'params': params},
      *_TOKENS,
      with_max_logits=with_max_logits,
    )
    return jnp.cos(out.hidden_BTD).sum(), out.max_logits_LN

  return jax.value_and_grad(loss, has_aux=True)(variables['params'])


@functools.partial(jax.jit, static_argnums=0, compiler_options=_OPTIONS)
def _layer(config, params, bias_E, x_BTD):
  """Returns query and keys [B, T, N, .] of one layer, and the next one's x."""
  _, segment_ids_BT, positions_BT = _TOKENS
  params = layer_stages.prepare({'params': params}, config)
  query, kept = layer_stages.attention_inputs(
    params, x_BTD, layer_stages.angles(positions_BT, config), config
  )
  visible = model_attention.visible_of(segment_ids_BT)
  out_BTN, _ = layer_stages.attend(
    params, query, kept, (visible, segment_ids_BT), config, None
  )
  if 'ffw' in params:
    x_BTD = layer_stages.dense(params, x_BTD, out_BTN, config)
  else:
    tokens = (x_BTD, out_BTN, segment_ids_BT != 0, None)
    x_BTD, _, _ = layer_stages.mixture(params, bias_E, tokens, config)
  return query, kept, x_BTD


def _by_hand(kind):
  """Layer by layer, logits in float64 from each layer's queries and keys."""
  config, variables = _config(kind), _variables(kind)
  tokens_BT, segment_ids_BT, _ = _TOKENS
  order_T = np.arange(T)
  sees_BTS = (order_T[:, None] >= order_T) & (
    np.equal(segment_ids_BT[:, :, None], segment_ids_BT[:, None])
  )
  scale = rope.softmax_scale(config.attention.head_dim, config.rope)
  x_BTD = variables['params']['embedding'][tokens_BT]
  rows = []
  for stack in ('dense_layers', 'moe_layers'):
    stacked = variables['params'][stack]
    biases = variables['selection_bias'].get(stack, {})
    for layer in range(jax.tree.leaves(stacked)[0].shape[0]):
      params = jax.tree.map(lambda p, i=layer: p[i], stacked)
      bias_E = [b[layer] for b in jax.tree.leaves(biases)]
      query, kept, x_BTD = _layer(
        config, params, bias_E[0] if bias_E else None, x_BTD
      )
      keys = kept[0]
      if kind == 'mla':
        query, up_CNH = np.concatenate(query, -1), params['attention']['key_up']
        own_BSNH = np.einsum('BSC,CNH->BSNH', *map(np.float64, (keys, up_CNH)))
        shared = np.broadcast_to(
          kept[1][:, :, None], (*own_BSNH.shape[:3], kept[1].shape[-1])
        )
        keys = np.concatenate([own_BSNH, shared], -1)
      tops_BTN = _tops_by_hand(query, keys, sees_BTS, scale)
      rows.append(tops_BTN[np.asarray(segment_ids_BT) != 0].max(0))
  return np.stack(rows)


@pytest.fixture(scope='module', params=['gqa', 'mla'])
def kind(request):
  return request.param


@pytest.fixture(scope='module')
def by_hand_LN(kind):
  return _by_hand(kind)


@pytest.mark.slow
@pytest.mark.parametrize('numerics', model_config.NUMERICS)
def test_decoder_measures_each_layer_and_head(kind, numerics, by_hand_LN):
  forward = jax.jit(_forward, static_argnums=0, compiler_options=_OPTIONS)
  have_LN = forward(_config(kind, numerics), _variables(kind), _TOKENS)
  num_heads = decoder_test.CONFIGS[kind].attention.num_heads
  assert have_LN.shape == (3, num_heads) and have_LN.dtype == jnp.float32
  np.testing.assert_allclose(have_LN, by_hand_LN, rtol=1e-5)


def _forward(config, variables, tokens, plan=None):
  out = decoder.Decoder(config, plan).apply(
    variables, *tokens, with_max_logits=True
  )
  return out.max_logits_LN


# The kernels' gradients are compared above, and products counted below.
@pytest.mark.slow
def test_asking_changes_neither_loss_nor_gradients():
  run = jax.jit(_run, static_argnums=(0, 2), compiler_options=_OPTIONS)
  (loss, _), gradients = run(_config('mla'), _variables('mla'), True)
  (plain, nothing), want = run(_config('mla'), _variables('mla'), False)
  assert nothing is None
  np.testing.assert_allclose(loss, plain, rtol=1e-6)
  # Two programs, so two orders of the same sums.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=1e-6 * np.abs(b).max() + 1e-12
    ),
    gradients,
    want,
  )


@pytest.mark.slow
def test_not_asking_costs_nothing_and_asking_no_product():
  def count(with_max_logits):
    closed = jax.make_jaxpr(_run, static_argnums=(0, 2))(
      _config('gqa'), _variables('gqa'), with_max_logits
    )
    text = str(closed)
    return text.count('dot_general['), text.count('reduce_max[')

  dots, maxima = count(False)
  # Over tokens, in each of the two scanned layers and in its recomputation;
  # over keys the softmax has it.
  assert count(True) == (dots, maxima + 4)


MESHES = {'cp2_ep8': (2, 2, 2), 'fsdp4_cp2': (1, 4, 2)}


@pytest.mark.parametrize(
  'name,shape',
  [
    # tests/train/muon_stage_test.py trains grouped queries on a mesh.
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ('deepseek_v3', 'fsdp4_cp2'),
        ('deepseek_v3', 'cp2_ep8'),
        ('qwen3_moe', 'cp2_ep8'),
        ('qwen3_moe', 'fsdp4_cp2'),
      )
    ),
  ],
)
def test_meshes_measure_what_one_device_does(name, shape):
  # Two documents a row, and shards of padding only.
  config = architectures_test.ARCHITECTURES[name]
  variables, tokens = on_mesh.initial(config), on_mesh.batch()
  forward = jax.jit(_forward, static_argnums=(0, 3), compiler_options=_OPTIONS)
  want_LN = forward(config, variables, tokens, None)
  where = dict(layout=layouts.TRAIN, mesh=topology.make_mesh(*MESHES[shape]))
  have_LN = forward(
    config,
    jax.device_put(variables, placement.variable_shardings(config, **where)),
    jax.device_put(tokens, shardings.tokens(*where.values())),
    placement.exchange_plan(config, **where),
  )
  np.testing.assert_allclose(have_LN, want_LN, rtol=2e-6)
  assert have_LN.sharding.is_fully_replicated
