"""Collectives of compiled train steps against the stated ones.

Programs of 8 emulated devices send exactly the stated bytes, layer by layer,
forward and backward. A change of these counts makes every run slower or faster,
so explain it with the change.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.core import platforms
from composer_jax.models import placement
from composer_jax.parallel import dispatch, exchange, layouts, rounds, topology
from composer_jax.plan.hlo import overlap
from tests.parallel import hsdp_test, traffic
from tests.parallel import step_programs as programs

DENSE, MIXTURE, STEP = 'dense layer', 'mixture layer', 'step'
NARROW, ALL = 'fsdp+context', 'replica+fsdp+context'

# The default policy of recomputation gathers weights again.
WIDE = hsdp_test.WIDE
# Keeps weights too. On this mesh there is one replica.
UNEVEN = hsdp_test.UNEVEN
# Operations of one layer. XLA:CPU merges all all-reduces of a group.
WIDE_COUNTS = {
  # Query, key, value, out, gate_up, down.
  (DENSE, 'forward', 'all-gather', NARROW): 6,
  (DENSE, 'recompute', 'all-gather', NARROW): 6,
  (DENSE, 'backward', 'reduce-scatter', NARROW): 6,
  # Gradients of shards; norms are summed once, after all layers.
  (DENSE, 'backward', 'all-reduce', 'replica'): 1,
  # Keys and values.
  (DENSE, 'forward', 'all-gather', 'context'): 2,
  (DENSE, 'backward', 'reduce-scatter', 'context'): 2,
  # The same and the router.
  (MIXTURE, 'forward', 'all-gather', NARROW): 7,
  (MIXTURE, 'recompute', 'all-gather', NARROW): 7,
  (MIXTURE, 'backward', 'reduce-scatter', NARROW): 7,
  (MIXTURE, 'backward', 'all-reduce', 'replica'): 1,
  (MIXTURE, 'forward', 'all-gather', 'context'): 2,
  (MIXTURE, 'backward', 'reduce-scatter', 'context'): 2,
  # Counts; copies to experts and outputs back, again with gradients.
  (MIXTURE, 'forward', 'all-gather', ALL): 1,
  (MIXTURE, 'forward', 'all-to-all', ALL): 2,
  (MIXTURE, 'backward', 'all-to-all', ALL): 2,
}
UNEVEN_COUNTS = {
  # Seven matrices of latent attention, gate_up, down.
  (DENSE, 'forward', 'all-gather', NARROW): 9,
  (DENSE, 'backward', 'reduce-scatter', NARROW): 9,
  # Latents and rotated keys.
  (DENSE, 'forward', 'all-gather', 'context'): 2,
  (DENSE, 'backward', 'reduce-scatter', 'context'): 2,
  (MIXTURE, 'forward', 'all-gather', NARROW): 10,
  (MIXTURE, 'backward', 'reduce-scatter', NARROW): 10,
  # And counts of copies.
  (MIXTURE, 'forward', 'all-gather', 'context'): 3,
  (MIXTURE, 'backward', 'reduce-scatter', 'context'): 2,
  # Six experts are on two shards; four devices share D.
  (MIXTURE, 'forward', 'all-gather', 'fsdp'): 2,
  (MIXTURE, 'backward', 'reduce-scatter', 'fsdp'): 2,
  # Copies and outputs, once more with gradients. All devices agree on the
  # number of rounds.
  (MIXTURE, 'forward', 'all-to-all', 'context'): 2,
  (MIXTURE, 'backward', 'all-to-all', 'context'): 2,
  (MIXTURE, 'forward', 'all-reduce', 'fsdp'): 1,
}
OTHERS = hsdp_test.OTHERS | {
  'nothing_recomputed': (
    programs.config(remat=False),
    (2, 2, 2),
    'ragged_a2a',
  ),
  'everything_recomputed': (
    programs.config(remat_saves=()),
    (2, 2, 2),
    'a2a',
  ),
}
CASES = [
  pytest.param(*WIDE, id='wide', marks=pytest.mark.slow),
  pytest.param(*UNEVEN, id='uneven'),
  *(
    pytest.param(*case, id=name, marks=pytest.mark.slow)
    for name, case in OTHERS.items()
  ),
]
by_case = pytest.mark.parametrize('model, shape, transport', CASES)


@functools.cache
def _sent(model, shape, transport):
  made = programs.program(model, shape, transport)
  return programs.measured(made, shape), programs.stated(made)


def _of(sent, *, layers):
  return {key: s for key, s in sent.items() if (key.where != STEP) == layers}


@pytest.mark.parametrize(
  'case, counts',
  [
    pytest.param(WIDE, WIDE_COUNTS, id='wide', marks=pytest.mark.slow),
    pytest.param(UNEVEN, UNEVEN_COUNTS, id='uneven'),
  ],
)
def test_collectives_of_a_layer_are_golden(case, counts):
  measured, _ = _sent(*case)
  layers = _of(measured, layers=True)
  assert {tuple(key): sent.count for key, sent in layers.items()} == counts


@by_case
def test_layers_send_the_stated_bytes_and_no_others(model, shape, transport):
  measured, stated = (
    {key: sent.bytes for key, sent in _of(sent, layers=True).items()}
    for sent in _sent(model, shape, transport)
  )
  assert measured == stated


@by_case
def test_operations_are_the_stated_ones_or_fewer(model, shape, transport):
  measured, stated = _sent(model, shape, transport)
  for key, sent in _of(measured, layers=True).items():
    # XLA:CPU merges sums.
    is_merged = key.kind == 'all-reduce'
    want = 1 if is_merged else stated[key].count
    assert sent.count == want, key


@by_case
def test_a_step_sends_little_beside_its_tables(model, shape, transport):
  measured, stated = (
    _of(sent, layers=False) for sent in _sent(model, shape, transport)
  )
  total = sum(sent.bytes for sent in stated.values())
  assert sum(sent.bytes for sent in measured.values()) <= 1.05 * total
  # Counts and norms, a few numbers each.
  others = {key: s for key, s in measured.items() if key not in stated}
  assert sum(sent.bytes for sent in others.values()) <= 0.02 * total, others


# By default tests/parallel/remat_test.py has this law.
@pytest.mark.slow
def test_recomputation_gathers_weights_and_nothing_else():
  made = programs.program(*WIDE)
  again = [c for c in made.hlo.collectives if 'rematted' in c.scope]
  assert again
  assert {c.kind for c in again} == {'all-gather'}
  assert all('/gather_weights/' in c.scope for c in again)


def test_nothing_is_sent_again_if_weights_are_kept():
  measured, _ = _sent(*UNEVEN)
  assert not [key for key in measured if key.phase == 'recompute']


@by_case
def test_the_state_is_updated_where_it_lies(model, shape, transport):
  made = programs.program(model, shape, transport)
  leaves = len(jax.tree.leaves(made.state))
  # The state is the first result.
  assert programs.aliased_outputs(made.text) >= set(range(leaves))


def test_ragged_rows_travel_twice_each_way():
  """Traced for a TPU, since XLA:CPU has no ragged all-to-all."""
  model, shape, _ = WIDE
  mesh = topology.make_mesh(*shape)
  plan = placement.exchange_plan(model, layout=layouts.TRAIN, mesh=mesh)
  plan = dataclasses.replace(plan, transport='ragged_a2a')
  tokens, experts = P(('replica', 'fsdp'), 'context'), P(topology.AXES)

  def scaled(weights, rows_YD, group_sizes_E):
    del group_sizes_E
    return rows_YD * weights['scale'][0, :, 0]

  def gradient(weights, arrays_Y, group_sizes_E, sums, _):
    rows_YD, d_out_YD, gates_Y = arrays_Y
    return (
      scaled(weights, d_out_YD, group_sizes_E),
      rows_YD[:, 0] * gates_Y,
      sums,
    )

  functions = dispatch.Experts(
    scaled,
    lambda *arrays: (scaled(*arrays), arrays[1]),
    gradient,
    lambda weights: jax.tree.map(jnp.zeros_like, weights),
  )
  exchanged = jax.shard_map(
    lambda *arrays: exchange.exchange(functions, *arrays, plan=plan)[0],
    mesh=mesh,
    in_specs=({'scale': experts}, tokens, tokens, tokens, tokens),
    out_specs=tokens,
    check_vma=False,
  )

  def loss(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
    y_BTD = exchanged(weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
    return (y_BTD**2).sum()

  def numbers(*dims, dtype='float32'):
    return jax.ShapeDtypeStruct(dims, dtype)

  rows = (programs.B, programs.T)
  with platforms.targeting('tpu'):
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(
      {'scale': numbers(8, model.embed_dim)},
      numbers(*rows, model.embed_dim),
      numbers(*rows, model.moe.num_active),
      numbers(*rows, model.moe.num_active, dtype='int32'),
      numbers(*rows, dtype='bool'),
    )
    lowered = traced.lower(lowering_platforms=('tpu',))
  text = lowered.as_text(dialect='hlo')
  exchanged = overlap.read(text, dynamic_trips=1).collectives
  everyone = programs.groups_of(shape, topology.AXES)
  assert {c.groups for c in exchanged} == {everyone}
  # Rows and outputs, again with gradients, in the rounds that overlap and in
  # the loop of the others; and counts.
  counts = collections.Counter(c.kind for c in exchanged)
  assert counts == {
    'ragged-all-to-all': (rounds.PARTS + 1) * 4,
    'all-gather': 1,
  }
  lines = traffic.lines(
    programs.case(model, shape), programs.asked('ragged_a2a')
  )
  stated = collections.Counter()
  for line in lines:
    if line.what in ('dispatch', 'combine', 'routes'):
      stated[line.kind] += line.count
  # Those of one round.
  assert stated == {'ragged-all-to-all': 4, 'all-gather': 1}
