"""Every transport is exact for every load, or reports that it had no room.

One program for each number of expert shards runs all transports. Routes are
arguments, so all loads share the program.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.core import platforms, records
from composer_jax.kernels.grouped import matmul
from composer_jax.models import experts
from composer_jax.parallel import carriers, exchange, topology

B, T, D, E, A, F = 8, 4, 6, 16, 3, 5
EXPERT_AXES = {
  1: (),
  2: ('context',),
  4: ('fsdp', 'context'),
  8: ('replica', 'fsdp', 'context'),
}
# Affects only machine code; the program is the same.
_OPTIONS = {'xla_backend_optimization_level': 0}


class Variant(NamedTuple):
  transport: str
  bucket: float | None = None
  backend: str = 'auto'


CARRIERS, BACKENDS = tuple(carriers.CARRIERS), matmul.BACKENDS
EXACT = [Variant(name) for name in CARRIERS]
# On CPU 'ragged' compiles fastest.
BUCKETED = [Variant(n, bucket=1.25, backend='ragged') for n in CARRIERS]


def variants_of(shards):
  if shards == 1:
    # Nothing travels.
    return [Variant('ring', backend=b) for b in matmul.BACKENDS]
  if shards == 2:
    return [Variant(name, backend='ragged') for name in CARRIERS]
  if shards == 4:
    return [Variant(n, backend=b) for n in CARRIERS for b in BACKENDS]
  return EXACT + BUCKETED


def make_plan(shards, variant=EXACT[0]):
  axes = EXPERT_AXES[shards] or None
  return exchange.ExchangePlan(
    mesh=topology.make_mesh(2, 2, 2),
    batch_axes=('replica', 'fsdp'),
    sequence_axes=('context',),
    weight_specs=(('gate_up', P(axes)), ('down', P(axes))),
    transport=variant.transport,
    bucket=variant.bucket,
  )


@functools.cache
def inputs():
  keys = jax.random.split(jax.random.key(0), 5)
  weights = {
    'gate_up': jax.random.normal(keys[0], (E, D, 2, F)),
    'down': jax.random.normal(keys[1], (E, F, D)),
  }
  x_BTD = jax.random.normal(keys[2], (B, T, D))
  gates_BTA = jax.random.uniform(keys[3], (B, T, A))
  d_y_BTD = jax.random.normal(keys[4], (B, T, D))
  return weights, x_BTD, gates_BTA, d_y_BTD


def dense(weights, x_BTD, ids_BTA, gates_BTA, valid_BT):
  """Returns gated sums over all experts, with SwiGLU by its definition."""
  gate_up = jnp.einsum('btd,edsf->btesf', x_BTD, weights['gate_up'])
  gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
  hidden = gate / (1 + jnp.exp(-gate)) * up
  y = jnp.einsum('btef,efd->bted', hidden, weights['down'])
  # Ids without an expert match no column.
  chosen = (ids_BTA[..., None] == jnp.arange(E)) & valid_BT[..., None, None]
  gates = (chosen * gates_BTA[..., None]).sum(2)
  return jnp.einsum('bted,bte->btd', y, gates)


def value_and_pull(function, weights, x_BTD, ids_BTA, gates_BTA, valid_BT):
  """Returns y and the gradients of weights, x and gates."""
  d_y_BTD = inputs()[3]

  def of(weights, x_BTD, gates_BTA):
    return function(weights, x_BTD, ids_BTA, gates_BTA, valid_BT)

  y_BTD, pull, aux = jax.vjp(of, weights, x_BTD, gates_BTA, has_aux=True)
  return (y_BTD, *pull(d_y_BTD)), aux


def carried(plan, backend):
  def mlp(weights, rows_YD, group_sizes_E):
    chosen = 'blocked' if backend == 'auto' else backend
    with matmul.using(chosen):
      return experts.expert_mlp(weights, rows_YD, group_sizes_E)

  every = tuple(plan.mesh.axis_names)
  tokens = P(plan.batch_axes, plan.sequence_axes)

  def shard(*arrays):
    y_BTD, stats = exchange.exchange(mlp, *arrays, plan=plan)
    return y_BTD, jax.tree.map(lambda a: a[None], stats)

  return jax.shard_map(
    shard,
    mesh=plan.mesh,
    in_specs=(dict(plan.weight_specs), *[tokens] * 4),
    out_specs=(tokens, P(every)),
    check_vma=False,
  )


@functools.cache
def program(shards):
  """Returns (ids, valid) -> results of all variants, and the program's text."""

  def run(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
    arrays = (weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
    return [
      value_and_pull(carried(make_plan(shards, v), v.backend), *arrays)
      for v in variants_of(shards)
    ]

  arrays = (*inputs()[:3], *loads()['random'])
  lowered = jax.jit(run).lower(*arrays)
  compiled = lowered.compile(compiler_options=_OPTIONS)
  return (lambda *load: compiled(*inputs()[:3], *load)), lowered.as_text()


@jax.jit
def reference(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
  arrays = (weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
  return value_and_pull(lambda *a: (dense(*a), None), *arrays)[0]


@functools.cache
def loads():
  """Returns (ids_BTA, valid_BT) by name."""
  random = np.random.default_rng(0)
  ids = np.argsort(random.random((B, T, E)), -1)[..., :A]
  valid = np.ones((B, T), bool)
  half = valid.copy()
  half[3:, 1:] = False
  single = np.zeros((B, T), bool)
  single[5, 2] = True
  unrouted = ids.copy()
  unrouted[::2, 1] = records.NO_ROUTE
  unrouted[1, 2, 0] = records.NO_ROUTE
  by_name = {
    'random': (ids, valid),
    # Routes as recorders write them.
    'replayed': (ids.astype(np.uint16), valid),
    'to one expert and two others': (
      np.broadcast_to([E - 1, 0, 1], ids.shape),
      valid,
    ),
    'to one expert thrice': (np.full_like(ids, E - 1), valid),
    'to one shard': (np.broadcast_to([E - 1, E - 2, E - 2], ids.shape), valid),
    'to half of the experts': (ids // 2, valid),
    'no route': (unrouted, valid),
    'no route at all': (np.full_like(ids, records.NO_ROUTE), valid),
    'padding': (ids, half),
    'one token': (ids, single),
    'all padding': (ids, ~valid),
  }
  # The tokens of one shard all go to one shard.
  skewed = ids.copy()
  skewed[:2] = [0, 1, 2]
  by_name['one pair of shards'] = (skewed, valid)
  for seed in range(5):
    few = np.random.default_rng(seed).integers(0, 2 + 3 * seed, ids.shape)
    by_name[f'{2 + 3 * seed} experts at random'] = (few, valid)
  return {k: (i.astype(np.int32), v) for k, (i, v) in by_name.items()}


def difference(have, want):
  """Returns the largest difference of each array, relative to its largest."""
  return jax.tree.map(
    lambda a, b: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)),
    have,
    want,
  )


@pytest.mark.parametrize(
  'shards',
  [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 8],
)
def test_every_transport_is_exact_or_says_that_it_had_no_room(shards):
  run, _ = program(shards)
  overflowed = set()
  for name, load in loads().items():
    want = reference(*inputs()[:3], *load)
    results = run(*load)
    for variant, (have, stats) in zip(
      variants_of(shards), results, strict=True
    ):
      where = (name, variant)
      needed, capacity = stats.needed_rows.max(), stats.capacity[0]
      if variant.bucket is None:
        assert needed <= capacity, where
      # Also with a slot for each token: a repeated step must not ask for the
      # bucket that it overflowed.
      if variant.bucket or variant.transport == 'a2a':
        # The host counts the same before any step.
        plan = make_plan(shards, variant)
        counted = exchange.needed_rows(
          plan,
          load[0][None].astype(np.uint16),
          load[1],
          num_experts=E,
        )
        assert needed == counted[0], where
      if needed > capacity:
        overflowed.add(variant)
        continue
      for error in jax.tree.leaves(difference(have, want)):
        assert error <= 1e-6, (where, error)
      np.testing.assert_array_equal(have[0][~load[1]], 0)
  assert overflowed == {v for v in variants_of(shards) if v.bucket}


def test_nothing_is_scattered_forward_or_backward():
  _, text = program(8)
  assert 'stablehlo.gather' in text
  assert 'scatter"(' not in text.replace('reduce_scatter"(', '')


def counted(jaxpr, kinds):
  """Counts equations by primitive, including those of inner programs."""
  counts = dict.fromkeys(kinds, 0)
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name in counts:
      counts[name] += 1
    for value in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda v: hasattr(v, 'eqns')
    ):
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        for kind, count in counted(inner, kinds).items():
          counts[kind] += count
  return counts


@pytest.mark.parametrize(
  'transport, collectives, sorts',
  [
    # Tokens and routes to experts, sums back, gradients the other way. The
    # order of copies and its inverse take one sort each.
    ('ring', {'all_gather': 3, 'reduce_scatter': 3}, 2),
    # Orders by shard and by expert, and one sort of places.
    ('a2a', {'all_to_all': 6}, 5),
    # Six emulated exchanges and one of counts.
    ('ragged_a2a', {'all_gather': 7}, 5),
  ],
)
def test_backward_repeats_no_collective_and_no_sort(
  transport, collectives, sorts
):
  function = jax.checkpoint(
    carried(make_plan(8, Variant(transport)), 'auto'),
    policy=jax.checkpoint_policies.save_only_these_names(
      'dispatched', 'routes', 'combined'
    ),
  )

  def run(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
    arrays = (weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
    return value_and_pull(function, *arrays)

  traced = jax.jit(run).trace(*inputs()[:3], *loads()['random'])
  kinds = ('all_gather', 'reduce_scatter', 'all_to_all', 'psum', 'sort')
  want = dict.fromkeys(kinds, 0) | collectives | {'sort': sorts}
  assert counted(traced.jaxpr.jaxpr, kinds) == want


@pytest.mark.parametrize(
  'platform', ['tpu', pytest.param('cuda', marks=pytest.mark.slow)]
)
def test_accelerators_get_the_collective_itself(platform):
  plan = make_plan(8, Variant('ragged_a2a'))
  with platforms.targeting('gpu' if platform == 'cuda' else platform):

    def run(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
      arrays = (weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
      return value_and_pull(carried(plan, 'blocked'), *arrays)

    traced = jax.jit(run).trace(*inputs()[:3], *loads()['random'])
    text = traced.lower(lowering_platforms=(platform,)).as_text()
  # Tokens, routes and sums, each with its gradient.
  assert text.count('@ragged_all_to_all') == 6
  assert text.count('stablehlo.all_gather"(') == 1
