"""Roles come from logical axes; nothing is guessed."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups, schedules
from configs.models import kimi_k2
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


def test_roles_of_a_decoder(params):
  assert groups.roles(params, AXES) == {
    'embedding': 'adam',
    'norm': 'adam',
    'router': 'adam',
    'query': 'embed->head_dim',
    'out': 'head_dim->embed',
    'gate_up': 'embed->ffw',
    'down': 'ffw->embed',
  }


def _attention_roles(config):
  shapes, axes = decoder.abstract(config)
  roles = groups.roles(shapes['params'], axes['params'])
  return trees.flatten_names(roles['moe_layers']['attention'])


def test_latent_attention_is_orthogonalised_head_by_head():
  fields = kimi_k2.get_config().to_dict()
  config = model_config.ModelConfig.from_dict(fields)
  assert _attention_roles(config) == {
    'query_down': 'embed->q_lora',
    'query_norm/scale': 'adam',
    'query_up': 'q_lora->head_dim',
    'kv_down': 'embed->kv_lora',
    'key_rope': 'embed->head_dim',
    'kv_norm/scale': 'adam',
    'key_up': 'kv_lora->head_dim',
    'value_up': 'kv_lora->head_dim',
    'out': 'head_dim->embed',
  }


def test_biases_and_norms_of_queries_are_adams():
  roles = _attention_roles(decoder_test.CONFIGS['gqa'])
  matrices = {'query', 'key', 'value', 'out'}
  assert {n for n, role in roles.items() if role != 'adam'} == matrices
  others = {'query_bias', 'key_bias', 'value_bias', 'out_bias', 'query_norm'}
  assert roles.keys() - matrices == others | {'key_norm'}


@pytest.mark.parametrize(
  'axes', [P(), P('embed', None), P('embed', 'fwf'), P('embed', 'embed')]
)
def test_unlabelled_or_unknown_parameter_is_an_error(axes):
  params = {'block': {'up': np.zeros((3, 4))}}
  if axes == P('embed', 'embed'):  # A square map is fine.
    assert groups.roles(params, {'block': {'up': axes}}) == {
      'block': {'up': 'embed->embed'}
    }
    return
  with pytest.raises(ValueError, match=r'block/up has 2 dimensions.*teach'):
    groups.roles(params, {'block': {'up': axes}})


def test_muon_moves_matrices_by_its_rms_and_adam_the_rest(params):
  transform = groups.optimizer(
    _options(weight_decay=0.0, preset='quintic'),
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
    # An orthogonal p x q matrix times sqrt(max(p, q)) has RMS 1; QUINTIC ends
    # within 0.97..1.15.
    assert 0.97 * 0.2 < rms[name] / 0.01 < 1.15 * 0.2, name


def test_adam_for_all_equals_optax_adamw(params):
  options = _options(name='adam', weight_decay=0.1, b2=0.99)
  ours = groups.optimizer(options, params=params, axes=AXES, total_steps=10)
  mask = {n: n != 'norm' for n in params}
  theirs = optax.adamw(0.01, b2=0.99, weight_decay=0.1, mask=mask)
  gradients = jax.tree.map(np.cos, params)
  a = _first_update(ours, gradients, params)
  b = _first_update(theirs, gradients, params)
  jax.tree.map(np.testing.assert_array_equal, a, b)


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
  schedule = schedules.warmup_stable_decay(
    2.0, total_steps=10, warmup_steps=4, decay_steps=4, final_ratio=0.5
  )
  np.testing.assert_allclose(
    schedule(np.arange(12)),
    [0.5, 1, 1.5, 2, 2, 2, 2, 1.75, 1.5, 1.25, 1, 1],
  )


def test_schedule_that_does_not_fit_is_an_error():
  with pytest.raises(ValueError, match=r'\(7\).*\(4\).*total_steps \(10\)'):
    schedules.warmup_stable_decay(
      1.0, total_steps=10, warmup_steps=7, decay_steps=4, final_ratio=0.0
    )
