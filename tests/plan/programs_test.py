"""Programs of a run as the planner lowers them, here for emulated CPUs."""

import dataclasses

import jax
import pytest

from composer_jax.plan import aot, compiled, memory, programs
from composer_jax.plan import case as cases
from composer_jax.rollout import options as rollout_options
from tests import compiling
from tests.plan import compiled_test, params_test

DEVICES = 8


@pytest.fixture(scope='module')
def subject():
  return compiled_test.case_of('cpu:8', '2,2,2')


def lower(subject, name, **options):
  options = programs.StepOptions(batch_size=8, seq_len=64, **options)
  return programs.lower(subject, name, options, jax.devices()[:DEVICES])


@pytest.mark.slow
@pytest.mark.parametrize('name', programs.NAMES)
def test_arguments_are_those_of_the_compiler(subject, name, tmp_path):
  """But for rows of an engine, which are few, and what a program ignores."""
  traced, lowered = lower(subject, name)
  made = lowered.compile(compiler_options=compiling.QUICKLY)
  stated = made.memory_analysis().argument_size_in_bytes
  few = 64 << 10 if name in ('prefill', 'decode') else 1 << 10
  assert 0 <= stated - traced.arguments + (1 << 10) < few + (1 << 10)
  assert all(size >= 0 for size in traced.beside.values())
  assert traced.ragged_dots == 0
  # What lies beside is what the run needs and the program does not take.
  assert not {*traced.terms} & {*traced.beside}


@pytest.mark.slow
def test_reinforcement_holds_its_state_in_every_program(subject):
  """The state is an argument or lies beside, and never both."""
  held = {}
  for name in ('rl', 'hint', 'rl_update', 'policy', 'publish'):
    traced, _ = lower(subject, name)
    given = traced.terms | traced.beside
    held[name] = given['masters'], given['moments']
  assert len({*held.values()}) == 1
  masters, moments = held['rl']
  assert moments == pytest.approx(2 * masters, rel=0.01)  # Adam's.


def test_an_unknown_program_is_named(subject):
  with pytest.raises(ValueError, match="'tarin' is not one of .*'train'"):
    lower(subject, 'tarin')


def test_engines_hold_weights_once_more_in_a_swap(subject):
  traced, lowered = lower(subject, 'decode', slots=4)
  assert traced.beside['weights of a swap'] == traced.terms['served weights']
  assert traced.num_tokens == 4 and traced.shards is None
  model = subject.model
  assert traced.ragged_dots == 0 and lowered.as_text()
  # Keys and values of 4 sessions, whole: two key heads do not divide.
  attention = model.attention
  elements = 2 * attention.num_kv_heads * attention.head_dim * model.num_layers
  assert traced.terms['KV cache'] == 4 * 64 * 4 * elements
  options = rollout_options.EngineOptions(
    devices=DEVICES, num_slots=4, max_len=64
  )
  counted = memory.serving(model, options).terms
  assert counted['KV cache'] == traced.terms['KV cache']
  # The count has weights in the compute dtype, the selection bias in float32.
  served = traced.terms['served weights']
  assert counted['served weights'] == pytest.approx(served, rel=0.01)


def _made(traced):
  return aot.Compiled(
    text='HloModule m\n\nENTRY %main (x: f32[]) -> f32[] {\n'
    '  ROOT %x = f32[] parameter(0)\n}\n',
    traced=traced,
    seconds=1.0,
    has_code=True,
    temporaries=100,
    limit=None,
    error='',
    warnings=(),
    live=(),
  )


def facts(**change):
  given = programs.Traced(
    program='rl',
    terms={'policy values': 500, 'batch': 1},
    beside={'moments': 900},
    seconds=0.1,
    num_tokens=64,
    forwards=3,
    lines=(),
    shards=None,
    micro_tokens=8,
    ragged_dots=0,
  )
  return given._replace(**change)


def test_what_lies_beside_counts_and_the_largest_is_named():
  made = _made(facts())
  assert made.peak == 500 + 1 + 900 + 100
  assert made.terms['temporaries'] == 100
  assert compiled.largest(made) == 'moments'
  assert made.traced.arguments == 501


@pytest.mark.parametrize(
  'topology', ['cpu:8', 'h200:8', 'tpu7x:2x2x1', 'v5p:2x2x2']
)
def test_ragged_dot_fails_a_plan_where_it_is_expanded(subject, topology):
  case = dataclasses.replace(subject, topology=topology)
  failures = lambda n: compiled._Reading(
    case, _made(facts(ragged_dots=n))
  ).failures()
  assert failures(8).title == compiled.FAILED
  assert not failures(0).rows
  words = [row[0] for row in failures(8).rows]
  assert [w.startswith('8 calls of ragged_dot, which') for w in words] == (
    [] if topology == 'v5p:2x2x2' else [True]
  )


def test_calls_of_ragged_dot_are_counted(subject, monkeypatch):
  """In place of the engine's program, one that calls it twice."""

  def twice(rows, experts, sizes):
    again = jax.jit(jax.lax.ragged_dot)(rows, experts, sizes)
    return jax.lax.ragged_dot(again, experts, sizes)

  whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = lambda *shape, dtype='float32': jax.ShapeDtypeStruct(
    shape, dtype, sharding=whole
  )
  arguments = like(8, 4), like(2, 4, 4), like(2, dtype='int32')
  program = programs._RunProgram(jax.jit(twice), arguments, {}, {}, 8)
  monkeypatch.setattr(programs, '_engine', lambda *_: program)
  assert lower(subject, 'decode')[0].ragged_dots == 2


def test_cases_of_a_model_config_have_all_programs():
  case = cases.make(
    params_test.fields('tiny'),
    topology_name='cpu:8',
    mesh='',
    layout='hsdp',
    dtype='float32',
  )
  assert case.mesh.size == DEVICES
  assert len({*programs.NAMES}) == len(programs.NAMES) == 10
