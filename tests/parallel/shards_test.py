"""Weights gathered inside shards, and the reduction of their gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.parallel import exchange, shards, topology

NARROW = ('fsdp', 'context')


def _plan():
  return exchange.ExchangePlan(
    mesh=topology.make_mesh(2, 2, 2),
    batch_axes=('replica', 'fsdp'),
    sequence_axes=('context',),
    weight_specs=(),
  )


def _loss(spec, dtype):
  """Returns (weight_DF, x_BD) -> sum of sin(x w), every token on its device."""
  plan = _plan()

  def stage(weight_DF, x_BD):
    weight_DF = shards.gather(weight_DF, spec, dtype=dtype)
    return shards.stacked(jnp.sin(x_BD.astype(dtype) @ weight_DF).sum())

  everyone = shards.stacked_spec(plan)
  stage = shards.per_shard(
    stage, plan, in_specs=(spec, everyone), out_specs=everyone
  )
  return lambda weight_DF, x_BD: stage(weight_DF, x_BD).sum()


def _arrays():
  random = np.random.default_rng(0)
  shapes = (8, 12), (16, 8)
  return [random.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
  'spec',
  [P(NARROW, None), P(None, NARROW), P('context', 'fsdp'), P(None, None)],
  ids=str,
)
def test_a_gathered_weight_and_its_gradient_are_those_of_one_device(spec):
  arrays = _arrays()
  have = jax.jit(jax.value_and_grad(_loss(spec, 'float32'), (0, 1)))

  def alone(weight_DF, x_BD):
    return jnp.sin(x_BD @ weight_DF).sum()

  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    have(*arrays),
    jax.value_and_grad(alone, (0, 1))(*arrays),
  )


def test_a_weight_travels_as_computed_with_and_its_gradient_in_float32():
  gradient = jax.grad(_loss(P(NARROW, None), 'bfloat16'))
  text = jax.jit(gradient).lower(*_arrays()).as_text()
  operand = r'stablehlo.{}"?\(.*?\) -> tensor<[\dx]*x(\w+)>'
  found = {
    kind: set(re.findall(operand.format(kind), text, re.S))
    for kind in ('all_gather', 'reduce_scatter')
  }
  assert found == {'all_gather': {'bf16'}, 'reduce_scatter': {'f32'}}
  # Masters move by float32, whatever was sent.
  assert jax.eval_shape(gradient, *_arrays()).dtype == jnp.float32


def test_rows_of_a_table_arrive_from_all_its_columns():
  plan, spec = _plan(), P(None, NARROW)
  table_VD = np.random.default_rng(0).normal(size=(10, 8)).astype(np.float32)
  ids_BT = np.random.default_rng(1).integers(0, 10, (8, 6))
  where = shards.tokens_spec(plan)
  look_up = shards.per_shard(
    functools.partial(shards.look_up, spec=spec, dtype='float32'),
    plan,
    in_specs=(spec, where),
    out_specs=where,
  )

  def loss(look_up, table_VD):
    x_BTD = look_up(table_VD, ids_BT)
    return (x_BTD * jnp.arange(x_BTD.size).reshape(x_BTD.shape)).sum(), x_BTD

  def run(look_up):
    gradient = jax.grad(functools.partial(loss, look_up), has_aux=True)
    return jax.jit(gradient)(table_VD)

  want = run(lambda table_VD, ids_BT: table_VD[ids_BT])
  jax.tree.map(np.testing.assert_array_equal, run(look_up), want)


@pytest.mark.parametrize('spec', [P(), P(None, NARROW)], ids=str)
def test_a_row_that_many_tokens_look_up_has_a_float32_gradient(spec):
  plan = _plan()
  where = shards.tokens_spec(plan)
  look_up = shards.per_shard(
    functools.partial(shards.look_up, spec=spec, dtype='bfloat16'),
    plan,
    in_specs=(spec, where),
    out_specs=where,
  )
  ids_BT = np.ones((8, 600), np.int32)
  gradient = jax.jit(
    jax.grad(lambda table_VD: look_up(table_VD, ids_BT).astype('float32').sum())
  )
  # bfloat16 counts to 256.
  want_VD = np.zeros((3, 8))
  want_VD[1] = ids_BT.size
  np.testing.assert_array_equal(gradient(np.ones((3, 8), np.float32)), want_VD)


def test_a_plan_without_a_variable_is_refused_by_name():
  with pytest.raises(KeyError, match='params/x/a'):
    shards.specs_of(_plan(), 'params/x', {'a': 0})
