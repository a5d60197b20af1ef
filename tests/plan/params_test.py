"""The table of parameters against arrays, closed forms and literals."""

import dataclasses
import importlib
import itertools
import json
import math
import os

import jax
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.models import decoder, flops
from composer_jax.parallel import layouts, shardings, topology
from composer_jax.plan import case as cases
from composer_jax.plan import params, report, topologies
from configs.composer import tiny
from configs.models import moe_1_5t
from tests import programs

MODELS = (
  *('tiny', 'small', 'olmoe_7b_a1b', 'moonlight_16b_a3b', 'qwen3_30b_a3b'),
  *('qwen3_235b_a22b', 'deepseek_v3', 'kimi_k2', 'moe_1_5t'),
)


def fields(name):
  return (
    importlib.import_module(f'configs.models.{name}').get_config().to_dict()
  )


def case(name='tiny', mesh='', topology_name='cpu:8', **options):
  options = dict(layout='hsdp', dtype='float32') | options
  made = fields(name) if isinstance(name, str) else name
  return cases.make(made, topology_name=topology_name, mesh=mesh, **options)


def on_abstract_mesh(name, *sizes):
  """Returns a Case on more devices than a test emulates."""
  return dataclasses.replace(
    case(name), mesh=jax.sharding.AbstractMesh(sizes, topology.AXES)
  )


@pytest.mark.parametrize('mesh', ['2,2,2', '4,1,2'])
@pytest.mark.parametrize('layout', layouts.BY_NAME)
def test_bytes_are_those_of_arrays(mesh, layout):
  subject = case(mesh=mesh, layout=layout)
  shapes, logical = decoder.abstract(subject.model)
  arrays = jax.tree.map(
    lambda s, place: jax.device_put(np.zeros(s.shape, s.dtype), place),
    shapes,
    shardings.shardings(
      shapes,
      logical,
      layout=subject.layout,
      mesh=topology.make_mesh(*subject.mesh.axis_sizes),
    ),
  )
  held = {p.name: p.bytes_per_device for p in params.parameters(subject)}
  named = trees.flatten_names(arrays)
  assert held.keys() == named.keys()
  for name, array in named.items():
    for shard in array.addressable_shards:
      assert shard.data.nbytes == held[name], name


@pytest.mark.parametrize('name', MODELS)
def test_parts_sum_to_the_closed_forms(name):
  placed = params.parameters(case(name))
  sizes = dict.fromkeys(flops.params_by_part(case(name).model), 0)
  for parameter in placed:
    if parameter.part != 'selection_bias':
      sizes[parameter.part] += math.prod(parameter.shape)
  assert sizes == flops.params_by_part(case(name).model)
  # No expert is lost: together, devices hold all of them once.
  held = sum(p.bytes_per_device for p in placed if p.part == 'routed_experts')
  assert 8 * held == 4 * sizes['routed_experts']


def test_kimi_k2_on_eight_devices_equals_literals():
  by_name = {p.name: p for p in params.parameters(case('kimi_k2'))}
  wide, narrow = ('replica', 'fsdp', 'context'), ('fsdp', 'context')
  gate_up = by_name['params/moe_layers/moe/gate_up']
  assert gate_up.shape == (60, 384, 7168, 2, 2048)
  assert gate_up.axes == ('layer', 'expert', 'embed', 'gate_up', 'ffw')
  assert tuple(gate_up.spec) == (None, wide, None, None, None)
  assert gate_up.bytes_per_device == 60 * 48 * 7168 * 2 * 2048 * 4
  query_up = by_name['params/moe_layers/attention/query_up']
  assert query_up.shape == (60, 1536, 64, 192)
  assert tuple(query_up.spec) == (None, narrow, None, None)
  bias = by_name['selection_bias/moe_layers/moe/bias']
  assert bias.bytes_per_device == 60 * 384 * 4
  each, totals = params.tables(case('kimi_k2'))
  assert len(each.rows) == len(by_name) == 33
  # As --layout calls it.
  assert each.title.endswith('layout hsdp, float32')
  assert totals.rows[-1] == ('total', 1_026_408_209_408, 519_068_217_344)


def test_bfloat16_halves_all_but_the_selection_bias():
  whole = params.parameters(case('kimi_k2'))
  half = params.parameters(case('kimi_k2', dtype='bfloat16'))
  for before, after in zip(whole, half, strict=True):
    factor = 1 if before.part == 'selection_bias' else 2
    assert before.bytes_per_device == factor * after.bytes_per_device


def test_512_experts_lie_one_a_device_where_384_do_not():
  def expert_spec(name):
    placed = params.parameters(on_abstract_mesh(name, 64, 4, 2))
    return next(tuple(p.spec) for p in placed if p.name.endswith('moe/gate_up'))

  assert expert_spec('moe_1_5t')[1] == ('replica', 'fsdp', 'context')
  assert expert_spec('kimi_k2')[1:3] == (('replica', 'context'), 'fsdp')
  each, _ = params.tables(on_abstract_mesh('kimi_k2', 64, 4, 2))
  cells = {row[0]: row[3] for row in each.rows}['params/moe_layers/moe/down']
  assert cells == (None, 'replica+context', None, 'fsdp')


@pytest.mark.parametrize(
  'sizes, experts, others',
  [
    ((64, 4, 2), 'experts take {:.1f} GB', '64 times, {:.1f} GB a device'),
    ((16, 16, 2), 'experts take {:.1f} GB', 'the rest takes {:.1f} GB'),
  ],
)
def test_moe_1_5t_takes_the_memory_its_docstring_says(sizes, experts, others):
  text = ' '.join(str(moe_1_5t.__doc__).split())
  # Masters, gradient and two moments: four float32 a parameter.
  held = {'experts': 0, 'others': 0}
  for p in params.parameters(on_abstract_mesh('moe_1_5t', *sizes)):
    part = 'experts' if p.part == 'routed_experts' else 'others'
    held[part] += 4 * p.bytes_per_device
  assert str(sizes) in text
  assert experts.format(held['experts'] / 1e9) in text
  assert others.format(held['others'] / 1e9) in text


def powers_of_two(most):
  """Returns all meshes of at most 2^most devices."""
  exponents = itertools.product(range(most + 1), repeat=3)
  return [tuple(2**n for n in each) for each in exponents if sum(each) <= most]


@pytest.mark.parametrize(
  'name, narrow, wide',
  [
    ('moe_1_5t', 2**13, [*powers_of_two(13), (512, 1024, 8), (2, 4096, 2)]),
    # D = 7168 = 7 x 2^10, and the experts' F = 2^11.
    ('kimi_k2', 2**10, powers_of_two(11)),
    ('deepseek_v3', 2**10, powers_of_two(11)),
  ],
)
def test_every_parameter_divides_over_wide_meshes(name, narrow, wide):
  shapes, logical = decoder.abstract(on_abstract_mesh(name, 1, 1, 1).model)
  shapes = trees.flatten_names(shapes)
  logical = trees.flatten_names(logical)
  for sizes in wide:
    if sizes[1] * sizes[2] > narrow:
      continue
    mesh = jax.sharding.AbstractMesh(sizes, topology.AXES)
    for path, leaf in shapes.items():
      axes = tuple(logical[path])
      spec = shardings.spec(
        path, leaf.shape, axes, layout=layouts.TRAIN, mesh=mesh
      )
      shard = jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape)
      # Experts lie over all devices, what has the residual stream's width over
      # a replica; the rest is small.
      shards = math.prod(leaf.shape) // math.prod(shard)
      if 'expert' in axes:
        assert shards == math.prod(sizes), (path, sizes)
      elif 'embed' in axes:
        assert shards == sizes[1] * sizes[2], (path, sizes)


def test_a_mesh_wider_than_the_embedding_is_refused_by_name():
  with pytest.raises(ValueError, match=r'key_rope.*\(7168\).*\(2048\)'):
    params.parameters(on_abstract_mesh('kimi_k2', 1, 2048, 1))
  with pytest.raises(ValueError, match=r'moe/down: its 512 experts'):
    params.parameters(on_abstract_mesh('moe_1_5t', 2**14, 1, 1))


def test_an_axis_that_no_layout_maps_is_named():
  subject = case('kimi_k2')
  dense = {k: v for k, v in layouts.TRAIN.dense.items() if k != 'kv_lora'}
  layout = dataclasses.replace(layouts.TRAIN, dense=dense)
  with pytest.raises(ValueError, match=r'attention/k\w+ .*kv_lora'):
    params.parameters(dataclasses.replace(subject, layout=layout))


def test_a_dimension_that_does_not_divide_is_named():
  subject = case(topology_name='cpu:3')
  with pytest.raises(ValueError, match=r'attention/key.*\(128\).*\(3\)'):
    params.parameters(subject)
  odd = fields('tiny')
  odd['moe'] |= dict(num_experts=7, ffw_dim=129)
  odd['embed_dim'] = 130
  with pytest.raises(ValueError, match=r'moe/down: its 7 experts'):
    params.parameters(case(odd, mesh='4,1,2'))


def test_a_parameter_of_no_part_is_named():
  with pytest.raises(ValueError, match='params/vision/patch .*_PARTS'):
    params.part_of('params/vision/patch')


@pytest.mark.parametrize(
  'options, message',
  [
    ({'layout': 'pipeline'}, r"layout 'pipeline' .*'hsdp'"),
    ({'dtype': 'float16'}, r"dtype 'float16' .*'bfloat16'"),
    ({'mesh': '2,2'}, r"mesh '2,2' .*replica,fsdp,context"),
    ({'mesh': '2,x,2'}, r"mesh '2,x,2'"),
    ({'mesh': '2,1\u0662,2'}, r'numbers of at least 1'),
    ({'mesh': '0,8,1'}, r"mesh '0,8,1' .*at least 1"),
    ({'mesh': '2,2,1'}, r"mesh '2,2,1' needs 4 devices .*'cpu:8' has 8"),
    ({'topology_name': 'v5p:8x8'}, r"topology 'v5p:8x8' .*v5p:AxBxC"),
    ({'topology_name': 'v5e:256'}, r"topology 'v5e:256' .*v5e:AxB"),
    ({'topology_name': 'h100:2x8'}, r"topology 'h100:2x8' .*h100:N"),
    ({'topology_name': 'a100:8'}, r"topology 'a100:8' .*cpu:N"),
    ({'topology_name': 'v5p'}, r"topology 'v5p' is not known"),
    ({'topology_name': 'v5p:8x0x8'}, r'numbers of at least 1'),
    ({'topology_name': 'cpu:0'}, r"topology 'cpu:0'"),
    ({'topology_name': 'cpu:1\u0668'}, r'not known'),
  ],
)
def test_impossible_request_is_named(options, message):
  with pytest.raises(ValueError, match=message):
    case(**options)


@pytest.mark.parametrize(
  'name, machine, count',
  [
    ('cpu:12', 'cpu', 12),
    ('v5e:4x8', 'v5e', 32),
    ('v5p:8x8x8', 'v5p', 512),
    ('v6e:16x16', 'v6e', 256),
    ('h100:64', 'h100', 64),
    ('h200:8', 'h200', 8),
  ],
)
def test_a_topology_names_machines_and_their_number(name, machine, count):
  assert topologies.machine(name) == machine
  assert topologies.num_devices(name) == count
  # Where the parameters lie is a matter of the mesh alone.
  there, here = (case('small', topology_name=t) for t in (name, f'cpu:{count}'))
  assert params.parameters(there) == params.parameters(here)


@pytest.mark.parametrize('count', [1, 2, 3, 4, 8, 12, 512])
def test_default_mesh_uses_every_device(count):
  assert math.prod(topologies.default_mesh(count)) == count


def test_default_mesh_of_eight_has_context_2_and_experts_8():
  assert topologies.default_mesh(8) == (2, 2, 2)


def test_table_aligns_words_left_and_numbers_right():
  table = report.Table(
    title='Sizes',
    columns=('name', 'shape', 'bytes'),
    rows=[('a', (2, 3), 24), ('longer', (None, 'fsdp'), 1234567)],
  )
  assert table.to_text().splitlines() == [
    'Sizes',
    '--------------------------',
    'name    shape        bytes',
    '--------------------------',
    'a       2, 3            24',
    'longer  -, fsdp  1,234,567',
  ]


def command(*arguments, main='plan', run=programs.run):
  # Without the tests' eight devices, as a user starts it.
  unset = ('XLA_FLAGS', 'JAX_PLATFORMS')
  env = {k: v for k, v in os.environ.items() if k not in unset}
  done = run(f'experiments.{main}', *arguments, env=env, timeout_s=120)
  return done.returncode, done.stdout, done.stderr.strip().splitlines()


def test_command_prints_the_table():
  code, text, _ = command(
    '--config=configs/models/kimi_k2.py',
    '--topology=cpu:8',
    '--what=params',
    run=programs.run_fresh,
  )
  assert code == 0
  expected = params.tables(case('kimi_k2'))
  assert text.strip() == '\n\n'.join(table.to_text() for table in expected)


def test_command_takes_configs_of_runs_and_prints_json():
  code, text, _ = command(
    '--config=configs/composer/tiny.py',
    '--topology=cpu:2',
    '--layout=data_parallel',
    '--json',
  )
  assert code == 0
  model = tiny.get_config().model.to_dict()
  subject = case(model, topology_name='cpu:2', layout='data_parallel')
  expected = [table.to_json() for table in params.tables(subject)]
  assert json.loads(text) == json.loads(json.dumps({'params': expected}))


def test_command_needs_no_devices_for_a_mesh_of_any_size():
  # Emulated devices of that number do not start within the command's limit.
  code, text, _ = command(
    '--config=configs/models/moe_1_5t.py',
    f'--topology=cpu:{2**22}',
    '--mesh=512,1024,8',
    '--json',
  )
  assert code == 0
  _, totals = json.loads(text)['params']
  (held,) = (r for r in totals['rows'] if r['part'] == 'routed_experts')
  assert held['bytes_per_device'] * 2**22 == 4 * held['parameters']


MODEL = 'configs/models/'
RUN = 'configs/composer/tiny.py'


def check_one_line(code, text, lines, message):
  assert (code, text) == (1, '')
  assert len(lines) == 1
  assert lines[0].startswith('error: ') and message in lines[0]
  # No traceback was folded into the line either.
  assert 'Traceback' not in lines[0]


@pytest.mark.parametrize(
  'main, arguments, message',
  [
    ('plan', ['--topology=cpu:3'], 'embed dimension'),
    (
      'plan',
      ['--what=weather'],
      "'weather' is not one of ['compile', 'memory', 'muon', 'params'",
    ),
    (
      'plan',
      ['--what=compile', '--until=schedule'],
      'cpu:8 is compiled by XLA:CPU, which shows its schedule only at the end',
    ),
    (
      'plan',
      ['--config.num_layers=0'],
      'num_layers must be an integer of at least 1',
    ),
    (
      'plan',
      ['--config.attention.kv_heads=3'],
      'GQAConfig has no field kv_heads. Did you mean num_kv_heads? Its fields',
    ),
    ('plan', [f'--config={RUN}', '--config.rl.stepz=3'], 'Did you mean steps'),
    (
      'composer',
      ['--config.rl.stepz=3'],
      '--config.rl has no field stepz. Did you mean steps?',
    ),
    ('composer', ['--config.rl.mesh.fsdp=two'], 'rl.mesh.fsdp must be'),
    ('composer', ['--config.mesh.replika=x'], 'Did you mean replica'),
    ('composer', ['--config.rollout.devices=None'], 'rollout.devices must be'),
  ],
)
def test_a_value_that_cannot_be_fails_with_one_line(main, arguments, message):
  check_one_line(*command(*arguments, main=main), message)


@pytest.mark.parametrize(
  'main, arguments, message',
  [
    (
      'plan',
      [f'--config={MODEL}none.py'],
      f"No such file or directory: '{MODEL}none",
    ),
    (
      'plan',
      ['--config='],
      '--config cannot be loaded: Path to config file is an empt',
    ),
    (
      'plan',
      ['--config=LICENSE'],
      'with a function get_config: unexpected indent',
    ),
    (
      'plan',
      ['--config=configs/__init__.py'],
      "has no attribute 'get_config'",
    ),
    (
      'plan',
      [f'--config={MODEL}kimi_k2.py:foo'],
      f"{MODEL}deepseek_v3.py and kimi_k2.py take no argument, not 'foo'.",
    ),
    (
      'plan',
      [f'--config={MODEL}none.py', '--config.attention.num_heads=3'],
      'No such file',
    ),
    (
      'plan',
      ['--config.rope.yarn.factor=2'],
      'Override rope.yarn.factor can not',
    ),
    ('plan', ['--config.embed_dim=many'], "'many'"),
    ('plan', ['--confg=x'], "Unknown command line flag 'confg'"),
    ('plan', ['weather'], "Unknown arguments ['weather']"),
    ('composer', ['--config=configs/none.py'], 'No such file'),
    ('composer', ['--config=configs/composer/tiny.py:hug'], "not 'hug'"),
    ('serve', ['--source=here', '--config.device=2'], 'mean "devices"'),
    ('make_tasks', ['--out=here', '--config.sandbx=3'], 'mean "sandbox"'),
    ('make_tasks', ['--out=here', '--config.options.foo=3'], 'foo'),
    ('export', [], 'Flag --source must have a value'),
  ],
)
def test_a_flag_that_cannot_be_fails_with_one_line(main, arguments, message):
  # They end before they import JAX, so a new process is as quick as a fork.
  done = command(*arguments, main=main, run=programs.run_fresh)
  check_one_line(*done, message)


def test_debug_shows_where_an_error_is_from():
  _, _, lines = command('--debug', '--config.attention.kv_heads=3')
  assert lines[0].startswith('Traceback') and len(lines) > 9
  assert lines[-1].startswith('error: GQAConfig has no field kv_heads.')


def test_help_lists_the_flags_of_every_main():
  for main in ('plan', 'composer'):
    code, text, _ = command('--help', main=main, run=programs.run_fresh)
    assert code == 0
    assert '--config:' in text and '--[no]debug:' in text
