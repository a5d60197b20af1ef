"""What a gate stopped at can be read, token by token."""

import numpy as np
import pytest

from composer_jax.core import group_bytes
from experiments.studies.mismatch import show
from tests.rl import advantage_test


def test_a_stopped_trajectory_is_shown_with_both_logprobs(tmp_path):
  arrays = {
    'tokens_T': np.array([7, 8, 9], np.int32),
    'loss_mask_T': np.array([False, True, True]),
    'logprobs_T': np.array([0, -0.5, -1.0], np.float32),
    'expert_ids_TMA': np.array(
      [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[65535] * 2] * 2], np.uint16
    ),
    'policy_version_T': np.array([3, 3, 5], np.int32),
    'context_version_T': np.array([2, 2, 2], np.int32),
    'consumed_version_T': np.array([2, 5, 5], np.int32),
    'temperature': np.array(0.5),
    'train_logprobs_T': np.array([0, -0.25, 0], np.float32),
    'compared_T': np.array([False, True, False]),
    'differing_T': np.array([0, 1, 0], np.int32),
  }
  path = tmp_path / 'stopped.npz'
  np.savez(path, **arrays)
  temperature, head, *rows = show.of_file(path)
  assert temperature == 'temperature 0.5' and 'trainer' in head
  cells = [row.split() for row in rows]
  assert cells[0] == ['0', '7', '3', '2', '2', '0+1', '2+3']
  assert cells[1] == (
    ['1', '8', '*', '-0.50000', '-0.25000', '2.5e-01', '3', '2', '5', '1']
    + ['4+5', '6+7']
  )
  assert cells[2] == ['2', '9', '*', '-1.00000', '5', '2', '5', '-']


def test_a_group_is_shown_without_a_trainer(tmp_path):
  group = advantage_test.make_group([1.0, 0.0])
  path = tmp_path / '00000000.npz'
  path.write_bytes(group_bytes.to_bytes(group) + b'seal')
  text = list(show.of_file(path))
  titles = [line for line in text if line.startswith('group')]
  want = [f'group {group.group}, member {m}, window 0' for m in range(2)]
  assert titles == want
  tokens = sum(len(t) for r in group.rollouts for t in r.trajectories)
  # A title, the temperature and a head for each window.
  assert len(text) == tokens + 3 * len(titles)
  with pytest.raises(OSError):
    list(show.of_file(tmp_path / 'missing'))
