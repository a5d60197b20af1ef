"""Muon in a plain optax loop: optax's numbers, on any mesh that arrays lie on.

Three layers on eight devices: no group of matrices divides among its owners.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

from composer_jax.core import trees
from composer_jax.optim.muon import alias, newton_schulz
from composer_jax.plan import muon_model
from composer_jax.plan.hlo import overlap

LIKE_OPTAX = newton_schulz.NewtonSchulz(
  coefficients='keller', method='standard', dtype='float32'
)
NUMBERS = {
  'embed': None,
  'layers': {
    'up': contrib.MuonDimensionNumbers(1, 2),
    'down': contrib.MuonDimensionNumbers(-2, -1),
    'out': contrib.MuonDimensionNumbers((1, 2), 3),
    'bias': None,
  },
}
SHAPES = {
  'embed': (16, 8),
  'layers': {
    'up': (3, 8, 24),
    'down': (3, 24, 8),
    'out': (3, 2, 4, 8),
    'bias': (3, 24),
  },
}
# Mesh, and the axes of each parameter.
MESHES = {
  'fsdp8': (
    {'d': 8},
    {
      'embed': P('d'),
      'layers': {
        'up': P(None, 'd'),
        'down': P(None, None, 'd'),
        'out': P(None, None, None, 'd'),
        'bias': P(),
      },
    },
  ),
  'fsdp4_tp2': (
    {'d': 4, 't': 2},
    {
      'embed': P(None, 'd'),
      'layers': {
        'up': P(None, 'd', 't'),
        'down': P(None, 't', 'd'),
        'out': P(None, 't', None, 'd'),
        'bias': P(None, 't'),
      },
    },
  ),
}
each_mesh = pytest.mark.parametrize('name', MESHES)


def values(seed):
  random = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def shardings(name, kind=AxisType.Auto):
  sizes, specs = MESHES[name]
  kinds = (kind,) * len(sizes)
  mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def train(transform, places=None):
  """Returns the parameters after three steps."""
  params, *gradients = (
    jax.device_put(values(seed), places) for seed in range(4)
  )
  state = transform.init(params)
  update = jax.jit(transform.update)
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
  return jax.tree.map(np.asarray, params)


def ours(**options):
  options = (
    dict(newton_schulz=LIKE_OPTAX, muon_weight_dimension_numbers=NUMBERS)
    | options
  )
  return alias.muon(0.1, weight_decay=0.1, **options)


def assert_close(ours, theirs):
  # Two orders of the same float32 products.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6),
    ours,
    theirs,
  )


@pytest.fixture(scope='module')
def theirs():
  return {
    rms: train(
      contrib.muon(
        0.1,
        weight_decay=0.1,
        muon_weight_dimension_numbers=NUMBERS,
        consistent_rms=rms,
      )
    )
    for rms in (None, 0.2)
  }


@pytest.mark.parametrize('rms', [None, 0.2])
def test_equals_optax_on_one_device(theirs, rms):
  assert_close(train(ours(consistent_rms=rms)), theirs[rms])


@each_mesh
def test_equals_optax_on_a_mesh_that_the_arrays_tell(theirs, name):
  assert_close(train(ours(), shardings(name)), theirs[None])


def test_explicit_axes_tell_shardings_under_jit(theirs):
  places = shardings('fsdp4_tp2', AxisType.Explicit)
  params, gradients = (jax.device_put(values(seed), places) for seed in (0, 1))
  transform = ours()
  with jax.set_mesh(jax.tree.leaves(places)[0].mesh):
    state = jax.jit(transform.init)(params)
    actual, _ = jax.jit(transform.update)(gradients, state, params)
  single = transform.init(values(0))
  expected, _ = transform.update(values(1), single, values(0))
  assert_close(jax.tree.map(np.asarray, actual), expected)


@each_mesh
@pytest.mark.parametrize('is_given', [False, True])
def test_the_compiled_update_has_the_planned_collectives_alone(name, is_given):
  places = shardings(name)
  params = jax.device_put(values(0), places)
  transform = ours(shardings=places if is_given else None)
  init = jax.jit(transform.init) if is_given else transform.init
  state = jax.device_get(init(params))
  lay = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  shapes = jax.tree.map(lay, params)
  plan = alias.plan(
    shapes, newton_schulz=LIKE_OPTAX, muon_weight_dimension_numbers=NUMBERS
  )
  compiled = jax.jit(transform.update).lower(params, state, params).compile()
  planned, actual = collections.Counter(), collections.Counter()
  for group in plan.groups:
    for kind, _, num_bytes in muon_model.collectives(group):
      planned[kind] += num_bytes
  for collective in overlap.read(compiled.as_text()).collectives:
    actual[collective.kind] += collective.bytes
  assert actual == planned and sum(planned.values()) > 0


def test_a_schedule_and_another_transform_for_the_rest():
  schedule = lambda count: 0.1 / (count + 1)
  transform = alias.muon(schedule, adam=optax.sgd(1.0))
  state = transform.init(values(0))
  for step in range(2):
    updates, state = transform.update(values(1), state, values(0))
    np.testing.assert_array_equal(updates['embed'], -values(1)['embed'])
    # Singular values between 0.86 and 1.12, by 24 columns over 8 rows.
    sizes = np.linalg.svd(updates['layers']['up'], compute_uv=False)
    scale = 0.1 / (step + 1) * 3**0.5
    assert np.all((0.86 * scale < sizes) & (sizes < 1.13 * scale))


def test_flax_boxes_give_axes_and_stay():
  class Attention(nn.Module):
    @nn.compact
    def __call__(self, x_BTD):
      init = nn.with_logical_partitioning(
        nn.initializers.normal(), ('embed', 'heads', 'kv')
      )
      kernel = self.param('kernel', init, (8, 2, 4))
      return jnp.einsum('BTD,DNH->BTNH', x_BTD, kernel)

  params = Attention().init(jax.random.key(0), jnp.ones((1, 1, 8)))
  gradients = jax.tree.map(jnp.ones_like, params)
  transform = alias.muon(1.0, newton_schulz=LIKE_OPTAX)
  updates, _ = transform.update(gradients, transform.init(params), params)
  assert jax.tree.structure(updates) == jax.tree.structure(params)
  numbers = contrib.MuonDimensionNumbers(0, 2)
  plain = alias.muon(
    1.0,
    newton_schulz=LIKE_OPTAX,
    muon_weight_dimension_numbers={'params': {'kernel': numbers}},
  )
  params, gradients = nn.unbox(params), nn.unbox(gradients)
  expected, _ = plain.update(gradients, plain.init(params), params)
  jax.tree.map(np.testing.assert_array_equal, nn.unbox(updates), expected)


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('what', ['Gradient', 'Momentum'])
def test_gradients_or_momentum_elsewhere_are_an_error(what, kind):
  places = shardings('fsdp4_tp2', kind)
  on_mesh = jax.device_put(values(0), places)
  elsewhere = jax.tree.map(lambda s: NamedSharding(s.mesh, P()), places)
  transform = ours(shardings=places)
  # On Explicit axes, jit sees it too.
  jit = jax.jit if kind == AxisType.Explicit else lambda function: function
  with jax.set_mesh(jax.tree.leaves(places)[0].mesh):
    state = jit(transform.init)(on_mesh)
    gradients = on_mesh
    if what == 'Gradient':
      gradients = jax.device_put(values(1), elsewhere)
    else:
      move = lambda x: jax.device_put(x, NamedSharding(x.sharding.mesh, P()))
      state = jax.tree.map(move, state)
    message = rf"{what} layers/down is on P\(None, None, None\) .*'t', 'd'\)"
    with pytest.raises(ValueError, match=message):
      jit(transform.update)(gradients, state, on_mesh)


def test_another_order_of_devices_is_an_error():
  places = shardings('fsdp8')
  mesh = jax.tree.leaves(places)[0].mesh
  kinds = (AxisType.Auto,)
  mirrored = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=kinds)
  other = jax.tree.map(lambda s: NamedSharding(mirrored, s.spec), places)
  params = jax.device_put(values(0), places)
  message = r'devices \[0, 1, .*by shardings .* devices \[7, 6, '
  with pytest.raises(ValueError, match=message):
    ours(shardings=other).init(params)


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda s: {'layer': s['layers']}, r'entry layer/bias, .* embed, layers'),
    (lambda s: {'params': s}, r'entry params/embed, but no parameter'),
    (
      lambda s: jax.tree.map(lambda x: x.spec, s),
      r'hold NamedShardings; embed is P',
    ),
  ],
)
def test_shardings_of_no_parameter_are_an_error(change, message):
  places = shardings('fsdp8')
  params = jax.device_put(values(0), places)
  with pytest.raises(ValueError, match=message):
    ours(shardings=change(places)).init(params)


def test_one_sharding_may_stand_for_a_subtree():
  place = shardings('fsdp8')['layers']['bias']
  params = jax.device_put(values(0), place)
  states = [ours(shardings=s).init(params) for s in (place, None)]
  assert states[0].placed == states[1].placed


def test_a_sharding_of_more_dimensions_is_an_error():
  place = NamedSharding(shardings('fsdp8')['embed'].mesh, P(None, None, 'd'))
  message = r'w of shape \(8, 8\) has 2 dimensions, but its .* has 3'
  with pytest.raises(ValueError, match=message):
    alias.plan({'w': jax.ShapeDtypeStruct((8, 8), 'float32')}, shardings=place)


def test_hyperparameters_can_be_injected():
  static = ('beta', 'consistent_rms')
  inject = optax.inject_hyperparams(alias.muon, static_args=static)
  transform = inject(0.1, consistent_rms=0.2)
  params = {'w': jnp.ones((4, 3))}
  state = transform.init(params)
  updates, state = jax.jit(transform.update)(params, state, params)
  plain = alias.muon(0.1, consistent_rms=0.2)
  expected, _ = plain.update(params, plain.init(params), params)
  assert_close(updates, expected)
  with pytest.raises(TypeError, match=r"beta must .*static_args=\('beta'"):
    optax.inject_hyperparams(alias.muon)(0.1).init(params)


@each_mesh
def test_auto_axes_under_jit_ask_for_shardings(name):
  params = jax.device_put(values(0), shardings(name))
  transform = ours()
  message = r'layers/down is on mesh .*init outside of jit.*shardings=\.\.\.'
  with pytest.raises(ValueError, match=message):
    jax.jit(transform.init)(params)
  on_one_device = transform.init(values(0))
  message = r'layers/down is on mesh .*not on it: move .*shardings=\.\.\.'
  with pytest.raises(ValueError, match=message):
    jax.jit(transform.update)(params, on_one_device, params)


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
  'jit',
  [jax.jit, pytest.param(lambda function: function, marks=pytest.mark.slow)],
)
def test_a_mesh_of_one_device_is_one_device(kind, jit):
  one = jax.make_mesh((1,), ('d',), (kind,), devices=jax.devices()[:1])
  params = jax.device_put(values(0), NamedSharding(one, P()))
  transform = ours()
  updates, _ = jit(transform.update)(params, transform.init(params), params)
  plain = transform.init(values(0))
  expected, _ = transform.update(values(0), plain, values(0))
  assert_close(jax.device_get(updates), expected)


def test_inside_of_shard_map_arrays_are_whole():
  mesh = jax.tree.leaves(shardings('fsdp8'))[0].mesh
  transform = ours()
  state = transform.init(values(0))
  expected, _ = transform.update(values(1), state, values(0))
  update = jax.shard_map(
    lambda *trees: transform.update(*trees)[0],
    mesh=mesh,
    in_specs=P(),
    out_specs=P(),
    check_vma=False,
  )
  assert_close(jax.jit(update)(values(1), state, values(0)), expected)


@each_mesh
def test_an_optimizer_of_nnx_keeps_shardings(name):
  places = shardings(name)['layers']

  class Model(nnx.Module):
    def __init__(self):
      for part in ('up', 'down'):
        weights = jax.device_put(values(0)['layers'][part], places[part])
        setattr(self, part, nnx.Param(weights))

  model = Model()
  optimizer = nnx.Optimizer(model, alias.muon(0.1), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    loss = lambda m: (m.up[...] ** 2).sum() + (m.down[...] ** 2).sum()
    optimizer.update(model, nnx.grad(loss)(model))

  before = np.asarray(model.up[...])
  step(model, optimizer)
  assert model.up[...].sharding.is_equivalent_to(places['up'], 3)
  assert not np.array_equal(model.up[...], before)


@pytest.mark.parametrize(
  'places, message',
  [
    (
      lambda: shardings('fsdp8'),
      r"layers/down is on P\(None, 't', 'd'\) of mesh {'d': 4, 't': 2}, but by "
      r"shardings it is on P\(None, None, 'd'\) of mesh {'d': 8}.*device_put",
    ),
    (
      lambda: jax.tree.map(
        lambda s: NamedSharding(s.mesh, P()), shardings('fsdp4_tp2')
      ),
      r"layers/down is on P\(None, 't', 'd'\) .*by shardings .*P\(None, None, ",
    ),
  ],
)
def test_shardings_that_are_not_those_of_the_arrays_are_an_error(
  places, message
):
  params = jax.device_put(values(0), shardings('fsdp4_tp2'))
  with pytest.raises(ValueError, match=message):
    ours(shardings=places()).init(params)


def test_shardings_that_are_not_given_are_read_off_the_arrays():
  places = shardings('fsdp8')
  params = jax.device_put(values(0), places)
  some = {'layers': {'up': places['layers']['up']}}
  states = [ours(shardings=s).init(params) for s in (some, None)]
  assert states[0].placed == states[1].placed


def test_another_mesh_than_that_of_the_state_is_an_error_under_jit():
  transform = ours()
  state = transform.init(jax.device_put(values(0), shardings('fsdp8')))
  params = jax.device_put(values(0), shardings('fsdp4_tp2'))
  message = (
    r"is on mesh {'d': 4, 't': 2}, but by the state it is on P\(.*'d': 8}"
  )
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(transform.update, params, state, params)


def test_parameters_on_two_meshes_are_an_error():
  params = jax.device_put(values(0), shardings('fsdp8'))
  params['layers']['up'] = values(0)['layers']['up']
  message = r"one mesh; .*layers/down': .P\(.*layers/up': 'one device'"
  with pytest.raises(ValueError, match=message):
    ours().init(params)


def test_an_abstract_mesh_is_planned_like_the_real_one():
  places = shardings('fsdp4_tp2')
  abstract = AbstractMesh((4, 2), ('d', 't'))
  lie = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
  shapes = jax.tree.map(
    lambda x, s: lie(x, NamedSharding(abstract, s.spec)), values(0), places
  )
  real = alias.plan(jax.tree.map(lie, values(0), places))
  members = lambda plan: [g.members for g in plan.groups]
  assert members(alias.plan(shapes)) == members(real)
  # A sharding given for arrays of an abstract mesh is compared by its axes.
  wrong = jax.tree.map(lambda s: NamedSharding(s.mesh, P()), places)
  with pytest.raises(ValueError, match=r'layers/down is on .*by shardings'):
    alias.plan(shapes, shardings=wrong)


@pytest.mark.parametrize('shape', [(0, 3), (4, 0), (0, 4, 3)])
def test_a_dimension_of_size_zero_is_an_error(shape):
  for call in (alias.plan, alias.muon(0.1).init):
    with pytest.raises(ValueError, match=rf'w of shape \({shape[0]}, .*size 0'):
      call({'w': jnp.ones(shape)})


@pytest.mark.parametrize(
  'numbers', [(0, 2), (1, -1), ((0, 1), 1), ((), 1), ((0, 0), 1)]
)
def test_dimension_numbers_that_do_not_fit_are_an_error(numbers):
  numbers = contrib.MuonDimensionNumbers(*numbers)
  message = r'Parameter a/w of shape \(4, 3\) has MuonDimensionNumbers'
  with pytest.raises(ValueError, match=message):
    alias.plan(
      {'a': {'w': jnp.ones((4, 3))}}, muon_weight_dimension_numbers=numbers
    )


@pytest.mark.parametrize(
  'numbers', [{'w': None, 'x': None}, {'w': True}, {'w': (0, 1)}]
)
def test_dimension_numbers_of_another_tree_are_an_error(numbers):
  message = 'muon_weight_dimension_numbers must be a tree .*parameters are w'
  with pytest.raises(ValueError, match=message):
    alias.plan({'w': jnp.ones((4, 3))}, muon_weight_dimension_numbers=numbers)


def test_dimension_numbers_may_be_a_prefix_and_parameters_may_be_none():
  params = {'a': {'w': jnp.ones((4, 3)), 'x': None}, 'b': jnp.ones((3, 2))}
  numbers = {'a': contrib.MuonDimensionNumbers(), 'b': None}
  for given in (numbers, lambda params: numbers):
    (group,) = alias.plan(params, muon_weight_dimension_numbers=given).groups
    assert [member.name for member in group.members] == ['a/w']
  inferred = alias.plan(params).groups[0].members
  assert [member.name for member in inferred] == ['a/w']


def test_parameters_are_required():
  transform = ours()
  with pytest.raises(ValueError, match='passing `params`'):
    transform.update(values(0), transform.init(values(0)))


def test_a_checkpoint_restores_the_state(tmp_path):
  ocp = pytest.importorskip('orbax.checkpoint')
  places = shardings('fsdp8')
  params = jax.device_put(values(0), places)
  transform = ours()
  _, state = jax.jit(transform.update)(params, transform.init(params), params)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'state', state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / 'state', transform.init(params))
  assert restored.placed == state.placed
  for name, x in trees.flatten_names(state).items():
    np.testing.assert_array_equal(trees.flatten_names(restored)[name], x)
