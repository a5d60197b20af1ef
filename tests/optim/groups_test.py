"""Each parameter gets the optimizer that its role and the options say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import decoder
from composer_jax.optim import groups, roles
from composer_jax.parallel import topology
from tests.models import decoder_test

AXES = {
  'embedding': P('vocab', 'embed'),
  'norm': P('layer', 'norm'),
  'router': P('layer', 'embed', 'route'),
  'query': P('layer', 'embed', 'heads', 'head_dim'),
  'out': P('layer', 'heads', 'head_dim', 'embed'),
  'gate_up': P('layer', 'expert', 'gate_up', 'embed', 'ffw'),
  'down': P('layer', 'expert', 'ffw', 'embed'),
}
# Of a mesh of 2 x 2 x 2: a replicated router, experts over two axes, heads
# whose matrices are divided.
SPECS = {
  'embedding': P(None, ('fsdp', 'context')),
  'norm': P(),
  'router': P(),
  'query': P(None, ('fsdp', 'context')),
  'out': P(None, None, None, ('fsdp', 'context')),
  'gate_up': P(None, ('replica', 'fsdp'), None, 'context'),
  'down': P(None, ('replica', 'fsdp'), None, 'context'),
}
SHAPES = {
  'embedding': (16, 8),
  'norm': (2, 8),
  'router': (2, 8, 4),
  'query': (2, 8, 2, 4),
  'out': (2, 2, 4, 8),
  'gate_up': (2, 4, 2, 8, 6),
  'down': (2, 4, 6, 8),
}


@pytest.fixture(scope='module')
def params():
  rng = np.random.default_rng(0)
  return {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}


@pytest.fixture(scope='module')
def shardings():
  mesh = topology.make_mesh(2, 2, 2)
  return {n: NamedSharding(mesh, spec) for n, spec in SPECS.items()}


def _first_update(transform, gradients, params):
  # Jitted whole: run eagerly, every small operation compiles by itself.
  first = lambda g, p: transform.update(g, transform.init(p), p)[0]
  return jax.jit(first)(gradients, params)


def _options(**changes):
  return groups.OptimizerOptions(
    **{
      'name': 'muon',
      'learning_rate': 0.01,
      'adam_learning_rate': 0.002,
      'warmup_steps': 0,
      'decay_steps': 0,
      'final_ratio': 1.0,
      'grad_clip': 1e9,
      **changes,
    }
  )


def test_biases_and_norms_of_queries_are_adams():
  shapes, axes = decoder.abstract(decoder_test.CONFIGS['gqa'])
  actual = roles.tree(shapes['params'], axes['params'])['moe_layers']
  by_role = trees.flatten_names(actual['attention'])
  matrices = {'query', 'key', 'value', 'out'}
  assert {n for n, role in by_role.items() if role != 'adam'} == matrices
  others = {'query_bias', 'key_bias', 'value_bias', 'out_bias', 'query_norm'}
  assert by_role.keys() - matrices == others | {'key_norm'}


def test_muon_moves_matrices_by_its_rms_and_adam_the_rest(params):
  transform = groups.optimizer(
    _options(weight_decay=0.0),
    params=params,
    axes=AXES,
    total_steps=10,
  )
  updates = _first_update(transform, jax.tree.map(np.sin, params), params)
  rms = {n: float(np.sqrt(np.mean(u**2))) for n, u in updates.items()}
  for name in ('embedding', 'norm', 'router'):
    # Adam's first update is lr * sign(g).
    assert rms[name] == pytest.approx(0.002, rel=1e-3)
  for name in ('gate_up', 'down'):
    # An orthogonal p x q matrix times sqrt(max(p, q)) has RMS 1; Polar Express
    # ends within 0.86..1.13.
    assert 0.86 * 0.2 < rms[name] / 0.01 < 1.13 * 0.2, name


def test_adam_for_all_equals_optax_adamw(params):
  options = _options(name='adam', weight_decay=0.1, b2=0.99)
  ours = groups.optimizer(options, params=params, axes=AXES, total_steps=10)
  mask = {n: n != 'norm' for n in params}
  theirs = optax.adamw(0.01, b2=0.99, weight_decay=0.1, mask=mask)
  gradients = jax.tree.map(np.cos, params)
  a = _first_update(ours, gradients, params)
  b = _first_update(theirs, gradients, params)
  # Ours multiplies by reciprocals where optax divides.
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), a, b)


def _program(params, shardings, **choices):
  """Returns params -> the first update, jitted."""
  transform = groups.optimizer(
    _options(muon=groups.MuonChoices(**choices)),
    params=params,
    axes=AXES,
    total_steps=10,
    shardings=shardings,
  )

  def first(params):
    gradients = jax.tree.map(jnp.sin, params)
    return transform.update(gradients, transform.init(params), params)[0]

  return jax.jit(
    first,
    in_shardings=(shardings,),
    out_shardings=shardings,
    # It runs once, so that compiling takes most of the time.
    compiler_options={'xla_backend_optimization_level': 0},
  )


CHOICES = {
  'beta': 0.9,
  'rms': 0.4,
  'coefficients': 'keller',
  'method': 'standard',
  'dtype': 'bfloat16',
  'deterministic': True,
  'roles': (('router', 'embed->route'),),
}


@pytest.fixture(scope='module')
def default_program(params, shardings):
  return str(_program(params, shardings).trace(params).jaxpr)


@pytest.mark.parametrize('name', CHOICES)
def test_every_choice_changes_the_program(
  params, shardings, default_program, name
):
  """Every field of the options has an effect."""
  program = _program(params, shardings, **{name: CHOICES[name]})
  assert str(program.trace(params).jaxpr) != default_program


def test_no_choice_is_left_out_of_that_test():
  fields = {f.name for f in dataclasses.fields(groups.MuonChoices)}
  # It needs a decoder's parameters (tests/train/loop_test.py).
  assert fields - CHOICES.keys() == {'qk_clip'}


def test_a_mesh_changes_no_update(params, shardings):
  """The router is on Muon, and the heads of `out` are one matrix."""
  choices = dict(
    roles=(('router', 'embed->route'), ('^out$', 'heads,head_dim->embed')),
  )
  here, sharded = (
    _program(params, places, **choices)(params) for places in (None, shardings)
  )
  for name, update in here.items():
    # The global norm is added up in another order. Of the orthogonal matrices,
    # whose scale is learning rate * rms * sqrt(8), it is 1e-5.
    np.testing.assert_allclose(
      sharded[name], update, rtol=0, atol=1e-5 * 0.01 * 0.2 * 8**0.5
    )
    assert sharded[name].sharding.spec == SPECS[name]


def test_a_role_moves_a_parameter_from_one_optimizer_to_the_other(params):
  def momenta(*pairs):
    transform = groups.optimizer(
      _options(muon=groups.MuonChoices(roles=pairs)),
      params=params,
      axes=AXES,
      total_steps=1,
    )
    state = trees.flatten_names(jax.eval_shape(transform.init, params))
    return {n.split('/')[-1] for n in state if '/momentum/' in n}

  matrices = {'query', 'out', 'gate_up', 'down'}
  assert momenta() == matrices
  actual = momenta(('router', 'embed->route'), ('down', 'adam'))
  assert actual == matrices - {'down'} | {'router'}


def test_a_plan_is_of_the_same_matrices(params, shardings):
  describe = dict(params=params, axes=AXES, shardings=shardings)
  plan = groups.plan(_options(), **describe)
  assert plan is not None and plan.devices == 8
  actual = {member.name for group in plan.groups for member in group.members}
  assert actual == {'query', 'out', 'gate_up', 'down'}
  assert groups.plan(_options(name='adam'), **describe) is None


@pytest.mark.parametrize(
  ('wrong', 'message'),
  [
    *(
      (dict(roles=roles), r"pairs.*\('router', 'embed->route'\)")
      for roles in (('router', 'adam'), [['router']], 'ab', 3, (3,), None)
    ),
    (
      dict(coefficients='polar'),
      "coefficients .*'polar_express'.* got 'polar'",
    ),
    (dict(method='grm'), "method .*'auto', 'standard'.* got 'grm'"),
    (dict(dtype='fp16'), "dtype .*'bfloat16', 'float32'.* got 'fp16'"),
    (dict(deterministic=1), 'MuonChoices.deterministic must be true or false'),
    (dict(qk_clip=-1.0), 'MuonChoices.qk_clip must be .* got -1.0'),
    (dict(beta=1.0), 'MuonChoices.beta must be less than 1'),
    (dict(rms=0.0), 'MuonChoices.rms must be positive'),
  ],
)
def test_a_wrong_choice_is_told_in_a_line(wrong, message):
  with pytest.raises(ValueError, match=message) as error:
    groups.MuonChoices(**wrong)
  assert '\n' not in str(error.value)


def test_a_weight_decay_that_lets_weights_grow_is_an_error():
  for wrong in (-0.1, float('nan')):
    with pytest.raises(ValueError, match='weight_decay must be a number of at'):
      _options(weight_decay=wrong)


def test_choices_from_json_can_be_compared_and_cached():
  choices = groups.MuonChoices(roles=[['router', 'adam']])
  assert choices == groups.MuonChoices(roles=(('router', 'adam'),))
  assert hash(choices) == hash(dataclasses.replace(choices))


def test_weight_decay_spares_vectors(params):
  transform = groups.optimizer(
    _options(weight_decay=0.5), params=params, axes=AXES, total_steps=10
  )
  zeros = jax.tree.map(np.zeros_like, params)
  updates = _first_update(transform, zeros, params)
  for name, update in updates.items():
    rate = {'norm': 0.0, 'embedding': 0.002, 'router': 0.002}.get(name, 0.01)
    np.testing.assert_allclose(update, -rate * 0.5 * params[name], rtol=1e-6)


def test_gradients_are_clipped_to_the_global_norm(params):
  options = dict(name='adam', eps=1.0, weight_decay=0.0)
  scaled = jax.tree.map(lambda p: np.float32(100) * p, params)
  norm = np.sqrt(sum((p**2).sum() for p in scaled.values()))
  unit = jax.tree.map(lambda p: p / norm, scaled)
  clipped, free = (
    groups.optimizer(
      _options(grad_clip=c, **options),
      params=params,
      axes=AXES,
      total_steps=1,
    )
    for c in (1.0, 1e9)
  )
  a = _first_update(clipped, scaled, params)
  b = _first_update(free, unit, params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-9), a, b
  )


def test_state_names_end_in_parameter_names(params):
  transform = groups.optimizer(
    _options(), params=params, axes=AXES, total_steps=1
  )
  state = jax.eval_shape(transform.init, params)
  for name, leaf in trees.flatten_names(state).items():
    assert leaf.ndim == 0 or name.split('/')[-1] in params, name


def test_schedule_literal():
  options = _options(warmup_steps=4, decay_steps=4, final_ratio=0.5)
  schedule = groups.schedule(options, 10, 2.0)
  np.testing.assert_allclose(
    schedule(np.arange(12)),
    [0.5, 1, 1.5, 2, 2, 2, 2, 1.75, 1.5, 1.25, 1, 1],
  )


def test_schedule_that_does_not_fit_is_an_error():
  with pytest.raises(ValueError, match=r'\(7\).*\(4\).*stage \(10\)'):
    groups.schedule(_options(warmup_steps=7, decay_steps=4), 10, 1.0)
