"""A window joins what the policy gives it, token by token."""

import numpy as np
import pytest

from composer_jax.agent import window as windows
from composer_jax.core import records


def test_routes_of_tokens_consumed_anew_replace_those_before():
  def completion(tokens, routes, **fields):
    ids_T = np.array(routes, np.uint16)
    return records.Completion(
      session='s',
      tokens_T=np.array(tokens, np.int32),
      logprobs_T=np.zeros(len(tokens), np.float32),
      policy_version_T=np.full(len(tokens), fields.pop('version'), np.int32),
      consumed_expert_ids_TMA=np.repeat(ids_T[:, None, None], 2, axis=2),
      stopped=True,
      **fields,
    )

  context_T = np.arange(3, dtype=np.int32)
  window = windows.Window()
  window.append(context_T, completion([5, 6], [1, 2, 3, 4], version=1))
  window.append(
    context_T,
    completion(
      [7],
      range(11, 19),
      version=4,
      routes_start=0,
      context_version_T=np.array([3], np.int32),
      consumed_version_T=np.array([3] * 5 + [4] * 3, np.int32),
    ),
  )
  window.append(
    context_T[:1], completion([8, 9], [21, 22, 23], version=5, routes_start=8)
  )
  trajectory = window.trajectory(1.0)
  np.testing.assert_array_equal(
    trajectory.expert_ids_TMA[:, 0, 0],
    [*range(11, 19), 21, 22, 23, records.NO_ROUTE],
  )
  # Context has the versions of the next sampled token.
  sampled_by, read = trajectory.policy_version_T, trajectory.context_version_T
  assert sampled_by.tolist() == [1] * 5 + [4] * 4 + [5] * 3
  assert read.tolist() == [1] * 5 + [3] * 4 + [5] * 3
  # The versions of routes are replaced with them.
  consumed = trajectory.consumed_version_T.tolist()
  assert consumed == [3] * 5 + [4] * 3 + [5] * 4
  with pytest.raises(ValueError, match='from token 12 on.*only those of 11'):
    window.append(context_T, completion([7], [1], version=5, routes_start=12))
