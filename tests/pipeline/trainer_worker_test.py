"""What the trainer requires of the groups that it gets."""

import types

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.pipeline import reinforce, trainer_worker
from composer_jax.pipeline import spec as specs
from composer_jax.telemetry import writer as writers


def make_group(group, *versions):
  """Returns a group with a rollout for each (context version, version)."""
  rollouts = tuple(
    records.Rollout(
      task_id='t',
      group=group,
      member=member,
      trajectories=(
        records.Trajectory(
          tokens_T=np.zeros(3, np.int32),
          loss_mask_T=np.array([False, True, True]),
          logprobs_T=np.zeros(3, np.float32),
          expert_ids_TMA=np.zeros((3, 1, 1), np.uint16),
          policy_version_T=np.array([before, before, last], np.int32),
          context_version_T=np.array([before, before, last], np.int32),
          consumed_version_T=np.array([before, before, last], np.int32),
          temperature=1.0,
        ),
      ),
      verdict=records.Verdict(
        passed=False,
        num_passed=0,
        num_tests=1,
        status=records.GRADED,
        sandbox_level='static',
      ),
      reward=0.0,
      num_turns=1,
      num_invalid=0,
    )
    for member, (before, last) in enumerate(versions)
  )
  return records.Group(group=group, task_id='t', rollouts=rollouts)


def test_groups_within_the_bound_are_let_in():
  groups = [make_group(6, (3, 3), (4, 5)), make_group(7, (5, 5))]
  for group in groups:
    assert not trainer_worker.fault_of_staleness(group, 5, 2)
  assert not trainer_worker.fault_of_staleness(make_group(0, (0, 0)), 0, 0)


@pytest.mark.parametrize(
  'versions,bound,message',
  [
    (((5, 5), (2, 5)), 2, 'versions 2 to 5; version 5 with max_staleness 2 '),
    (((4, 5),), 0, 'versions 4 to 5; version 5 with max_staleness 0 trains '),
    (((5, 6),), 2, 'versions 5 to 6; version 5 with max_staleness 2 trains '),
  ],
)
def test_a_group_that_breaks_the_bound_is_named(versions, bound, message):
  group = make_group(7, *versions)
  fault = trainer_worker.fault_of_staleness(group, 5, bound)
  assert fault.startswith(f'Group 7 was sampled by {message}')


def test_a_run_that_only_has_to_be_exported_publishes_its_last_version():
  """A kill may have come between the checkpoint and the pointer."""
  published = []
  state = types.SimpleNamespace(step=3)
  ports = types.SimpleNamespace(publish=lambda _, v: published.append(v))
  rl = types.SimpleNamespace(prompts=2, steps=3)
  final_state = trainer_worker.run(state, None, ports, rl)
  assert final_state is state and published == [3]


@pytest.mark.parametrize('overtake', [0, 3])
@pytest.mark.parametrize('first', [0, 2])
def test_each_group_that_may_begin_is_drawn_once(overtake, first, tmp_path):
  fields = dict(warmup_steps=0, decay_steps=1, overtake=overtake)
  rl = specs.RLSection(prompts=2, steps=6, max_staleness=3, **fields)
  with writers.Writer(tmp_path, tensorboard=False) as writer:
    for step in range(first):
      taken = [2 * step + 1, 2 * step + 2]  # Group 0 is overtaken.
      writer.write('fleet', step + 1, taken=taken)
  drawn, admitted = [], []
  job = types.SimpleNamespace(
    spec=types.SimpleNamespace(rl=rl), workdir=tmp_path
  )
  groups = types.SimpleNamespace(admit=admitted.extend)
  source = reinforce._Source(
    job, groups, None, lambda g: drawn.append(g) or g, first
  )
  for version in range(first, 7):
    source.admit(version)
    assert drawn[-1] == rl.window.admitted(version) - 1
  skipped = {*range(1, 2 * first + 1)} if overtake else {*range(2 * first)}
  assert drawn == admitted == [g for g in range(12) if g not in skipped]
