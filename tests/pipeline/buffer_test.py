"""Groups on disk: bounded staleness, exactly once, damage named."""

import dataclasses
import hashlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from composer_jax.core import records
from composer_jax.pipeline import buffer as buffers
from tests.rl import advantage_test


@pytest.fixture
def buffer(tmp_path):
  return buffers.GroupBuffer(tmp_path / 'groups')


def make_group(number, version=0):
  group = advantage_test.make_group([1.0, 0.0])
  rollouts = tuple(
    dataclasses.replace(
      r,
      group=number,
      trajectories=tuple(
        dataclasses.replace(
          t,
          **{name: getattr(t, name) + version for name in records.VERSIONS},
        )
        for t in r.trajectories
      ),
    )
    for r in group.rollouts
  )
  return dataclasses.replace(group, group=number, rollouts=rollouts)


@hypothesis.given(
  prompts=st.integers(1, 5),
  max_staleness=st.integers(0, 4),
  steps=st.integers(1, 12),
  data=st.data(),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_staleness_is_bounded_and_every_group_trained_once(
  prompts, max_staleness, steps, data
):
  # A simulated clock: at each tick either the worker starts or finishes some
  # admitted group with whatever version it serves, or the trainer steps.
  version, served, next_group = 0, 0, 0
  running, finished, trained = {}, {}, []
  ticks = 0
  while version < steps:
    ticks += 1
    assert ticks < 10_000, 'deadlock'
    limit = buffers.admitted(
      served, prompts=prompts, max_staleness=max_staleness, steps=steps
    )
    moves = []
    if next_group < limit:
      moves.append('start')
    if running:
      moves.append('finish')
    if served < version:
      moves.append('follow')
    due = range(version * prompts, (version + 1) * prompts)
    if all(g in finished for g in due):
      moves.append('train')
    move = data.draw(st.sampled_from(moves))
    if move == 'start':
      running[next_group] = served
      next_group += 1
    elif move == 'finish':
      group = data.draw(st.sampled_from(sorted(running)))
      finished[group] = running.pop(group)
    elif move == 'follow':
      served = data.draw(st.integers(served + 1, version))
    else:
      for group in due:
        assert 0 <= version - finished[group] <= max_staleness
        trained.append(group)
      version += 1
  assert trained == list(range(steps * prompts))


def test_put_get_keeps_a_group(buffer):
  buffer.put(make_group(7))
  assert buffer.ids() == [7]
  assert buffer.get(7).rollouts[0].reward == 1.0


def test_a_group_is_also_a_plain_npz(buffer):
  buffer.put(make_group(7))
  with np.load(buffer.path(7)) as arrays:
    assert arrays['header'].size and len(arrays.files) > 1


def test_any_flipped_bit_or_cut_sets_a_group_aside_by_name(buffer):
  buffer.put(make_group(3))
  intact = buffer.path(3).read_bytes()
  rng = np.random.default_rng(0)
  damaged = [intact[: rng.integers(len(intact))] for _ in range(50)]
  for at in rng.integers(len(intact), size=400):
    flipped = bytearray(intact)
    flipped[at] ^= 1 << rng.integers(8)
    damaged.append(bytes(flipped))
  for content in damaged:
    buffer.path(3).write_bytes(content)
    with pytest.raises(ValueError, match=r'00000003.npz is damaged.*command'):
      buffer.get(3)
    assert buffer.ids() == []
    assert buffer.path(3).with_suffix('.damaged').read_bytes() == content
  buffer.path(3).write_bytes(intact)
  assert buffer.get(3).group == 3


def test_an_intact_file_that_is_no_such_group_is_set_aside(buffer):
  buffer.put(make_group(3))
  buffer.path(3).replace(buffer.path(4))
  with pytest.raises(ValueError, match='4.npz is damaged .it holds group 3'):
    buffer.get(4)
  # Another version of the code may have written such a file.
  np.savez(buffer.path(5), header=np.frombuffer(b'{}', np.uint8))
  data = buffer.path(5).read_bytes()
  buffer.path(5).write_bytes(data + hashlib.sha256(data).digest())
  with pytest.raises(ValueError, match="5.npz is damaged .'rollouts'"):
    buffer.get(5)
  assert buffer.ids() == []


def test_resuming_samples_a_damaged_group_anew(buffer, caplog):
  for number in (4, 5, 6):
    buffer.put(make_group(number))
  buffer.path(5).write_bytes(b'rot')
  assert buffer.discard_newer(2) == [5]
  assert '00000005.npz is damaged' in caplog.text
  assert buffer.ids() == [4, 6] and buffer.discard_newer(2) == []


def test_resuming_discards_what_a_lost_policy_sampled(buffer):
  for number, version in ((4, 1), (5, 2), (6, 3)):
    buffer.put(make_group(number, version))
  assert buffer.discard_newer(2) == [6]
  assert buffer.ids() == [4, 5]


def test_consumed_groups_go_once_a_checkpoint_holds_them(buffer):
  for number in range(5):
    buffer.put(make_group(number))
  buffer.remove_below(3)
  assert buffer.ids() == [3, 4]


def test_waiting_in_vain_names_the_missing_groups(buffer):
  buffer.put(make_group(1))
  with pytest.raises(TimeoutError, match=r'groups \[0, 2\]'):
    buffer.wait([0, 1, 2], timeout_s=0.05, while_waiting=lambda: None)
