"""The gate stops every lie of the catalogue that moves the gradient.

A relative change of a step's gradient by more than 0.02 must stop the run
within five tries of a step, or be refused, at staleness 0, 1 and 3; honest
records of sessions whose weights were swapped must pass.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.agent import window as windows
from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.gate import health
from composer_jax.models import decoder
from composer_jax.rl import batching, comparison, mismatch, update
from composer_jax.rl import step as steps
from composer_jax.rl.hints import distill
from composer_jax.rollout import engine as engines
from experiments.studies.staleness import lies
from tests.gate import gate_test
from tests.rl import update_test

MODEL, SHAPE = update_test.MODEL, update_test.SHAPE
P, R, LENGTH = 4, 8, update_test.LENGTH
OPTIONS = dataclasses.replace(
  gate_test.OPTIONS, prompts=P, rollouts_per_prompt=R, mismatch_every=0
)
NEWEST = 3  # The version that is trained.


@pytest.fixture(scope='module')
def states(functions, trained):
  """Training states of versions 0 to NEWEST, a step of RL apart."""
  state = trained.replace(step=jnp.int32(0))
  made = [gate_test.copied(state)]
  groups = update_test.sample(functions.policy(state))
  # Steps about as large as those of the main job, in the mean k3.
  rewards = [[0.05 * r.reward for r in g.rollouts] for g in groups]
  groups = update_test.with_rewards(groups, rewards)
  options = dataclasses.replace(gate_test.OPTIONS, mismatch_every=0)
  for _ in range(NEWEST):
    state, _ = update.update(
      gate_test.copied(state), groups, functions, options, SHAPE
    )
    made.append(gate_test.copied(state))
  return made


def sample(policies, versions, on_swap='keep'):
  """Returns groups of an engine that is swapped through versions meanwhile."""
  engine = engines.Engine(
    MODEL,
    policies[versions[0]],
    versions[0],
    engines.EngineOptions(
      num_slots=P * R,
      max_len=LENGTH,
      prefill_chunk=4,
      decode_steps=2,
      page_size=8,
      on_swap=on_swap,
    ),
  )
  rng = np.random.default_rng(5)
  contexts = {}
  for group in range(P):
    context_T = rng.integers(0, MODEL.vocab_size, 5 + group).astype(np.int32)
    for member in range(R):
      contexts[f'{group}/{member}'] = context_T
      engine.submit(
        records.SampleRequest(
          session=f'{group}/{member}',
          context_T=context_T,
          max_new_tokens=6 + (5 * member + group) % 10,
          stop_tokens=(),
          seed=(group, member),
          temperature=update_test.TEMPERATURE,
        )
      )
  # The newest version comes so late that it samples few tokens.
  period = 12 // len(versions)
  ended, count, rest = {}, 0, list(versions[1:])
  while engine.num_unfinished:
    ended |= {c.session: c for c in engine.step()}
    count += 1
    if rest and count % period == 0 and not engine.is_refreshing:
      version = rest.pop(0)
      engine.swap(policies[version], version)
  return [
    records.Group(
      group=g,
      task_id=f'task {g}',
      rollouts=tuple(
        rollout_of(ended[f'{g}/{m}'], contexts[f'{g}/{m}'], g, m)
        for m in range(R)
      ),
    )
    for g in range(P)
  ]


def rollout_of(
  completion,
  context_T,
  group,
  member,
  temperature=update_test.TEMPERATURE,
):
  window = windows.Window()
  window.append(context_T, completion)
  start, stop = len(context_T), window.length
  return records.Rollout(
    task_id=f'task {group}',
    group=group,
    member=member,
    trajectories=(window.trajectory(temperature),),
    verdict=records.Verdict(
      passed=member == 0,
      num_passed=int(member == 0),
      num_tests=1,
      status=records.GRADED,
      sandbox_level='static',
    ),
    reward=0.1 * ((7 * member + 3 * group) % R),
    num_turns=1,
    num_invalid=0,
    turns=(
      turns_lib.Turn(
        trajectory=0, start=start, stop=stop, tool='', outcome='ok'
      ),
    ),
  )


@pytest.fixture(scope='module')
def policies(functions, states):
  return [decoder.policy(functions.policy(state)) for state in states]


def gate_of(functions, policies, staleness):
  gate = health.HealthGate(
    functions, SHAPE, mismatch.GateOptions(), max_staleness=staleness
  )
  for version in range(NEWEST - staleness, NEWEST):
    gate.keep(version, policies[version])
  return gate


def world_of(functions, policies, groups):
  windows = [r.trajectories[0] for g in groups for r in g.rollouts]
  packed = batching.pack(windows, [0.0] * len(windows), SHAPE)
  values = [
    {**p, 'params': jax.tree.map(lambda x: x.astype(jnp.float32), p['params'])}
    for p in (policies[NEWEST - 1], policies[NEWEST])
  ]
  fresh = [comparison.fresh(b) for b in packed.microbatches]
  stale = [functions.score(values[0], b) for b in fresh]
  own = [functions.score(values[1], b) for b in packed.microbatches]
  arrays = [np.moveaxis(np.asarray(s.expert_ids_MBTA), 0, 2) for s in stale]
  return lies.World(
    stale_routes=comparison.per_token(packed.places, arrays),
    stale_logprobs=comparison.logprobs(packed, stale),
    true_logprobs=comparison.logprobs(packed, own),
    num_experts=MODEL.moe.num_experts,
  )


def gradient(functions, values, groups):
  """Returns the flat gradient of a step, before its scale."""
  rewards = [np.array([r.reward for r in g.rollouts]) for g in groups]
  by_group = [r - r.mean() for r in rewards]
  trained, _ = update._trained(groups, by_group, SHAPE)
  sums = None
  for batch in trained.microbatches:
    sums, _ = functions.add_microbatch(values, sums, batch)
  leaves = jax.device_get(jax.tree.leaves(sums.grads))
  return np.concatenate([leaf.ravel() for leaf in leaves])


def tries_until_caught(functions, state, groups, gate, most=5):
  """Returns the try that is stopped, and why; (None, metrics) if none is.

  Each try is the same step, with other draws and another list in the lead.
  """
  metrics = {}
  for step in range(1, most + 1):
    gate._auditor._seed = step
    try:
      _, metrics = update.update(
        gate_test.copied(state),
        groups,
        functions,
        OPTIONS,
        SHAPE,
        gate=gate,
      )
    except mismatch.OutOfBand as error:
      return step, str(error)
    except ValueError as error:
      return step, f'refused: {error}'
  return None, metrics


def versions_of(staleness):
  return list(range(NEWEST - staleness, NEWEST + 1))


def run(functions, states, policies, staleness, names, on_swap='keep'):
  """Returns (name, change of the gradient, try, message) of each lie.

  An honest step comes first, so that no gate is fresh.
  """
  groups = sample(policies, versions_of(staleness), on_swap)
  world = world_of(functions, policies, groups)
  values = functions.policy(states[NEWEST])
  honest = gradient(functions, values, groups)
  rows = []
  for name in names:
    told = lies.tell(groups, name, world, seed=1)
    try:
      change = gradient(functions, values, told) - honest
      size = np.linalg.norm(change) / np.linalg.norm(honest)
    except ValueError:
      size = np.inf
    gate = gate_of(functions, policies, staleness)
    caught, _ = tries_until_caught(
      functions, states[NEWEST], groups, gate, most=1
    )
    assert caught is None
    step, message = tries_until_caught(functions, states[NEWEST], told, gate)
    rows.append((name, float(size), step, message))
  return rows


# What the message of a stopped step says of some lies.
EXPLAINED = {
  'routes a token late in 100% of trajectories': 'routes a token late',
  'random routes on 20% of tokens': 'routes not of its tokens',
  'log-probabilities times 0.9': 'log-probabilities times 0.9',
  'log-probabilities moved by 0.3': 'log-probabilities shifted by 0.3',
  'log-probabilities with noise of 0.3': 'no single lie',
  'log-probabilities of a stale version in 100% of trajectories': (
    'computed by version 2, not as labelled'
  ),
  'a temperature of 1.25 times in 5% of trajectories': (
    'sampled at temperature 0.8, not 1'
  ),
  'masks over context': 'tokens of context marked as sampled',
}


@pytest.mark.slow
@pytest.mark.parametrize('staleness', [0, 1, 3])
def test_every_lie_that_moves_the_gradient_is_caught(
  functions, states, policies, staleness
):
  rows = run(functions, states, policies, staleness, lies.CATALOGUE)
  missed = [r[:2] for r in rows if r[1] > 0.02 and r[2] is None]
  assert not missed
  assert sum(size > 0.02 for _, size, *_ in rows) >= 25


def test_a_lie_is_caught_and_explained(functions, states, policies):
  rows = run(functions, states, policies, 1, EXPLAINED)
  for name, _, step, message in rows:
    assert step is not None, name
    assert EXPLAINED[name] in message, (name, message)


HINTS = distill.HintLossOptions(weight=1.0)


@pytest.fixture(scope='module')
def hinting():
  return steps.build(decoder.Decoder(MODEL), optax.sgd(0.1), hints=HINTS)


def train_hinted(functions, states, groups, gate):
  update.update(
    gate_test.copied(states[NEWEST]),
    groups,
    functions,
    dataclasses.replace(OPTIONS, hints=HINTS),
    SHAPE,
    gate=gate,
    teacher=functions.policy(states[0]),
  )


def with_hints(groups):
  """Returns the groups, the first one hinted and without an advantage."""

  def changed(rollout):
    (turn,) = rollout.turns
    hint = turns_lib.Hint(
      trajectory=0,
      start=turn.start,
      stop=turn.stop,
      at=turn.start,
      kind='test',
      tokens_T=np.array([4, 9], np.int32),
    )
    return dataclasses.replace(rollout, reward=0.3, hints=(hint,))

  first = groups[0]
  rollouts = tuple(map(changed, first.rollouts))
  return [dataclasses.replace(first, rollouts=rollouts), *groups[1:]]


# Another trajectory's routes are left out: under this first group's windows,
# which begin alike, they change no gradient.
HINTED = [
  *(f'random routes on {share} of tokens' for share in ('5%', '20%', '100%')),
  *(
    f'{name} in 1% of trajectories'
    for name in (
      'routes a token late',
      'routes of experts renumbered',
      '5% of context replaced',
      '20% of context replaced',
    )
  ),
]


@pytest.mark.slow
@pytest.mark.parametrize('name', HINTED)
def test_a_lie_in_one_hinted_window_is_caught(hinting, policies, states, name):
  """A new window in each of five steps, under one gate."""
  groups = with_hints(sample(policies, versions_of(1)))
  world = world_of(hinting, policies, groups)
  gate = gate_of(hinting, policies, 1)
  with pytest.raises(mismatch.OutOfBand):
    for member in range(5):
      told = lies.tell(groups, name, world, seed=member, only=member)
      train_hinted(hinting, states, told, gate)


@pytest.mark.slow
@pytest.mark.parametrize('staleness', [0, 1])
def test_hinted_windows_without_an_advantage_are_scored(
  hinting, states, policies, staleness
):
  groups = with_hints(sample(policies, versions_of(staleness)))

  def take(groups):
    gate = gate_of(hinting, policies, staleness)
    train_hinted(hinting, states, groups, gate)

  take(groups)
  # One window of 32; a share of a tenth affords a few.
  wrong = gate_test.with_trajectories(groups[:1], gate_test.shifted, [5])
  with pytest.raises(mismatch.OutOfBand, match='Of its groups, 0 is the worst'):
    take([*wrong, *groups[1:]])


STALENESS = [
  pytest.param(0, marks=pytest.mark.slow),
  1,
  pytest.param(3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize('on_swap', ['keep', 'refresh'])
@pytest.mark.parametrize('staleness', STALENESS)
def test_honest_records_of_swapped_sessions_pass(
  functions, states, policies, staleness, on_swap
):
  groups = sample(policies, versions_of(staleness), on_swap)
  gate = gate_of(functions, policies, staleness)
  caught, metrics = tries_until_caught(functions, states[NEWEST], groups, gate)
  assert caught is None, metrics
  assert metrics['tokens_exact'] > 10
  assert metrics['mismatch_kl_exact'] < 1e-12
  assert metrics['exact_agreement'] == 1
