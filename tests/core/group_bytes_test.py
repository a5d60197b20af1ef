"""A group survives its bytes, and impossible routes are refused."""

import dataclasses
import io
import math
import zipfile

import numpy as np
import pytest

from composer_jax.core import group_bytes, records


def make_trajectory(num_tokens, seed=0, temperature=1.0, num_experts=8):
  rng = np.random.default_rng(seed)
  order = np.argsort(rng.random((num_tokens, 2, num_experts)), axis=-1)
  ids_TMA = order[..., :2].astype(np.uint16)
  ids_TMA[-1:] = records.NO_ROUTE
  return records.Trajectory(
    tokens_T=rng.integers(0, 9, num_tokens).astype(np.int32),
    loss_mask_T=rng.random(num_tokens) < 0.5,
    logprobs_T=-rng.random(num_tokens).astype(np.float32),
    expert_ids_TMA=ids_TMA,
    policy_version_T=np.arange(num_tokens, dtype=np.int32),
    context_version_T=np.zeros(num_tokens, np.int32),
    consumed_version_T=np.full(num_tokens, 3, np.int32),
    temperature=temperature,
  )


def make_group(*trajectories):
  verdict = records.Verdict(
    passed=False,
    num_passed=1,
    num_tests=2,
    status=records.GRADED,
    sandbox_level='static',
  )
  rollout = records.Rollout(
    task_id='t',
    group=3,
    member=0,
    trajectories=trajectories,
    verdict=verdict,
    reward=0.5,
    num_turns=1,
    num_invalid=0,
    tools=('read', ''),
    flags=('forging_code',),
  )
  return records.Group(group=3, task_id='t', rollouts=(rollout,))


GROUP = make_group(make_trajectory(7), make_trajectory(3, 1, temperature=0.5))


def test_what_is_written_is_read():
  (again,) = group_bytes.from_bytes(group_bytes.to_bytes(GROUP)).rollouts
  (rollout,) = GROUP.rollouts
  for field in dataclasses.fields(rollout):
    if field.name != 'trajectories':
      assert getattr(again, field.name) == getattr(rollout, field.name)
  for ours, theirs in zip(
    rollout.trajectories, again.trajectories, strict=True
  ):
    for field in dataclasses.fields(ours):
      mine, other = (getattr(t, field.name) for t in (ours, theirs))
      assert np.asarray(mine).dtype == np.asarray(other).dtype
      np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize('policies', [None, {v: f'{v:064x}' for v in range(7)}])
def test_identities_are_read_by_version(policies):
  group = dataclasses.replace(GROUP, policies=policies)
  again = group_bytes.from_bytes(group_bytes.to_bytes(group))
  assert again.policies == policies and again.versions == set(range(7))


def test_equal_groups_are_equal_bytes_whenever_they_are_written():
  data = group_bytes.to_bytes(GROUP)
  assert group_bytes.to_bytes(GROUP) == data
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    assert {i.date_time[0] for i in archive.infolist()} == {1980}


def test_everything_is_compressed_but_what_is_packed():
  with zipfile.ZipFile(io.BytesIO(group_bytes.to_bytes(GROUP))) as archive:
    for info in archive.infolist():
      stored = info.compress_type == zipfile.ZIP_STORED
      assert stored == info.filename.endswith('/routes.npy')


def test_routes_take_their_bound_and_not_the_width_of_a_number():
  long, short = (
    len(group_bytes.to_bytes(make_group(make_trajectory(n, num_experts=256))))
    for n in (2001, 1001)
  )
  bound = 1000 * 2 * math.log2(256 * 255) / 8
  # Log-probabilities, which deflate cannot shrink much, and all other fields.
  others = 1000 * (4 + 2)
  assert (
    bound < long - short < 1.05 * bound + others < 1000 * 2 * 2 * 2 + others
  )


def test_without_any_record_there_is_nothing_of_it():
  trajectory = dataclasses.replace(
    GROUP.rollouts[0].trajectories[0],
    expert_ids_TMA=np.full((7, 2, 2), records.NO_ROUTE, np.uint16),
  )
  again = group_bytes.from_bytes(group_bytes.to_bytes(make_group(trajectory)))
  np.testing.assert_array_equal(
    again.rollouts[0].trajectories[0].expert_ids_TMA, trajectory.expert_ids_TMA
  )


def test_routes_that_no_router_makes_are_not_written():
  ids_TMA = GROUP.rollouts[0].trajectories[0].expert_ids_TMA.copy()
  ids_TMA[2, 1] = 0
  broken = dataclasses.replace(
    GROUP.rollouts[0].trajectories[0], expert_ids_TMA=ids_TMA
  )
  with pytest.raises(
    ValueError,
    match=r'Group 3, member 0, trajectory 1: Token 2, layer 1 .*\[0, 0\]',
  ):
    group_bytes.to_bytes(make_group(GROUP.rollouts[0].trajectories[1], broken))


def test_routes_of_another_length_than_the_tokens_are_refused():
  tapes = []
  for n in (7, 6):
    data = group_bytes.to_bytes(make_group(make_trajectory(n)))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
      tapes.append({n: archive.read(n) for n in archive.namelist()})
  tapes[0]['0/0/routes.npy'] = tapes[1]['0/0/routes.npy']
  mixed = io.BytesIO()
  with zipfile.ZipFile(mixed, 'w') as archive:
    for name, content in tapes[0].items():
      archive.writestr(name, content)
  with pytest.raises(
    ValueError, match=r'expert_ids_TMA has shape \(6, 2, 2\); \(7,'
  ):
    group_bytes.from_bytes(mixed.getvalue())
