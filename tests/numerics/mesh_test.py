"""Experts of few bits over a mesh: the sums and gradients of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.models import config as model_config
from composer_jax.models import experts, placement
from composer_jax.numerics import formats
from composer_jax.parallel import exchange, layouts, rounds, shards, topology
from composer_jax.plan.hlo import overlap
from tests import compiling
from tests.parallel import rounds_test
from tests.rl import replayed


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['8', '4, two replicas'])
def test_rounds_of_an_exchange_change_nothing(mesh):
  """Of 24 experts with uneven loads, in several rounds."""
  precision = model_config.PrecisionConfig(experts='nvfp4')
  forms = experts.forms(precision)
  plan = rounds_test.make_plan(mesh)

  def alone(*arrays):
    return exchange.exchange(forms.sorted, *arrays, plan=None)

  def of(function):
    def run(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
      return rounds_test.value_and_pull(
        function, weights, x_BTD, ids_BTA, gates_BTA, valid_BT
      )

    return jax.jit(run)

  arrays = (*rounds_test.inputs()[:3], *rounds_test.loads()['random'])
  have, counts = of(rounds_test.carried(plan, functions=forms.sorted))(*arrays)
  want, _ = of(alone)(*arrays)
  assert counts.max() > 1
  for error in jax.tree.leaves(rounds_test.difference(have, want)):
    assert error <= 1e-6


def _wired(plan, wire, forms):
  plan = dataclasses.replace(plan, wire=wire)

  def run(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
    return rounds_test.value_and_pull(
      rounds_test.carried(plan, functions=forms.sorted),
      *(weights, x_BTD, ids_BTA, gates_BTA, valid_BT),
    )

  return run


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, mesh, variant',
  [('fp8', '8', 0), ('mxfp8', '6', 0), ('fp8', '4, two replicas', 1)],
)
def test_codes_on_the_wire_change_no_bit(name, mesh, variant):
  """In several rounds and one, forward and backward, with fewer bytes."""
  precision = model_config.PrecisionConfig(experts=name, backward='mxfp8')
  forms = experts.forms(precision)
  plan = rounds_test.make_plan(mesh, rounds_test.QUICK[variant])
  arrays = (*rounds_test.inputs()[:3], *rounds_test.loads()['random'])
  results, widths = [], []
  for wire in rounds.WIRES:
    lowered = jax.jit(_wired(plan, wire, forms)).lower(*arrays)
    # The order of sums must not depend on the program around them.
    compiled = lowered.compile(compiler_options=compiling.ORDERLY)
    results.append(compiled(*arrays))
    moved = overlap.read(compiled.as_text(), dynamic_trips=lambda _: 1.0)
    kind = 'all-gather' if variant else 'all-to-all'
    widths.append(
      sorted(
        (c.dtype, c.result_bytes / c.count)
        for c in moved.collectives
        if c.kind == kind and ('dispatch' in c.scope or 'combine' in c.scope)
      )
    )
  jax.tree.map(np.testing.assert_array_equal, *results)
  values, codes = map(dict, widths)
  assert 'u8' in codes and 'u8' not in values
  # A row of six numbers: 24 bytes, or six codes and one scale.
  total = lambda pairs: sum(n for _, n in pairs)
  assert total(widths[1]) < 0.8 * total(widths[0])


def test_tokens_that_experts_use_whole_are_not_sent_as_codes():
  config = replayed.CONFIGS['gqa_softmax']
  mesh = topology.make_mesh(1, 8, 1)
  for fields in (
    {},
    dict(experts='nvfp4'),
    dict(experts='fp8', first=1),
    dict(experts='fp8', backward='bf16'),
  ):
    config = dataclasses.replace(
      config, precision=model_config.PrecisionConfig(**fields)
    )
    with pytest.raises(ValueError, match="'codes'.*wire='values'"):
      placement.exchange_plan(
        config, layout=layouts.TRAIN, mesh=mesh, wire='codes'
      )


def test_weights_are_gathered_as_codes_without_loss():
  """With the gradient of a plain gather; parts of blocks travel as they are."""
  precision = model_config.PrecisionConfig(experts='mxfp8')
  mesh = topology.make_mesh(1, 4, 2)
  spec = P(None, ('fsdp', 'context'))
  weight = jax.random.normal(jax.random.key(0), (2, 256, 2, 8))
  axes = formats.Axes((1,), ())
  weight = jax.jit(formats.rounded, static_argnums=(1, 2))(
    weight, 'mxfp8', axes
  )

  def run(weight, is_coded):
    def shard(weight):
      coding = experts.coding(precision, 'gate_up', weight, spec)
      assert coding is not None
      whole = shards.gather(
        weight,
        spec,
        dtype=jnp.bfloat16,
        coding=coding if is_coded else None,
      )
      return jnp.sum(whole.astype(jnp.float32) ** 3)[None], whole

    mapped = jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=spec,
      out_specs=(P(mesh.axis_names), P()),
      check_vma=False,
    )
    return jax.value_and_grad(
      lambda w: (lambda total, whole: (total.sum(), whole))(*mapped(w)),
      has_aux=True,
    )(weight)

  run = jax.jit(run, static_argnums=1)
  coded, plain = run.lower(weight, True).compile(), run
  assert 'u8[8,2,32,2,8]' in coded.as_text()
  jax.tree.map(
    np.testing.assert_array_equal, coded(weight), plain(weight, False)
  )
  assert experts.coding(precision, 'gate_up', weight[:, :40], spec) is None


@pytest.mark.slow
def test_gradients_rounded_by_chance_draw_the_same_on_every_mesh():
  """Whole in one round; rows of three devices are uneven over 24 experts.

  Tokens keep their order, so that blocks of rows have the same rows. With the
  draws of another step all gradients differ.
  """
  precision = model_config.PrecisionConfig(
    experts='nvfp4', backward='mxfp8', stochastic=True, hadamard=True
  )
  forms = experts.forms(precision)
  draws_BT = jax.random.bits(
    jax.random.key(5), (rounds_test.B, rounds_test.T), jnp.uint32
  )

  def of(plan):
    def shard(weights, x_BTD, ids_BTA, gates_BTA, valid_BT, draws_BT):
      arrays = weights, x_BTD, ids_BTA, gates_BTA, valid_BT
      return exchange.exchange(
        forms.sorted, *arrays, plan=plan, draws_BT=draws_BT
      )[0]

    if plan is None:
      return shard
    tokens = P(plan.batch_axes, plan.sequence_axes)
    return jax.shard_map(
      shard,
      mesh=plan.mesh,
      in_specs=(dict(plan.weight_specs), *[tokens] * 5),
      out_specs=tokens,
      check_vma=False,
    )

  # Cached, so not within the traced function.
  weights, x_BTD, gates_BTA, _ = rounds_test.inputs()

  @functools.partial(jax.jit, static_argnums=0)
  def run(plan, draws_BT):
    ids_BTA, valid_BT = map(jnp.asarray, rounds_test.loads()['random'])
    function = lambda *arrays: (of(plan)(*arrays, draws_BT), None)
    return rounds_test.value_and_pull(
      function, weights, x_BTD, ids_BTA, gates_BTA, valid_BT
    )[0]

  want = run(None, draws_BT)
  scale = [np.abs(x).max() for x in jax.tree.leaves(want)]
  for shape in ((1, 8, 1), (2, 4, 1), (1, 3, 1)):
    plan = exchange.ExchangePlan(
      mesh=topology.make_mesh(*shape, devices=jax.devices()[: np.prod(shape)]),
      batch_axes=('replica', 'fsdp'),
      sequence_axes=('context',),
      weight_specs=(
        ('gate_up', P(topology.AXES)),
        ('down', P(topology.AXES)),
      ),
      room=8.0,
    )
    have = run(plan, draws_BT)
    for x, y, most in zip(
      *map(jax.tree.leaves, (have, want)), scale, strict=True
    ):
      # A sum in another order may cross a tie of a code here and there.
      assert (np.abs(x - y) <= 1e-5 * most).mean() > 0.99, (shape, most)
  other = run(None, draws_BT + jnp.uint32(1))
  for x, y in zip(jax.tree.leaves(other)[1:-1], jax.tree.leaves(want)[1:-1]):
    assert (x != y).mean() > 0.5
