"""Counted bytes against the compiler's, and refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from composer_jax import wiring
from composer_jax.core import batches, platforms
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups
from composer_jax.parallel import layouts, topology
from composer_jax.pipeline import spec as specs
from composer_jax.plan import memory
from composer_jax.rollout import engine as engines
from composer_jax.rollout import forward, placing, steps
from composer_jax.rollout import options as rollout_options
from composer_jax.train import loop, placement
from composer_jax.train import state as train_state
from configs.composer import tiny
from tests.models import adapters_test
from tests.plan import params_test

# Compiles quickly and keeps its buffers.
OPTIONS = {
  'xla_backend_optimization_level': 0,
  'xla_cpu_use_fusion_emitters': False,
}
PLAIN = model_config.ModelConfig.from_dict(
  params_test.fields('tiny') | dict(num_layers=2, num_dense_layers=1)
)
MODELS = {
  'plain': PLAIN,
  'adapted': dataclasses.replace(PLAIN, adapters=adapters_test.ALL),
  'recomputed': dataclasses.replace(PLAIN, num_layers=4, remat=True),
}
MODELS['exact'] = dataclasses.replace(
  MODELS['recomputed'],
  precision=model_config.PrecisionConfig(experts='fp8', backward='bf16'),
)
SLOW = pytest.mark.slow


def _in_all(compiled):
  memory_of = compiled.memory_analysis()
  results = memory_of.output_size_in_bytes - memory_of.alias_size_in_bytes
  return (
    memory_of.argument_size_in_bytes
    + memory_of.temp_size_in_bytes
    + max(0, results)
  )


def _train_step(model, mesh, layout, optimizer, rows, seq_len):
  placed = placement.build(model, mesh=mesh, layout=layout)
  programs = loop.make_programs(
    loop.LoopOptions(
      stage='plan',
      optimizer=optimizer,
      bias_rate=0.0,
      seed=0,
      steps=10,
      batch_size=rows,
      seq_len=seq_len,
    ),
    model,
    placed,
  )
  integers = jax.ShapeDtypeStruct(
    (rows, seq_len), jnp.int32, sharding=placed.batch
  )
  batch = batches.LMBatch(
    tokens_BT=integers,
    segment_ids_BT=integers,
    positions_BT=integers,
    loss_weights_BT=integers.update(dtype=jnp.float32),
  )
  lowered = programs.step.lower(programs.like, batch)
  return lowered.compile(compiler_options=OPTIONS)


@pytest.mark.parametrize(
  'name,sizes,state',
  [
    pytest.param('plain', (1, 1, 1), 'float32', marks=SLOW),
    pytest.param('adapted', (1, 1, 1), 'float32', marks=SLOW),
    pytest.param('recomputed', (1, 1, 1), 'float32', marks=SLOW),
    pytest.param('plain', (2, 2, 2), 'float32', marks=SLOW),
    pytest.param('exact', (1, 1, 1), 'float32', marks=SLOW),
  ],
)
def test_a_train_step_takes_what_is_counted(name, sizes, state):
  mesh = specs.Mesh(**dict(zip(topology.AXES, sizes, strict=True)))
  layout = layouts.TRAIN if mesh.size > 1 else layouts.REPLICATED
  optimizer = groups.OptimizerOptions(
    name='adam', warmup_steps=1, decay_steps=1, state=state
  )
  rows, seq_len = 8, 64
  counted = memory.training(
    name, MODELS[name], optimizer, mesh, layout, (rows, seq_len, False)
  )
  real = topology.make_mesh(*sizes, devices=jax.devices()[: mesh.size])
  compiled = _train_step(MODELS[name], real, layout, optimizer, rows, seq_len)
  needed = _in_all(compiled)
  assert counted.total == pytest.approx(needed, rel=0.1), counted.terms


@pytest.mark.slow
def test_moments_of_eight_bits_are_a_quarter():
  narrow, codes = (
    memory.training(
      'train',
      PLAIN,
      groups.OptimizerOptions(
        name='adam', warmup_steps=1, decay_steps=1, state=state
      ),
      specs.Mesh(),
      layouts.REPLICATED,
      (8, 64, False),
    ).terms
    for state in ('bfloat16', 'int8')
  )
  number = narrow['masters'] // 2
  assert codes['masters'] == 2 * number
  # Beside moments, numbers of steps; beside codes, two scales of each block.
  assert 4 * number <= narrow['moments'] < 4 * number + 64
  assert 2 * number < codes['moments'] < 2.2 * number


@SLOW
def test_frozen_weights_have_no_gradients():
  """A step has three products for each weight, two if it is frozen."""
  ranks = model_config.AdapterConfig(attention=4)
  mesh = topology.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  optimizer = groups.OptimizerOptions(
    name='adam', warmup_steps=1, decay_steps=1
  )
  whole, adapted = (
    _train_step(model, mesh, layouts.REPLICATED, optimizer, 8, 64)
    for model in (PLAIN, dataclasses.replace(PLAIN, adapters=ranks))
  )
  flops = [c.cost_analysis()['flops'] for c in (adapted, whole)]
  assert flops[0] < 0.7 * flops[1]
  # Their place holds float32 copies of weights, as this CPU computes in it.
  temporaries = [
    c.memory_analysis().temp_size_in_bytes for c in (adapted, whole)
  ]
  assert temporaries[0] < 0.75 * temporaries[1]


@SLOW
@pytest.mark.parametrize('name', ['plain', 'adapted'])
def test_a_decode_step_takes_what_is_counted(name):
  options = engines.EngineOptions(num_slots=8, max_len=256)
  model = MODELS[name]
  counted = memory.serving(model, options)
  place = placing._on_device(jax.devices()[0])
  weights = jax.eval_shape(
    lambda: forward.unstack(decoder.init(model, jax.random.key(0)), model)
  )
  cache = jax.eval_shape(
    lambda: forward.empty_cache(model, options.pages, options.page_size)
  )
  rows = jax.ShapeDtypeStruct((8, sum(steps.decode_widths(options))), jnp.int32)
  state = steps.State(*[jax.ShapeDtypeStruct((8,), jnp.int32)] * 3)
  program = steps.build(model, options, place).decode
  compiled = program.lower(
    *(weights, cache, rows, state, None, None, False, 0)
  ).compile(compiler_options=OPTIONS)
  beside = counted.total - counted.terms['weights of a swap']
  assert beside == pytest.approx(_in_all(compiled), rel=0.1), counted.terms


def test_what_does_not_fit_is_refused_with_what_does():
  spec = wiring.spec_of(tiny.get_config().to_dict())
  largest = max(need.total for need in memory.needs(spec))
  assert all(memory.check(spec, largest))
  with pytest.raises(
    ValueError,
    match=r'needs .* the largest part is .*rows of a microbatch divided by 2',
  ):
    list(memory.check(spec, int(0.7 * largest)))


def test_what_fits_is_said_of_the_whole_run():
  c = tiny.get_config()
  c.sft.accumulate = 1
  spec = wiring.spec_of(c.to_dict())
  by_name = {need.name: need.total for need in memory.needs(spec)}
  for limit in (0.9 * min(by_name['sft'], by_name['rl']), 0.25 * by_name['rl']):
    with pytest.raises(ValueError) as refused:
      list(memory.check(spec, int(limit)))
    names = [name for name, total in by_name.items() if total > limit]
    assert {'sft', 'rl'} <= {*names}
    largest = max(names, key=lambda name: by_name[name])
    assert str(refused.value).startswith(f'{largest} needs ')
    assert f'too little for {", ".join(names)};' in str(refused.value)
    said = str(refused.value).partition('What fits: ')[2].split('; or ')
    options = memory._choices(spec, names)
    for words in said:
      first, _, second = words.removesuffix('.').partition(' with ')
      known = dict(pair for made in options.values() for pair in made)
      other = known[first]
      if second:
        more = memory._choices(other, names).values()
        other = dict(pair for made in more for pair in made)[second]
      assert max(need.total for need in memory.needs(other)) <= limit
  assert second  # No single one is enough for the last.


def test_three_pairs_are_enough(monkeypatch):
  without = lambda spec, parts: {
    kind: [(kind, spec | {kind})] for kind in 'abcd' if kind not in spec
  }
  total = lambda spec: [
    memory.Need(name='rl', devices=1, terms={'state': 9 - 4 * len(spec)})
  ]
  monkeypatch.setattr(memory, '_choices', without)
  monkeypatch.setattr(memory, 'needs', total)
  fitting = lambda limit: memory._fitting(frozenset(), ['rl'], limit)
  assert fitting(5) == [*'abcd']
  assert fitting(1) == ['a with b', 'a with c', 'a with d']
  assert not fitting(0)


def test_an_engine_that_does_not_fit_gets_more_devices():
  options = memory._choices(
    wiring.spec_of(tiny.get_config().to_dict()), ['engine']
  )
  devices = [
    (words, changed.rollout.devices)
    for words, changed in options['{} times as many devices in layout hsdp']
  ]
  assert devices[:2] == [
    (f'{n} times as many devices in layout hsdp', n) for n in (2, 4)
  ]


def test_a_pass_that_verifies_has_logits_behind_every_draft():
  options = engines.EngineOptions(num_slots=8, max_len=256)
  speculation = rollout_options.Speculation(drafter='ngrams', depth=4)
  plain, drafting = (
    memory.serving(MODELS['plain'], o).terms
    for o in (options, dataclasses.replace(options, speculation=speculation))
  )
  assert drafting == plain | {'logits': 5 * plain['logits']}


@pytest.mark.slow
def test_experts_from_before_their_rounding_are_a_second_copy():
  exact = MODELS['exact']
  rounded = dataclasses.replace(
    exact, precision=model_config.PrecisionConfig(experts='fp8')
  )
  counted = {}
  for name, model in (('exact', exact), ('rounded', rounded)):
    for state in ('float32', 'bfloat16'):
      counted[name, state] = memory.training(
        'train',
        model,
        groups.OptimizerOptions(
          name='adam', warmup_steps=1, decay_steps=1, state=state
        ),
        specs.Mesh(),
        layouts.REPLICATED,
        (8, 64, True),
      ).terms
  moe = exact.moe
  weights = 3 * moe.num_experts * exact.embed_dim * moe.ffw_dim
  layers = exact.num_moe_layers
  name = 'experts before rounding'
  assert counted['exact', 'float32'][name] == 4 * layers * weights
  # Masters in bfloat16 are that copy.
  others = [counts[name] for counts in counted.values()]
  assert sorted(others) == [0, 0, 0, 4 * layers * weights]
  # Each layer casts, and on a mesh gathers, both.
  both, one = (
    counted[kind, 'float32']['copies of weights']
    for kind in ('exact', 'rounded')
  )
  assert both - one == weights * jnp.dtype(exact.compute_dtype).itemsize


def test_masters_of_sixteen_bits_are_the_policys_values():
  counted = {
    state: memory.training(
      'train',
      PLAIN,
      groups.OptimizerOptions(
        name='adam', warmup_steps=1, decay_steps=1, state=state
      ),
      specs.Mesh(),
      layouts.REPLICATED,
      (8, 64, True),
    ).terms
    for state in ('float32', 'bfloat16')
  }
  wide = counted['float32']
  assert wide['policy values'] == wide['masters'] == wide['gradients'] // 2
  narrow = counted['bfloat16']
  assert narrow['policy values'] == 0
  assert narrow['gradients'] == 3 * narrow['masters']
  like = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
  rounded = functools.partial(train_state.policy_values, config=PLAIN)
  text = str(jax.make_jaxpr(rounded)(like))
  assert 'reduce_precision' not in text


@pytest.mark.slow
def test_values_of_masters_in_the_host_have_the_width_of_the_model():
  model = dataclasses.replace(PLAIN, compute_dtype='bfloat16')
  with platforms.targeting('tpu'):
    on_host, here = (
      memory.training(
        'train',
        model,
        groups.OptimizerOptions(
          name='adam', warmup_steps=1, decay_steps=1, offload=offload
        ),
        specs.Mesh(),
        layouts.REPLICATED,
        (8, 64, True),
      )
      for offload in (True, False)
    )
  assert here.terms['policy values'] == here.terms['masters']
  assert on_host.terms['policy values'] == here.terms['masters'] // 2
  assert on_host.terms['masters'] == 0 < on_host.host
