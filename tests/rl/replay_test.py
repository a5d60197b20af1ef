"""Training uses the recorded experts, however tokens are packed."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.kernels.attention import grouped_query
from tests.rl import replayed

NAMES = tuple(replayed.CONFIGS)


@functools.cache
def _packed(name):
  (batch,) = replayed.pack(replayed.CONFIGS[name], rows=3, seq_len=16)
  return batch


@functools.cache
def _recorded(name):
  return replayed.one(replayed.CONFIGS[name], _packed(name))


def _result(name):
  return replayed.gather([_packed(name)], [_recorded(name)])


@functools.cache
def _afresh(name):
  """Returns the same program's result without records: the model's routes."""
  batch = _packed(name)
  nothing = np.full_like(batch.expert_ids_MBTA, records.NO_ROUTE)
  return replayed.one(
    replayed.CONFIGS[name], batch.replace(expert_ids_MBTA=nothing)
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_packed_or_alone_the_sums_are_the_same(name):
  config = replayed.CONFIGS[name]
  # Trajectories at other places in the rows, with gaps.
  aligned = replayed.pack(config, rows=3, seq_len=16, align=4)
  assert (aligned[0].segment_ids_BT != _packed(name).segment_ids_BT).any()
  # Sums of microbatches, most of whose rows are padding.
  alone = replayed.alone(config, rows=3, seq_len=16)
  assert (len(aligned), len(alone)) == (1, 6)
  for other_packing in (aligned, alone):
    replayed.assert_equal_up_to_rounding(
      replayed.result(config, other_packing), _result(name)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', [pytest.param('gqa_softmax', marks=pytest.mark.slow), 'mla_sigmoid']
)
def test_in_batch_invariant_numerics_packing_keeps_every_bit(name):
  config = dataclasses.replace(
    replayed.CONFIGS[name], numerics='batch_invariant', remat=True
  )
  sizes = dict(
    rows=3, seq_len=2 * grouped_query.KEY_BLOCK, align=grouped_query.KEY_BLOCK
  )
  packed = replayed.result(config, replayed.pack(config, **sizes))
  alone = replayed.result(config, replayed.alone(config, **sizes))
  for field in ('logprobs', 'expert_ids'):
    jax.tree.map(
      np.testing.assert_array_equal,
      getattr(packed, field),
      getattr(alone, field),
    )
  # Gradients and the loss are sums over tokens, in the order of the packing.
  replayed.assert_equal_up_to_rounding(packed, alone)
  replayed.assert_equal_up_to_rounding(packed, _result(name))


@pytest.mark.parametrize('name', NAMES)
def test_what_is_recorded_works_and_what_is_not_is_routed_afresh(name):
  batch = _packed(name)
  _, scores = _recorded(name)
  _, afresh = _afresh(name)
  recorded_MBT = (batch.expert_ids_MBTA != records.NO_ROUTE).all(-1)
  np.testing.assert_array_equal(
    scores.expert_ids_MBTA[recorded_MBT], batch.expert_ids_MBTA[recorded_MBT]
  )
  assert (scores.expert_ids_MBTA != afresh.expert_ids_MBTA)[recorded_MBT].any()
  # Replay changes nothing before the first MoE layer, and nothing at the
  # beginning of a trajectory that begins without records.
  valid_BT = batch.segment_ids_BT > 0
  afresh_BT = ~recorded_MBT[0] & valid_BT
  assert afresh.expert_ids_MBTA.max() < replayed.CONFIGS[name].moe.num_experts
  np.testing.assert_array_equal(
    scores.expert_ids_MBTA[0, afresh_BT], afresh.expert_ids_MBTA[0, afresh_BT]
  )
  begins_BT = afresh_BT & (batch.positions_BT < 2)
  assert begins_BT.sum() == 6
  np.testing.assert_array_equal(
    scores.expert_ids_MBTA[:, begins_BT], afresh.expert_ids_MBTA[:, begins_BT]
  )


@pytest.mark.parametrize('name', NAMES)
def test_replay_of_own_routes_is_the_own_forward_bit_for_bit(name):
  sums, afresh = _afresh(name)
  batch = _packed(name).replace(expert_ids_MBTA=afresh.expert_ids_MBTA)
  again, scores = replayed.one(replayed.CONFIGS[name], batch)
  jax.tree.map(
    np.testing.assert_array_equal,
    (sums.loss, sums.grads, sums.stats, sums.load_ME, afresh),
    (again.loss, again.grads, again.stats, again.load_ME, scores),
  )


@pytest.mark.parametrize('name', NAMES)
def test_other_routes_are_another_loss(name):
  sums, _ = _recorded(name)
  batch = _packed(name)
  sums_by_routes = {
    'nothing': _afresh(name)[0],
    'layers swapped': replayed.one(
      replayed.CONFIGS[name],
      batch.replace(expert_ids_MBTA=batch.expert_ids_MBTA[::-1]),
    )[0],
    'shifted by a token': replayed.one(
      replayed.CONFIGS[name],
      batch.replace(expert_ids_MBTA=np.roll(batch.expert_ids_MBTA, 1, 2)),
    )[0],
  }
  for why, other_sums in sums_by_routes.items():
    assert abs(other_sums.loss - sums.loss) > 1e-3 * abs(sums.loss), why


@pytest.mark.parametrize('name', NAMES)
def test_forced_experts_teach_the_router(name):
  """With all experts replayed every layer's router still has a gradient."""
  batch = _packed(name)
  rng = np.random.default_rng(5)
  experts = replayed.CONFIGS[name].moe.num_experts
  shape = (*batch.expert_ids_MBTA.shape[:-1], experts)
  ids = np.argsort(rng.random(shape), axis=-1)[..., : replayed.A]
  sums, _ = replayed.one(
    replayed.CONFIGS[name],
    batch.replace(expert_ids_MBTA=ids.astype(np.uint16)),
  )
  router_MDE = sums.grads['moe_layers']['moe']['router']
  assert (np.abs(router_MDE).max((1, 2)) > 1e-4).all()
  # The selection bias is no parameter and has no gradient.
  assert 'selection_bias' not in str(jax.tree.structure(sums.grads))
