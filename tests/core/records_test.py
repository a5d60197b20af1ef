"""What the records refuse, by the field's name and the value found."""

import dataclasses

import numpy as np
import pytest

from composer_jax.core import records

TRAJECTORY = records.Trajectory(
  tokens_T=np.arange(3, dtype=np.int32),
  loss_mask_T=np.array([False, True, True]),
  logprobs_T=np.array([0, -1, -2], np.float32),
  expert_ids_TMA=np.zeros((3, 2, 1), np.uint16),
  policy_version_T=np.array([4, 4, 5], np.int32),
  temperature=1.0,
)
VERDICT = records.Verdict(
  passed=False,
  num_passed=1,
  num_tests=2,
  status=records.GRADED,
  sandbox_level='static',
)
ROLLOUT = records.Rollout(
  task_id='t',
  group=3,
  member=0,
  trajectories=(TRAJECTORY,),
  verdict=VERDICT,
  reward=0.5,
  num_turns=1,
  num_invalid=0,
)
GROUP = records.Group(group=3, task_id='t', rollouts=(ROLLOUT,))
REQUEST = records.SampleRequest(
  session='s',
  context_T=np.zeros(2, np.int32),
  max_new_tokens=1,
  stop_tokens=(),
  seed=(0,),
)
COMPLETION = records.Completion(
  session='s',
  tokens_T=np.zeros(2, np.int32),
  logprobs_T=np.zeros(2, np.float32),
  policy_version_T=np.zeros(2, np.int32),
  consumed_expert_ids_TMA=np.zeros((3, 2, 1), np.uint16),
  stopped=False,
)


@pytest.mark.parametrize(
  'record,change,message',
  [
    (TRAJECTORY, {'tokens_T': [1, 2, 3]}, 'tokens_T .* not list'),
    (TRAJECTORY, {'tokens_T': np.arange(3)}, 'tokens_T .*int32.*not int64'),
    (
      TRAJECTORY,
      {'logprobs_T': np.zeros(2, np.float32)},
      r'logprobs_T has shape \(2,\); \(3,\)',
    ),
    (
      TRAJECTORY,
      {'expert_ids_TMA': np.zeros((3, 2), np.uint16)},
      r'expert_ids_TMA has shape \(3, 2\); \(3, None, None\)',
    ),
    (
      TRAJECTORY,
      {'policy_version_T': np.array([5, 4, 5], np.int32)},
      r'never decrease.*\[5, 4, 5\]',
    ),
    (
      TRAJECTORY,
      {'logprobs_T': np.array([0, -np.inf, 0], np.float32)},
      'logprobs_T holds a value that is not finite',
    ),
    (TRAJECTORY, {'temperature': 0.0}, r'temperature must be positive.*0\.0'),
    (VERDICT, {'status': 'lost'}, "status 'lost' is not one of"),
    (VERDICT, {'num_passed': 3}, r'num_passed \(3\).*num_tests \(2\)'),
    (VERDICT, {'passed': True}, "got 'graded' with 1 of 2"),
    (
      VERDICT,
      {'passed': True, 'num_passed': 2, 'status': records.UNFINISHED},
      "got 'unfinished' with 2 of 2",
    ),
    (ROLLOUT, {'trajectories': ()}, "'t' has no trajectory"),
    (ROLLOUT, {'reward': float('nan')}, 'reward must be finite, not nan'),
    (GROUP, {'rollouts': ()}, r'Group 3 must hold members 0\.\.R-1.*\[\]'),
    (GROUP, {'group': 4}, "Group 4 of task 't'.*group 3, task 't'"),
    (GROUP, {'task_id': 'u'}, "Group 3 of task 'u'.*group 3, task 't'"),
    (REQUEST, {'context_T': np.zeros(2)}, 'context_T .*int32, not float64'),
    (REQUEST, {'max_new_tokens': 0}, 'max_new_tokens .*at least 1, not 0'),
    (REQUEST, {'temperature': -1.0}, r'temperature must be positive.*-1\.0'),
    (
      COMPLETION,
      {'policy_version_T': np.zeros(3, np.int32)},
      r'policy_version_T has shape \(3,\); \(2,\)',
    ),
    (
      COMPLETION,
      {'consumed_expert_ids_TMA': np.zeros((3, 2), np.uint16)},
      r'consumed_expert_ids_TMA has shape \(3, 2\)',
    ),
  ],
)
def test_a_record_refuses_what_its_reader_may_not_trust(
  record, change, message
):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(record, **change)


def test_bytes_of_a_group_hold_no_pickle_and_all_fields():
  rollout = dataclasses.replace(
    ROLLOUT,
    trajectories=(TRAJECTORY, dataclasses.replace(TRAJECTORY, temperature=0.5)),
    tools=('read', ''),
    flags=('edited_other_function',),
  )
  group = dataclasses.replace(GROUP, rollouts=(rollout,))
  (again,) = records.group_from_bytes(records.group_to_bytes(group)).rollouts
  for field in dataclasses.fields(rollout):
    if field.name != 'trajectories':
      assert getattr(again, field.name) == getattr(rollout, field.name)
  assert [t.temperature for t in again.trajectories] == [1.0, 0.5]
  for name in ('tokens_T', 'policy_version_T', 'expert_ids_TMA', 'logprobs_T'):
    ours, theirs = (getattr(r.trajectories[1], name) for r in (rollout, again))
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
