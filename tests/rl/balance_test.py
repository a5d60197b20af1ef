"""Devices get as many tokens, whatever the lengths and the devices."""

import collections
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from composer_jax.rl import batching

T = 256


def shape_of(shards, rows_each, align=1):
  return batching.BatchShape(
    rows=shards * rows_each,
    seq_len=T,
    num_moe_layers=1,
    num_active=1,
    num_experts=2,
    align=align,
    shards=shards,
  )


def loads_of(lengths, shape):
  """Returns tokens by microbatch and shard, having checked the packing."""
  places = batching.places(lengths, shape)
  used = collections.defaultdict[tuple[int, int], list[slice]](list)
  num_batches = max(p.batch for p in places) + 1
  loads_MS = np.zeros((num_batches, shape.shards), int)
  for length, place in zip(lengths, places, strict=True):
    assert place.span.stop - place.span.start == length
    assert place.span.start % shape.align == 0 and place.span.stop <= T
    used[place.batch, place.row].append(place.span)
    shard = place.row * shape.shards // shape.rows
    loads_MS[place.batch, shard] += length
  for spans in used.values():
    for before, after in itertools.pairwise(
      sorted(spans, key=lambda s: s.start)
    ):
      assert before.stop <= after.start
  return loads_MS


def excess(loads_MS):
  """Returns how much longer a step takes than with an even share.

  The devices wait for the fullest of each microbatch.
  """
  return loads_MS.max(1).sum() / loads_MS.mean(1).sum() - 1


def lengths_at_random(seed, count, longest):
  rng = np.random.default_rng(seed)
  match seed % 3:
    case 0:
      lengths = rng.integers(1, longest + 1, count)
    case 1:
      lengths = np.minimum(np.exp(rng.normal(3, 1, count)) + 1, longest)
    case _:
      lengths = rng.choice([longest, longest // 7 + 1], count)
  return [int(n) for n in lengths]


@pytest.mark.parametrize('shards', [2, 3, 5, 7, 8])
@pytest.mark.parametrize('rows_each', [1, 4])
def test_with_some_trajectories_a_device_imbalance_is_below_5_percent(
  shards, rows_each
):
  shape = shape_of(shards, rows_each)
  for seed in range(12):
    lengths = lengths_at_random(seed, 12 * shards * rows_each, T // 8)
    loads_MS = loads_of(lengths, shape)
    assert excess(loads_MS) <= 0.05, seed
    # Over the whole batch, too.
    assert loads_MS.sum(0).max() <= 1.05 * loads_MS.sum(0).mean()


ADVERSARIAL = {
  'equal': [40] * 50,
  'just above half a row': [T // 2 + 1] * 150,
  'two thirds and a third': [170, 86] * 60,
  'powers of two': [2**i for i in range(8)] * 20,
  'sizes against LPT': [n for k in range(8, 16) for n in (2 * k, 2 * k)] * 20,
  'one per row, all different': list(range(T // 2, T)) * 2,
  'long ones first': [T] * 60 + [1] * 200,
}


@pytest.mark.parametrize('shards', [3, 4, 7])
@pytest.mark.parametrize('name', ADVERSARIAL)
def test_lengths_that_are_hard_to_divide_are_divided(name, shards):
  """Within 5 %, or one trajectory where so few do not divide evenly."""
  lengths = ADVERSARIAL[name]
  loads_MS = loads_of(lengths, shape_of(shards, 1))
  share = loads_MS.mean(1).sum()
  assert excess(loads_MS) <= max(0.05, max(lengths) / share)
  print(f'{name} over {shards}: {excess(loads_MS):.3f}')


@hypothesis.given(
  lengths=st.lists(st.integers(1, T), min_size=1, max_size=60),
  shards=st.integers(1, 7),
  rows_each=st.integers(1, 3),
  align=st.sampled_from([1, 16]),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_whatever_the_lengths_the_excess_has_a_bound(
  lengths, shards, rows_each, align
):
  shape = shape_of(shards, rows_each, align)
  loads_MS = loads_of(lengths, shape)
  alone = loads_of(lengths, shape_of(1, shards * rows_each, align))
  assert len(loads_MS) == len(alone)  # No more microbatches.
  # A step waits for less than one device's rows in one microbatch.
  waited = loads_MS.max(1).sum() - loads_MS.mean(1).sum()
  assert (
    waited <= loads_MS.max() - loads_MS.min() <= rows_each * T or shards < 2
  )


def test_devices_that_hold_more_share_a_microbatch():
  """36 trajectories, two to a row, fill 4 rows of 5 microbatches unevenly."""
  loads_MS = loads_of([102 + i % 12 for i in range(36)], shape_of(4, 1))
  assert len(loads_MS) == 5 and excess(loads_MS) < 0.01
  assert loads_MS.max() > 1.8 * loads_MS.min()


def test_what_differs_in_one_microbatch_is_made_up_in_the_next():
  loads_MS = loads_of(ADVERSARIAL['one per row, all different'], shape_of(4, 1))
  assert len(loads_MS) == 64
  assert np.ptp(loads_MS.sum(0)) <= np.ptp(loads_MS, axis=1).max()


def test_a_row_that_dominates_is_the_bound():
  loads_MS = loads_of([T, *[4] * 45], shape_of(4, 1))
  (loads_S,) = loads_MS
  assert sorted(loads_S) == [60, 60, 60, T]


def test_few_trajectories_are_divided_as_well_as_can_be():
  """Against all divisions of up to seven trajectories among three devices."""
  rng = np.random.default_rng(0)
  ratios = []
  for _ in range(40):
    lengths = [int(n) for n in rng.integers(20, T // 3, rng.integers(3, 8))]
    best = min(
      max(np.bincount(split, lengths, minlength=3))
      for split in itertools.product(range(3), repeat=len(lengths))
    )
    loads_MS = loads_of(lengths, shape_of(3, 2))
    ratios.append(loads_MS.max() / best)
  assert max(ratios) <= 1.1 and np.mean(ratios) < 1.01
