"""Roles follow logical axes or are given by name; none is guessed."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import roles
from configs.models import kimi_k2

AXES = {
  'block': {
    'query': P('layer', 'embed', 'heads', 'head_dim'),
    'out': P('layer', 'heads', 'head_dim', 'embed'),
    'router': P('layer', 'embed', 'route'),
    'norm': P('norm'),
  },
  'table': P('vocab', 'embed'),
}
PARAMS = {
  'block': {
    'query': jax.ShapeDtypeStruct((2, 8, 3, 4), jnp.float32),
    'out': jax.ShapeDtypeStruct((2, 3, 4, 8), jnp.float32),
    'router': jax.ShapeDtypeStruct((2, 8, 6), jnp.float32),
    'norm': jax.ShapeDtypeStruct((8,), jnp.float32),
  },
  'table': jax.ShapeDtypeStruct((16, 8), jnp.float32),
}


@pytest.mark.parametrize(
  'role, axes, expected',
  [
    ('embed->ffw', ('layer', 'expert', 'embed', 'ffw'), ((2,), (3,))),
    ('ffw->embed', ('layer', 'expert', 'ffw', 'embed'), ((2,), (3,))),
    # Every axis not named is a batch axis, wherever it stands.
    ('embed->ffw', ('expert', 'embed', 'gate_up', 'ffw'), ((1,), (3,))),
    ('embed->head_dim', ('embed', 'heads', 'head_dim'), ((0,), (2,))),
    ('embed->heads,head_dim', ('embed', 'heads', 'head_dim'), ((0,), (1, 2))),
    # In the order of the role, not of the parameter.
    (
      'head_dim, heads -> embed',
      ('heads', 'head_dim', 'embed'),
      ((1, 0), (2,)),
    ),
    ('embed->embed', ('layer', 'embed', 'embed'), ((1,), (2,))),
  ],
)
def test_sides_are_the_named_axes_in_order(role, axes, expected):
  matrix = roles.parse('w', role, axes, (2,) * len(axes))
  assert matrix is not None and (matrix.rows, matrix.columns) == expected


def test_a_map_and_its_transpose_agree_on_the_leading_side():
  # By name, so that it cannot depend on the mesh.
  there = roles.parse('w', 'embed->head_dim', ('embed', 'head_dim'), (4, 4))
  back = roles.parse('w', 'head_dim->embed', ('head_dim', 'embed'), (4, 4))
  assert there is not None and back is not None
  assert there.swapped != back.swapped


@pytest.mark.parametrize(
  'role, message',
  [
    ('embed', 'must be .*two sides'),
    ('embed->', 'two sides'),
    ('embed->ffw->embed', 'two sides'),
    ('Adam', "role 'Adam' must be 'adam'"),
    ('embed->fwf', "names 'fwf' once too often"),
    ('embed->embed', "names 'embed' once too often"),
    ('embed->heads', "which of the axes called 'heads'"),
  ],
)
def test_a_role_that_does_not_fit_is_named(role, message):
  axes = ('layer', 'embed', 'ffw', 'heads', 'heads')
  with pytest.raises(ValueError, match=rf'moe/up of shape .*{message}'):
    roles.parse('moe/up', role, axes, (2, 3, 4, 5, 5))


def test_roles_and_matrices_of_a_tree():
  by_role = roles.tree(PARAMS, AXES)
  assert trees.flatten_names(by_role) == {
    'block/query': 'embed->head_dim',
    'block/out': 'head_dim->embed',
    'block/router': 'adam',
    'block/norm': 'adam',
    'table': 'adam',
  }
  matrices = roles.matrices(PARAMS, AXES, by_role)
  assert matrices['block']['router'] == optax.MaskedNode()
  assert matrices['block']['out'] == roles.Matrix(
    rows=(2,), columns=(3,), swapped=True
  )


def test_the_first_override_found_decides():
  overrides = (
    ('query$', 'embed->heads,head_dim'),
    ('block/', 'adam'),
    ('router', 'embed->route'),
  )
  by_role = trees.flatten_names(roles.tree(PARAMS, AXES, overrides))
  assert by_role['block/query'] == 'embed->heads,head_dim'
  assert by_role['block/out'] == by_role['block/router'] == 'adam'


def test_an_override_for_no_parameter_is_an_error():
  with pytest.raises(ValueError, match=r"'moe/up'.*no parameter.*block/query"):
    roles.tree(PARAMS, AXES, (('moe/up', 'adam'),))


def test_an_override_that_is_no_regular_expression_is_an_error():
  with pytest.raises(ValueError, match=r"'\(query' is no regular expression"):
    roles.tree(PARAMS, AXES, (('(query', 'adam'),))


def test_an_override_that_does_not_fit_is_an_error():
  with pytest.raises(ValueError, match=r"block/out .*names 'ffw'"):
    roles.tree(PARAMS, AXES, (('out', 'embed->ffw'),))


@pytest.mark.parametrize(
  'axes',
  [P(), P('embed', None), P('embed', 'fwf'), P('q_lora', 'ffw', 'embed')],
)
def test_an_unlabelled_parameter_is_an_error_unless_it_is_given_to_adam(axes):
  shape = (2, 3, 4)[: max(len(axes), 2)]
  params = {'block': {'up': jax.ShapeDtypeStruct(shape, jnp.float32)}}
  tree = {'block': {'up': axes}}
  message = rf"block/up has {len(shape)} dimensions .*'embed'.*'adam'"
  with pytest.raises(ValueError, match=message):
    roles.tree(params, tree)
  given = roles.tree(params, tree, (('up', 'adam'),))
  assert given == {'block': {'up': 'adam'}}


def test_an_unlabelled_vector_is_adams():
  bias = {'bias': jax.ShapeDtypeStruct((3,), jnp.float32)}
  assert roles.tree(bias, {'bias': P()}) == {'bias': 'adam'}


def test_kimi_k2_is_orthogonalised_by_expert_and_by_head():
  config = model_config.ModelConfig.from_dict(kimi_k2.get_config().to_dict())
  shapes, axes = decoder.abstract(config)
  actual = trees.flatten_names(roles.tree(shapes['params'], axes['params']))
  layers = {
    name.removeprefix('moe_layers/'): role
    for name, role in actual.items()
    if name.startswith('moe_layers/') and role != roles.ADAM
  }
  assert layers == {
    'attention/query_down': 'embed->q_lora',
    'attention/query_up': 'q_lora->head_dim',
    'attention/kv_down': 'embed->kv_lora',
    'attention/key_rope': 'embed->head_dim',
    'attention/key_up': 'kv_lora->head_dim',
    'attention/value_up': 'kv_lora->head_dim',
    'attention/out': 'head_dim->embed',
    'moe/gate_up': 'embed->ffw',
    'moe/down': 'ffw->embed',
    'moe/shared/gate_up': 'embed->ffw',
    'moe/shared/down': 'ffw->embed',
  }
