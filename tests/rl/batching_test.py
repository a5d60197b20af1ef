"""Packing loses nothing, and padding is inert."""

import dataclasses

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.rl import batching

SHAPE = batching.BatchShape(
  rows=2, seq_len=10, num_moe_layers=3, num_active=2, num_experts=8
)


def make_trajectory(length, seed, layers=3):
  rng = np.random.default_rng(seed)
  ids = np.stack(
    [
      np.stack([rng.permutation(8)[:2] for _ in range(layers)])
      for _ in range(length)
    ]
  ).astype(np.uint16)
  ids[-1] = records.NO_ROUTE
  return records.Trajectory(
    tokens_T=rng.integers(1, 100, length).astype(np.int32),
    loss_mask_T=rng.random(length) < 0.5,
    logprobs_T=-rng.random(length).astype(np.float32),
    expert_ids_TMA=ids,
    policy_version_T=np.zeros(length, np.int32),
    context_version_T=np.zeros(length, np.int32),
    consumed_version_T=np.zeros(length, np.int32),
    temperature=0.5 + seed,
  )


@pytest.fixture(scope='module')
def packed():
  trajectories = [make_trajectory(n, i) for i, n in enumerate([4, 9, 6, 3, 7])]
  advantages = [1.0, -2.0, 3.0, 4.0, -5.0]
  return (
    trajectories,
    advantages,
    batching.pack(trajectories, advantages, SHAPE).microbatches,
  )


def spans(batches):
  """Yields every packed segment as (batch, row, slice)."""
  for batch in batches:
    for row, segments_T in enumerate(batch.segment_ids_BT):
      for segment in range(1, segments_T.max() + 1):
        where = np.flatnonzero(segments_T == segment)
        assert (np.diff(where) == 1).all()
        yield batch, row, slice(where[0], where[-1] + 1)


def test_every_trajectory_is_packed_once_with_all_its_fields(packed):
  trajectories, advantages, batches = packed
  unseen = {t.tokens_T.tobytes(): i for i, t in enumerate(trajectories)}
  for batch, row, span in spans(batches):
    i = unseen.pop(batch.tokens_BT[row, span].tobytes())
    t = trajectories[i]
    np.testing.assert_array_equal(
      batch.positions_BT[row, span], np.arange(len(t))
    )
    np.testing.assert_array_equal(
      batch.loss_weights_BT[row, span], t.loss_mask_T
    )
    np.testing.assert_array_equal(
      batch.rollout_logprobs_BT[row, span], t.logprobs_T
    )
    assert (batch.advantages_BT[row, span] == advantages[i]).all()
    assert (batch.temperatures_BT[row, span] == t.temperature).all()
    for layer in range(3):
      np.testing.assert_array_equal(
        batch.expert_ids_MBTA[layer, row, span], t.expert_ids_TMA[:, layer]
      )
  assert not unseen


def test_padding_is_inert(packed):
  _, _, batches = packed
  for batch in batches:
    padding_BT = batch.segment_ids_BT == 0
    assert (batch.loss_weights_BT[padding_BT] == 0).all()
    assert (batch.temperatures_BT[padding_BT] == 1).all()
    assert (batch.expert_ids_MBTA[:, padding_BT] == records.NO_ROUTE).all()


def rows_of(lengths, seq_len, align=1):
  """Returns the trajectories of each row."""
  shape = dataclasses.replace(SHAPE, seq_len=seq_len, align=align)
  rows = {}
  for i, place in enumerate(batching.places(lengths, shape)):
    rows.setdefault((place.batch, place.row), []).append(i)
    assert place.segment == len(rows[place.batch, place.row])
  return [rows[key] for key in sorted(rows)]


def test_rows_never_overflow_and_packing_is_dense():
  lengths = [4, 9, 6, 3, 7, 10, 1]
  rows = rows_of(lengths, 10)
  assert sorted(i for row in rows for i in row) == list(range(7))
  assert all(sum(lengths[i] for i in row) <= 10 for row in rows)
  assert len(rows) == 4


def test_a_long_trajectory_is_refused_by_its_length():
  with pytest.raises(ValueError, match='trajectory of 11 tokens.*row of 10'):
    batching.pack([make_trajectory(11, 0)], [0.0], SHAPE)


def test_routes_of_another_model_are_refused():
  with pytest.raises(ValueError, match=r'another model.*\(4, 2, 2\).*3 layers'):
    batching.pack([make_trajectory(4, 0, layers=2)], [0.0], SHAPE)


@pytest.mark.parametrize('align', [1, 4, 5])
def test_aligned_trajectories_start_at_multiples_where_places_says(align):
  shape = dataclasses.replace(SHAPE, seq_len=20, align=align)
  lengths = [4, 9, 6, 3, 7, 20, 1, 13]
  trajectories = [make_trajectory(n, i) for i, n in enumerate(lengths)]
  packed = batching.pack(trajectories, [1.0] * len(lengths), shape).microbatches
  where = batching.places(lengths, shape)
  occupied = [np.zeros((shape.rows, shape.seq_len), bool) for _ in packed]
  for place, trajectory in zip(where, trajectories, strict=True):
    batch, row, segment, span = place
    assert span.start % align == 0
    assert not occupied[batch][row, span].any()
    occupied[batch][row, span] = True
    np.testing.assert_array_equal(
      packed[batch].tokens_BT[row, span], trajectory.tokens_T
    )
    assert (packed[batch].segment_ids_BT[row, span] == segment).all()
    np.testing.assert_array_equal(
      packed[batch].expert_ids_MBTA[:, row, span].transpose(1, 0, 2),
      trajectory.expert_ids_TMA,
    )
  for batch, taken_BT in zip(packed, occupied, strict=True):
    np.testing.assert_array_equal(batch.segment_ids_BT > 0, taken_BT)
    assert (batch.expert_ids_MBTA[:, ~taken_BT] == records.NO_ROUTE).all()


def test_alignment_costs_rows_only_where_it_must():
  assert rows_of([3, 3, 4], 12, 4) == [[0, 1, 2]]
  assert rows_of([5, 5], 12, 4) == [[0], [1]]
  assert rows_of([5, 5], 12, 1) == [[0, 1]]


@pytest.mark.parametrize('align', [0, 3])
def test_an_alignment_that_does_not_divide_a_row_is_refused(align):
  with pytest.raises(
    ValueError, match=rf'align must divide seq_len \(10\); got {align}'
  ):
    dataclasses.replace(SHAPE, align=align)


@pytest.mark.parametrize(
  'place,ids,message',
  [
    ((2, 1), [3, 3], r'Token 2, layer 1 .*\[3, 3\].*must differ'),
    # Trajectories of an engine that records no routes.
    ((0, 0), [0, 0], r'Token 0, layer 0 .*\[0, 0\].*must differ'),
    ((3, 2), [1, 8], r'Token 3, layer 2 .*\[1, 8\].*num_experts \(8\)'),
    ((4, 0), [65535, 1], r'Token 4, layer 0 .*NO_ROUTE \(65535\) must fill'),
    ((4, 1), [65535, 65535], 'Token 4, layer 1 .*NO_ROUTE'),
  ],
)
def test_a_record_that_no_router_makes_is_refused(place, ids, message):
  trajectories = [make_trajectory(6, 0), make_trajectory(6, 1)]
  trajectories[1].expert_ids_TMA[place] = ids
  with pytest.raises(ValueError, match='trajectory 1 of the step.*' + message):
    batching.pack(trajectories, [0.0, 0.0], SHAPE)
