"""Rules that span sections of a config, and the gate's section."""

import dataclasses
import json

import pytest

from composer_jax import wiring
from composer_jax.core import files, processes
from composer_jax.models import decoder
from composer_jax.optim import groups
from configs.composer import gpu, imported, tiny
from tests.pipeline import runs


def make(**changes):
  """Returns the smoke spec with fields changed, or deleted where None."""
  fields = tiny.get_config('smoke').to_dict()
  for name, value in changes.items():
    *path, field = name.split('__')
    section = fields
    for part in path:
      section = section.setdefault(part, {})
    if value is None:
      del section[field]
    else:
      section[field] = value
  return wiring.spec_of(fields)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'rl__gate__max_kll': 1.0}, r'config\.rl\.gate has no field max_kll'),
    ({'rl__gate': 'stop'}, r"config\.rl\.gate must be a section, not 'stop'"),
    (
      {'rl__gate__min_agreement': 2.0},
      r'--config\.rl\.gate\.min_agreement must be .* at most 1; got 2\.0\.',
    ),
    ({'rollout__devices': 0}, r'--config\.rollout: .*devices must .*least 1'),
    (
      {'hints__templates': []},
      r'--config\.hints\.loss\.weight \(1\.0\) needs --config\.hints\.templ',
    ),
    ({'rollout__record_routes': False}, r'rl\.replay needs the routes'),
    (
      {
        'rollout__speculation': {'drafter': 'heads'},
        'model__mtp': {'depth': 1},
        'mtp': {'cpt': 'off', 'sft': 'off', 'rl': 'off'},
      },
      r"--config\.rollout\.speculation\.drafter is 'heads', which no stage",
    ),
    (
      {'rollout__speculation': {'depth': 3}},
      r'--config\.rollout\.speculation\.depth must be 2 or 4; got 3',
    ),
    ({'delta__keep': 0}, r'--config\.delta\.keep must be at least 1; got 0'),
    ({'delta__poll_s': 0.0}, r'--config\.delta\.poll_s must be positive'),
    (
      {'delta__store': 'direct:', 'rl__placement': 'processes'},
      r"'direct:' lives in a single process: set "
      r"--config\.rl\.placement='colo",
    ),
    (
      {'model__numerics': 'batch_invariant', 'rl__seq_len': 200},
      r'--config\.rl\.seq_len: BatchShape.align must divide seq_len \(200\)',
    ),
    (
      {'rollout__experts': 'nvfp4', 'rl__gate__action': 'off'},
      r'rollout\.experts=nvfp4 samples with other experts than '
      r'--config\.model\.precision\.experts=bf16 trains.*action=off',
    ),
    (
      {
        'model__numerics': 'batch_invariant',
        'rollout__cache_dtype': 'float8_e4m3fn',
      },
      "promise the trainer's log-probabilities.*numerics 'fast'",
    ),
    (
      {'rollout__cache_dtype': 'float8_e4m3fn'},
      'max_kl_exact=1e-09 is a band for float32.*cache in float8',
    ),
    (
      {'model__precision': {'experts': 'fp8'}},
      'max_kl_exact=1e-09 would stop honest.*experts=fp8.*Set it to 1e-4',
    ),
    (
      {'model__precision': {'codes': True}},
      "precision.codes=True is for experts of few bits.*is 'bf16'",
    ),
  ],
)
def test_what_cannot_be_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    make(**changes)


def test_routes_need_not_be_recorded_where_none_is_replayed():
  spec = make(rollout__record_routes=False, rl__replay=False)
  assert not spec.engine_options().record_routes


def test_numerics_are_those_of_rollouts_and_rl():
  fast = make()
  spec = make(model__numerics='batch_invariant')
  # Pretraining and SFT, which run on a mesh, do not change.
  assert spec.lm_model == fast.lm_model == fast.model
  assert fast.batch_shape().align == 1 < spec.batch_shape().align


def test_bfloat16_has_a_wider_band():
  gates = [
    dataclasses.asdict(wiring.spec_of(c.get_config().to_dict()).rl.gate)
    for c in (tiny, gpu)
  ]
  differing = {k for k in gates[0] if gates[0][k] != gates[1][k]}
  exact = {'max_kl_exact', 'min_exact_agreement', 'max_kl_afresh'}
  assert differing == exact


@pytest.mark.parametrize('part', ['model', 'rollout'])
def test_bfloat16_under_a_band_of_float32_is_refused(part):
  """Otherwise an honest run would stop at its first step of RL."""
  rounded = {f'{part}__compute_dtype': 'bfloat16'}
  with pytest.raises(
    ValueError, match='max_kl_exact=1e-09 is a band for float'
  ):
    make(**rounded)
  wide = {'max_kl_exact': 1e-3}
  with pytest.raises(
    ValueError, match='min_exact_agreement=0.999 is a band for float'
  ):
    make(**rounded, **{f'rl__gate__{k}': v for k, v in wide.items()})
  wide |= {'min_exact_agreement': 0.97, 'max_kl_afresh': 1e-3}
  for gate in (wide, {'action': 'flag'}):
    make(**rounded, **{f'rl__gate__{k}': v for k, v in gate.items()})


def test_bfloat16_that_is_bitwise_the_same_may_have_the_tight_band():
  make(
    model__compute_dtype='bfloat16',
    rollout__compute_dtype='bfloat16',
    model__numerics='batch_invariant',
  )


def test_a_run_goes_on_under_another_gate(tmp_path):
  """Otherwise a run that its gate stopped could not go on with a wider gate."""
  spec = make(sandbox__level='static', telemetry__tensorboard=False)
  flagging = dataclasses.replace(
    spec,
    rl=dataclasses.replace(
      spec.rl, gate=dataclasses.replace(spec.rl.gate, action='flag')
    ),
  )
  for run_spec in (spec, flagging, spec):
    with runs.open_run(run_spec, tmp_path):
      pass


def test_a_run_goes_on_with_bundles_of_another_kind_elsewhere(tmp_path):
  """Its followers find the bundles in the new place."""
  options = {'sandbox__level': 'static', 'telemetry__tensorboard': False}
  moved = make(**options, delta__store='s3://x/y', delta__tier='fast')
  for spec in (make(**options), moved):
    with runs.open_run(spec, tmp_path):
      pass
    delta = files.read_json(tmp_path / 'config.json')['delta']
    assert delta == json.loads(
      json.dumps(dataclasses.asdict(spec.systems['delta']))
    )


def test_where_files_lie_on_another_host_is_not_written_down(
  tmp_path, monkeypatch
):
  options = {'sandbox__level': 'static', 'telemetry__tensorboard': False}
  with runs.open_run(make(**options), tmp_path):
    pass
  before = (tmp_path / 'config.json').read_bytes()
  second = processes._Membership(index=1, folder=tmp_path / 'fleet')
  monkeypatch.setattr(processes, '_self', second)
  with runs.open_run(make(**options, delta__store='s3://x/y'), tmp_path):
    pass
  assert (tmp_path / 'config.json').read_bytes() == before


def test_two_lines_switch_a_stage_to_muon():
  config = imported.get_config()
  plans = []
  for name in ('adam', 'muon'):
    config.sft.optimizer = name
    config.sft.learning_rate = 2e-4
    spec = wiring.spec_of(config.to_dict())
    shapes, axes = (tree['params'] for tree in decoder.abstract(spec.model))
    options = spec.sft.optimizer_options()
    plans.append(groups.plan(options, params=shapes, axes=axes))
  assert plans[0] is None
  assert plans[1] is not None and plans[1].flops > 0


def test_each_stage_has_choices_of_its_own():
  pairs = [  # The examples of tiny.py, in the form that JSON gives them.
    ['router', 'embed->route'],
    ['attention/out$', 'heads,head_dim->embed'],
  ]
  spec = make(sft__muon__qk_clip=50.0, cpt__muon__roles=pairs)
  cpt, sft = (s.optimizer_options() for s in (spec.cpt, spec.sft))
  assert sft.clips_logits and not cpt.clips_logits
  assert cpt.muon.roles == tuple(map(tuple, pairs)) and not sft.muon.roles
  assert spec.rl.optimizer_options().name == 'adam'


def test_a_workdir_from_before_muon_could_be_chosen_is_refused(tmp_path):
  """Other coefficients trained it, so the run cannot go on with these."""
  spec = make(sandbox__level='static', telemetry__tensorboard=False)
  with runs.open_run(spec, tmp_path):
    pass
  path = tmp_path / 'config.json'
  config = files.read_json(path)
  for stage in ('cpt', 'sft'):
    del config[stage]['muon']
  files.write_json(path, config)
  message = r"cpt\.muon\.coefficients is 'absent' there and 'polar_express' now"
  with pytest.raises(ValueError, match=message):
    with runs.open_run(spec, tmp_path):
      pass
