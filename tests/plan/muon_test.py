"""The tables of Muon's plan against the plan itself."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.optim import roles
from composer_jax.optim.muon import exchange, planner
from composer_jax.optim.muon import plan as muon_plan
from composer_jax.plan import muon, muon_model, network, report
from tests.optim.muon import plans
from tests.plan import params_test


@pytest.fixture(scope='module')
def subject():
  return params_test.case('kimi_k2', topology_name='v5p:8x8x8')


@pytest.fixture(scope='module')
def tables(subject):
  return [table.to_json() for table in muon.tables(subject)]


def test_the_plan_is_for_the_machine_that_is_named():
  for name, dtype in (
    ('cpu:8', 'float32'),
    ('v5e:2x4', 'bfloat16'),
    ('h200:8', 'bfloat16'),
  ):
    made = muon.plan(params_test.case(topology_name=name))
    assert {group.newton_schulz.dtype for group in made.groups} == {dtype}
    assert made.devices == 8


def test_every_matrix_of_kimi_k2_is_planned(subject, tables):
  made = muon.plan(subject)
  groups, members, chunks, *_ = (table['rows'] for table in tables)
  # Attention of 61 layers; of 60 a shared expert and 384 routed ones; one dense
  # layer.
  heads = 61 * (3 + 4 * 64)
  everywhere = sum(
    g.count * 512 // (g.num_shards * g.num_replicas) for g in made.groups
  )
  assert everywhere == heads + 60 * 385 * 3 + 3
  assert len(groups) == len(made.groups) == 9
  assert sum(row['chunks'] for row in groups) == len(chunks)
  assert sum(row['matrices'] for row in chunks) == sum(
    row['matrices'] for row in members
  )
  sides = {row['name']: (row['input'], row['output']) for row in members}
  wide = '7168@replica+context'
  assert sides['moe_layers/moe/down'] == ('2048', wide)
  assert sides['moe_layers/moe/gate_up'] == (wide, '2048')
  (giant,) = (row for row in groups if row['matrix'] == (7168, 18432))
  assert (giant['mode'], giant['owners']) == ('gram_sharded', 8)


def test_totals_are_those_of_the_plan(subject, tables):
  made = muon.plan(subject)
  totals = {row['total']: row for row in tables[3]['rows']}
  assert totals['flops']['value'] == made.flops
  assert totals['critical_path']['ratio'] == pytest.approx(
    plans.critical_path(made)
  )
  assert totals['wire_bytes']['value'] == made.wire_bytes
  assert totals['wire_bytes']['least'] == round(muon_model.bound_bytes(made))
  shared = totals['of_them_to_share']
  assert 0.2 < shared['ratio'] < 0.3 and shared['least'] == made.wire_bytes


def test_the_roofline_is_stated_plainly(subject, tables):
  made = muon.plan(subject)
  times = tables[4]
  compute, wire, memory, roofline, total, in_order, slower = (
    row['ms'] / 1e3 for row in times['rows']
  )
  assert compute == pytest.approx(made.flops / 459e12)
  # Links are shared, so no faster than 600 GB/s into a chip.
  assert wire > made.wire_bytes / 600e9
  assert roofline == pytest.approx(max(compute, wire))
  assert total == pytest.approx(compute + wire)
  rates = network.rates(subject.topology, tuple(subject.mesh.shape.values()))
  chunks = muon_model.chunk_times(made, rates)
  assert in_order == pytest.approx(muon_model.pipelined_seconds(chunks))
  assert roofline <= in_order < slower < in_order / 0.7
  assert memory < roofline
  assert 'v5p: 459 TFLOP/s, memory 2765 GB/s, wires links' in times['title']


def test_networks_beyond_a_node_are_named():
  table = muon.tables(params_test.case('small', topology_name='h100:16'))[4]
  assert table.title.endswith('wires 405 GB/s within 8 devices, 45 beyond')


def test_a_device_alone_exchanges_nothing():
  tables = muon.tables(params_test.case(topology_name='cpu:1'))
  totals = {row[0]: row for row in tables[3].rows}
  assert totals['wire_bytes'][1:] == (0, 'whole matrices', 0, None)
  # No ratio to nothing.
  assert 'wire_bytes' in tables[3].to_text()
  assert {row[2] for row in tables[0].rows} == {'local'}


def test_a_cell_without_a_value_is_a_dash():
  table = report.Table(title='T', columns=('a',), rows=[(None,), (1.5,)])
  assert table.to_text().splitlines()[-2:] == ['  -', '1.5']


def test_what_a_run_chooses_of_muon_is_planned():
  fields = {'model': params_test.fields('tiny')}
  choices = dict(method='standard', dtype='bfloat16')
  choices |= dict(roles=(('attention/query$', 'embed->heads,head_dim'),))
  made = muon.plan(params_test.case(fields | {'cpt': {'muon': choices}}))
  assert {g.newton_schulz.dtype for g in made.groups} == {'bfloat16'}
  query = next(
    member
    for group in made.groups
    for member in group.members
    if member.name == 'moe_layers/attention/query'
  )
  assert query.count == query.shape[0]
  assert all(g.even_flops == g.ideal_flops for g in made.groups)
  by_head = muon.plan(params_test.case(fields))
  assert {g.newton_schulz.dtype for g in by_head.groups} == {'float32'}


def test_an_override_for_no_parameter_is_named():
  fields = {'model': params_test.fields('tiny')}
  fields['cpt'] = {'muon': {'roles': (('attnetion', 'adam'),)}}
  with pytest.raises(ValueError, match="'attnetion' matches no parameter"):
    muon.plan(params_test.case(fields))


def test_a_run_without_muon_is_told_how_to_see_it():
  fields = {'model': params_test.fields('tiny')}
  fields['cpt'] = {'optimizer': 'adam', 'muon': {}}
  with pytest.raises(ValueError, match='--config.cpt.optimizer=muon'):
    muon.plan(params_test.case(fields))
  fields['cpt'] = {'muon': {'roles': (('.', 'adam'),)}}
  with pytest.raises(ValueError, match=r"'adam'\),\) of cpt.muon.roles leave"):
    muon.tables(params_test.case(fields))


def test_command_prints_the_plan(subject):
  code, text, _ = params_test.command(
    '--config=configs/models/kimi_k2.py',
    '--topology=v5p:8x8x8',
    '--what=muon',
    '--json',
  )
  assert code == 0
  expected = [table.to_json() for table in muon.tables(subject)]
  assert json.loads(text) == json.loads(json.dumps({'muon': expected}))


@pytest.mark.parametrize(
  'fixed, mode',
  [
    pytest.param(dict(repeats=False, split=1), 'owner', marks=pytest.mark.slow),
    pytest.param(
      dict(repeats=False, split=1, chunks=9),
      'owner',
      marks=pytest.mark.slow,
    ),
    pytest.param(
      dict(repeats=True, split=1), 'redundant', marks=pytest.mark.slow
    ),
    pytest.param(
      dict(repeats=False, split=2), 'gram_sharded', marks=pytest.mark.slow
    ),
  ],
)
def test_owners_are_the_devices_to_which_matrices_travel(fixed, mode):
  mesh = jax.make_mesh((2, 4), ('r', 'f'))
  # Numbers of layers that no owners divide, and three places of experts.
  shapes_and_specs = {
    'there': ((3, 8, 16), P(None, 'f')),
    'back': ((2, 16, 8), P(None, None, 'f')),
    'experts': ((3, 4, 8, 12), P(None, 'r', 'f')),
    'local': ((2, 8, 8, 12), P(None, ('r', 'f'))),
    'two': ((2, 12, 24), P(None, None, 'f')),
  }
  places = {n: NamedSharding(mesh, s) for n, (_, s) in shapes_and_specs.items()}
  # Every entry of a matrix is its number; padding is 0.
  arrays, numbers, first = {}, {}, 1
  for name, (shape, _) in shapes_and_specs.items():
    batch = shape[:-2]
    ids = np.arange(first, first + np.prod(batch)).reshape(batch)
    numbers |= {int(ids[i]): (name, i) for i in np.ndindex(batch)}
    first += ids.size
    whole = np.broadcast_to(ids[..., None, None], shape).astype(np.float32)
    arrays[name] = jax.device_put(whole, places[name])
  made = planner.make(
    arrays,
    {
      n: roles.Matrix(rows=(x.ndim - 2,), columns=(x.ndim - 1,))
      for n, x in arrays.items()
    },
    shardings=places,
    newton_schulz=plans.STANDARD,
    fixed=planner.PlanOptions(rates=plans.CPU, **fixed),
  )
  assert mode in {group.mode for group in made.groups}

  def received(arrays):
    slots = []
    for group in made.groups:
      for chunk in group.chunks:
        boxes = exchange._boxes_of(group, chunk, arrays)
        x = exchange._read(boxes, lambda a: a, (arrays,), group)
        if group.mode != muon_plan.LOCAL:
          x = exchange._gather(x, group, chunk.owned)
        # A part of a shared matrix has padded columns.
        slots.append(x.max((1, 2)))
    return jnp.concatenate(slots)[None]

  slots = jax.shard_map(
    received,
    mesh=mesh,
    in_specs=({name: place.spec for name, place in places.items()},),
    out_specs=P(('r', 'f')),
    check_vma=False,
  )(arrays)
  expected: dict = {}
  for device, ids in enumerate(np.asarray(slots).astype(int).tolist()):
    for number in filter(None, ids):
      expected.setdefault(numbers[number], []).append(device)
  assert len(expected) == len(numbers)
  assert plans.owners(
    made, trees.map_names(lambda n, x: places[n], arrays)
  ) == (expected)
