"""One update from groups that the engine sampled, with their routes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.core import records, trees
from composer_jax.core import turns as turns_lib
from composer_jax.gate import health
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head
from composer_jax.rl import (
  advantage,
  batching,
  behaviour,
  comparison,
  mismatch,
  update,
)
from composer_jax.rl import step as steps
from composer_jax.rl.hints import distill
from composer_jax.rollout import engine as engines
from composer_jax.train import state as train_state

MODEL = model_config.ModelConfig.from_dict(
  {
    'vocab_size': 40,
    'embed_dim': 16,
    'num_layers': 3,
    'num_dense_layers': 1,
    'dense_ffw_dim': 24,
    'attention': {
      'kind': 'gqa',
      'num_heads': 4,
      'num_kv_heads': 2,
      'head_dim': 8,
      'qk_norm': 'none',
      'qkv_bias': False,
      'out_bias': False,
    },
    'rope': {'theta': 1e4, 'interleaved': False, 'yarn': None},
    'norm_eps': 1e-6,
    'tie_embeddings': True,
    'remat': False,
    'compute_dtype': 'float32',
    'moe': {
      'num_experts': 8,
      'num_active': 2,
      'ffw_dim': 8,
      'num_shared': 1,
      'router': 'sigmoid',
      'num_groups': 1,
      'num_active_groups': 1,
      'renormalize': True,
      'routed_scale': 1.5,
      'aux_loss_weight': 0.0,
      'z_loss_weight': 0.0,
    },
  }
)
P, R, LENGTH = 2, 3, 24
SHAPE = batching.BatchShape(
  rows=2, seq_len=2 * LENGTH, num_moe_layers=2, num_active=2, num_experts=8
)
OPTIONS = update.UpdateOptions(
  prompts=P, rollouts_per_prompt=R, mismatch_every=0
)
TEMPERATURE = 0.8


def draw(seed):
  rng = np.random.default_rng(seed)
  shapes, _ = decoder.abstract(MODEL)
  return jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), shapes
  )


def make_state(variables):
  # Copied, because the update donates its state.
  return train_state.create(jax.tree.map(jnp.copy, variables), optax.sgd(0.1))


def rounded(variables):
  """Returns the policy's values, which the engine serves."""
  params = train_state.policy_values(variables['params'], MODEL)
  return {**variables, 'params': params}


def reroute(variables, size):
  """Moves only the routers, as optimizer steps would."""
  rng = np.random.default_rng(3)
  return trees.map_names(
    lambda name, a: (
      a + size * rng.normal(size=a.shape).astype(np.float32)
      if 'router' in name
      else a
    ),
    variables,
  )


@pytest.fixture(scope='module')
def variables():
  return draw(0)


@pytest.fixture(scope='module')
def functions():
  return steps.build(decoder.Decoder(MODEL), optax.sgd(0.1))


def _rollout(completion, context_T, group, member):
  tokens_T = np.concatenate([context_T, completion.tokens_T])
  sampled = len(completion.tokens_T)
  unrouted = np.full((1, 2, 2), records.NO_ROUTE, np.uint16)
  return records.Rollout(
    task_id=f'task {group}',
    group=group,
    member=member,
    trajectories=(
      records.Trajectory(
        tokens_T=tokens_T,
        loss_mask_T=np.arange(len(tokens_T)) >= len(context_T),
        logprobs_T=np.pad(completion.logprobs_T, (len(context_T), 0)),
        expert_ids_TMA=np.concatenate(
          [completion.consumed_expert_ids_TMA, unrouted]
        ),
        policy_version_T=np.zeros(len(tokens_T), np.int32),
        context_version_T=np.zeros(len(tokens_T), np.int32),
        consumed_version_T=np.zeros(len(tokens_T), np.int32),
        temperature=TEMPERATURE,
      ),
    ),
    verdict=records.Verdict(
      passed=member == 0,
      num_passed=int(member == 0),
      num_tests=1,
      status=records.GRADED,
      sandbox_level='static',
    ),
    turns=(
      turns_lib.Turn(
        trajectory=0,
        start=len(context_T),
        stop=len(tokens_T),
        tool='',
        outcome='ok',
      ),
    ),
    reward=1.0 * (member == 0) - 0.1 * sampled,
    num_turns=1,
    num_invalid=member,
  )


@pytest.fixture(scope='module')
def groups(variables):
  return sample(rounded(variables))


def sample(values):
  """Samples two groups of three rollouts of different lengths."""
  engine = engines.Engine(
    MODEL,
    values,
    0,
    engines.EngineOptions(
      num_slots=P * R, max_len=LENGTH, prefill_chunk=4, decode_steps=4
    ),
  )
  contexts = {}
  for group in range(P):
    for member in range(R):
      name = f'{group}/{member}'
      contexts[name] = np.arange(5, dtype=np.int32) + 7 * group
      engine.submit(
        records.SampleRequest(
          session=name,
          context_T=contexts[name],
          max_new_tokens=9 + 5 * member,
          stop_tokens=(),
          seed=(group, member),
          temperature=TEMPERATURE,
        )
      )
  completions = {}
  while engine.num_unfinished:
    completions |= {c.session: c for c in engine.step()}
  return [
    records.Group(
      group=group,
      task_id=f'task {group}',
      rollouts=tuple(
        _rollout(completions[name], contexts[name], group, member)
        for member in range(R)
        for name in [f'{group}/{member}']
      ),
    )
    for group in range(P)
  ]


def packed(groups, values=(1.0, -1.0, 0.5)):
  trajectories = [r.trajectories[0] for g in groups for r in g.rollouts]
  return batching.pack(trajectories, list(values) * P, SHAPE).microbatches


def mean_k3(functions, values, batches):
  """Returns the mean k3, token by token from the packed arrays."""
  terms = []
  for batch in batches:
    logprobs_BT = np.asarray(functions.score(values, batch).logprobs_BT)
    x_BT = logprobs_BT.astype(float) - batch.rollout_logprobs_BT
    terms.append((np.expm1(x_BT) - x_BT)[batch.loss_weights_BT > 0])
  return np.concatenate(terms).mean()


def with_rewards(groups, rewards_PR):
  return [
    dataclasses.replace(
      g,
      rollouts=tuple(
        dataclasses.replace(r, reward=float(reward))
        for r, reward in zip(g.rollouts, rewards, strict=True)
      ),
    )
    for g, rewards in zip(groups, rewards_PR, strict=True)
  ]


def test_replayed_trainer_gives_the_engines_logprobs(
  functions, variables, groups
):
  for batch in packed(groups):
    logprobs_BT = functions.score(rounded(variables), batch).logprobs_BT
    gap_BT = (logprobs_BT - batch.rollout_logprobs_BT) * batch.loss_weights_BT
    # Tile shapes and packing differ, so float32 sums run in another order.
    assert np.abs(gap_BT).max() < 1e-4


@pytest.mark.slow
def test_what_is_compiled_ahead_is_not_compiled_again(
  variables, groups, monkeypatch
):
  traced = []

  def count(module, name):
    original = getattr(module, name)

    def counted(*args, **kwargs):
      traced.append(name)
      return original(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)

  count(steps, 'microbatch_sums')
  count(distill, 'gradients')
  hints = distill.HintLossOptions(weight=0.5)
  functions = steps.build(decoder.Decoder(MODEL), optax.sgd(0.1), hints=hints)
  hint = turns_lib.Hint(
    trajectory=0,
    start=5,
    stop=9,
    at=5,
    kind='x',
    tokens_T=np.arange(3, dtype=np.int32),
  )
  rollouts = list(groups[0].rollouts)
  rollouts[0] = dataclasses.replace(rollouts[0], hints=(hint,))
  hinted = [
    dataclasses.replace(groups[0], rollouts=tuple(rollouts)), groups[1]
  ]  # fmt: skip
  options = dataclasses.replace(OPTIONS, hints=hints)

  def learn(ahead):
    state = make_state(variables)
    teacher = functions.policy(state)
    if ahead:
      update.compile_ahead(state, functions, SHAPE, teacher)
      assert sorted(traced) == ['gradients', 'microbatch_sums']
    return update.update(
      state, hinted, functions, options, SHAPE, teacher=teacher
    )

  (first, metrics), (again, _) = learn(True), learn(False)
  assert metrics['hints'] == 1
  assert len(traced) == 2
  # Padding leaves nothing behind.
  chex.assert_trees_all_equal(first.params, again.params)


def test_replay_lowers_the_mismatch_of_a_router_that_moved(
  functions, variables, groups
):
  batches = packed(groups)
  fresh = [comparison.fresh(b) for b in batches]
  for size in (0.03, 0.1):
    values = rounded(reroute(variables, size))
    replayed = mean_k3(functions, values, batches)
    rerouted = mean_k3(functions, values, fresh)
    assert 0 <= replayed < rerouted
  unmoved = rounded(variables)
  # k3 is quadratic in gaps below 1e-4.
  assert 0 <= mean_k3(functions, unmoved, batches) < 1e-9


def test_a_replayed_choice_keeps_the_routers_gradient(
  functions, variables, groups
):
  values = rounded(variables)
  sums, _ = functions.add_microbatch(values, None, packed(groups)[0])
  grads = trees.flatten_names(sums.grads)
  routers = [n for n in grads if 'router' in n]
  assert routers
  for name in routers:
    moved_ME = np.abs(grads[name]).max(axis=1) > 0
    assert moved_ME.any(axis=1).all(), name
    # An expert without tokens has no gradient.
    assert not moved_ME[np.asarray(sums.load_ME) == 0].any(), name
  assert np.all(np.asarray(sums.replay_agreement_M) == sums.num_routed)


def test_gradient_is_that_of_the_loss_written_out(functions, variables, groups):
  """REINFORCE on one trajectory at a time, without packing or padding."""
  rewards = np.array([[r.reward for r in g.rollouts] for g in groups])
  advantages = rewards - rewards.mean(1, keepdims=True)

  grads = jax.tree.map(jnp.zeros_like, variables['params'])
  for group, row in zip(groups, advantages, strict=True):
    for rollout, a in zip(group.rollouts, row, strict=True):
      gradient = gradient_alone(
        rounded(variables), padded(rollout.trajectories[0])
      )
      grads = jax.tree.map(
        lambda g, o, a=a: g + a * o / (P * R), grads, gradient
      )
  state, metrics = update.update(
    make_state(variables), groups, functions, OPTIONS, SHAPE
  )
  for name, grad in trees.flatten_names(grads).items():
    moved = trees.flatten_names(state.params)[name]
    moved = moved - trees.flatten_names(variables['params'])[name]
    np.testing.assert_allclose(moved, 0.1 * grad, atol=2e-5, err_msg=name)
  assert metrics['grad_norm'] == pytest.approx(
    float(optax.tree.norm(grads)), rel=1e-4
  )
  assert metrics['microbatches'] == 2 and metrics['groups'] == [0, 1]


def padded(t, *, replay=True):
  """Returns a trajectory as arrays [LENGTH], so that all compile once."""
  pad = (0, LENGTH - len(t))
  ids_TMA = np.pad(
    t.expert_ids_TMA, (pad, (0, 0), (0, 0)), constant_values=records.NO_ROUTE
  )
  if not replay:
    ids_TMA = np.full_like(ids_TMA, records.NO_ROUTE)
  return (
    np.pad(t.tokens_T, pad),
    np.pad(t.loss_mask_T, pad),
    (np.arange(LENGTH) < len(t)).astype(np.int32),
    ids_TMA.transpose(1, 0, 2),
  )


@jax.jit
def score_alone(variables, trajectory):
  """Returns the sum of the sampled tokens' log-probabilities."""
  tokens_T, mask_T, segments_T, ids_MTA = trajectory
  output = decoder.Decoder(MODEL).apply(
    variables,
    tokens_T[None],
    segments_T[None],
    jnp.arange(LENGTH)[None],
    expert_ids_MBTA=ids_MTA[:, None],
  )
  logprobs_BT, _ = head.target_logprobs(
    variables,
    output.hidden_BTD,
    tokens_T[None],
    segments_T[None],
    jnp.full((1, LENGTH), TEMPERATURE),
    MODEL,
  )
  return (logprobs_BT[0] * mask_T).sum()


@jax.jit
def gradient_alone(variables, trajectory):
  return jax.grad(
    lambda params: score_alone({**variables, 'params': params}, trajectory)
  )(variables['params'])


def test_order_of_the_groups_changes_no_bit(functions, variables, groups):
  results = [
    update.update(make_state(variables), g, functions, OPTIONS, SHAPE)
    for g in (groups, groups[::-1])
  ]
  jax.tree.map(
    np.testing.assert_array_equal, results[0][0].params, results[1][0].params
  )
  assert results[0][1] == results[1][1]


def test_equal_rewards_move_nothing(functions, variables, groups):
  equal = with_rewards(groups, np.ones((P, R)))
  state, metrics = update.update(
    make_state(variables), equal, functions, OPTIONS, SHAPE
  )
  assert metrics['grad_norm'] == 0 and metrics['informative_groups'] == 0
  jax.tree.map(np.testing.assert_array_equal, state.params, variables['params'])


def test_a_group_of_equal_rewards_has_no_part_in_the_update(
  functions, variables, groups
):
  """Exactly none, although the float64 mean of three times 0.8 is not 0.8."""
  assert np.full(R, 0.8).mean() != 0.8
  mixed, flat = groups[0], with_rewards(groups[1:], np.full((1, R), 0.8))[0]
  state_of_both, metrics = update.update(
    make_state(variables), [mixed, flat], functions, OPTIONS, SHAPE
  )
  alone, metrics_alone = update.update(
    make_state(variables), [mixed], functions, OPTIONS, SHAPE
  )
  jax.tree.map(
    np.testing.assert_array_equal, state_of_both.params, alone.params
  )
  assert metrics['informative_groups'] == 0.5
  assert metrics_alone['informative_groups'] == 1
  for name in ('grad_norm', 'sampled_tokens', 'entropy', 'expert_load'):
    assert metrics[name] == metrics_alone[name]
  assert metrics['grad_norm'] > 0
  # The gradient with the flat group's tokens in the batch is the same.
  values = rounded(variables)
  trajectories = [r.trajectories[0] for g in (mixed, flat) for r in g.rollouts]
  rewards_R = np.array([r.reward for r in mixed.rollouts])
  advantages = [*advantage.group_advantages(mixed, rewards_R), *[0.0] * R]
  sums = None
  for batch in batching.pack(trajectories, advantages, SHAPE).microbatches:
    sums, _ = functions.add_microbatch(values, sums, batch)
  expected_norm = float(optax.tree.norm(sums.grads)) / (P * R)
  assert metrics['grad_norm'] == pytest.approx(expected_norm, rel=1e-5)


def test_every_rollout_has_one_of_four_verdicts(groups):
  rollouts = [r for g in groups for r in g.rollouts]
  assert len(rollouts) == 6

  def judged(status, num_passed):
    return records.Verdict(
      passed=status == records.GRADED and num_passed == 3,
      num_passed=num_passed,
      num_tests=3,
      status=status,
      sandbox_level='static',
    )

  verdicts = [judged(records.GRADED, n) for n in (3, 3, 2)]
  # An unfinished episode does not count as passed, whatever its tests say.
  verdicts += [judged(records.UNFINISHED, 3), judged(records.UNFINISHED, 0)]
  verdicts.append(judged(records.INFRASTRUCTURE, 0))
  counts = behaviour.verdict_counts(
    [
      dataclasses.replace(r, verdict=v)
      for r, v in zip(rollouts, verdicts, strict=True)
    ]
  )
  assert counts == {
    'passed': 2,
    'failed': 1,
    'unfinished': 2,
    'infrastructure': 1,
  }


def test_the_shuffled_control_takes_no_kl_penalty():
  message = r'kl_coefficient and .* must be 0.*not 0\.1 and'
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(OPTIONS, reward='shuffled', kl_coefficient=0.1)


def test_the_shuffled_control_trains_on_permuted_rewards(
  functions, variables, groups
):
  options = dataclasses.replace(OPTIONS, reward='shuffled', seed=1)
  permuted = [advantage.shuffled_rewards(g, seed=1) for g in groups]
  assert any(
    list(p) != [r.reward for r in g.rollouts]
    for p, g in zip(permuted, groups, strict=True)
  )
  shuffled, metrics = update.update(
    make_state(variables), groups, functions, options, SHAPE
  )
  direct, _ = update.update(
    make_state(variables),
    with_rewards(groups, permuted),
    functions,
    OPTIONS,
    SHAPE,
  )
  jax.tree.map(np.testing.assert_array_equal, shuffled.params, direct.params)
  # The reported reward stays the one that was earned.
  earned = [r.reward for g in groups for r in g.rollouts]
  assert metrics['reward'] == pytest.approx(np.mean(earned))


def test_kl_penalty_is_the_divergence_from_the_reference(
  functions, variables, groups
):
  reference = rounded(draw(1))
  options = dataclasses.replace(OPTIONS, kl_coefficient=0.3)
  rewards_PR = update.rewards_of(groups, options, functions, reference, SHAPE)
  for group, rewards_R in zip(groups, rewards_PR, strict=True):
    for rollout, reward in zip(group.rollouts, rewards_R, strict=True):
      t = rollout.trajectories[0]
      # The reference policy routes for itself.
      reference_logprob = score_alone(reference, padded(t, replay=False))
      kl = t.logprobs_T[t.loss_mask_T].sum() - float(reference_logprob)
      assert reward == pytest.approx(rollout.reward - 0.3 * kl, abs=1e-3)


def test_mismatch_is_measured_both_ways_when_due(functions, variables, groups):
  def learn(replay):
    options = dataclasses.replace(OPTIONS, mismatch_every=1, replay=replay)
    state = make_state(reroute(variables, 0.1))
    flag = mismatch.GateOptions(action='flag')
    gate = health.HealthGate(functions, SHAPE, flag, replay=replay)
    return update.update(state, groups, functions, options, SHAPE, gate=gate)

  _, metrics = learn(replay=True)
  assert metrics['mismatch_kl_replay'] < metrics['mismatch_kl_no_replay']
  assert metrics['replay_agreement'] < 1
  # A separate pass measures the same, whichever routes were trained on.
  values = rounded(reroute(variables, 0.1))
  fresh = [comparison.fresh(b) for b in packed(groups)]
  expected = {
    'mismatch_kl_replay': mean_k3(functions, values, packed(groups)),
    'mismatch_kl_no_replay': mean_k3(functions, values, fresh),
  }
  _, afresh = learn(replay=False)
  for name in ('kl', 'p99', 'max', 'large'):
    pair = f'mismatch_{name}_replay', f'mismatch_{name}_no_replay'
    assert metrics[f'mismatch_{name}'] == metrics[pair[0]]
    assert afresh[f'mismatch_{name}'] == afresh[pair[1]]
    for key in pair:
      # The programs with and without gradient sum in different orders.
      assert metrics[key] == pytest.approx(afresh[key], rel=1e-3)
  for name, value in expected.items():
    assert metrics[name] == pytest.approx(value, rel=1e-3)
  # Route metrics come from the pass that routes afresh, in both cases.
  names = [n for n in metrics if n.startswith('route')]
  assert len(names) == 3
  for name in names:
    assert metrics[name] == afresh[name]
  assert 'replay_agreement' not in afresh


def test_a_loss_that_is_not_finite_stops_with_step_and_statistics(
  functions, variables, groups
):
  broken = jax.tree.map(jnp.copy, variables)
  embed = next(n for n in trees.flatten_names(broken) if 'embed' in n)
  broken = trees.map_names(
    lambda name, a: a.at[0].set(jnp.nan) if name == embed else a, broken
  )
  with pytest.raises(FloatingPointError, match=r'rl step 0: loss is nan.*rewa'):
    update.update(make_state(broken), groups, functions, OPTIONS, SHAPE)
