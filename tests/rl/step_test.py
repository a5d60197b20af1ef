"""A microbatch gives the same gradient on 8 devices as on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from composer_jax.core import batches, records, trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder, placement
from composer_jax.parallel import layouts, shardings, topology
from composer_jax.rl import step as steps

B, T, M, E, A = 8, 8, 1, 8, 2
MODEL = model_config.ModelConfig.from_dict(
  dict(
    vocab_size=24,
    embed_dim=16,
    num_layers=2,
    num_dense_layers=1,
    dense_ffw_dim=16,
    attention=dict(
      kind='gqa',
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      qk_norm='none',
      qkv_bias=False,
      out_bias=False,
    ),
    rope=dict(theta=1e4, interleaved=False, yarn=None),
    norm_eps=1e-6,
    tie_embeddings=True,
    remat=False,
    compute_dtype='float32',
    moe=dict(
      num_experts=E,
      num_active=A,
      ffw_dim=8,
      num_shared=1,
      router='softmax',
      num_groups=1,
      num_active_groups=1,
      renormalize=True,
      routed_scale=1.0,
      aux_loss_weight=0.0,
      z_loss_weight=0.0,
    ),
  )
)


@functools.cache
def make_batch():
  """Returns two padded trajectories a row; a few tokens have no routes.

  The records of two rows are the router's own choices; others are random.
  """
  rng = np.random.default_rng(0)
  segments_T = np.array([1, 1, 1, 1, 2, 2, 2, 0], np.int32)
  segments_BT = np.tile(segments_T, (B, 1))
  segments_BT[6:] = 0  # whole shards of padding
  ids_MBTA = np.argsort(rng.random((M, B, T, E)), axis=-1)[..., :A]
  tokens_BT = rng.integers(0, 24, (B, T), dtype=np.int32)
  positions_BT = np.tile(np.array([0, 1, 2, 3, 0, 1, 2, 0], np.int32), (B, 1))
  own_MBTA = own_routes(tokens_BT, segments_BT, positions_BT)
  ids_MBTA[:, :2] = own_MBTA[:, :2]
  ids_MBTA[:, :, 3] = records.NO_ROUTE  # the last token of a trajectory
  return batches.RLBatch(
    tokens_BT=tokens_BT,
    segment_ids_BT=segments_BT,
    positions_BT=positions_BT,
    loss_weights_BT=((segments_BT > 0) & (rng.random((B, T)) < 0.7)).astype(
      np.float32
    ),
    rollout_logprobs_BT=-3 - rng.random((B, T)).astype(np.float32),
    advantages_BT=rng.normal(size=(B, T)).astype(np.float32),
    temperatures_BT=np.where(segments_BT == 1, 0.7, 1.0).astype(np.float32),
    expert_ids_MBTA=ids_MBTA.astype(np.uint16),
  )


def make_variables():
  rng = np.random.default_rng(1)
  shapes, _ = decoder.abstract(MODEL)
  return jax.tree.map(
    lambda x: (0.3 * rng.normal(size=x.shape)).astype(np.float32), shapes
  )


def own_routes(*packed):
  """Returns the router's own choices, in any order."""
  run = jax.jit(decoder.Decoder(MODEL).apply)
  return np.asarray(run(make_variables(), *packed).expert_ids_MBTA)[..., ::-1]


def sums_on(replica, fsdp, context):
  devices = jax.devices()[: replica * fsdp * context]
  mesh = topology.make_mesh(replica, fsdp, context, devices=devices)
  kwargs = dict(layout=layouts.TRAIN, mesh=mesh)
  model = decoder.Decoder(MODEL, placement.exchange_plan(MODEL, **kwargs))
  places = placement.variable_shardings(MODEL, **kwargs)
  batch = make_batch()
  tokens = shardings.tokens(layouts.TRAIN, mesh)
  by_field = jax.tree.map(lambda _: tokens, batch)
  by_field = by_field.replace(
    expert_ids_MBTA=shardings.routes(layouts.TRAIN, mesh)
  )
  run = jax.jit(
    lambda values, batch: steps.microbatch_sums(model, values, batch)
  )
  return run(
    jax.device_put(make_variables(), places), jax.device_put(batch, by_field)
  )


@pytest.fixture(scope='module')
def single_scored():
  return sums_on(1, 1, 1)


@pytest.fixture(scope='module')
def single(single_scored):
  return single_scored[0]


# By default tests/rl/mesh_test.py has this law for a whole update.
@pytest.mark.slow
@pytest.mark.parametrize('shape', [(2, 2, 2), (1, 8, 1)])
def test_sharded_microbatch_equals_the_single_device(single_scored, shape):
  single, expected = single_scored
  sums, scores = sums_on(*shape)
  experts = trees.flatten_names(sums.grads)['moe_layers/moe/gate_up']
  assert isinstance(experts.sharding, NamedSharding)
  for name, array in trees.flatten_names(single.grads).items():
    np.testing.assert_allclose(
      trees.flatten_names(sums.grads)[name], array, atol=1e-5, err_msg=name
    )
  np.testing.assert_array_equal(sums.load_ME, single.load_ME)
  np.testing.assert_allclose(
    sums.replay_agreement_M, single.replay_agreement_M, rtol=1e-6
  )
  assert float(sums.loss) == pytest.approx(float(single.loss), rel=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    sums.stats,
    single.stats,
  )
  real_BT = make_batch().segment_ids_BT > 0
  np.testing.assert_allclose(
    scores.logprobs_BT[real_BT], expected.logprobs_BT[real_BT], atol=1e-5
  )
  np.testing.assert_array_equal(
    scores.expert_ids_MBTA[:, real_BT], expected.expert_ids_MBTA[:, real_BT]
  )


def test_replayed_routes_decide_which_experts_work(single):
  batch = make_batch()
  real_BT = batch.segment_ids_BT > 0
  ids_ZA = batch.expert_ids_MBTA[0][real_BT]
  recorded_Z = (ids_ZA != records.NO_ROUTE).all(-1)
  replayed_E = np.bincount(ids_ZA[recorded_Z].ravel(), minlength=E)
  fresh_E = np.asarray(single.load_ME)[0] - replayed_E
  assert fresh_E.min() >= 0
  assert fresh_E.sum() == A * (~recorded_Z).sum() > 0
  # Share of records that equal the router's own choices; no replayed layer
  # comes before the only MoE layer.
  own_MBTA = own_routes(
    batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT
  )
  own_ZA = own_MBTA[0][real_BT]
  same_Z = (np.sort(own_ZA) == np.sort(ids_ZA)).all(-1)[recorded_Z]
  assert 0 < same_Z.sum() < len(same_Z)
  np.testing.assert_allclose(
    single.replay_agreement_M / single.num_routed, [same_Z.mean()], rtol=1e-6
  )
  assert int(single.num_routed) == len(recorded_Z)


def test_adding_microbatches_adds_sums(single):
  total = steps.add(single, single)
  jax.tree.map(
    lambda t, s: np.testing.assert_allclose(t, 2 * s, rtol=1e-6),
    (total.grads, total.stats, total.loss),
    (single.grads, single.stats, single.loss),
  )


def test_padding_and_context_have_no_say(single):
  """Gradient and statistics do not depend on masked tokens."""
  batch = make_batch()
  masked_BT = batch.loss_weights_BT == 0
  changed = batch.replace(
    rollout_logprobs_BT=np.where(masked_BT, -9, batch.rollout_logprobs_BT),
    advantages_BT=np.where(masked_BT, 7, batch.advantages_BT),
  )
  model = decoder.Decoder(MODEL)
  values = jax.tree.map(jnp.asarray, make_variables())
  run = jax.jit(
    lambda values, batch: steps.microbatch_sums(model, values, batch)
  )
  sums, _ = run(
    values,
    changed.replace(
      rollout_logprobs_BT=changed.rollout_logprobs_BT.astype(np.float32),
      advantages_BT=changed.advantages_BT.astype(np.float32),
    ),
  )
  expected, _ = run(values, batch)
  jax.tree.map(np.testing.assert_array_equal, sums.grads, expected.grads)
