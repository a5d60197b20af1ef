"""Copies reach their experts and come back, whatever the routes.

One program for each mesh runs every transport and size of buffer. Routes are
arguments, so all loads share the program, and with it its memory.
"""

import functools
import math
import os
import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.core import platforms, records
from composer_jax.kernels import linear
from composer_jax.kernels.grouped import matmul
from composer_jax.models import experts
from composer_jax.parallel import dispatch, exchange, rounds, topology

# 24 experts and rows divide over 2, 3, 4, 6, 8 and 12 devices.
B, T, D, E, A, F = 24, 4, 6, 24, 3, 5
AXES = topology.AXES
# Mesh (replica, fsdp, context), and the axes over which experts lie.
MESHES = {
  '2': ((1, 2, 1), AXES),
  '3': ((1, 3, 1), AXES),
  '4, two replicas': ((2, 2, 2), ('fsdp', 'context')),
  '2 of context, four replicas': ((2, 2, 2), ('context',)),
  '6': ((3, 1, 2), AXES),
  '8': ((2, 2, 2), AXES),
  '4 of context, two replicas': ((2, 1, 4), ('context',)),
  '12': ((3, 2, 2), AXES),
}
# Affects only machine code; the program is the same.
_OPTIONS = {'xla_backend_optimization_level': 0}


class Variant(NamedTuple):
  transport: str
  room: float
  backend: str = 'blocked'
  keeps: bool = False
  parts: int = 0


# From many rounds to one.
QUICK = (
  Variant('a2a', 0.4, keeps=True, parts=2),
  Variant('ragged_a2a', 0.3, 'ragged'),
)
VARIANTS = (
  *QUICK,
  Variant('a2a', 0.4),
  Variant('a2a', 2.0, 'ragged', keeps=True),
  Variant('ragged_a2a', 1.25),
  Variant('ragged_a2a', 2.0, parts=3),
)


def make_plan(mesh='8', variant=VARIANTS[0]):
  shape, axes = MESHES[mesh]
  devices = jax.devices()[: math.prod(shape)]
  return exchange.ExchangePlan(
    mesh=topology.make_mesh(*shape, devices=devices),
    batch_axes=('replica', 'fsdp'),
    sequence_axes=('context',),
    weight_specs=(('gate_up', P(axes)), ('down', P(axes))),
    transport=variant.transport,
    room=variant.room,
    parts=variant.parts,
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

  def of(weights, x_BTD, gates_BTA):
    return function(weights, x_BTD, ids_BTA, gates_BTA, valid_BT)

  y_BTD, pull, aux = jax.vjp(of, weights, x_BTD, gates_BTA, has_aux=True)
  return (y_BTD, *pull(inputs()[3])), aux


def carried(plan, backend='blocked', functions=experts.MLP, keeps=False):
  def using(function):
    def run(*arrays):
      with matmul.using(backend):
        return function(*arrays)

    return run

  functions = dispatch.Experts(
    *(using(function) for function in functions[:3]), *functions[3:]
  )
  every = tuple(plan.mesh.axis_names)
  tokens = P(plan.batch_axes, plan.sequence_axes)

  def shard(*arrays):
    y_BTD, count = exchange.exchange(functions, *arrays, plan=plan, keeps=keeps)
    return y_BTD, count[None]

  return jax.shard_map(
    shard,
    mesh=plan.mesh,
    in_specs=(dict(plan.weight_specs), *[tokens] * 4),
    out_specs=(tokens, P(every)),
    check_vma=False,
  )


@functools.cache
def program(mesh='8', variants=VARIANTS):
  """Returns (ids, valid) -> results of all variants, and the program's text."""

  def run(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
    arrays = (weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
    return [
      value_and_pull(
        carried(make_plan(mesh, v), v.backend, keeps=v.keeps), *arrays
      )
      for v in variants
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
  # The tokens of one shard all go to one shard.
  skewed = ids.copy()
  skewed[:2] = [0, 1, 2]
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
    'one pair of shards': (skewed, valid),
    'no route': (unrouted, valid),
    'no route at all': (np.full_like(ids, records.NO_ROUTE), valid),
    'padding': (ids, half),
    'one token': (ids, single),
    'all padding': (ids, ~valid),
  }
  return {k: (i.astype(np.int32), v) for k, (i, v) in by_name.items()}


def drawn(seed):
  """Returns an adversarial load: few or skewed experts, repeats and holes."""
  random = np.random.default_rng(seed)
  if seed % 3 == 0:
    ids = random.integers(0, random.integers(1, E + 1), (B, T, A))
  else:
    # Some experts are chosen e times as often as others, up to e ** 4 times.
    scores = random.gumbel(size=(B, T, E)) + random.uniform(0, 4) * (
      random.normal(size=E) if seed % 3 == 1 else random.normal(size=(B, 1, E))
    )
    ids = np.argsort(-scores, -1)[..., :A]
  holes = random.random((B, T, 1 if seed % 2 else A)) < random.choice([0, 0.3])
  ids = np.where(holes, records.NO_ROUTE, ids)
  valid = random.random((B, T)) >= random.choice([0, 0.2, 0.9])
  valid[: random.integers(0, B)] &= bool(seed % 5)
  return ids.astype(np.int32), valid


def needed(plan, ids_BTA, valid_BT):
  """Returns the number of rounds, counted on the host."""
  *outer, columns = plan.mesh.shape.values()
  outer, num_local = math.prod(outer), E // plan.expert_shards
  shards = exchange.shards_of(
    plan,
    num_tokens=B * T // plan.mesh.size,
    num_active=A,
    num_local=num_local,
  )
  b, t = B // outer, T // columns
  counts = np.zeros((outer, columns, plan.expert_shards), int)
  for (i, j), is_valid in np.ndenumerate(valid_BT):
    chosen = {e for e in ids_BTA[i, j] if is_valid and e < E}
    for e in chosen:
      counts[i // b, j // t, e // num_local] += 1
  shape = dict(plan.mesh.shape)
  counts = counts.reshape(*shape.values(), -1)
  if shards.transport != 'a2a':
    within = tuple(
      i for i, axis in enumerate(shape) if axis in plan.expert_axes
    )
    counts = counts.sum(within)
  rounds = -(-counts.max() // shards.rows)
  return max(rounds, shards.parts) if rounds else 0


def difference(have, want):
  """Returns the largest difference of each array, relative to its largest."""
  return jax.tree.map(
    lambda a, b: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)),
    have,
    want,
  )


def check(mesh, by_name, variants=VARIANTS):
  """Checks loads; returns the numbers of rounds of each variant."""
  run, _ = program(mesh, variants)
  seen = {variant: set() for variant in variants}
  for name, load in by_name.items():
    want = reference(*inputs()[:3], *load)
    for variant, (have, counts) in zip(variants, run(*load), strict=True):
      where = (name, variant)
      plan = make_plan(mesh, variant)
      assert set(counts.tolist()) == {needed(plan, *load)}, where
      seen[variant].add(int(counts[0]))
      for error in jax.tree.leaves(difference(have, want)):
        assert error <= 1e-6, (where, error)
      np.testing.assert_array_equal(have[0][~load[1]], 0)
  return seen


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
  'mesh, variants',
  [
    ('8', QUICK),
    ('4, two replicas', QUICK),
    *(pytest.param(m, VARIANTS, marks=SLOW) for m in MESHES if m != '12'),
  ],
)
def test_sums_and_gradients_are_those_of_all_experts(mesh, variants):
  seen = check(mesh, loads(), variants)
  for variant, counts in seen.items():
    # Nothing travels where no token has an expert.
    assert 0 in counts
    assert variant.room > 1 or max(counts) > 1, variant


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MESHES)
def test_adversarial_routes_are_exact_on_any_mesh(mesh):
  """Of 800 loads each mesh gets its share; 12 devices are another process."""
  if math.prod(MESHES[mesh][0]) <= jax.device_count():
    check(mesh, {seed: drawn(seed) for seed in range(115)})
    return
  flags = re.sub(r'(device_count=)\d+', r'\g<1>12', os.environ['XLA_FLAGS'])
  command = f'from tests.parallel import rounds_test as t; t.{{}}({mesh!r})'
  subprocess.run(
    [
      sys.executable,
      '-c',
      command.format('test_adversarial_routes_are_exact_on_any_mesh'),
    ],
    env={**os.environ, 'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    check=True,
  )


def _scaled(weights, rows_YD, group_sizes_E):
  row_Y1 = jnp.arange(len(rows_YD))[:, None]
  group_Y = (row_Y1 >= jnp.cumsum(group_sizes_E)).sum(1)
  scale_YD = weights['down'][:, 0].at[group_Y].get(mode='clip')
  return jnp.tanh(rows_YD) * scale_YD


def _scaled_gradient(weights, arrays_Y, group_sizes_E, sums, _):
  rows_YD, d_out_YD, gates_Y = arrays_Y
  function = lambda rows_YD: _scaled(weights, rows_YD, group_sizes_E)
  out_YD, pull = jax.vjp(function, rows_YD)
  (d_rows_YD,) = pull(gates_Y[:, None] * d_out_YD)
  return d_rows_YD, (out_YD * d_out_YD).sum(-1), sums


# Each row by itself, unlike products on CPU, whose tiles depend on the groups.
ROWS = dispatch.Experts(
  _scaled,
  lambda *arrays: (_scaled(*arrays), arrays[1]),
  _scaled_gradient,
  experts.MLP.zeros,
)


def test_the_number_of_rounds_changes_no_bit():
  variants = [Variant('a2a', room) for room in (0.1, 0.5, 8.0)]
  variants.append(Variant('ragged_a2a', 0.2))
  variants.append(Variant('a2a', 8.0, parts=3))

  @functools.partial(jax.jit, compiler_options=_OPTIONS)
  def run(*arrays):
    return [
      value_and_pull(carried(make_plan('8', v), functions=ROWS), *arrays)
      for v in variants
    ]

  for name in ('random', 'one pair of shards'):
    ids_BTA, valid_BT = loads()[name]
    weights, x_BTD, gates_BTA, _ = inputs()
    results = run(weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
    assert len({int(count[0]) for _, count in results}) >= 3
    (y_BTD, _, *gradients), _ = results[0]
    assert all(np.any(x) for x in (y_BTD, *gradients))
    for (other_BTD, _, *others), _ in results[1:]:
      jax.tree.map(
        np.testing.assert_array_equal,
        [other_BTD, *others],
        [y_BTD, *gradients],
      )


def sizes_of(text):
  """Returns the number of elements of each float array in a program."""
  shapes = re.findall(r'tensor<((?:\d+x)+)(?:f32|ui32)>', text)
  return {math.prod(map(int, s[:-1].split('x'))) for s in shapes}


@pytest.mark.parametrize('room', [1.0, 4.0])
def test_memory_is_that_of_buffers_whatever_the_routes(room):
  plan = make_plan('8', Variant('a2a', room))
  copies = B * T // 8 * A
  buffer = 8 * math.ceil(room * copies / 8)
  # Less than the copies that one device could receive.
  assert max(copies, buffer) < B * T * min(A, E // 8)
  text = traced(plan).lower().as_text()
  # The largest arrays are the weights, or tokens and gradients of outputs side
  # by side with a gate.
  weights, rows = E * D * 2 * F, max(copies, buffer) * (2 * D + 1)
  assert max(sizes_of(text)) == max(weights, rows)


def test_nothing_is_scattered_forward_or_backward():
  for transport in rounds.TRANSPORTS:
    text = traced(make_plan('8', Variant(transport, 1.0))).lower().as_text()
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


def traced(plan, function=lambda f: f):
  def run(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
    arrays = (weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
    return value_and_pull(function(carried(plan)), *arrays)

  return jax.jit(run).trace(*inputs()[:3], *loads()['random'])


def test_backward_repeats_no_round_and_no_sort():
  names = jax.checkpoint_policies.save_only_these_names('routes')
  plan = make_plan(variant=Variant('a2a', 0.4))
  program = traced(plan, lambda f: jax.checkpoint(f, policy=names))
  kinds = ('all_gather', 'all_to_all', 'psum', 'sort')
  # Rows there and back, again with gradients; the order and its inverse.
  want = {'all_gather': 1, 'all_to_all': 4, 'psum': 0, 'sort': 2}
  assert counted(program.jaxpr.jaxpr, kinds) == want


@pytest.mark.parametrize('platform', ['tpu', pytest.param('cuda', marks=SLOW)])
def test_accelerators_get_the_collective_itself(platform):
  plan = make_plan('8', Variant('ragged_a2a', 1.0))
  with platforms.targeting('gpu' if platform == 'cuda' else platform):
    text = traced(plan).lower(lowering_platforms=(platform,)).as_text()
  # Tokens and outputs, and both again with gradients.
  # Some rounds stand before the loop of the others.
  assert text.count('@ragged_all_to_all') == (rounds.PARTS + 1) * 4
  assert text.count('stablehlo.all_gather"(') == 1


def test_words_keep_all_bits():
  random = np.random.default_rng(0)
  for dtype, word in ((jnp.float32, jnp.uint32), (jnp.bfloat16, jnp.uint16)):
    bits = random.integers(0, jnp.iinfo(word).max, (2, 3, 4)).astype(word)
    rows = [jax.lax.bitcast_convert_type(x, dtype) for x in bits]
    numbers_Y = jnp.float32([1 / 3, -0.0, 1e-30])
    arrays = *rows, numbers_Y[:, None]
    words_YX = rounds._packed(*arrays)
    assert words_YX.dtype == word
    *back, numbers_Y1 = rounds._unpacked(words_YX, *arrays)
    for x, y in zip(bits, back, strict=True):
      np.testing.assert_array_equal(x, jax.lax.bitcast_convert_type(y, word))
    np.testing.assert_array_equal(numbers_Y1[:, 0], numbers_Y)


def test_the_gradient_is_that_of_outputs_times_gates():
  """Frozen weights with adapters too, in every backend of this machine."""
  keys = iter(jax.random.split(jax.random.key(0), 9))
  draw = lambda *shape: jax.random.normal(next(keys), shape)
  rows_YD, d_out_YD = draw(20, D), draw(20, D)
  gates_Y, sizes_E = draw(20), jnp.array([4, 0, 11])
  plain = {'gate_up': draw(3, D, 2 * F), 'down': draw(3, F, D)}
  adapted = {
    name: linear.Adapted(w, draw(3, w.shape[1], 2), draw(3, 2, w.shape[2]))
    for name, w in plain.items()
  }
  for weights in (plain, adapted):
    trained = jax.tree.map(
      lambda z, w: None if z is None else w,
      zeros := experts.MLP.zeros(weights),
      weights,
      is_leaf=lambda x: x is None,
    )

    def gated(trained, rows_YD, gates_Y, weights=weights):
      whole = jax.tree.map(
        lambda t, w: w if t is None else t,
        trained,
        weights,
        is_leaf=lambda x: x is None,
      )
      y_YD = experts.MLP.forward(whole, rows_YD, sizes_E)
      return gates_Y[:, None] * y_YD

    @functools.partial(jax.jit, compiler_options=_OPTIONS)
    def both(gated=gated, trained=trained, weights=weights, zeros=zeros):
      _, pull = jax.vjp(gated, trained, rows_YD, gates_Y)
      ones = jax.tree.map(jnp.ones_like, zeros)
      arrays_Y = rows_YD, d_out_YD, gates_Y
      _, hidden_YX = experts.MLP.kept(weights, rows_YD, sizes_E)
      have = [
        experts.MLP.gradient(weights, arrays_Y, sizes_E, ones, hidden)
        for hidden in (None, hidden_YX)
      ]
      return pull(d_out_YD), have

    for backend in matmul.BACKENDS:
      with matmul.using(backend):
        (d_weights, d_rows_YD, d_gates_Y), both_ways = both()
      want = d_rows_YD, d_gates_Y, jax.tree.map(lambda x: x + 1, d_weights)
      for have in both_ways:
        for error in jax.tree.leaves(difference(have, want)):
          assert error <= 2e-6
