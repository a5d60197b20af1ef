"""Matrices of plain trees are found by logical axes, names and shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from composer_jax.core import trees
from composer_jax.optim.muon import inference


def numbers(tree):
  """Returns the dimension numbers of matrices by name."""
  return {
    '/'.join(str(getattr(key, 'key', key)) for key in path): tuple(leaf)
    for path, leaf in jax.tree.leaves_with_path(
      inference.dimension_numbers(tree),
      is_leaf=lambda x: isinstance(x, MuonDimensionNumbers),
    )
  }


def shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


@pytest.mark.parametrize(
  'name',
  [
    'embed',
    'tok_embeddings',
    'wte',
    'Embed_0/embedding',
    'lm_head/kernel',
    'head',
    'logits_dense/kernel',
    'moe/router/kernel',
    'LayerNorm_0/scale',
    'layers/attention_norm/weight',
    'layers/ln_1',
    'Dense_0/bias',
    'layers/b1',
    'tok_emb',
    'pos_emb/weight',
    'cls',
    'mask_token',
    'ssm/A_log',
    'layer_scale',
  ],
)
def test_tables_heads_norms_and_biases_are_adams(name):
  assert numbers({name: shape(4, 3)}) == {}


@pytest.mark.parametrize(
  'name',
  [
    *('w', 'up', 'multi_head/w', 'MultiHead_0/w', 'embed_to_hidden/w'),
    *('AttentionHead_0/Dense_0/kernel', 'downscale/kernel', 'lora_b'),
  ],
)
def test_all_else_of_two_dimensions_is_a_matrix(name):
  assert numbers({name: shape(4, 3)}) == {name: (0, 1)}
  assert numbers({name: shape(4)}) == {}


def test_leading_dimensions_stack_matrices():
  assert numbers({'experts': shape(2, 5, 4, 3)}) == {'experts': (2, 3)}


def test_counters_are_no_matrices():
  steps = jax.ShapeDtypeStruct((4, 3), jnp.int32)
  assert numbers({'steps': steps, 'w': shape(4, 3)}) == {'w': (0, 1)}


class Net(nn.Module):
  @nn.compact
  def __call__(self, x_BTD):
    x_BTD = nn.Embed(7, 8)(x_BTD)
    x_BTD = nn.MultiHeadDotProductAttention(num_heads=2)(x_BTD)
    x_BTD = nn.Conv(8, kernel_size=(3,))(nn.LayerNorm()(x_BTD))
    return nn.Dense(7, name='head')(nn.Dense(8)(x_BTD))


def test_modules_of_linen():
  tree = jax.eval_shape(
    Net().init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32)
  )
  attention = 'MultiHeadDotProductAttention_0'
  assert numbers(tree['params']) == {
    **{f'{attention}/{n}/kernel': (0, 2) for n in ('query', 'key', 'value')},
    f'{attention}/out/kernel': (1, 2),
    'Conv_0/kernel': ((0, 1), 2),
    'Dense_0/kernel': (0, 1),
  }


def test_scanned_kernels_are_not_taken_for_heads():
  kernels = {n: {'kernel': shape(3, 8, 8)} for n in ('query', 'key', 'out')}
  assert set(numbers(kernels).values()) == {(1, 2)}
  by_head = {
    'query': {'kernel': shape(3, 8, 2, 4)},
    'out': {'kernel': shape(3, 2, 4, 8)},
  }
  assert numbers(by_head) == {'query/kernel': (1, 3), 'out/kernel': (2, 3)}
  llama = {'q_proj': by_head['query'], 'o_proj': by_head['out']}
  assert numbers(llama) == {'q_proj/kernel': (1, 3), 'o_proj/kernel': (2, 3)}


def test_convolutions_of_haiku():
  convolution = {'conv2_d': {'w': shape(3, 3, 4, 8)}}
  assert numbers(convolution) == {'conv2_d/w': ((0, 1, 2), 3)}


def test_modules_of_nnx():
  class Model(nnx.Module):
    def __init__(self, rngs):
      self.table = nnx.Embed(7, 8, rngs=rngs)
      self.up = nnx.Linear(8, 16, rngs=rngs)

  state = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
  actual = inference.dimension_numbers(state)
  assert actual['up']['kernel'] == MuonDimensionNumbers(0, 1)
  assert actual['up']['bias'] is actual['table']['embedding'] is None


@pytest.mark.parametrize(
  'axes, expected',
  [
    (('layers', 'embed', 'mlp'), ((1,), (2,))),
    (('embed', 'heads', 'kv'), ((0,), (2,))),
    (('exp', 'mlp', 'layers', 'embed'), ((1,), (3,))),
    (('embed', 'joined_kv'), ((0,), (1,))),
    (('vocab', 'embed'), None),
    (('layers', 'norm'), None),
  ],
)
def test_logical_axes_of_flax_decide(axes, expected):
  x = np.zeros((2, 3, 4, 5)[: len(axes)])
  boxed = {'w': nn.LogicallyPartitioned(x, names=axes)}
  actual = numbers(boxed).get('w')
  assert actual == expected
  assert numbers({'w': nn.Partitioned(x, names=axes)}).get('w') == expected


def test_an_unknown_logical_axis_is_an_error():
  boxed = {
    'a': {'w': nn.LogicallyPartitioned(shape(4, 3), names=('embed', 'x'))}
  }
  message = r"a/w has .*'x'.*not know x; it knows .*mlp.*MuonDimensionNumbers"
  with pytest.raises(ValueError, match=message):
    inference.dimension_numbers(boxed)


def test_where_an_axis_has_no_name_the_shape_decides():
  x = nn.LogicallyPartitioned(shape(2, 4, 3), names=('layers', 'embed', None))
  assert numbers({'w': x}) == {'w': (1, 2)}


def test_mesh_axes_in_a_box_tell_nothing():
  boxed = {'w': nn.Partitioned(shape(2, 4, 3), names=(None, 'data', 'model'))}
  assert numbers(boxed) == {'w': (1, 2)}


def test_the_tree_keeps_its_structure():
  tree = {'a': [shape(4, 3), shape(4)], 'b': (shape(2, 2),)}
  actual = inference.dimension_numbers(tree)
  assert actual == {
    'a': [MuonDimensionNumbers(0, 1), None],
    'b': (None,),
  }
  assert list(trees.flatten_names(tree)) == ['a/0', 'a/1', 'b/0']
