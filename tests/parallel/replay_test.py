"""Training with recorded routes on 8 emulated devices equals one device.

Three of eight rows hold trajectories, so some shards are padding. Where the
sequence is sharded, two devices share a trajectory. Six experts do not divide
over eight devices.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.models import decoder, placement
from composer_jax.parallel import layouts, shardings, topology
from composer_jax.rl import step as steps
from tests.models import routing
from tests.rl import replayed

CASES = {
  # Context 2, experts over all eight.
  'hsdp_cp2_ep8': ('gqa_softmax', (2, 2, 2), layouts.TRAIN),
  'hsdp_fsdp4_cp2': ('mla_sigmoid', (1, 4, 2), layouts.TRAIN),
  'data_parallel': ('mla_sigmoid', (4, 2, 1), layouts.REPLICATED),
}

by_case = pytest.mark.parametrize(
  'case',
  [pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)


def _batch(config):
  (batch,) = replayed.pack(config, rows=8, seq_len=16)
  assert (batch.segment_ids_BT > 0).any(-1).sum() == 3
  return batch


def _on_one_device(config):
  """Returns the results of the rows without padding on one device."""
  (batch,) = replayed.pack(config, rows=3, seq_len=16)
  return replayed.one(config, batch)


@functools.cache
def _on_mesh(case):
  """Returns the compiled function from a batch to sums and scores."""
  name, shape, layout = CASES[case]
  config = replayed.CONFIGS[name]
  where = dict(layout=layout, mesh=topology.make_mesh(*shape))
  # With recomputation, in contrast to the single device.
  config = dataclasses.replace(config, remat=True)
  model = decoder.Decoder(config, placement.exchange_plan(config, **where))
  variables = jax.device_put(
    replayed.variables(config), placement.variable_shardings(config, **where)
  )
  tokens = shardings.tokens(layout, where['mesh'])
  run = jax.jit(
    functools.partial(steps.microbatch_sums, model),
    compiler_options=replayed.OPTIONS,
  )

  def on_mesh(batch):
    places = jax.tree.map(lambda _: tokens, batch)
    places = places.replace(
      expert_ids_MBTA=shardings.routes(layout, where['mesh'])
    )
    return jax.device_get(run(variables, jax.device_put(batch, places)))

  return on_mesh


@by_case
def test_replay_on_a_mesh_is_replay_on_one_device(case):
  config = replayed.CONFIGS[CASES[case][0]]
  batch = _batch(config)
  sums, scores = _on_mesh(case)(batch)
  want, want_scores = _on_one_device(config)
  (packed,) = replayed.pack(config, rows=3, seq_len=16)
  replayed.assert_equal_up_to_rounding(
    replayed.gather([batch], [(sums, scores)]),
    replayed.gather([packed], [(want, want_scores)]),
  )
  valid_BT = batch.segment_ids_BT > 0
  ids_MZA = scores.expert_ids_MBTA[:, valid_BT]
  np.testing.assert_array_equal(
    ids_MZA, want_scores.expert_ids_MBTA[:, valid_BT[:3]]
  )
  # What was recorded is what worked, on every shard.
  recorded_MZA = batch.expert_ids_MBTA[:, valid_BT]
  known_MZ = (recorded_MZA != records.NO_ROUTE).all(-1)
  np.testing.assert_array_equal(ids_MZA[known_MZ], recorded_MZA[known_MZ])
  for name in ('replay_agreement_M',):
    np.testing.assert_allclose(
      getattr(sums, name), getattr(want, name), rtol=1e-6
    )


def test_the_filter_keeps_and_refills_the_same_on_a_mesh():
  where = dict(layout=layouts.TRAIN, mesh=topology.make_mesh(2, 2, 2))
  config = dataclasses.replace(
    replayed.CONFIGS['mla_sigmoid'].moe, replay_alpha=0.7
  )
  rng = np.random.default_rng(0)
  logits_BTE = 2 * rng.normal(size=(4, 6, 6)).astype(np.float32)
  order_BTE = np.argsort(rng.random((4, 6, 6)), axis=-1)
  replay_BTA = order_BTE[..., : replayed.A].astype(np.uint16)
  replay_BTA[1, :3] = records.NO_ROUTE
  arrays = logits_BTE, replay_BTA, rng.random((4, 6)) < 0.8
  bias_E = np.linspace(-0.9, 0.3, 6, dtype=np.float32)

  @functools.partial(jax.jit, compiler_options=replayed.OPTIONS)
  def route(logits_BTE, replay_BTA, valid_BT):
    return routing.route(
      logits_BTE,
      config=config,
      valid_BT=valid_BT,
      bias_E=bias_E,
      replay_BTA=replay_BTA,
    )

  want_BTA, want_ids_BTA, want = route(*arrays)
  tokens = shardings.tokens(**where)
  have_BTA, ids_BTA, have = route(*jax.device_put(arrays, tokens))
  np.testing.assert_array_equal(ids_BTA, want_ids_BTA)
  np.testing.assert_allclose(have_BTA, want_BTA, rtol=1e-6)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5), have, want
  )
  assert 0.1 < want.replay_replaced < 0.9


@by_case
def test_another_order_of_layers_or_tokens_is_another_loss_on_a_mesh(case):
  config = replayed.CONFIGS[CASES[case][0]]
  batch = _batch(config)
  want, _ = _on_one_device(config)
  for ids_MBTA in (
    batch.expert_ids_MBTA[::-1],
    np.roll(batch.expert_ids_MBTA, 1, 2),
  ):
    sums, _ = _on_mesh(case)(batch.replace(expert_ids_MBTA=ids_MBTA))
    assert abs(sums.loss - want.loss) > 1e-3 * abs(want.loss)
