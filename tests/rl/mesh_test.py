"""RL's update on a mesh is its update on one device, replay included."""

import functools

import jax
import numpy as np
import optax
import pytest

from composer_jax.core import records
from composer_jax.models import decoder
from composer_jax.optim import groups as optim_groups
from composer_jax.parallel import layouts, topology
from composer_jax.rl import policy_loss, update
from composer_jax.rl import step as steps
from composer_jax.train import placement
from composer_jax.train import state as train_state
from tests.rl import replayed

P, R = 2, 3
CONFIG = replayed.CONFIGS['gqa_softmax']
SHAPE = replayed.shape(CONFIG, rows=8, seq_len=16)
OPTIONS = update.UpdateOptions(
  prompts=P,
  rollouts_per_prompt=R,
  replay=True,
  reward='verdict',
  kl_coefficient=0.0,
  loss=policy_loss.LossOptions(),
  mismatch_every=0,
  seed=0,
)
# With SGD at rate 1 a step adds the negative gradient to the masters.
OPTIMIZER = optax.sgd(1.0)
# Context 2 with experts over all eight devices, and batch and experts over 8.
MESHES = {
  'cp2_ep8_slots': ((2, 2, 2), 'a2a'),
  'cp2_ep8_ragged': ((2, 2, 2), 'ragged_a2a'),
  'fsdp4_cp2_a2a': ((1, 4, 2), 'a2a'),
}


@functools.cache
def groups():
  """Returns six random trajectories as two groups with uneven rewards."""
  verdict = records.Verdict(
    passed=False,
    num_passed=0,
    num_tests=1,
    status=records.GRADED,
    sandbox_level='static',
  )
  rollouts = [
    records.Rollout(
      task_id='task',
      group=i // R,
      member=i % R,
      trajectories=(trajectory,),
      verdict=verdict,
      reward=reward,
      num_turns=1,
      num_invalid=0,
    )
    for i, (trajectory, reward) in enumerate(
      zip(replayed.trajectories(CONFIG), replayed.ADVANTAGES, strict=True)
    )
  ]
  return [
    records.Group(
      group=g, task_id='task', rollouts=tuple(rollouts[g * R : (g + 1) * R])
    )
    for g in range(P)
  ]


def placed(shape, transport='auto'):
  num_devices = int(np.prod(shape))
  return placement.build(
    CONFIG,
    mesh=topology.make_mesh(*shape, devices=jax.devices()[:num_devices]),
    layout=layouts.TRAIN,
    options=placement.ParallelOptions(transport=transport),
  )


@functools.cache
def updated(shape=(1, 1, 1), transport='auto'):
  """Returns what a step added to the masters, and its metrics."""
  where = placed(shape, transport)
  functions = steps.build(
    decoder.Decoder(CONFIG, where.plan),
    OPTIMIZER,
    placement=where,
    compiler_options=replayed.OPTIONS,
  )
  variables = replayed.variables(CONFIG)
  state = train_state.create(
    jax.device_put(variables, where.variables), OPTIMIZER
  )
  state, metrics = update.update(state, groups(), functions, OPTIONS, SHAPE)
  jax.tree.map(
    lambda a, place: (
      a.sharding.is_equivalent_to(place, a.ndim)
      or pytest.fail(f'{a.sharding} is not {place}')
    ),
    state.params,
    where.variables['params'],
  )
  added = jax.tree.map(np.subtract, state.params, variables['params'])
  return added, metrics


@pytest.mark.parametrize(
  'case',
  [
    'cp2_ep8_slots',
    pytest.param('cp2_ep8_ragged', marks=pytest.mark.slow),
    pytest.param('fsdp4_cp2_a2a', marks=pytest.mark.slow),
  ],
)
def test_an_update_on_a_mesh_is_that_of_one_device(case):
  added, metrics = updated(*MESHES[case])
  want, want_metrics = updated()
  # Sums run in another order: some units of the last place of the largest term,
  # and the rounding of the masters.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=5e-6 * np.abs(b).max() + 2e-7
    ),
    added,
    want,
  )
  for name in ('loss', 'grad_norm', 'entropy', 'mismatch_kl', 'truncated'):
    assert metrics[name] == pytest.approx(want_metrics[name], rel=2e-5), name
  for name in ('expert_load',):
    assert metrics[name] == want_metrics[name], name


@pytest.mark.parametrize(
  'shape',
  [
    pytest.param((1, 1, 1), marks=pytest.mark.slow),
    pytest.param((1, 4, 2), marks=pytest.mark.slow),
  ],
)
def test_an_update_of_state_in_the_hosts_memory_has_the_same_bits(shape):
  where = placed(shape, 'ring')
  shapes, axes = decoder.abstract(CONFIG)

  def learn(offload):
    optimizer = optim_groups.optimizer(
      optim_groups.OptimizerOptions(
        name='adam', warmup_steps=1, decay_steps=1, offload=offload
      ),
      params=shapes['params'],
      axes=axes['params'],
      total_steps=9,
    )
    functions = steps.build(
      decoder.Decoder(CONFIG, where.plan), optimizer, placement=where
    )
    create = functools.partial(train_state.create, optimizer=optimizer)
    places = train_state.shardings(
      jax.eval_shape(create, shapes), where.variables, where.mesh, offload
    )
    variables = jax.device_put(replayed.variables(CONFIG), where.variables)
    state = train_state.place(create, variables, places)
    for _ in range(2):
      state, metrics = update.update(state, groups(), functions, OPTIONS, SHAPE)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.params)}
    assert kinds == {'pinned_host' if offload else 'device'}
    return jax.device_get(state.params), metrics

  (have, have_metrics), (want, want_metrics) = learn(True), learn(False)
  jax.tree.map(np.testing.assert_array_equal, have, want)
  assert have_metrics == want_metrics
