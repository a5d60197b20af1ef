"""Laws of the decoder: replay, packing, causality, recomputation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head
from tests import compiling

B, T, V = 2, 12, 32
# Compiles in half the time; programs that are compared use the same options.
_OPTIONS = {'xla_backend_optimization_level': 0}
FIELDS = dict(
  vocab_size=V,
  embed_dim=16,
  num_layers=3,
  num_dense_layers=1,
  dense_ffw_dim=24,
  attention=dict(
    kind='gqa',
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    qk_norm='none',
    qkv_bias=False,
    out_bias=False,
  ),
  rope=dict(theta=1e4, interleaved=False, yarn=None),
  norm_eps=1e-6,
  tie_embeddings=False,
  remat=False,
  compute_dtype='float32',
  moe=dict(
    num_experts=6,
    num_active=2,
    ffw_dim=8,
    num_shared=1,
    router='sigmoid',
    num_groups=1,
    num_active_groups=1,
    renormalize=True,
    routed_scale=2.0,
    aux_loss_weight=0.0,
    z_loss_weight=0.0,
  ),
)
CONFIG = model_config.ModelConfig.from_dict(FIELDS)
MLA = dict(
  kind='mla',
  num_heads=3,
  q_lora_dim=10,
  kv_lora_dim=6,
  nope_dim=4,
  rope_dim=2,
  value_dim=5,
  latent_norm_eps=1e-5,
)
YARN = dict(
  factor=4.0,
  original_max_len=8,
  beta_fast=2.0,
  beta_slow=0.5,
  mscale=1.0,
  mscale_all_dim=0.7,
  truncate=False,
)
GROUPED = dict(num_groups=3, num_active_groups=2)
CONFIGS = {
  # All options of grouped-query attention.
  'gqa': model_config.ModelConfig.from_dict(
    FIELDS
    | dict(
      attention=FIELDS['attention']
      | dict(qk_norm='projection', qkv_bias=True, out_bias=True)
    )
  ),
  'mla': model_config.ModelConfig.from_dict(
    FIELDS
    | dict(
      attention=MLA,
      rope=dict(theta=100.0, interleaved=True, yarn=YARN),
      moe=FIELDS['moe'] | GROUPED,
    )
  ),
}


@pytest.fixture(scope='module', params=sorted(CONFIGS))
def config(request):
  return CONFIGS[request.param]


@pytest.fixture(scope='module')
def variables(config):
  init = jax.jit(
    functools.partial(decoder.init, config),
    compiler_options=compiling.INIT,
  )
  # With initial biases and norms a test would not notice their absence.
  leaves, tree = jax.tree.flatten(init(jax.random.key(0)))
  random = np.random.default_rng(0)
  return tree.unflatten(
    [leaf + 0.1 * random.normal(size=leaf.shape) for leaf in leaves]
  )


@pytest.fixture(scope='module')
def batch():
  tokens_BT = jax.random.randint(jax.random.key(1), (B, T), 0, V)
  ones_BT = jnp.ones((B, T), jnp.int32)
  return tokens_BT, ones_BT, ones_BT * jnp.arange(T)


@pytest.fixture(scope='module')
def run(config):
  @functools.partial(jax.jit, compiler_options=_OPTIONS)
  def run(variables, batch, expert_ids_MBTA=None):
    return decoder.Decoder(config).apply(
      variables, *batch, expert_ids_MBTA=expert_ids_MBTA
    )

  return run


@pytest.fixture(scope='module')
def output(run, variables, batch):
  return run(variables, batch)


@pytest.fixture(scope='module')
def value_and_grad(config):
  """Returns {remat: (variables, batch, ids) -> (loss, aux), gradients}."""

  def make(remat):
    remade = dataclasses.replace(config, remat=remat)

    def loss(variables, batch, expert_ids_MBTA):
      out = decoder.Decoder(remade).apply(
        variables, *batch, expert_ids_MBTA=expert_ids_MBTA
      )
      logprobs_BT, _ = head.target_logprobs(
        variables, out.hidden_BTD, batch[0], batch[1], None, remade
      )
      return -logprobs_BT.sum(), (out.hidden_BTD, out.expert_ids_MBTA)

    gradient = jax.value_and_grad(loss, has_aux=True)
    return jax.jit(gradient, compiler_options=_OPTIONS)

  return {remat: make(remat) for remat in (False, True)}


@pytest.fixture(scope='module')
def afresh(output):
  return jnp.full_like(output.expert_ids_MBTA, records.NO_ROUTE)


def test_replay_of_own_routes_is_bitwise(run, variables, batch, output):
  replayed = run(variables, batch, output.expert_ids_MBTA)
  np.testing.assert_array_equal(replayed.hidden_BTD, output.hidden_BTD)
  np.testing.assert_array_equal(
    replayed.expert_ids_MBTA, output.expert_ids_MBTA
  )
  np.testing.assert_array_equal(replayed.stats.replay_agreement_M, [1, 1])


def test_tokens_without_route_are_routed_afresh_whole(
  run, variables, batch, output, afresh
):
  np.testing.assert_array_equal(
    run(variables, batch, afresh).hidden_BTD, output.hidden_BTD
  )
  # An incomplete record is not used.
  half = afresh.at[..., 0].set(5)
  np.testing.assert_array_equal(
    run(variables, batch, half).expert_ids_MBTA, output.expert_ids_MBTA
  )
  other = afresh.at[:, 0, 0].set(jnp.array([4, 1], jnp.uint16))
  replayed = run(variables, batch, other)
  np.testing.assert_array_equal(replayed.expert_ids_MBTA[:, 0, 0], [[4, 1]] * 2)
  np.testing.assert_array_equal(replayed.hidden_BTD[1], output.hidden_BTD[1])


def test_packed_documents_equal_documents_alone(run, variables, batch, output):
  tokens_BT = batch[0]
  packed = jnp.concatenate([tokens_BT[:1, :7], tokens_BT[1:, :3]], 1)
  packed = jnp.pad(packed, ((0, 1), (0, 2)))
  segments = jnp.array([[1] * 7 + [2] * 3 + [0] * 2, [0] * 12])
  positions = jnp.array([[*range(7), *range(3), 0, 0], [0] * 12])
  out = run(variables, (packed, segments, positions))
  np.testing.assert_allclose(
    out.hidden_BTD[0, :7], output.hidden_BTD[0, :7], atol=2e-5
  )
  np.testing.assert_allclose(
    out.hidden_BTD[0, 7:10], output.hidden_BTD[1, :3], atol=2e-5
  )
  # Padding reaches no expert: ten tokens, two experts each.
  np.testing.assert_array_equal(out.stats.load_ME.sum(-1), [20, 20])


def test_no_gradient_from_the_future_or_another_document(config, variables):
  segments = jnp.array([[1] * 6 + [2] * 6])
  positions = jnp.array([[*range(6)] * 2])
  tokens_BT = jnp.arange(T)[None] % V

  def value(embedding_VD):
    params = {**variables['params'], 'embedding': embedding_VD}
    out = decoder.Decoder(config).apply(
      {**variables, 'params': params}, tokens_BT, segments, positions
    )
    return jnp.sin(out.hidden_BTD[0, 8]).sum()

  # All tokens of the row differ, so that a row of the table is a position.
  seen_T = np.abs(jax.jit(jax.grad(value))(variables['params']['embedding']))
  seen_T = seen_T.max(-1)[:T] > 0
  np.testing.assert_array_equal(seen_T, [False] * 6 + [True] * 3 + [False] * 3)


@pytest.mark.parametrize(
  'remat', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_replay_of_own_routes_keeps_every_bit_of_the_gradients(
  variables, batch, value_and_grad, afresh, remat
):
  fresh = value_and_grad[remat](variables, batch, afresh)
  own_MBTA = fresh[0][1][1]
  replayed = value_and_grad[remat](variables, batch, own_MBTA)
  jax.tree.map(np.testing.assert_array_equal, replayed, fresh)


@pytest.mark.slow
def test_recomputation_changes_nothing(
  variables, batch, value_and_grad, afresh
):
  # Recomputed layers are fused differently, and sums round differently.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5),
    value_and_grad[True](variables, batch, afresh),
    value_and_grad[False](variables, batch, afresh),
  )


def test_recomputation_repeats_no_choice_of_experts():
  def choices(**change):
    config = dataclasses.replace(CONFIG, **change)
    variables, _ = decoder.abstract(config)
    tokens_BT = jax.ShapeDtypeStruct((B, T), 'int32')

    def loss(params, variables, tokens_BT):
      out = decoder.Decoder(config).apply(
        {**variables, 'params': params}, *[tokens_BT] * 3
      )
      return out.hidden_BTD.sum()

    gradient = jax.grad(loss)
    text = str(
      jax.make_jaxpr(gradient)(variables['params'], variables, tokens_BT)
    )
    return text.count('argmax['), text.count(' sort[')

  # Kept although remat_saves is empty: a recomputed choice could differ.
  assert choices(remat=True, remat_saves=()) == choices(remat=False)


@pytest.mark.parametrize('remat', [False, True])
def test_router_learns_under_replay_and_bias_does_not(
  variables, batch, value_and_grad, output, remat
):
  _, grads = value_and_grad[remat](variables, batch, output.expert_ids_MBTA)
  router_MDE = np.abs(grads['params']['moe_layers']['moe']['router'])
  # Every layer's, and of no expert alone.
  assert (router_MDE.max(1) > 1e-5).sum(-1).min() >= 2
  for leaf in jax.tree.leaves(grads['selection_bias']):
    np.testing.assert_array_equal(leaf, 0)


def test_policy_is_the_bfloat16_of_the_masters(variables):
  biased = {**variables, 'selection_bias': {'x': jnp.full(3, 1 / 3)}}
  policy = jax.jit(decoder.policy)(biased)
  assert policy['params']['embedding'].dtype == jnp.bfloat16
  assert policy['selection_bias']['x'].dtype == jnp.float32


def test_every_parameter_has_named_axes(config):
  shapes, axes = decoder.abstract(config)
  jax.tree.map(
    lambda s, a: np.testing.assert_equal(len(s.shape), len(a)), shapes, axes
  )
  assert tuple(axes['params']['moe_layers']['moe']['gate_up']) == (
    'layer',
    'expert',
    'embed',
    'gate_up',
    'ffw',
  )


def _attention(**change):
  return dict(attention=FIELDS['attention'] | change)


def _rope(**change):
  return dict(rope=FIELDS['rope'] | change)


def _yarn(**change):
  return _rope(yarn=YARN | change)


@pytest.mark.parametrize(
  'change,message',
  [
    (dict(num_dense_layers=3), r'num_dense_layers must be less .* got 3'),
    (
      _attention(num_kv_heads=3),
      r'num_kv_heads must divide num_heads .* got 3',
    ),
    (_attention(head_dim=3), 'head_dim must be even.*got 3'),
    (_attention(qk_norm='key'), "qk_norm must be one of .*'key'"),
    (_attention(rope_dim=2), 'GQAConfig has no field rope_dim'),
    (_attention(kind='mha'), "attention.kind must be one of .* not 'mha'"),
    (dict(attention=MLA | dict(rope_dim=3)), 'rope_dim must be even.*got 3'),
    (dict(attention=MLA | dict(q_lora_dim=0)), 'q_lora_dim .* got 0'),
    (dict(rope=dict(theta=1e4, interleaved=True)), r"needs \['yarn'\]"),
    (_yarn(factor=0.5), 'factor must be a number of at least 1; got 0.5'),
    (_yarn(factor='40'), "YarnConfig.factor must be a number .* got '40'"),
    (_yarn(beta_fast=0.5), 'beta_fast must be above beta_slow .* got 0.5'),
    (_yarn(truncate=1), 'truncate must be true or false; got 1'),
    (_yarn(), r'mscale_all_dim \(0.7\) needs latent attention'),
    (_rope(theta=float('inf')), 'theta must be a number .* got inf'),
    (_rope(theta=1), 'theta must be above 1'),
    (_rope(interleaved='no'), "interleaved must be true or false; got 'no'"),
    (_attention(qkv_bias='false'), 'qkv_bias must be true or false'),
    (dict(tie_embeddings='false'), 'tie_embeddings must be true or false'),
    (dict(attention=None), 'attention must be a section, not None'),
    (dict(moe=FIELDS['moe'] | dict(routed_scale=True)), 'routed_scale must be'),
    (_yarn(mscale=None), r'mscale \(None\) and mscale_all_dim \(0.7\)'),
    (_yarn(beta=1.0), 'YarnConfig has no field beta'),
    (dict(compute_dtype='half'), "compute_dtype must be one of .*'half'"),
    (dict(embed_dimm=3), 'embed_dimm'),
    (
      dict(moe=dict(FIELDS['moe'], num_active=9)),
      'num_active must not .* got 9',
    ),
    (dict(moe=dict(FIELDS['moe'], top_k=2)), 'top_k'),
  ],
)
def test_config_errors_name_the_field(change, message):
  with pytest.raises(ValueError, match=message):
    model_config.ModelConfig.from_dict({**FIELDS, **change})
