"""Experts in formats of few bits: which weights, on which meshes, for whom."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core as extend_core

from composer_jax.models import config as model_config
from composer_jax.models import decoder, experts, placement
from composer_jax.numerics import formats
from composer_jax.parallel import layouts, topology
from composer_jax.rl import step as rl_step
from composer_jax.rollout import options as rollout_options
from composer_jax.train import state as train_state
from tests.rl import replayed
from tests.train import step_test

FORMATS = ('mxfp8', 'nvfp4', 'fp8', 'int4')

# Op by op it would take seconds to compile.
_rounded = jax.jit(formats.rounded, static_argnames=('name', 'axes'))


def _config(name='gqa_softmax', **fields):
  precision = model_config.PrecisionConfig(**fields)
  return dataclasses.replace(replayed.CONFIGS[name], precision=precision)


@pytest.mark.parametrize('name', FORMATS)
def test_only_routed_experts_of_the_named_layers_are_rounded(name):
  config = _config(experts=name, first=1)
  params = replayed.variables(config)['params']
  moe = params['moe_layers']['moe']
  # So small that scales of their own would keep them better.
  moe['gate_up'] = moe['gate_up'] * np.float32([1, 2**-18])[:, None]
  rounded = jax.jit(functools.partial(experts.in_format, config=config))(params)
  flat = lambda tree: dict(jax.tree_util.tree_leaves_with_path(tree))
  changed = {
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, x in flat(rounded).items()
    if (x != flat(params)[path]).any()
  }
  assert changed == {'moe_layers/moe/gate_up', 'moe_layers/moe/down'}
  for leaf in ('gate_up', 'down'):
    before, after = (
      params['moe_layers']['moe'][leaf],
      rounded['moe_layers']['moe'][leaf],
    )
    np.testing.assert_array_equal(after[0], before[0])
    # Along the contracted axis, expert by expert; gate and up share scales.
    row = (0, 1) if leaf == 'gate_up' else (0,)
    blocks = (0, before.ndim - 3) if name == 'fp8' else (0,)
    for e in range(config.moe.num_experts):
      wanted = _rounded(before[1, e], name, formats.Axes(blocks, row))
      np.testing.assert_array_equal(after[1, e], wanted)


@pytest.mark.parametrize(
  'name',
  [
    'nvfp4',
    *(pytest.param(n, marks=pytest.mark.slow) for n in FORMATS if n != 'nvfp4'),
  ],
)
def test_trainer_and_rollout_round_alike_on_every_mesh(name):
  """Six experts over eight devices, and whole ones: the same bits."""
  config = _config('mla_sigmoid', experts=name)
  variables = replayed.variables(config)
  policy = decoder.policy(jax.tree.map(jnp.asarray, variables), config)
  values = functools.partial(train_state.policy_values, config=config)
  for shape in ((1, 8, 1), (2, 2, 2)):
    mesh = topology.make_mesh(*shape)
    places = placement.variable_shardings(
      config, layout=layouts.TRAIN, mesh=mesh
    )
    sharded = jax.device_put(variables, places)['params']
    jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.float32)),
      jax.jit(values)(sharded),
      policy['params'],
    )


def test_later_tokens_change_no_bit_of_earlier_ones():
  config = dataclasses.replace(
    _config(experts='nvfp4'), numerics='batch_invariant'
  )
  variables = decoder.policy(
    jax.tree.map(jnp.asarray, replayed.variables(config)), config
  )
  rng = np.random.default_rng(0)
  tokens_BT = rng.integers(0, replayed.V, (1, 24))
  others_BT = tokens_BT.copy()
  others_BT[0, 10:] = rng.integers(0, replayed.V, 14)

  @functools.partial(jax.jit, static_argnames='config')
  def run(tokens_BT, config=config):
    places = jnp.ones_like(tokens_BT), jnp.arange(24)[None]
    return decoder.Decoder(config).apply(variables, tokens_BT, *places)

  one, two = run(jnp.asarray(tokens_BT)), run(jnp.asarray(others_BT))
  np.testing.assert_array_equal(one.hidden_BTD[:, :10], two.hidden_BTD[:, :10])
  assert (one.hidden_BTD[:, 10:] != two.hidden_BTD[:, 10:]).any()
  # Both numerics round alike.
  fast = run(
    jnp.asarray(tokens_BT), dataclasses.replace(config, numerics='fast')
  )
  np.testing.assert_allclose(fast.hidden_BTD, one.hidden_BTD, atol=1e-4)


def _rounds_weights(jaxpr, inside=False):
  """Yields whether each equation of `policy_values` lies within a loop."""
  for equation in jaxpr.eqns:
    if 'policy_values' in str(equation.source_info.name_stack):
      yield inside
    is_loop = equation.primitive.name in ('scan', 'while')
    for inner in extend_core.jaxprs_in_params(equation.params):
      yield from _rounds_weights(inner, inside or is_loop)


def _trained(accumulate=1, shape=(1, 1, 1), **fields):
  fields = dict(experts='nvfp4') | fields
  model = dataclasses.replace(
    step_test.MODEL, precision=model_config.PrecisionConfig(**fields)
  )
  return accumulate, shape, model


@pytest.mark.parametrize(
  'backward', ['dequantised', pytest.param('bf16', marks=pytest.mark.slow)]
)
def test_weights_are_rounded_once_a_step_however_many_microbatches(backward):
  run, arguments = step_test.program(*_trained(4, backward=backward))
  places = [*_rounds_weights(run.trace(*arguments).jaxpr.jaxpr)]
  assert len(places) > 10 and not any(places)


@pytest.mark.slow
@pytest.mark.parametrize(
  'fields',
  [
    dict(backward='bf16'),
    dict(backward='mxfp8', stochastic=True),
  ],
)
def test_backward_passes_differ_in_experts_alone_and_not_by_mesh(fields):
  """The last router has the gradient of the forward pass in each."""
  before = replayed.variables(step_test.MODEL)['params']
  gradient = lambda *args, **kwargs: jax.tree.map(
    lambda old, new: old - new,
    before,
    step_test.step_of(*_trained(*args, **kwargs))[0].params,
  )
  usual, ours = gradient(), gradient(**fields)
  last = lambda tree: tree['moe_layers']['moe']['router'][-1]
  np.testing.assert_allclose(last(ours), last(usual), atol=1e-6)
  experts_of = lambda tree: tree['moe_layers']['moe']['gate_up']
  assert np.abs(experts_of(ours) - experts_of(usual)).max() > 1e-5
  # On a mesh with whole rows, and in microbatches without chance.
  others = [gradient(1, (2, 4, 1), **fields)]
  if fields['backward'] == 'bf16':
    others += [gradient(4, (2, 2, 2), **fields)]
  for other in others:
    for x, y in zip(*map(jax.tree.leaves, (other, ours)), strict=True):
      close = np.abs(x - y) <= 2e-5 * np.abs(y).max() + 1e-6
      # A sum in another order may cross a tie of a code.
      assert close.mean() > 0.97


@pytest.mark.slow
def test_a_step_of_rl_draws_by_its_number():
  """What the backward pass needs is no part of the policy that is served."""
  config = _config(experts='nvfp4', backward='mxfp8', stochastic=True)
  functions = rl_step.build(decoder.Decoder(config), optax.sgd(1.0))
  (batch, *_) = replayed.pack(config, rows=2, seq_len=24)
  state = train_state.create(replayed.variables(config), optax.sgd(1.0))

  def gradient(state):
    values = functions.policy(state)
    assert 'backward' not in values
    given = values | functions.for_backward(state)
    sums, _ = functions.add_microbatch(given, None, batch)
    return sums.grads['moe_layers']['moe']['down']

  first = gradient(state)
  np.testing.assert_array_equal(gradient(state), first)
  later = gradient(state.replace(step=state.step + 1))
  assert (later != first).mean() > 0.5
  # A part of the error of a code, not another gradient.
  assert np.abs(later - first).max() < 0.2 * np.abs(first).max()


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (dict(experts='fp4'), "experts.*'bf16', 'mxfp8', 'nvfp4', 'fp8', 'int4'"),
    (dict(backward='fp8'), "backward.*'dequantised', 'bf16', 'mxfp8'"),
    (
      dict(experts='fp8', stochastic=True),
      "backward must be 'mxfp8' with stochastic or",
    ),
    (
      dict(experts='fp8', backward='bf16', hadamard=True),
      "backward must be 'mxfp8'.*'bf16'",
    ),
    *(
      (
        {name: value},
        rf'precision\.{name}={value!r} is for experts of few bits, .* is '
        rf"'bf16'\. Set .*leave {name} at",
      )
      for name, value in (
        ('backward', 'mxfp8'),
        ('first', 1),
        ('last', 1),
        ('stochastic', True),
        ('hadamard', True),
        ('products', 'codes'),
        ('codes', True),
      )
    ),
    (
      dict(experts='nvfp4', products='codes'),
      r"products='codes' needs precision\.experts='fp8', not 'nvfp4'",
    ),
    (dict(first=-1), 'first.*at least 0'),
    (dict(experts='nvfp4', first=1, last=1), 'leave none of 2 mixture layers'),
  ],
)
def test_what_is_no_precision_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    _config(**fields)


def test_codes_that_fill_no_byte_are_refused():
  config = _config(experts='int4')
  odd = dataclasses.replace(config.moe, ffw_dim=15)
  coded = _config(experts='int4', codes=True)
  with pytest.raises(ValueError, match=r'precision.codes needs even .*, 15\)'):
    dataclasses.replace(coded, moe=odd)
  options = rollout_options.ServingOptions(experts='nvfp4')
  with pytest.raises(
    ValueError, match="experts='nvfp4' of an engine needs even"
  ):
    rollout_options.served(dataclasses.replace(config, moe=odd), options)


def test_invariant_engines_hold_the_trainers_experts():
  invariant = dataclasses.replace(
    _config(experts='nvfp4'), numerics='batch_invariant'
  )
  served = lambda config, name: rollout_options.served(
    config, rollout_options.ServingOptions(experts=name)
  )
  for name in ('', 'nvfp4'):
    assert served(invariant, name) == invariant
  for config in (invariant, invariant.precise()):
    trained = config.precision.experts
    message = (
      rf"experts='fp8' of an engine .*precision\.experts='{trained}'.*'fast'"
    )
    with pytest.raises(ValueError, match=message):
      served(config, 'fp8')


def test_adapters_and_parts_of_rows_are_refused():
  config = _config(experts='nvfp4')
  with pytest.raises(ValueError, match="has adapters.*experts='bf16'"):
    dataclasses.replace(
      config, adapters=model_config.AdapterConfig(attention=2)
    )
  uneven = _config('mla_sigmoid', experts='nvfp4')
  mesh = topology.make_mesh(1, 8, 1)
  with pytest.raises(ValueError, match='8 devices for 6 experts'):
    placement.exchange_plan(uneven, layout=layouts.DECODE, mesh=mesh)
  placement.exchange_plan(config, layout=layouts.DECODE, mesh=mesh)
