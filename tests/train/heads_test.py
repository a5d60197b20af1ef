"""Training heads for multi-token prediction beside a policy, or alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder, mtp, placement
from composer_jax.optim import groups
from composer_jax.parallel import layouts, sequence, shardings, topology
from composer_jax.rl import step as rl_steps
from composer_jax.rollout import engine as engines
from composer_jax.rollout import options as rollout_options
from composer_jax.train import heads as train_heads
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step
from tests import compiling
from tests.rl import replayed
from tests.train import loop_test, step_test

SLOW = pytest.mark.slow
RATE = 0.125


def with_heads(config, depth=2, **changed):
  heads = model_config.MTPConfig(depth=depth)
  return dataclasses.replace(config, mtp=heads, **changed)


# Six experts do not divide over eight devices; a layer is computed again.
UNEVEN = with_heads(replayed.CONFIGS['mla_sigmoid'], remat=True)
EVEN = with_heads(step_test.MODEL, remat=True, tie_embeddings=False)


def variables_of(config):
  """Returns the same policy whether it has heads or not."""
  made = dict(replayed.variables(with_heads(config)))
  return made if config.mtp else {k: v for k, v in made.items() if k != 'mtp'}


@functools.cache
def step_of(
  config, shape=(1, 1, 1), order='contiguous', accumulate=1, alone=False
):
  """Returns (state after, metrics) of a step of plain gradient descent."""
  num_devices = int(np.prod(shape))
  mesh = topology.make_mesh(*shape, devices=jax.devices()[:num_devices])
  where = dict(layout=layouts.TRAIN, mesh=mesh)
  places = placement.variable_shardings(config, **where)
  heads = None
  if config.mtp is not None:
    heads = train_heads.HeadProgram(
      mtp.HeadLossOptions(), optax.sgd(1.0), alone, places['mtp']['params']
    )
  state = train_state.create(
    jax.device_put(variables_of(config), places),
    optax.sgd(1.0),
    heads=heads and heads.optimizer,
  )
  step = train_step.make(
    config,
    optax.sgd(1.0),
    plan=placement.exchange_plan(config, **where, sequence_order=order),
    bias_rate=RATE,
    accumulate=accumulate,
    places=places['params'],
    heads=heads,
  )
  batch = step_test.make_batch()
  if order == 'zigzag':
    batch = jax.tree.map(lambda x: sequence.to_device(x, shape[2]), batch)
  batch = jax.device_put(batch, shardings.tokens(**where))
  run = jax.jit(step, donate_argnums=0, compiler_options=compiling.ORDERLY)
  return jax.device_get(run(state, batch))


def assert_same_heads(config, have, want):
  (after, metrics), (want_after, want_metrics) = have, want
  before = replayed.variables(config)['mtp']
  jax.tree.map(
    lambda a, b, old: np.testing.assert_allclose(
      a - old, b - old, rtol=0, atol=1e-5 * np.abs(b - old).max() + 1e-6
    ),
    after.heads.params,
    want_after.heads.params,
    before['params'],
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    after.heads.selection_bias,
    want_after.heads.selection_bias,
  )
  have_stats, stats = metrics.loss.heads, want_metrics.loss.heads
  np.testing.assert_array_equal(have_stats.load_KE, stats.load_KE)
  np.testing.assert_allclose(have_stats.loss_K, stats.loss_K, rtol=1e-5)
  np.testing.assert_allclose(have_stats.weight_K, stats.weight_K, rtol=1e-6)
  np.testing.assert_allclose(have_stats.agrees_K, stats.agrees_K, rtol=1e-6)


@SLOW
@pytest.mark.parametrize(
  'config,shape,order,accumulate',
  [
    pytest.param(EVEN, (2, 2, 2), 'contiguous', 1, id='even'),
    pytest.param(EVEN, (2, 2, 2), 'zigzag', 2, id='accumulated'),
    pytest.param(UNEVEN, (1, 2, 4), 'zigzag', 1, id='uneven'),
    pytest.param(UNEVEN, (1, 2, 4), 'contiguous', 1, id='cut'),
  ],
)
def test_a_mesh_equals_one_device(config, shape, order, accumulate):
  """Documents lie across the borders of context shards."""
  have = step_of(config, shape, order, accumulate)
  assert_same_heads(config, have, step_of(config))


@SLOW
def test_recomputation_and_microbatches_change_nothing_but_rounding():
  want = step_of(EVEN)
  kept = dataclasses.replace(EVEN, remat=False)
  assert_same_heads(EVEN, step_of(kept), want)
  assert_same_heads(EVEN, step_of(EVEN, accumulate=4), want)


@SLOW
@pytest.mark.parametrize('config', [EVEN, UNEVEN])
def test_heads_change_no_bit_of_the_policy(config):
  after, metrics = step_of(config)
  plain, plain_metrics = step_of(dataclasses.replace(config, mtp=None))
  jax.tree.map(np.testing.assert_array_equal, after.params, plain.params)
  jax.tree.map(
    np.testing.assert_array_equal, after.selection_bias, plain.selection_bias
  )
  assert metrics.loss.loss == plain_metrics.loss.loss
  assert metrics.update.grad_norm == plain_metrics.update.grad_norm


@SLOW
@pytest.mark.parametrize('config', [EVEN, UNEVEN])
def test_alone_they_move_as_beside_the_policy_which_stays(config):
  after, metrics = step_of(config)
  alone, alone_metrics = step_of(config, alone=True)
  assert_same_heads(config, (alone, alone_metrics), (after, metrics))
  before = replayed.variables(config)
  jax.tree.map(np.testing.assert_array_equal, alone.params, before['params'])
  assert alone.step == 1 and alone_metrics.update.grad_norm == 0


RL = with_heads(replayed.CONFIGS['gqa_softmax'], depth=1)


@SLOW
def test_rl_trains_heads_on_sampled_tokens_and_never_mixes_routes():
  batch = replayed.pack(RL, rows=2, seq_len=24)[0]
  plain = dataclasses.replace(RL, mtp=None)
  heads = train_heads.HeadProgram(mtp.HeadLossOptions(), optax.sgd(0.5))
  build = functools.partial(
    rl_steps.build, optimizer=optax.sgd(0.1), compiler_options=compiling.ORDERLY
  )
  functions = build(decoder.Decoder(RL), heads=heads)
  others = build(decoder.Decoder(plain))
  variables = jax.tree.map(jnp.asarray, replayed.variables(RL))
  # A step donates its state.
  trunk = {
    name: jax.tree.map(jnp.copy, tree)
    for name, tree in variables.items()
    if name != 'mtp'
  }
  state = train_state.create(variables, optax.sgd(0.1), heads=heads.optimizer)
  other = train_state.create(trunk, optax.sgd(0.1))
  values = functions.policy(state)
  sums, scores = functions.add_microbatch(values, None, batch)
  other_sums, other_scores = others.add_microbatch(
    others.policy(other), None, batch
  )
  # Neither gradient nor tape knows of the heads.
  jax.tree.map(np.testing.assert_array_equal, sums.grads, other_sums.grads)
  jax.tree.map(np.testing.assert_array_equal, scores, other_scores)
  sampled = batch.loss_weights_BT[:, 2:] * (
    batch.segment_ids_BT[:, 2:] == batch.segment_ids_BT[:, :-2]
  )
  np.testing.assert_array_equal(sums.heads.weight_K, [sampled.sum()])
  assert sums.without_grads().head_grads is None
  both, _ = functions.add_microbatch(values, sums, batch)
  np.testing.assert_array_equal(both.heads.weight_K, [2 * sampled.sum()])
  after, _ = functions.apply(state, both, jnp.float32(0.25))
  other_sums, _ = others.add_microbatch(others.policy(other), other_sums, batch)
  other_after, _ = others.apply(other, other_sums, jnp.float32(0.25))
  jax.tree.map(np.testing.assert_array_equal, after.params, other_after.params)
  moved = jax.tree.map(
    lambda new, old: float(np.abs(new - old).max()),
    after.heads.params,
    replayed.variables(RL)['mtp']['params'],
  )
  assert min(jax.tree.leaves(moved)) > 0


def test_policies_carry_heads_which_engines_leave_aside():
  """Bundles send all arrays of a policy by name."""
  variables = jax.tree.map(jnp.asarray, replayed.variables(RL))
  served = decoder.policy(variables, RL)
  flat = trees.flatten_names(served)
  heads = {n: x.dtype.name for n, x in flat.items() if n.startswith('mtp/')}
  assert len(heads) > 10 and set(heads.values()) == {'bfloat16'}
  options = rollout_options.EngineOptions(num_slots=2, max_len=16)
  engine = engines.Engine(RL, served, 0, options)
  held = jax.tree.leaves(engine._served.weights)
  trunk = [x for n, x in flat.items() if not n.startswith('mtp/')]
  # Experts are split and the tied table is copied, but no head is there.
  assert sum(x.size for x in held) == (
    sum(x.size for x in trunk) + served['params']['embedding'].size
  )
  with pytest.raises(ValueError, match='mtp/'):
    engine.swap({k: v for k, v in served.items() if k != 'mtp'}, 1)


def test_sections_give_each_stage_its_training():
  stage = groups.OptimizerOptions(name='muon', weight_decay=0.1, warmup_steps=3)
  section = train_heads.HeadSection(cpt='alone', rl='off', top_k=4)
  assert section.training('rl', RL, stage) is None
  plain = dataclasses.replace(RL, mtp=None)
  assert section.training('cpt', plain, stage) is None
  training = section.training('cpt', RL, stage)
  assert training.is_alone and training.loss == mtp.HeadLossOptions(top_k=4)
  assert not section.training('sft', RL, stage).is_alone
  options = training.optimizer
  assert (options.name, options.warmup_steps) == ('adam', 3)
  assert (options.weight_decay, options.grad_clip) == (0, section.grad_clip)
  with pytest.raises(ValueError, match="rl must be one of .*got 'alone'"):
    train_heads.HeadSection(rl='alone')


@SLOW
def test_a_stage_resumes_its_heads_bit_for_bit(tmp_path, monkeypatch):
  model = with_heads(loop_test.MODEL, depth=1)
  options = loop_test.OPTIONS
  training = train_heads.HeadSection().training('cpt', model, options.optimizer)
  options = dataclasses.replace(options, heads=training)
  monkeypatch.setattr(loop_test, 'MODEL', model)
  loop_test.placed.cache_clear()
  initial = loop_test.initial_variables(model)
  train = functools.partial(loop_test.train, options=options, initial=initial)
  straight, killed = tmp_path / 'straight', tmp_path / 'killed'
  want = train(straight)
  with pytest.raises(KeyboardInterrupt):
    train(killed, stream=loop_test.CountingStream(stop_at=4))
  have = train(killed)
  loop_test.placed.cache_clear()
  curves = loop_test.curves(straight)
  assert loop_test.curves(killed) == curves
  jax.tree.map(np.testing.assert_array_equal, have, want)
  measured = [row for row in curves if 'mtp_agreement' in row]
  assert measured and all(len(row['mtp_loss']) == 1 for row in measured)
  assert all(row['mtp_grad_norm'] > 0 for row in measured)
  # The curves of the policy are those of a run without heads.
  plain = dataclasses.replace(model, mtp=None)
  monkeypatch.setattr(loop_test, 'MODEL', plain)
  policy = {k: v for k, v in initial.items() if k != 'mtp'}
  loop_test.train(tmp_path / 'plain', initial=policy)
  loop_test.placed.cache_clear()
  others = loop_test.curves(tmp_path / 'plain')
  names = ('loss', 'heldout_loss', 'grad_norm')
  shown = lambda rows: [{n: row.get(n) for n in names} for row in rows]
  assert shown(others) == shown(curves)
