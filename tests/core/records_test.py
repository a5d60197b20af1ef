"""Records refuse wrong values, by name of the field and value."""

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
  context_version_T=np.array([4, 4, 5], np.int32),
  consumed_version_T=np.array([4, 4, 5], np.int32),
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
    (TRAJECTORY, {'tokens_T': [1, 2, 3]}, 'tokens_T .* got list'),
    (TRAJECTORY, {'tokens_T': np.arange(3)}, 'tokens_T .*int32; got int64'),
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
      'logprobs_T must be finite',
    ),
    (TRAJECTORY, {'temperature': 0.0}, r'temperature must be positive.*0\.0'),
    (
      GROUP,
      {'policies': {4: 'a'}},
      r'Group 3 holds tokens of versions \[4, 5\] and names .* \[4\]',
    ),
    (GROUP, {'policies': {}}, r'versions \[4, 5\] and names .* \[\]'),
    (VERDICT, {'status': 'lost'}, "status must be one of .*'lost'"),
    (VERDICT, {'num_passed': 3}, r'num_passed must .*num_tests \(2\); got 3'),
    (VERDICT, {'passed': True}, "got 'graded' with 1 of 2"),
    (
      VERDICT,
      {'passed': True, 'num_passed': 2, 'status': records.UNFINISHED},
      "got 'unfinished' with 2 of 2",
    ),
    (ROLLOUT, {'trajectories': ()}, "'t' has no trajectory"),
    (ROLLOUT, {'reward': float('nan')}, 'reward must be finite; got nan'),
    (GROUP, {'rollouts': ()}, r'Group 3 must hold consecutive .*\[\]'),
    (GROUP, {'group': 4}, "Group 4 of task 't'.*group 3, task 't'"),
    (GROUP, {'task_id': 'u'}, "Group 3 of task 'u'.*group 3, task 't'"),
    (REQUEST, {'context_T': np.zeros(2)}, 'context_T .*int32; got float64'),
    (REQUEST, {'max_new_tokens': 0}, 'max_new_tokens .*at least 1; got 0'),
    (
      REQUEST,
      {'temperature': -1.0},
      r'temperature must lie in \[0, inf\).*-1\.0',
    ),
    (REQUEST, {'temperature': float('nan')}, 'temperature must .*got nan'),
    (REQUEST, {'temperature': float('inf')}, 'temperature must .*got inf'),
    (REQUEST, {'top_p': 0.0}, r'top_p must lie in \(0, 1\].*got 0\.0'),
    (REQUEST, {'top_p': 1.5}, r'top_p .*got 1\.5'),
    (REQUEST, {'top_p': float('nan')}, 'top_p .*got nan'),
    (REQUEST, {'top_k': -1}, 'top_k must .* at least 0; got -1'),
    (REQUEST, {'top_k': 2.0}, r'top_k must be an integer .*got 2\.0'),
    (REQUEST, {'top_k': True}, 'top_k must be an integer .*got True'),
    (REQUEST, {'max_new_tokens': 1.5}, r'max_new_tokens must .*got 1\.5'),
    (REQUEST, {'stop_tokens': (3, 4.0)}, r'stop_tokens must .*got \(3, 4\.0\)'),
    (REQUEST, {'seed': (1, 'a')}, "seed must hold integers; got .*'a'"),
    (REQUEST, {'seed': (None,)}, 'seed must hold integers; got .*None'),
    (REQUEST, {'min_p': 1.0}, r'min_p must lie in \[0, 1\).*got 1\.0'),
    (REQUEST, {'min_p': -0.1}, r'min_p .*got -0\.1'),
    (REQUEST, {'min_p': float('nan')}, 'min_p .*got nan'),
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
    (
      COMPLETION,
      {'raw_logprobs_T': np.zeros(3, np.float32)},
      r'raw_logprobs_T has shape \(3,\); \(2,\)',
    ),
    (COMPLETION, {'routes_start': -1}, 'routes_start .* at least 0; got -1'),
  ],
)
def test_a_record_refuses_what_its_reader_may_not_trust(
  record, change, message
):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(record, **change)


def test_a_request_truncates_if_some_tokens_have_no_chance():
  assert not REQUEST.truncates
  assert not dataclasses.replace(REQUEST, temperature=0.0).truncates
  for change in ({'top_p': 0.9}, {'top_k': 1}, {'min_p': 0.1}):
    assert dataclasses.replace(REQUEST, **change).truncates
