"""The default bands refuse false records and pass honest ones.

The engine samples from a model that was trained a little, because routers and
predictions of random weights would hide faults.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.gate import health
from composer_jax.rl import mismatch, update
from tests.rl import update_test

MODEL, SHAPE = update_test.MODEL, update_test.SHAPE
OPTIONS = dataclasses.replace(update_test.OPTIONS, mismatch_every=1)


@pytest.fixture(scope='module')
def groups(functions, trained):
  """Groups that the trained policy sampled, with its version."""
  sampled = update_test.sample(functions.policy(trained))
  # Small rewards, so that a step moves the policy as far as a step of Adam.
  rewards = [[0.1 * r.reward for r in g.rollouts] for g in sampled]
  sampled = update_test.with_rewards(sampled, rewards)
  return with_trajectories(
    sampled,
    lambda t: dict.fromkeys(
      records.VERSIONS, np.full(len(t), int(trained.step), np.int32)
    ),
  )


def with_trajectories(groups, change, members=range(3)):
  """Returns the groups with fields of some members' trajectories changed."""

  def changed(rollout):
    if rollout.member not in members:
      return rollout
    return dataclasses.replace(
      rollout,
      trajectories=tuple(
        dataclasses.replace(t, **change(t)) for t in rollout.trajectories
      ),
    )

  return [
    dataclasses.replace(g, rollouts=tuple(map(changed, g.rollouts)))
    for g in groups
  ]


def shifted(t):
  """Returns routes shifted by one token."""
  ids_TMA = t.expert_ids_TMA.copy()
  ids_TMA[1:-1] = t.expert_ids_TMA[:-2]
  return {'expert_ids_TMA': ids_TMA}


def swapped(t):
  """Returns routes with the layers swapped."""
  return {'expert_ids_TMA': t.expert_ids_TMA[:, ::-1].copy()}


def newer(t):
  """Returns versions one newer than those that sampled the tokens."""
  return {name: getattr(t, name) + 1 for name in records.VERSIONS}


def copied(state):
  return jax.tree.map(jnp.copy, state)


def gate_of(functions, action='stop', replay=True):
  options = mismatch.GateOptions(action=action)
  return health.HealthGate(
    functions, SHAPE, options, replay=replay, max_staleness=1
  )


def run(functions, state, groups, action='stop', **changes):
  options = dataclasses.replace(OPTIONS, **changes)
  gate = None
  if action != 'off':
    gate = gate_of(functions, action, options.replay)
  return update.update(
    copied(state), groups, functions, options, SHAPE, gate=gate
  )


@pytest.fixture(scope='module')
def honest(functions, trained, groups):
  """State and metrics of `update` on honest records, under the default gate."""
  assert mismatch.GateOptions().action == 'stop'
  return run(functions, trained, groups)


def test_honest_records_pass(trained, honest):
  state, metrics = honest
  assert metrics['gate'] == [] and metrics['gate_breaches'] == 0
  assert int(state.step) == int(trained.step) + 1
  assert metrics['tokens_exact'] == metrics['sampled_tokens']
  assert metrics['mismatch_kl_exact'] < 1e-12
  assert metrics['exact_agreement'] == 1 and metrics['unrecorded'] == 0
  assert metrics['route_agreement'] == metrics['replay_agreement'] == 1


def test_honest_records_of_an_older_policy_pass(functions, groups, honest):
  state, _ = honest
  _, metrics = run(functions, state, groups)
  assert metrics['tokens_exact'] == 0 and metrics['staleness'] == 1
  assert metrics['mismatch_kl'] > 1e-3 and metrics['gate'] == []


@pytest.mark.parametrize('members', [range(3), [1]], ids=['all', 'one'])
@pytest.mark.parametrize('lie', [shifted, swapped, newer])
def test_a_lie_stops_the_step_before_it_is_applied(
  functions, trained, honest, groups, lie, members
):
  # A record can claim a newer version only if the trainer has one.
  state = copied(honest[0] if lie is newer else trained)
  before = copied(state)
  wrong = with_trajectories(groups, lie, members)
  with pytest.raises(mismatch.OutOfBand) as stopped:
    gate = gate_of(functions)
    update.update(state, wrong, functions, OPTIONS, SHAPE, gate=gate)
  message = str(stopped.value)
  assert message.startswith(
    f'rl step {int(state.step) + 1}: mismatch_kl_exact is '
    f'{stopped.value.metrics["mismatch_kl_exact"]:.3g}, its band is at most '
    '1e-09 (--config.rl.gate.max_kl_exact): '
  )
  assert '--config.rl.gate.action=flag' in message and 'groups/' in message
  # The state was neither donated nor changed.
  jax.tree.map(np.testing.assert_array_equal, state, before)


@pytest.mark.parametrize('due, caught', [(1.0, True), (0.8, False)])
def test_a_temperature_that_the_run_does_not_sample_at_is_named(
  functions, trained, groups, due, caught
):
  """Log-probabilities that fit the false temperature hide it from the bands."""
  gate = health.HealthGate(
    functions,
    SHAPE,
    mismatch.GateOptions(action='flag'),
    temperature=due,
  )
  _, metrics = update.update(
    copied(trained), groups, functions, OPTIONS, SHAPE, gate=gate
  )
  words = 'group 0, member 0: window 0 was sampled at temperature 0.8, this run'
  assert (words in ' '.join(metrics['gate'])) == caught
  assert bool(metrics['gate']) == caught


def test_the_worst_trajectory_is_kept_until_a_step_passes(
  functions, trained, groups, tmp_path
):
  gate = health.HealthGate(
    functions, SHAPE, mismatch.GateOptions(), folder=tmp_path
  )

  def take(groups):
    update.update(copied(trained), groups, functions, OPTIONS, SHAPE, gate=gate)

  wrong = with_trajectories(groups, shifted)
  with pytest.raises(mismatch.OutOfBand, match=f'--group={tmp_path}'):
    take(wrong)
  assert 'compared_T' in np.load(tmp_path / 'stopped.npz')
  take(groups)
  assert not list(tmp_path.iterdir())


def told(functions, states, groups, **choice):
  """Returns what a gate says that knows the policies of the states."""
  gate = health.HealthGate(
    functions, SHAPE, mismatch.GateOptions(), max_staleness=1, **choice
  )
  for version, state in states:
    gate.keep(version, functions.policy(state))
  with pytest.raises(mismatch.OutOfBand) as stopped:
    update.update(
      copied(states[-1][1]), groups, functions, OPTIONS, SHAPE, gate=gate
    )
  return str(stopped.value)


def test_missing_routes_are_told_from_the_move_of_the_policy(
  functions, trained, honest, groups
):
  """By exact weights, as any reading of the routes beats newer ones."""

  def lost(t):
    ids_TMA = t.expert_ids_TMA.copy()
    ids_TMA[1:-1:5] = records.NO_ROUTE
    return {'expert_ids_TMA': ids_TMA}

  states = [(60, trained), (61, honest[0])]
  message = told(functions, states, with_trajectories(groups, lost))
  assert 'unrecorded is' in message
  assert 'tokens lack a route; its log-probabilities are right' in message


def test_the_temperature_of_the_run_explains_another_one(
  functions, trained, groups
):
  wrong = with_trajectories(groups, lambda t: {'temperature': 0.96})
  message = told(functions, [(60, trained)], wrong, temperature=0.8)
  assert 'it fits best if sampled at temperature 0.8, not 0.96' in message


def unturned(t):
  """Returns a mask of no token."""
  return {'loss_mask_T': np.zeros(len(t), bool)}


def unread(t):
  """Returns versions that no cache can have had."""
  return {'context_version_T': t.context_version_T - 1}


@pytest.mark.parametrize(
  'lie, reason',
  [
    (unturned, 'has a loss mask that differs from its turns at .* tokens'),
    (unturned, 'has no sampled token'),
    (unread, 'has .* sampled tokens whose versions .* no engine can have had'),
    (newer, r'names versions \[61\], newer than the trained one'),
  ],
)
def test_records_that_contradict_themselves_are_refused_by_name(
  functions, trained, groups, lie, reason
):
  wrong = [groups[0], *with_trajectories(groups[1:], lie, [1])]
  match = f'rl step 61: .*group 1, member 1: window 0 {reason}'
  with pytest.raises(mismatch.OutOfBand, match=match):
    run(functions, trained, wrong)
  everywhere = with_trajectories(groups, lie)
  with pytest.raises(mismatch.OutOfBand, match='and 1 more|window 0'):
    run(functions, trained, everywhere)


def test_the_group_that_lies_is_named(functions, trained, groups):
  wrong = [groups[0], *with_trajectories(groups[1:], shifted)]
  with pytest.raises(
    mismatch.OutOfBand, match=r'Of its groups, 1 is the worst'
  ):
    run(functions, trained, wrong)


@pytest.mark.parametrize('lie', [shifted, swapped])
def test_a_tape_of_an_older_policy_is_judged_by_its_agreement(
  functions, honest, groups, lie
):
  _, metrics = run(
    functions, honest[0], with_trajectories(groups, lie), action='flag'
  )
  assert metrics['tokens_exact'] == 0
  assert any(s.startswith('replay_agreement is ') for s in metrics['gate'])
  # Without replay the tape changes no loss, but its disagreement still shows.
  _, afresh = run(
    functions,
    honest[0],
    with_trajectories(groups, lie),
    replay=False,
    action='flag',
  )
  assert [s.split()[0] for s in afresh['gate']] == ['route_agreement']


def test_a_flag_goes_on_with_the_same_gradient_as_no_gate(
  functions, trained, groups
):
  wrong = with_trajectories(groups, shifted)
  flagged, metrics = run(functions, trained, wrong, action='flag')
  passed, without = run(functions, trained, wrong, action='off')
  assert metrics['gate_breaches'] == len(metrics['gate']) > 1
  jax.tree.map(np.testing.assert_array_equal, flagged.params, passed.params)
  assert without == {k: metrics[k] for k in without}
  assert 'gate' not in without


def test_looking_first_changes_no_bit(functions, trained, groups, honest):
  stopping, metrics = honest
  flagging, flagging_metrics = run(functions, trained, groups, action='flag')
  jax.tree.map(np.testing.assert_array_equal, stopping.params, flagging.params)
  assert metrics == flagging_metrics
