"""Muon on a mesh: bits of one device, and only the plan's collectives."""

import collections

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

from composer_jax.optim.muon import planner, transform
from composer_jax.plan import muon_model
from composer_jax.plan.hlo import overlap
from tests.parallel import muon_meshes

FIRST = ('ep2_fsdp2_tp2', 'dual')
OTHERS = tuple(name for name in muon_meshes.CASES if name not in FIRST)


def _update(program, gradient_seed=0):
  return program.run(muon_meshes.values(gradient_seed), muon_meshes.values(1))


def _assert_bitwise(update, expected):
  for name, x in expected.items():
    np.testing.assert_array_equal(update[name], x, err_msg=name)


def _check_collectives(program):
  """Checks that the collectives are those of the plan, none in a loop."""
  planned, sent = collections.Counter(), collections.Counter()
  for group in program.plan.groups:
    for kind, number, num_bytes in muon_model.collectives(group):
      planned[kind, 'number'] += number
      planned[kind, 'bytes'] += num_bytes
  for collective in overlap.read(program.text).collectives:
    assert not collective.loops
    sent[collective.kind, 'number'] += 1
    sent[collective.kind, 'bytes'] += collective.bytes
  # XLA merges the norms of several groups.
  joined = planned.pop(('all-reduce', 'number'), 0)
  assert sent.pop(('all-reduce', 'number'), 0) <= joined
  assert sent == planned
  assert 'rematerialization' not in program.warnings


def _check(name, axis_type=AxisType.Auto, **how):
  sharded = muon_meshes.program(name, axis_type, **how)
  single = muon_meshes.program(None, AxisType.Auto, **how)
  for found, expected in zip(_update(sharded), _update(single), strict=True):
    _assert_bitwise(found, expected)
  _check_collectives(sharded)


@pytest.mark.parametrize(
  'name', [FIRST[0], pytest.param(FIRST[1], marks=pytest.mark.slow)]
)
def test_every_mesh_gives_the_bits_of_one_device(name):
  _check(name)


@pytest.mark.slow
@pytest.mark.parametrize('name', OTHERS)
def test_every_other_mesh_gives_the_bits_of_one_device(name):
  _check(name)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['ep2_fsdp2_tp2', 'hsdp', 'data_parallel'])
def test_explicit_axes_give_the_same_bits(name):
  _check(name, AxisType.Explicit)


BFLOAT16 = transform.MuonChoices(deterministic=True, dtype='bfloat16')
REPEATED = planner.PlanOptions(chunks=6, repeats=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name,how',
  [
    ('ep2_fsdp2_tp2', {'options': BFLOAT16}),
    ('hsdp', {'options': BFLOAT16}),
    ('dual', {'fixed': REPEATED}),
    ('data_parallel', {'fixed': REPEATED}),
  ],
)
def test_other_plans_give_the_bits_of_one_device_too(name, how):
  _check(name, **how)


@pytest.mark.slow
def test_bfloat16_takes_half_the_bytes():
  # Of the planned collectives `_check_collectives` compares the very bytes.
  narrow = muon_meshes.program('dual', options=BFLOAT16)
  _check_collectives(narrow)
  wide = muon_meshes.program('dual').plan
  assert 2 * narrow.plan.wire_bytes == wide.wire_bytes > 0


@pytest.mark.parametrize('name,k', [('ep2_fsdp2_tp2', 8)])
def test_matrices_shared_by_devices_are_those_of_one_device(name, k):
  # Twelve local columns on eight devices: two each, and four of zeros.
  _check_shared(name, k, ('alone',))


@pytest.mark.slow
@pytest.mark.parametrize('name,k', [('fsdp8', 2), ('hsdp', 2), ('dual', 4)])
def test_matrices_shared_on_other_meshes_are_those_of_one_device(name, k):
  _check_shared(name, k, ('alone', 'value'))


def _check_shared(name, k, names):
  how = dict(options=transform.MuonChoices(method='standard'), names=names)
  shared = muon_meshes.program(name, fixed=planner.PlanOptions(split=k), **how)
  assert any(g.split == k for g in shared.plan.groups)
  single = muon_meshes.program(None, **how)
  expected, _ = _update(single)
  for parameter, x in _update(shared)[0].items():
    # Sums over columns in two orders, lifted by up to the slope at zero.
    np.testing.assert_allclose(x, expected[parameter], rtol=0, atol=3e-5)
  _check_collectives(shared)


@pytest.fixture(scope='module')
def uneven():
  return muon_meshes.program(FIRST[0])


def test_permuting_experts_permutes_updates(uneven):
  order = np.random.default_rng(2).permutation(muon_meshes.E)
  experts = ('gate', 'up', 'down')

  def permuted(tree):
    return {n: x[:, order] if n in experts else x for n, x in tree.items()}

  updates, momentum = uneven.run(
    permuted(muon_meshes.values(0)), permuted(muon_meshes.values(1))
  )
  expected_updates, expected_momentum = _update(uneven)
  _assert_bitwise(updates, permuted(expected_updates))
  _assert_bitwise(momentum, permuted(expected_momentum))


@pytest.mark.parametrize('value', [0.0, np.nan])
def test_one_matrix_changes_no_other(uneven, value):
  gradients, momentum = (
    {n: x.copy() for n, x in muon_meshes.values(seed).items()}
    for seed in (0, 1)
  )
  # One expert of one layer, and one head.
  gradients['down'][1, 5], momentum['down'][1, 5] = value, value
  gradients['out'][2, 3], momentum['out'][2, 3] = value, value
  updates, _ = uneven.run(gradients, momentum)
  expected = {n: x.copy() for n, x in _update(uneven)[0].items()}
  # Zero stays zero: nothing is left to such an expert but its weight decay.
  expected['down'][1, 5], expected['out'][2, 3] = value, value
  _assert_bitwise(updates, expected)


@pytest.mark.slow
def test_state_saved_on_one_mesh_continues_on_another(uneven, tmp_path):
  first = jax.device_put(muon_meshes.values(1), uneven.shardings)
  state = transform.MuonState(np.int32(3), first)
  place = jax.device_put(muon_meshes.values(0), uneven.shardings)
  _, saved = uneven.update(place, state)
  other = muon_meshes.program(FIRST[1])
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'state', saved._asdict())
    checkpointer.wait_until_finished()
    replicated = jax.NamedSharding(
      other.shardings['gate'].mesh, jax.sharding.PartitionSpec()
    )
    target = {
      'count': jax.ShapeDtypeStruct((), np.int32, sharding=replicated),
      'momentum': {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=other.shardings[n])
        for n, x in saved.momentum.items()
      },
    }
    restored = checkpointer.restore(tmp_path / 'state', target)
  assert int(restored['count']) == 4
  gradients = muon_meshes.values(2)
  expected, _ = uneven.update(
    jax.device_put(gradients, uneven.shardings), saved
  )
  found, _ = other.update(
    jax.device_put(gradients, other.shardings), transform.MuonState(**restored)
  )
  _assert_bitwise(jax.device_get(found), jax.device_get(expected))
