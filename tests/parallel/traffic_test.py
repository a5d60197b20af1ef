"""The stated traffic of a step against closed forms.

golden_test.py checks it against compiled programs.
"""

import dataclasses
import math

import pytest

from composer_jax.models import flops
from composer_jax.parallel import layouts, rounds
from tests.parallel import traffic
from tests.plan import params_test


@pytest.fixture(scope='module')
def kimi_k2():
  """512 chips: two replicas of 256, experts over 128 and four to a row."""
  return params_test.case('kimi_k2', topology_name='v5p:8x8x8')


def _lines(
  case, transport='ragged_a2a', batch_size=256, seq_len=4096, **options
):
  return traffic.lines(
    case,
    traffic.Step(
      batch_size=batch_size, seq_len=seq_len, transport=transport, **options
    ),
  )


def _bytes(lines, *, least=False, **like):
  return sum(
    line.least if least else line.bytes
    for line in lines
    if all(getattr(line, name) == value for name, value in like.items())
  )


def _with(case, **change):
  return dataclasses.replace(
    case, model=dataclasses.replace(case.model, **change)
  )


def test_a_layer_gathers_its_weights_but_for_its_own_share(kimi_k2):
  parts = flops.params_by_part(kimi_k2.model)
  attention = parts['attention'] // 61
  shared, router = parts['shared_experts'] // 60, parts['router'] // 60
  lines = _lines(kimi_k2)
  gathered = _bytes(
    lines, where='mixture layer', what='dense weights', phase='forward'
  )
  # bfloat16, of 256 shares all but one; the router's scores are of float32.
  assert gathered == (2 * (attention + shared) + 4 * router) * 255 / 256
  reduced = _bytes(
    lines, where='mixture layer', what='dense weights', phase='backward'
  )
  assert reduced == 4 * (attention + shared + router) * 255 / 256
  # Both replicas have the same share, and each gets half of the other's sum.
  copies = _bytes(lines, where='mixture layer', what='copies')
  assert copies == 2 * 4 * (attention + shared + router) / 256 / 2
  # Norms lie everywhere and are summed once, after all layers.
  norms = [
    line
    for line in lines
    if line.axes == ('replica', 'fsdp', 'context') and line.what != 'statistics'
  ]
  assert {line.where for line in norms} == {'step'}
  assert _bytes(norms) == pytest.approx(2 * 4 * parts['norms'] * 511 / 512)
  # Three experts a device, of each a quarter; none has a copy anywhere.
  experts = dict(where='mixture layer', what='expert weights', phase='forward')
  assert _bytes(lines, **experts) == 2 * 3 * (3 * 7168 * 2048) * 3 / 4
  axes = {line.axes for line in lines if line.what == 'expert weights'}
  assert axes == {('replica', 'context')}


def test_experts_that_cover_all_devices_are_never_sent():
  lines = _lines(params_test.case('tiny', mesh='2,2,2'), batch_size=8)
  assert _bytes(lines, what='expert weights') == 0
  assert _bytes(lines, what='dense weights') > 0


def test_recomputation_repeats_what_the_policy_did_not_save(kimi_k2):
  again = {line.what for line in _lines(kimi_k2) if line.phase == 'recompute'}
  assert again == {'dense weights', 'expert weights'}
  every = ('weights', 'keys', 'routes')
  for change, want in (
    (dict(remat=False), set()),
    (dict(remat_saves=every), set()),
    (
      dict(remat_saves=()),
      again | {'keys'},
    ),
  ):
    lines = _lines(_with(kimi_k2, **change))
    assert {line.what for line in lines if line.phase == 'recompute'} == want
    # Recomputation repeats lines of the forward pass.
    for line in lines:
      if line.phase == 'recompute':
        assert line._replace(phase='forward') in lines


def test_context_shards_of_latent_attention_send_latents(kimi_k2):
  tokens = 256 * 4096 // 512
  lines = _lines(kimi_k2)
  keys = dict(where='mixture layer', what='keys')
  assert _bytes(lines, **keys, phase='forward') == tokens * 2 * (512 + 64)
  assert _bytes(lines, **keys, phase='backward') == tokens * 2 * (512 + 64)
  grouped = params_test.case('qwen3_30b_a3b', topology_name='h200:8')
  # Four key heads of 128, and their values.
  assert _bytes(
    _lines(grouped, batch_size=4), **keys, phase='forward'
  ) == 2048 * 2 * (2 * 4 * 128)


def test_a_copy_goes_five_times_to_or_from_its_device():
  """128 experts, 8 of them active, on 4, 32 and 128 devices."""
  for mesh, visits in (
    ((1, 4, 1), 1 - math.comb(96, 8) / math.comb(128, 8)),
    ((2, 8, 2), 1 - math.comb(124, 8) / math.comb(128, 8)),
    ((2, 32, 2), 8 / 128),
  ):
    case = params_test.on_abstract_mesh('qwen3_30b_a3b', *mesh)
    width = math.prod(mesh)
    tokens = 256 * 4096 // width
    row = 2048 * 2
    copies = tokens * 8 * (width - 1) / width
    for transport, room in (('a2a', 1.25), ('ragged_a2a', 1)):
      lines = _lines(case, transport, room=1.25)
      for what, phase, rows in (
        ('dispatch', 'forward', 1),
        ('combine', 'forward', 1),
        ('combine', 'backward', 2 + 4 / row),
        ('dispatch', 'backward', 1 + 4 / row),
      ):
        part = dict(what=what, phase=phase)
        assert _bytes(lines, **part) == pytest.approx(
          rows * room * copies * row, rel=1e-3
        )
        least = _bytes(lines, **part, least=True)
        assert least == pytest.approx(visits * tokens * (width - 1) * row)
    # Of what is routed, all that travels beside the rows.
    moved = sum(
      _bytes(lines, what=w) for w in ('dispatch', 'combine', 'routes')
    )
    assert moved <= 1.02 * 5 * copies * row


@pytest.mark.parametrize('transport', rounds.TRANSPORTS)
def test_exchanges_are_those_that_a_run_prints(transport):
  case = params_test.on_abstract_mesh('qwen3_30b_a3b', 2, 8, 2)
  step = traffic.Step(batch_size=16, seq_len=4096, transport=transport)
  lines = traffic.lines(case, step)
  sent = sum(_bytes(lines, what=what) for what in ('dispatch', 'combine'))
  shards = traffic.shards_of(case, step)
  want = rounds.bytes_received(shards, 16 * 4096 // 32 * 8, 2048 * 2)
  # Gates and their gradients.
  assert sent == pytest.approx(want, rel=1e-3)


def test_copies_everywhere_are_summed_everywhere():
  case = params_test.case('tiny', mesh='2,4,1', layout='data_parallel')
  lines = [
    line for line in _lines(case, batch_size=8) if line.what != 'statistics'
  ]
  assert {line.kind for line in lines} == {'all-reduce'}
  assert {line.axes for line in lines} == {('replica', 'fsdp')}
  layers = {'dense layer': 1, 'mixture layer': 3, 'step': 1}
  total = sum(layers[line.where] * line.least for line in lines)
  # The tied table twice, for its uses at both ends.
  twice = 2 * 4 * 7 / 8 * case.model.vocab_size * case.model.embed_dim
  assert sum(layers[line.where] * line.bytes for line in lines) == total + twice
  assert total == 2 * 4 * flops.params_total(case.model) * 7 / 8
  assert case.layout is layouts.REPLICATED


def test_one_device_sends_nothing():
  assert not _lines(params_test.case('tiny', topology_name='cpu:1'))


def test_what_does_not_divide_is_refused(kimi_k2):
  for options, message in (
    (
      dict(batch_size=250),
      r'batch size \(250\) must divide by .*replica=2 x fsdp=128 \(256\); the '
      r'nearest that does is 256',
    ),
    (
      dict(batch_size=256, seq_len=4097),
      r'sequence size \(4097\) must divide by .*context=2 \(2\); the nearest '
      r'that does is 4096',
    ),
  ):
    with pytest.raises(ValueError, match=message):
      _lines(kimi_k2, **options)
