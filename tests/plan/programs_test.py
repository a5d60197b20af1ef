"""Programs of a run as the planner lowers them, here for emulated CPUs."""

import dataclasses
import math

import jax
import pytest

from composer_jax.plan import aot, compiled, programs, report
from composer_jax.plan import case as cases
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
  model, text = subject.model, lowered.as_text()
  assert 'ragged_dot' not in text
  # Keys and values of 4 sessions, over the devices by key head.
  attention = model.attention
  elements = 2 * attention.num_kv_heads * attention.head_dim * model.num_layers
  whole = 4 * 64 * 4 * elements
  shards = math.gcd(DEVICES, attention.num_kv_heads)
  assert traced.terms['KV cache'] * shards == whole


def _made(traced, text=''):
  return aot.Compiled(
    text=f'HloModule m, entry_computation_layout={{()->()}}\n{text}',
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
  )
  return given._replace(**change)


def test_what_lies_beside_counts_and_the_largest_is_named():
  made = _made(facts())
  assert made.peak == 500 + 1 + 900 + 100
  assert made.terms['temporaries'] == 100
  assert compiled.largest(made) == 'moments'
  assert made.traced.arguments == 501


def test_ragged_dot_fails_a_plan(subject):
  """Of a program of the CPU's compiler, which expands it to all experts."""
  import jax.numpy as jnp

  def product(rows, experts, sizes):
    return jax.lax.ragged_dot(rows, experts, sizes)

  shapes = (
    jax.ShapeDtypeStruct((8, 4), jnp.float32),
    jax.ShapeDtypeStruct((2, 4, 4), jnp.float32),
    jax.ShapeDtypeStruct((2,), jnp.int32),
  )
  text = jax.jit(product).lower(*shapes).compile().as_text()
  made = dataclasses.replace(_made(facts()), text=text)
  failures = compiled._Reading(subject, made).failures()
  assert failures.title == compiled.FAILED
  assert 'ragged_dot, which multiplies by every expert' in failures.rows[0][0]
  clean = jax.jit(lambda a, b, c: a @ b[0]).lower(*shapes).compile().as_text()
  made = dataclasses.replace(made, text=clean)
  assert not compiled._Reading(subject, made).failures().rows
  assert isinstance(failures, report.Table)


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
