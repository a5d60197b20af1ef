"""Groups as workers would sample them, equal for equal arguments."""

import dataclasses

import numpy as np

from composer_jax.core import records
from composer_jax.core.routes import codec
from composer_jax.fleet.leases import uploads

TASK = 'family/train/0/{}'
RULES = uploads.UploadRules(
  members=4,
  max_tokens=16,
  max_windows=1,
  vocab_size=50,
  routes=codec.RouteScheme(num_experts=4, num_active=2, layers=(0,)),
  temperature=1.0,
)
REWARDS = {'version': 0}


def make_trajectory(number, member, version):
  rng = np.random.default_rng((number, member, version))
  length = int(rng.integers(4, RULES.max_tokens))
  sampled_T = np.arange(length) > 1
  ids_TMA = np.argsort(rng.random((length, 1, 4)), axis=-1)[..., :2]
  ids_TMA[-1] = records.NO_ROUTE
  versions = np.full(length, version, np.int32)
  return records.Trajectory(
    tokens_T=rng.integers(0, RULES.vocab_size, length).astype(np.int32),
    loss_mask_T=sampled_T,
    logprobs_T=np.where(sampled_T, -rng.random(length), 0).astype(np.float32),
    expert_ids_TMA=ids_TMA.astype(np.uint16),
    temperature=1.0,
    **dict.fromkeys(records.VERSIONS, versions),
  )


def make_group(number, version=0, members=range(4)):
  """Returns rollouts of a group, with rewards 1 and 0 in turn."""
  verdict = records.Verdict(
    passed=False,
    num_passed=0,
    num_tests=1,
    status=records.GRADED,
    sandbox_level='static',
  )
  task_id = TASK.format(number)
  rollouts = tuple(
    records.Rollout(
      task_id=task_id,
      group=number,
      member=member,
      trajectories=(make_trajectory(number, member, version),),
      verdict=verdict,
      reward=float(member % 2 == 0),
      num_turns=1,
      num_invalid=0,
    )
    for member in members
  )
  return records.Group(
    group=number,
    task_id=task_id,
    rollouts=rollouts,
    policies={version: f'{version:064x}'},
  )


def changed(group, member=0, **fields):
  """Returns a group with fields of one trajectory replaced."""
  rollouts = list(group.rollouts)
  (window,) = rollouts[member].trajectories
  window = dataclasses.replace(window, **fields)
  rollouts[member] = dataclasses.replace(
    rollouts[member], trajectories=(window,)
  )
  return dataclasses.replace(group, rollouts=tuple(rollouts))
