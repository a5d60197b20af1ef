"""A decoder on 8 emulated devices equals itself on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head, placement
from composer_jax.parallel import layouts, shardings, topology
from tests.parallel import collectives

# Sizes such that arrays of different meaning have different numbers of
# elements: collectives are told apart by them.
B, T, V, D, F = 8, 8, 18, 24, 7


def _config(num_experts, router, remat):
  return model_config.ModelConfig.from_dict(
    dict(
      vocab_size=V,
      embed_dim=D,
      num_layers=2,
      num_dense_layers=1,
      dense_ffw_dim=12,
      num_heads=2,
      num_kv_heads=1,
      head_dim=4,
      rope_theta=1e4,
      norm_eps=1e-6,
      tie_embeddings=True,
      remat=remat,
      compute_dtype='float32',
      moe=dict(
        num_experts=num_experts,
        num_active=2,
        ffw_dim=F,
        num_shared=3,
        router=router,
        renormalize=True,
        routed_scale=1.0,
        aux_loss_weight=0.01,
      ),
    )
  )


WIDE = _config(8, 'softmax', remat=False)
# Six experts do not divide over 8 devices.
UNEVEN = _config(6, 'sigmoid', remat=True)


def _batch():
  """Two documents per row and mostly padding: whole shards have no token."""
  tokens_BT = jax.random.randint(jax.random.key(1), (B, T), 0, V)
  segments = jnp.ones((B, T), jnp.int32).at[:, 3:].set(2)
  segments = segments.at[3:, 4:].set(0).at[6:].set(0)
  positions = jnp.where(jnp.arange(T) < 3, jnp.arange(T), jnp.arange(T) - 3)
  return tokens_BT, segments, jnp.broadcast_to(positions, (B, T))


@functools.cache
def _variables(config):
  init = jax.jit(
    functools.partial(decoder.init, config),
    compiler_options=decoder.INIT_COMPILER_OPTIONS,
  )
  return init(jax.random.key(0))


def _step(config, plan):
  """Returns (variables, batch, ids) -> ((loss, (load, ids)), gradients)."""

  def loss(params, variables, batch, expert_ids_MBTA):
    variables = {**variables, 'params': params}
    out = decoder.Decoder(config, plan).apply(
      variables, *batch, expert_ids_MBTA=expert_ids_MBTA
    )
    logprobs_BT, _ = head.target_logprobs(
      variables, out.hidden_BTD, batch[0], batch[1], None, config
    )
    value = 0.01 * out.stats.aux_loss_M.sum() - logprobs_BT.sum() / 30
    return value, (out.stats.load_ME, out.expert_ids_MBTA)

  def step(variables, batch, expert_ids_MBTA):
    return jax.value_and_grad(loss, has_aux=True)(
      variables['params'], variables, batch, expert_ids_MBTA
    )

  return step


@functools.cache
def _single(config):
  return jax.jit(_step(config, None))(_variables(config), _batch(), None)


def _sharded(config, shape, expert_ids_MBTA=None):
  mesh = topology.make_mesh(*shape)
  where = dict(layout=layouts.TRAIN, mesh=mesh)
  plan = placement.exchange_plan(config, **where)
  places = placement.variable_shardings(config, **where)
  variables = jax.device_put(_variables(config), places)
  batch = jax.device_put(_batch(), shardings.tokens(layouts.TRAIN, mesh))
  if expert_ids_MBTA is not None:
    expert_ids_MBTA = jax.device_put(
      expert_ids_MBTA, shardings.routes(layouts.TRAIN, mesh)
    )
  step = jax.jit(_step(config, plan), out_shardings=(None, places['params']))
  compiled = step.lower(variables, batch, expert_ids_MBTA).compile()
  result = compiled(variables, batch, expert_ids_MBTA)
  return plan, result, collectives.read(compiled.as_text())


def _assert_equal(have, want):
  (loss, aux), grads = have
  (want_loss, want_aux), want_grads = want
  np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
  jax.tree.map(np.testing.assert_array_equal, aux, want_aux)
  # Sums in another order: a few units of the last place of the largest term.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=5e-6 * np.abs(b).max() + 1e-9
    ),
    grads,
    want_grads,
  )


@pytest.fixture(scope='module')
def wide():
  return _sharded(WIDE, (2, 2, 2))


def test_loss_and_gradients_equal_one_device(wide):
  plan, result, _ = wide
  _assert_equal(result, _single(WIDE))
  expert = P(('replica', 'fsdp', 'context'), None, None, None)
  assert dict(plan.weight_specs)['gate_up'] == expert


def test_uneven_experts_replayed_and_recomputed_equal_one_device():
  single = _single(UNEVEN)
  # Replay on the mesh what one device routed.
  plan, result, _ = _sharded(UNEVEN, (1, 4, 2), single[0][1][1])
  _assert_equal(result, single)
  # Six experts over 2 devices; D takes the other axis.
  expert = P(('replica', 'context'), 'fsdp', None, None)
  assert dict(plan.weight_specs)['gate_up'] == expert


def _weight_sizes(config):
  """Returns the sizes of a layer's matrices: dense ones, and all experts'."""
  shapes, axes = decoder.abstract(config)
  axes = trees.flatten_names(axes['params'])
  dense, experts = set(), set()
  for name, leaf in trees.flatten_names(shapes['params']).items():
    layers = leaf.shape[0] if 'layer' in axes[name] else 1
    if 'expert' in axes[name]:
      experts.add(leaf.size // layers)
    elif 'embed' in axes[name]:
      dense.add(leaf.size // layers)
  return dense, experts


def test_dense_weights_gather_inside_a_replica_and_experts_never_move(wide):
  *_, found = wide
  dense, experts = _weight_sizes(WIDE)
  gathered = set()
  for collective in found:
    if collective.kind == 'all-gather' and set(collective.sizes) & dense:
      # Narrow: four devices hold a replica of the dense weights.
      assert collective.groups == collectives.blocks(8, 4), collective
      gathered |= set(collective.sizes)
    # Wide: a device holds its expert alone, so neither that weight nor its
    # gradient is gathered or reduced, whole or in shards.
    moved = {size // 8 for size in experts} | experts
    assert not moved & set(collective.sizes), collective
  assert gathered == dense


def test_tokens_meet_experts_across_all_devices(wide):
  *_, found = wide
  everyone = collectives.blocks(8, 8)
  inside = []
  for scope, kind, backward in (
    ('dispatch', 'all-gather', 'reduce-scatter'),
    ('combine', 'reduce-scatter', 'all-gather'),
  ):
    of_scope = [c for c in found if scope in c.scope.split('/')]
    assert {c.kind for c in of_scope} == {kind, backward}
    inside += of_scope
  assert {c.groups for c in inside} == {everyone}
  # Only the gradients of dense weights cross replicas otherwise, as sums.
  crossing = [c for c in found if c.groups == everyone and c not in inside]
  assert {c.kind for c in crossing} <= {'all-reduce'}


@pytest.mark.parametrize(
  'text',
  [
    '{{0,4},{1,5},{2,6},{3,7}}, use',
    '[4,2]<=[2,4]T(1,0), use',
    "mesh['a'=2,'b'=4] {'a'}, use",
    "mesh['a'=2,'b'=2,'c'=2] {'a'}, use",
    "mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}, use",
  ],
)
def test_spellings_of_groups_read_alike(text):
  want = {frozenset((n, n + 4)) for n in range(4)}
  assert collectives._groups(text) == want
