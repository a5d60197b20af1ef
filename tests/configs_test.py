"""Every file in configs/ loads, is documented, and describes a whole run."""

import ast
import dataclasses
import importlib.util
import pathlib
import re

import jax
import ml_collections
import pytest
from absl import flags
from ml_collections import config_flags

from composer_jax import wiring
from composer_jax.models import config as model_config
from composer_jax.models import decoder, flops
from composer_jax.rollout import forward
from tests.models import flops_test

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = sorted(
  path
  for path in (ROOT / 'configs').glob('*/*.py')
  if not path.name.startswith('_')
)
MODELS = [p for p in CONFIGS if p.parent.name == 'models']
COMPOSERS = [p for p in CONFIGS if p.parent.name == 'composer']
SERVERS = [p for p in CONFIGS if p.parent.name == 'serve']  # tests/serve
TASK_SETS = [p for p in CONFIGS if p.parent.name == 'tasks']  # tests/tasks

# Arguments other than '', as the docstrings name them after a colon.
ARGUMENTS = {
  'composer/tiny.py': ('smoke',),
  'composer/gpu.py': ('smoke',),
  'tasks/packages.py': ('small',),
}


def name_of(path: pathlib.Path) -> str:
  return str(path.relative_to(ROOT / 'configs'))


each = pytest.mark.parametrize('path', CONFIGS, ids=name_of)
each_composer = pytest.mark.parametrize(
  'path, argument',
  [(p, a) for p in COMPOSERS for a in ('', *ARGUMENTS.get(name_of(p), ()))],
  ids=lambda value: (
    name_of(value) if isinstance(value, pathlib.Path) else value
  ),
)


def load(path: pathlib.Path):
  name = '_'.join(path.relative_to(ROOT).with_suffix('').parts)
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def tiny() -> ml_collections.ConfigDict:
  return load(ROOT / 'configs' / 'composer' / 'tiny.py').get_config()


def leaves(config, prefix=''):
  """Yields (dotted name, value) of everything that is not a ConfigDict."""
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield prefix + name, value


def test_there_are_configs():
  assert ROOT / 'configs' / 'composer' / 'tiny.py' in COMPOSERS
  assert MODELS
  # A config that is in neither list would be loaded and never built.
  assert sorted(MODELS + COMPOSERS + SERVERS + TASK_SETS) == CONFIGS


@each
def test_config_loads(path):
  assert ast.get_docstring(ast.parse(path.read_bytes())), f'{path}: docstring'
  config = load(path).get_config()
  assert isinstance(config, ml_collections.ConfigDict)
  values = dict(leaves(config))
  assert values, f'{path} sets nothing'
  # The only types that YAML and the command line have.
  for name, value in values.items():
    kinds = (bool, int, float, str, tuple, list, type(None))
    assert isinstance(value, kinds), f'{path}: {name} is a {type(value)}'


@each
def test_two_loads_share_nothing(path):
  module = load(path)
  first, second = module.get_config(), module.get_config()
  with first.unlocked():
    for name in list(first):
      del first[name]
  assert dict(leaves(second)) == dict(leaves(module.get_config()))


@each
def test_documented_arguments_are_those_that_work(path):
  known = ARGUMENTS.get(name_of(path), ())
  text = path.read_text()
  for argument in known:
    assert f'.py:{argument}`' in text, f'{path} does not document {argument!r}'
    assert dict(leaves(load(path).get_config(argument)))
  with pytest.raises(ValueError, match="'nonsense'"):
    load(path).get_config('nonsense')


def counted(config: model_config.ModelConfig) -> int:
  shapes, axes = decoder.abstract(config)
  for shape, names in zip(
    jax.tree.leaves(shapes),
    jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, jax.P)),
    strict=True,
  ):
    assert len(shape.shape) == len(names), (shape, names)
  return sum(s.size for s in jax.tree.leaves(shapes['params']))


each_model = pytest.mark.parametrize('path', MODELS, ids=name_of)


def described(path: pathlib.Path) -> model_config.ModelConfig:
  fields = load(path).get_config().to_dict()
  return model_config.ModelConfig.from_dict(fields)


@each_model
def test_model_is_describable(path):
  config = described(path)
  assert counted(config) == flops.params_total(config)


@each_model
def test_model_docstring_states_its_counts(path):
  config = described(path)
  text = ' '.join(str(ast.get_docstring(ast.parse(path.read_bytes()))).split())
  units = {'M': 1e6, 'B': 1e9}
  match = re.search(
    r'([\d.]+)([MB]) parameters, ([\d.]+)([MB]) of them active', text
  )
  assert match, f'{path} does not state its parameters'
  total, total_unit, active, active_unit = match.groups()
  assert f'{flops.params_total(config) / units[total_unit]:.2f}' == total
  assert (
    f'{flops_test.params_active(config) / units[active_unit]:.2f}' == active
  )
  match = re.search(r'([\d,]+) bytes per token in bfloat16', text)
  assert match, f'{path} does not state the size of its cache'
  pools = jax.eval_shape(lambda: forward.empty_cache(config, 1, 1))
  cache_bytes = 2 * sum(x.size for x in jax.tree.leaves(pools))
  assert f'{cache_bytes:,}' == match.group(1)


@each_model
def test_model_survives_its_own_dictionary(path):
  config = described(path)
  assert model_config.ModelConfig.from_dict(config.to_dict()) == config


def test_big_models_recompute_and_use_bfloat16():
  big = [c for c in map(described, MODELS) if flops.params_total(c) > 5e9]
  assert len(big) == 7
  for config in big:
    assert config.remat and config.compute_dtype == 'bfloat16', config


@each_composer
def test_composer_is_a_whole_run(path, argument):
  config = load(path).get_config(argument)
  spec = wiring.spec_of(config.to_dict())
  # The spec holds what the config says; all else is at its default.
  shown = {name for name, _ in leaves(config)}
  resolved = {e.name: e for e in wiring.resolved(config.to_dict())}
  held = dict(flattened('', spec.as_dict()))
  for name, value in leaves(config):
    assert held[name] == value, name
  for name, entry in resolved.items():
    assert name in shown or entry.value == entry.default, name
  assert counted(spec.model) == flops.params_total(spec.model)
  # A run builds these from its sections later.
  spec.cpt.optimizer_options(), spec.sft.optimizer_options()
  spec.rl.optimizer_options(), spec.update_options(), spec.engine_options()
  spec.systems['sandbox'].limits()


def flattened(name, value):
  if isinstance(value, dict):
    for key, inner in value.items():
      yield from flattened(f'{name}.{key}' if name else key, inner)
  else:
    yield name, value


def test_the_main_config_shows_what_a_researcher_changes():
  assert len(list(leaves(tiny()))) <= 110


def test_every_field_says_what_it_means():
  entries = list(wiring.resolved(tiny().to_dict()))
  assert len(entries) > 200
  # A model's fields are explained by its own config class.
  assert not [e.name for e in entries if len(e.meaning) < 8]


def overridden(*overrides):
  """The config as the command line makes it."""
  arguments = ['test', f'--config={ROOT / "configs/composer/tiny.py"}']
  arguments += [f'--config.{o}' for o in overrides]
  values = flags.FlagValues()
  config = config_flags.DEFINE_config_file(
    'config',
    flag_values=values,
    sys_argv=arguments,
    lock_config=False,
    accept_new_attributes=True,
  )
  values(arguments)
  return config.value.to_dict()


def test_every_field_can_be_set_on_the_command_line():
  """Also those that the config does not show, in sections within sections."""

  def said(value):
    if isinstance(value, tuple):
      return repr(value)
    return value

  entries = {
    e.name: e
    for e in wiring.resolved(tiny().to_dict())
    # The command line cannot write None; texts of templates are quoted.
    if e.value is not None and e.name != 'hints.templates'
  }
  again = overridden(*(f'{n}={said(e.value)}' for n, e in entries.items()))
  spec = wiring.spec_of(again)
  held = dict(flattened('', spec.as_dict()))
  assert {n: held[n] for n in entries} == {
    n: e.value for n, e in entries.items()
  }


@pytest.mark.parametrize(
  'override, message',
  [
    ('rl.stepz=5', r'config\.rl has no field stepz\. Did you mean steps\?'),
    ('cpt.muon.rolez=1', r'cpt\.muon has no field rolez\. .* mean roles\?'),
    ('seeed=1', r'config has no field seeed\. Did you mean seed\?'),
    ('sandbox.file_bytes=big', r'file_bytes must be a whole number, not .big'),
    ('rollout.share_prefixes=perhaps', 'share_prefixes must be true or false'),
    ('model.embed=9', r'has no field embed\b.*embed_dim'),
  ],
)
def test_a_misspelt_override_is_refused_with_what_it_may_mean(
  override, message
):
  with pytest.raises(ValueError, match=message):
    wiring.spec_of(overridden(override))


def test_fields_that_a_section_does_not_name_keep_their_default():
  fields = tiny().to_dict()
  fields['hints'] = {'loss': {'divergence': 'jsd'}}
  loss = wiring.spec_of(fields).hints
  assert loss.divergence == 'jsd' and loss.weight == 1.0


SECTIONS = [n for n, v in tiny().items() if isinstance(v, dict | type(tiny()))]
each_section = pytest.mark.parametrize(
  'section',
  [
    *SECTIONS,
    'cpt.muon',
    'rl.mesh',
    'rl.loss',
    'hints.loss',
    'tasks.repository',
    'tasks.repository.bounds',
    'model.attention',
    'model.rope',
    'model.moe',
  ],
)


@each_section
def test_misspelt_key_is_named(section):
  fields = tiny().to_dict()
  inner = fields
  for name in section.split('.'):
    inner = inner[name]
  inner['num_expert'] = 8
  with pytest.raises(ValueError, match=r'num_expert\b'):
    wiring.spec_of(fields)


@pytest.mark.parametrize(
  'section, missing',
  [('cpt', 'steps'), ('sft', 'seq_len'), ('model', 'embed_dim')],
)
def test_a_field_without_default_is_asked_for(section, missing):
  fields = tiny().to_dict()
  del fields[section][missing]
  with pytest.raises(ValueError, match=missing):
    wiring.spec_of(fields)


def test_misspelt_key_of_another_attention_is_named():
  fields = load(ROOT / 'configs' / 'models' / 'kimi_k2.py').get_config()
  fields = fields.to_dict()
  for section in (fields['attention'], fields['rope']['yarn']):
    section['latent_dim'] = 512
    with pytest.raises(ValueError, match='latent_dim'):
      model_config.ModelConfig.from_dict(fields)
    del section['latent_dim']


def test_misspelt_section_is_named():
  fields = tiny().to_dict()
  fields['rollouts'] = fields.pop('rollout')
  with pytest.raises(ValueError, match='no field rollouts.*mean rollout'):
    wiring.spec_of(fields)


@pytest.mark.parametrize(
  'name, value, message',
  [
    ('layout', 'pipeline', 'pipeline'),
    ('mesh.fsdp', 0, r'config\.mesh\.fsdp .* 1; got 0'),
    ('model.attention.kind', 'mqa', "'mqa'"),
    ('model.attention.kind', 'mla', 'MLAConfig .*kv_lora_dim'),
    ('model.attention.num_kv_heads', 3, 'num_kv_heads .* got 3'),
    ('model.attention.head_dim', 31, 'head_dim .* got 31'),
    ('model.attention.qk_norm', 'l2', "qk_norm .*'l2'"),
    ('model.rope.theta', 0.0, r'RopeConfig\.theta .* got 0\.0'),
    ('model.rope.yarn', {'factor': 2.0}, 'YarnConfig .*beta_fast'),
    ('model.moe.num_groups', 0, r'num_groups .* got 0'),
    ('model.moe.num_active_groups', 2, 'num_active_groups .* got 2'),
    ('model.moe.routed_scale', 0.0, r'routed_scale .* got 0\.0'),
    ('model.moe.z_loss_weight', -1.0, r'z_loss_weight .* -1\.0'),
    ('model.compute_dtype', 'float16', 'float16'),
    ('model.moe.num_active', 9, 'num_active .* got 9'),
    ('model.moe.router', 'top', 'top'),
    ('data.sources', (), 'data.sources'),
    ('data.heldout_share', 1.5, '1.5'),
    # mesh.replica * mesh.fsdp is 2.
    ('cpt.batch_size', 5, r'cpt\.batch_size \(5\) .* fsdp \(2\).* is 4'),
    ('sft.batch_size', 1, r'sft\.batch_size \(1\) .* fsdp \(2\).* is 2'),
    ('seed', -1, r'seed must be .* at least 0; got -1'),
    ('cpt.accumulate', 0, r'accumulate must be .* at least 1; got 0'),
    ('cpt.accumulate', 3, r'batch_size \(16\) .*accumulate \(3\).* or 18'),
    # Zigzag order gives each context shard two pieces of a row.
    ('mesh.context', 3, r'cpt\.seq_len \(256\) .* context .*\(6\).* or 258'),
    ('mesh.context', 80, r'cpt\.seq_len \(256\) .*zigzag.*\(160\).* or 320'),
    ('parallel.transport', 'nccl', r"transport .*'ragged_a2a'.*'nccl'"),
    ('parallel.transport', 'ring', r"transport .*'a2a'.*'ring'"),
    ('parallel.buckets', (1.25,), r'no field buckets.*room'),
    ('parallel.room', 0.0, r'room must be positive; got 0\.0'),
    ('parallel.room', -1.0, r'room must be positive; got -1\.0'),
    ('parallel.sequence_order', 'striped', "'zigzag'.*'striped'"),
    ('model.remat_saves', ('key',), r"remat_saves must be of .*'keys'.*'key',"),
    ('rl.mesh.fsdp', 3, r'rl\.rows \(8\) .*replica x fsdp \(3\).* or 9'),
    ('rl.mesh.context', 7, r'rl\.seq_len \(384\) .*\(14\).* or 392'),
    ('rl.mesh.context', 0, r'rl\.mesh\.context .* 1; got 0'),
    ('cpt.warmup_steps', 10**6, r'warmup_steps \(1000000\)'),
    ('cpt.optimizer', 'sgd', 'sgd'),
    ('sft.learning_rate', 0.0, r'config\.sft: .*learning_rate .* got 0\.0'),
    ('cpt.grad_clip', 0.0, r'config\.cpt: .*grad_clip .* got 0\.0'),
    ('cpt.muon.coefficients', 'kellar', r"config\.cpt\.muon\.coeff.*'kellar'"),
    ('cpt.muon.method', 'fast', "'fast'"),
    ('sft.muon.dtype', 'float16', r"config\.sft\.muon\.dtype .*'float16'"),
    ('cpt.muon.qk_clip', -1.0, r'qk_clip .* at least 0; got -1\.0'),
    ('cpt.muon.rms', 0.0, r'rms must be positive; got 0\.0'),
    ('cpt.muon.beta', 1.0, r'beta .* got 1\.0'),
    ('cpt.muon.roles', (('router',),), r'must hold 2 values'),
    ('sft.muon.roles', (('routr', 'adam'),), r"sft\.muon\.roles: .*'routr'"),
    ('cpt.muon.roles', (('router', 'embed->ffw'),), 'router.*embed->ffw'),
    ('demonstrations.wrong_edit', 1.5, r'wrong_edit .* got 1\.5'),
    ('episode.max_tokens', 10**6, r'max_tokens \(1000000\)'),
    ('rewards.invalid_penalty', -1.0, r'invalid_penalty .* got -1\.0'),
    ('episode.temperature', 0.0, r'temperature .* got 0\.0'),
    ('episode.temperature', float('inf'), r'temperature .* got inf'),
    ('sandbox.level', 'docker', 'docker'),
    ('sandbox.wall_s', 0.0, 'wall_s'),
    ('rollout.num_slots', 0, 'num_slots'),
    ('rl.placement', 'remote', 'remote'),
    ('rl.reward', 'judge', 'judge'),
    ('rl.rollouts_per_prompt', 1, 'rollouts_per_prompt'),
    ('rl.loss.ratio_cap', 0.5, r'rl\.loss\.ratio_cap .* got 0\.5'),
    ('rl.loss.name', 'ppo', r"rl\.loss\.name must be one of .* got 'ppo'"),
    ('rl.loss.bounds', (1.0, 2.0), "bounds .* mean nothing to 'tis'"),
    ('tasks.family', 'puzzles', r"tasks\.family .*'deletion'.* not 'puzzles'"),
    (
      'tasks.family',
      'deletion',
      r"tasks\.folder \(''\) is needed .*make_tasks",
    ),
    ('tasks.folder', 'set', r"tasks\.folder \('set'\) .*'list_functions'"),
    ('tasks.tiers', ('line',), r"tasks\.tiers .*'body'.* no \['line'\]"),
    ('tasks.repository.tools', ('raed',), r"tasks\.repository: .*'raed'"),
    (
      'tasks.repository.bounds.run_s',
      0.0,
      r'bounds\.run_s must be positive; got 0\.0',
    ),
    (
      'summary.trigger',
      10**6,
      r'config\.summary: .*trigger must .* got 1000000',
    ),
    ('summary.max_tokens', 0, r'config\.summary\.max_tokens .* got 0'),
    ('rewards.effort_scale', 0.0, r'rewards\.effort_scale .* got 0\.0'),
    ('rewards.version', -1, r'version .* got -1'),
    ('hints.templates', (('typo', 'no'),), r"hints\.templates .*\['typo'\]"),
    ('hints.templates', (), r'hints\.loss\.weight \(1\.0\) needs'),
    ('hints.loss.teacher', 'live', r"config\.hints\.loss\.teacher .*'live'"),
    ('curriculum.candidates', 0, r'curriculum\.candidates .* got 0'),
    ('rl.max_staleness', -1, 'max_staleness'),
    ('rl.adam_b1', 1.5, r'config\.rl: .*b1 must .* below 1; got 1\.5'),
    ('cpt.warmup_steps', -1, r'cpt.*warmup_steps must .* got -1'),
    ('rl.mismatch_every', -1, r'rl\.mismatch_every .* least 0; got -1'),
    ('rl.episodes_every', 0, r'rl\.episodes_every .* least 1; got 0'),
    ('rl.max_restarts', -1, r'rl\.max_restarts .* least 0; got -1'),
    ('rl.wait_timeout_s', 0.0, r'rl\.wait_timeout_s .* got 0\.0'),
    ('rl.learning_rate', -1.0, r'config\.rl: .*learning_rate .* got -1\.0'),
    ('rl.grad_clip', 0.0, r'config\.rl: .*grad_clip .* got 0\.0'),
    ('rl.warmup_steps', 10**6, r'warmup_steps \(1000000\)'),
    ('sandbox.workers', 0, r'sandbox\.workers'),
    ('evaluation.episodes', 0, 'episodes'),
  ],
)
def test_impossible_value_is_named(name, value, message):
  fields = tiny().to_dict()
  *sections, field = name.split('.')
  inner = fields
  for section in sections:
    inner = inner.setdefault(section, {})
  inner[field] = value
  with pytest.raises(ValueError, match=message):
    wiring.spec_of(fields)


def test_an_import_needs_room_for_the_frame_of_a_query():
  spec = wiring.spec_of(tiny().to_dict())
  few, enough = (
    dataclasses.replace(spec.summary, trigger=300, max_tokens=n)
    for n in (9, 10)
  )
  dataclasses.replace(spec, summary=few)
  dataclasses.replace(spec, initial='import', summary=enough)
  with pytest.raises(ValueError, match=r'summary\.max_tokens must .* not 9'):
    dataclasses.replace(spec, initial='import', summary=few)


def test_rl_in_numerics_of_one_device_on_a_mesh_is_refused():
  fields = tiny().to_dict()
  fields['model']['numerics'] = 'batch_invariant'
  wiring.spec_of(fields)
  fields['rl']['mesh'] = {'replica': 2}
  with pytest.raises(ValueError, match=r"rl\.mesh has 2 .*'batch_invariant'"):
    wiring.spec_of(fields)


def test_an_engine_shares_frozen_weights_in_their_dtype_on_one_device():
  fields = tiny().to_dict()
  fields['model']['adapters'] = {'attention': 2}
  fields['initial'], fields['sft']['optimizer'] = 'import', 'adam'
  fields['cpt']['optimizer'] = 'adam'
  fields['rollout']['compute_dtype'] = 'bfloat16'
  fields['rl']['gate'] = {'action': 'off'}
  spec = wiring.spec_of(fields)
  assert spec.shares_base
  for name, field, value in (
    ('rollout', 'compute_dtype', 'float32'),
    ('rollout', 'devices', 2),
    ('model', 'adapters', {}),
  ):
    other = {**fields, name: {**fields[name], field: value}}
    assert not wiring.spec_of(other).shares_base, field
