"""Train steps compiled for machines, here for emulated CPUs."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import jax
import pytest

from composer_jax.optim.muon import cost
from composer_jax.parallel import rounds
from composer_jax.plan import (
  aot,
  aot_process,
  compiled,
  params,
  programs,
  topologies,
)
from composer_jax.plan import case as cases
from composer_jax.plan.hlo import overlap
from composer_jax.train import placement
from tests.plan import params_test


def case_of(topology_name: str, mesh: str, **fields) -> cases.Case:
  return cases.make(
    params_test.fields('tiny')
    | dict(num_layers=2, num_dense_layers=1)
    | fields,
    topology_name=topology_name,
    mesh=mesh,
    layout='hsdp',
    dtype='float32',
  )


@pytest.fixture(scope='module')
def subject():
  return case_of('cpu:8', '2,2,2')


OPTIONS = programs.StepOptions(
  batch_size=8,
  seq_len=16,
  optimizer='adam',
  parallel=placement.ParallelOptions(transport='a2a'),
)


@pytest.fixture(scope='module')
def made(subject, tmp_path_factory):
  folder = tmp_path_factory.mktemp('dump')
  traced, lowered = programs.lower(subject, 'train', OPTIONS, jax.devices()[:8])
  # The code never runs, so it need not be fast.
  options = {'xla_backend_optimization_level': 0}
  return aot.compile_lowered(traced, lowered, folder, options)


def test_arguments_are_the_state_and_the_batch(subject, made):
  placed = params.parameters(subject)
  trained = [p for p in placed if p.part != 'selection_bias']
  biases = [p for p in placed if p.part == 'selection_bias']
  state = 3 * sum(p.bytes_per_device for p in trained)
  state += sum(p.bytes_per_device for p in biases)
  # The batch is spread over 8 devices. The rest are step counters of the state,
  # of Adam and of its schedule, and a flag.
  batch = 4 * 4 * OPTIONS.batch_size * OPTIONS.seq_len // 8
  counters = made.traced.arguments - state - batch
  assert 0 < counters <= 4 * 4
  assert made.traced.num_tokens == 8 * 16


def test_a_donated_state_takes_its_place_once(made):
  assert made.has_code
  assert made.peak == made.traced.arguments + made.temporaries
  assert made.error == ''
  assert made.warnings == ()


def test_the_summary_is_that_of_the_program(subject, made):
  summary = compiled.summary(subject, made)
  even = lambda scope: 0.0 if rounds.FURTHER in scope else 1.0
  program = overlap.read(made.text, dynamic_trips=even)
  assert summary['flops'] == program.flops
  assert summary['wire_bytes'] == program.wire_bytes > 0
  assert summary['fits']  # The memory of the host has no limit here.
  assert 0 <= summary['hidden_share'] <= 1
  assert summary['modelled_seconds'] >= program.flops / 20e9
  json.dumps(summary)


def test_tables_add_up(subject, made):
  tables = compiled.tables(subject, made, OPTIONS.seq_len)
  by_title = {t.title.split(';')[0].split(' (')[0]: t for t in tables}
  kinds = by_title['Collectives'].rows
  assert kinds[-1][0] == 'total'
  assert {row[0] for row in kinds[:-1]} <= set(overlap.KINDS)
  for column in (1, 3, 4):
    total = sum(row[column] for row in kinds[:-1])
    assert kinds[-1][column] == pytest.approx(total)
  text = '\n'.join(table.to_text() for table in tables)
  assert 'transport a2a' in text


@pytest.mark.parametrize(
  ('scope', 'phase', 'place'),
  [
    (
      'jit(guarded)/jvp()/while/body/closed_call/shard_map/experts/combine/'
      'gather',
      'forward',
      'experts/combine/gather',
    ),
    (
      'jit(step)/transpose(jvp())/while/body/closed_call/shard_map/checkpoint/'
      'rematted_computation/gather_weights/all_gather',
      'again',
      'gather_weights/all_gather',
    ),
    (
      'jit(step)/transpose(jvp(head))/shard_map/dot_general',
      'backward',
      'head/dot_general',
    ),
    ('jit(step)/update/muon/shard_map/while', 'update', 'update/muon'),
  ],
)
def test_scopes_are_said_as_the_code_names_them(scope, phase, place):
  assert compiled.phase(scope) == phase
  assert compiled.place(scope) == place


def test_what_does_not_fit_says_how_much_it_wanted(subject, made):
  error = (
    'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required '
    'for HLO temporaries (186.87G) exceeds available HBM (95.74G).'
  )
  gib = 1 << 30
  wanted, limit = aot._wanted(error, 10 * gib)
  assert wanted == round(186.87 * gib) - 10 * gib
  assert limit == round(95.74 * gib)
  too_large = dataclasses.replace(
    made, temporaries=wanted, limit=limit, error=error, has_code=False
  )
  summary = compiled.summary(subject, too_large)
  assert not summary['fits']
  step = compiled.tables(subject, too_large, OPTIONS.seq_len)[0].to_text()
  assert 'does NOT fit' in step
  with pytest.raises(ValueError, match='states no sizes .* no luck'):
    aot._wanted('RESOURCE_EXHAUSTED: no luck', 0)


def test_involuntary_rematerialisation_fails_the_case(subject, made):
  tables = compiled.tables(subject, made, OPTIONS.seq_len)
  assert not any(t.title == compiled.FAILED for t in tables)
  warned = dataclasses.replace(made, warnings=('Involuntary full ...',))
  assert compiled.summary(subject, warned)['rematerialisation_warnings'] == 1
  last = compiled.tables(subject, warned, OPTIONS.seq_len)[-1]
  assert (last.title, last.rows) == (
    compiled.FAILED,
    [('Involuntary full ...',)],
  )


def test_arrays_of_the_fullest_moment_are_named(tmp_path):
  (tmp_path / 'm.live-range.txt').write_text(
    'HloLiveRange\n  Live ranges at 7 (peak):\n'
    '    dot.1{}: 10 bytes (cumulative: 10 bytes)\n'
    '    big.2{0}: 99 bytes (cumulative: 109 bytes)\n'
    '  Something else:\n    x{}: 5 bytes (cumulative: 5 bytes)\n'
  )
  text = '  %big.2 = f32[5] add(%a, %b), metadata={op_name="jit(f)/here"}\n'
  assert aot.live(tmp_path, text) == (
    aot.Live('big.2', 'jit(f)/here', 99),
    aot.Live('dot.1', '', 10),
  )


def test_rematerialisation_is_read_from_what_the_compiler_prints(tmp_path):
  (tmp_path / aot.PRINTED).write_text(
    'W0000 spmd.cc: [SPMD] Involuntary full rematerialization. The compiler\n'
    'all is well\n'
  )
  (line,) = aot.warnings(tmp_path)
  assert 'Involuntary full rematerialization' in line


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(seq_len=0), 'seq_len must be an integer of at least 1; got 0'),
    (dict(accumulate=0), 'accumulate must be an integer of at least 1'),
    (
      dict(batch_size=-8),
      'batch_size must be an integer of at least 0; got -8',
    ),
  ],
)
def test_impossible_steps_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    programs.StepOptions(**change)


def test_only_a_tpu_has_a_schedule_before_its_code(subject):
  task = aot_process.CompileTask(
    case=subject, options=OPTIONS, topology_name='cpu:8', libtpu=''
  )
  with pytest.raises(ValueError, match="XLA:CPU.* until must be 'code'"):
    aot_process.compile_step(task, 'schedule')
  with pytest.raises(ValueError, match="'hlo' is not one of"):
    aot_process.compile_step(task, 'hlo')


@pytest.mark.parametrize('inside', ['', 'libtpu'])
def test_a_wrong_folder_of_libtpu_is_named(tmp_path, inside, monkeypatch):
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  # Python takes an empty folder of the package's name for the package.
  (tmp_path / inside).mkdir(exist_ok=True)
  message = f'--libtpu={tmp_path} .*libtpu.so is not .*--target={tmp_path} '
  with pytest.raises(ValueError, match=message):
    topologies.prepare('v5p:2x2x1', str(tmp_path))


def _end(pipe, task, folder):
  del task, folder
  pipe.close()
  raise SystemExit(3)


def test_a_process_that_ends_early_states_its_exit_code(subject, monkeypatch):
  monkeypatch.setattr(aot_process, '_work', _end)
  task = aot_process.CompileTask(
    case=subject, options=OPTIONS, topology_name='cpu:8', libtpu=''
  )
  with pytest.raises(RuntimeError, match='for cpu:8 ended with exit code 3'):
    aot_process.compile_step(task)


def test_a_compiler_that_is_not_there_says_how_to_get_it(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  with pytest.raises(ValueError, match=r'libtpu.*pip install --target=FOLDER'):
    topologies.prepare('v5p:2x2x1')
  with pytest.raises(ValueError, match='jax-cuda13-plugin'):
    topologies.prepare('h200:8')
  with pytest.raises(ValueError, match=r'no h100_target_config.*h200_target'):
    topologies.prepare('h100:8')


@pytest.mark.parametrize(
  ('topology', 'count', 'gib'),
  [('tpu7x:4x4x4', 128, 96), ('v5p:8x8x8', 512, 95)],
)
def test_devices_and_memory_of_a_chip_are_shared(topology, count, gib):
  assert topologies.num_devices(topology) == count
  name = topologies.machine(topology)
  assert topologies.MACHINES[name].hbm == gib * 2**30


def test_every_machine_has_speeds():
  assert set(topologies.MACHINES) == set(cost.BY_NAME)


@pytest.mark.slow
def test_command_compiles_in_a_process_of_its_own():
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'experiments.plan', '--what=compile', '--json'),
      *('--topology=cpu:4', '--mesh=1,2,2', '--batch=4', '--seq_len=16'),
      '--optimizer=adam',
    ],
    capture_output=True,
    text=True,
    check=True,
  )
  tables = json.loads(done.stdout)['compile']
  assert tables[0]['title'].startswith('train on 4 cpu')


@pytest.mark.slow
def test_the_tpu_compiler_scatters_gradients_in_flight():
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('no libtpu')
  subject = case_of(
    'v5p:2x2x2',
    '2,2,2',
    embed_dim=1024,
    dense_ffw_dim=4096,
    compute_dtype='bfloat16',
  )
  task = aot_process.CompileTask(
    case=subject,
    options=programs.StepOptions(seq_len=256),
    topology_name='v5p:2x2x2',
    libtpu='',
  )
  made = aot_process.compile_step(task, 'schedule')
  summary = compiled.summary(subject, made)
  assert not made.has_code
  assert summary['fits']
  assert summary['rematerialisation_warnings'] == 0
  even = lambda scope: 0.0 if rounds.FURTHER in scope else 1.0
  program = overlap.read(made.text, dynamic_trips=even)
  moved = [c for c in program.collectives if 'scatter_grad' in c.scope]
  assert moved
  # None became an all-reduce of the whole array.
  assert {c.kind for c in moved} == {'reduce-scatter'}
  assert all(c.is_async for c in moved)
  assert made.live
