"""Laws of the heads for multi-token prediction and of their loss.

The reference is plain numpy of the published form (DeepSeek-V3, section 2.2),
one document after another.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from composer_jax.core import batches, trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder, flops, head, mtp
from composer_jax.plan import case as cases
from composer_jax.plan import params
from tests import compiling
from tests.models import decoder_test

DEPTH = 2
T = 12
SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], np.int32)
POSITIONS = np.array([[*range(5), *range(7)], [*range(9), 0, 0, 0]], np.int32)
SLOW = pytest.mark.slow
# One layer before the heads.
CONFIG = dataclasses.replace(
  decoder_test.CONFIG, num_layers=1, num_dense_layers=0
)
TARGETS = {
  'distribution': mtp.HeadLossOptions(),
  'top_k': mtp.HeadLossOptions(top_k=3),
  'tokens': mtp.HeadLossOptions(target='tokens'),
}


def with_heads(config, layer='moe', depth=DEPTH, **changed):
  heads = model_config.MTPConfig(depth=depth, layer=layer)
  return dataclasses.replace(config, mtp=heads, **changed)


def batch_of(vocab_size):
  random = np.random.default_rng(0)
  weights_BT = random.uniform(0.5, 1.5, SEGMENTS.shape)
  weights_BT *= (SEGMENTS != 0) & (POSITIONS != 0)
  return batches.LMBatch(
    tokens_BT=random.integers(vocab_size, size=SEGMENTS.shape, dtype=np.int32),
    segment_ids_BT=SEGMENTS,
    positions_BT=POSITIONS,
    loss_weights_BT=weights_BT.astype(np.float32),
  )


def variables_of(config):
  """Returns variables whose norms and biases have an effect."""
  shapes, _ = decoder.abstract(config)
  random = np.random.default_rng(1)

  def draw(path, leaf):
    noise = random.normal(size=leaf.shape).astype(np.float32)
    is_scale = getattr(path[-1], 'key', '') == 'scale'
    return 1 + 0.2 * noise if is_scale else 0.3 * noise

  return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def _losses(config, options):
  """Compiles the loss, its gradient by all variables, and the heads' logits."""
  batch = batch_of(config.vocab_size)

  def loss(variables):
    output = decoder.Decoder(config).apply(
      variables, batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT
    )
    heads = variables['mtp']
    arguments = (heads['params'], heads.get('selection_bias'), variables)
    total, stats = mtp.loss(
      *arguments,
      output.hidden_BTD,
      batch,
      config=config,
      plan=None,
      options=options,
    )
    made = mtp.states(
      heads, variables, output.hidden_BTD, batch, config=config, plan=None
    )
    logits = [head.logits(variables, state, config) for state, _ in made]
    main = head.logits(variables, output.hidden_BTD, config)
    return total, (stats, output, main, logits)

  step = jax.value_and_grad(loss, has_aux=True, allow_int=True)
  return jax.jit(step, compiler_options=compiling.INIT)


def expected(main_BTV, logits, batch, options):
  """Returns loss, agreement and weight of each head by definition."""
  rows = []
  for depth, logits_BTV in enumerate(logits, start=1):
    sums = np.zeros(3)
    for row, t in np.ndindex(*SEGMENTS.shape):
      to = t + depth + 1
      if to >= T or not SEGMENTS[row, t] == SEGMENTS[row, to] != 0:
        continue
      log_p_V = np.float64(jax.nn.log_softmax(logits_BTV[row, t]))
      teacher_V = np.float64(main_BTV[row, t + depth])
      if options.top_k:
        least = np.sort(teacher_V)[-options.top_k]
        teacher_V = np.where(teacher_V >= least, teacher_V, -np.inf)
      q_V = np.exp(teacher_V - teacher_V.max())
      q_V /= q_V.sum()
      if options.target == 'tokens':
        q_V = np.eye(len(q_V))[batch.tokens_BT[row, to]]
      some = q_V > 0
      kl = (q_V[some] * (np.log(q_V[some]) - log_p_V[some])).sum()
      agrees = log_p_V.argmax() == main_BTV[row, t + depth].argmax()
      sums += batch.loss_weights_BT[row, to] * np.array([kl, agrees, 1])
    rows.append(sums)
  return np.array(rows).T


@pytest.mark.slow
@pytest.mark.parametrize(
  'target, numerics',
  [
    ('distribution', 'fast'),
    pytest.param('top_k', 'fast', marks=SLOW),
    pytest.param('tokens', 'fast', marks=SLOW),
    pytest.param('distribution', 'batch_invariant', marks=SLOW),
  ],
)
def test_loss_is_the_definition_and_moves_nothing_but_heads(target, numerics):
  config, options = with_heads(CONFIG, numerics=numerics), TARGETS[target]
  variables, batch = variables_of(config), batch_of(config.vocab_size)
  (total, aux), gradients = _losses(config, options)(variables)
  stats, output, main_BTV, logits = aux
  losses_K, agrees_K, weights_K = expected(main_BTV, logits, batch, options)
  np.testing.assert_allclose(stats.loss_K, losses_K, rtol=2e-5)
  np.testing.assert_allclose(stats.agrees_K, agrees_K, rtol=1e-6)
  np.testing.assert_allclose(stats.weight_K, weights_K, rtol=1e-6)
  np.testing.assert_allclose(total, losses_K.sum(), rtol=2e-5)
  # Bit for bit: zero, and not merely small.
  others = {name: tree for name, tree in gradients.items() if name != 'mtp'}
  assert all(not np.asarray(g).any() for g in jax.tree.leaves(others))
  for gradient in jax.tree.leaves(gradients['mtp']['params']):
    assert np.abs(gradient).max() > 1e-6
  assert output.expert_ids_MBTA.shape[0] == config.num_moe_layers
  counted = [
    (SEGMENTS[:, n:] == SEGMENTS[:, :-n]) & (SEGMENTS[:, n:] != 0)
    for n in (1, 2)
  ]
  routed = [n.sum() * config.moe.num_active for n in counted]
  np.testing.assert_array_equal(stats.load_KE.sum(-1), routed)


@SLOW
@pytest.mark.parametrize('target', TARGETS)
@pytest.mark.parametrize('tied', [False, True])
def test_chunks_of_words_change_nothing_but_rounding(target, tied, monkeypatch):
  config = with_heads(CONFIG, tie_embeddings=tied)
  variables = variables_of(config)
  (_, (want, *_)), whole = _losses.__wrapped__(config, TARGETS[target])(
    variables
  )
  # Two chunks of 12 words and a rest of 8.
  monkeypatch.setattr(head, 'words_at_once', lambda *_: 12)
  (_, (have, *_)), chunked = _losses.__wrapped__(config, TARGETS[target])(
    variables
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), have, want
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=2e-5 * np.abs(b).max() + 1e-9
    ),
    chunked['mtp']['params'],
    whole['mtp']['params'],
  )


@SLOW
@pytest.mark.parametrize('target', TARGETS)
@pytest.mark.parametrize('layer', ['moe', 'dense'])
def test_gradient_is_the_slope_of_the_loss(target, layer):
  config = with_heads(CONFIG, layer)
  variables = variables_of(config)
  loss = _losses(config, TARGETS[target])
  (_, (stats, *_)), gradients = loss(variables)
  assert (stats.load_KE is None) == (layer == 'dense')
  # Along the gradient itself, where differences are largest.
  way = gradients['mtp']['params']

  def at(step):
    moved = jax.tree.map(
      lambda x, d: x + step * d, variables['mtp']['params'], way
    )
    return loss({**variables, 'mtp': {**variables['mtp'], 'params': moved}})[0][
      0
    ]

  slope = sum((g * g).sum() for g in jax.tree.leaves(way))
  step = 2e-3 / slope
  np.testing.assert_allclose(
    (at(step) - at(-step)) / (2 * step), slope, rtol=0.005
  )


@pytest.mark.parametrize('name,layer', [('gqa', 'moe'), ('mla', 'dense')])
def test_counts_know_the_heads(name, layer):
  plain = decoder_test.CONFIGS[name]
  config = with_heads(plain, layer)
  sizes = trees.flatten_names(decoder.abstract(config)[0]['mtp']['params'])
  added = sum(leaf.size for leaf in sizes.values())
  parts = flops.params_by_part(config)
  assert parts.pop('mtp') == added
  assert parts == flops.params_by_part(plain)
  # A layer, the projection, and logits of both heads with one gradient.
  one = with_heads(plain, layer, depth=1)
  extra = {'moe': 1, 'dense': 0}[layer]
  grown = dataclasses.replace(
    plain,
    num_layers=plain.num_layers + 1,
    num_dense_layers=plain.num_dense_layers + 1 - extra,
  )
  layers = [flops.train_per_token(c, T) for c in (grown, plain)]
  D = plain.embed_dim
  assert flops.heads_per_token(one, T) == (
    layers[0] - layers[1] + 6 * (2 * D * D + plain.vocab_size * D)
  )
  assert flops.heads_per_token(config, T) == 2 * flops.heads_per_token(one, T)
  assert flops.heads_per_token(plain, T) == 0


def test_plans_place_every_array_of_the_heads():
  subject = cases.make(
    with_heads(decoder_test.CONFIG).to_dict(),
    topology_name='cpu:8',
    mesh='2,2,2',
    layout='hsdp',
    dtype='float32',
  )
  placed = {p.name: p for p in params.parameters(subject)}
  sizes = dict.fromkeys(flops.params_by_part(subject.model), 0)
  for parameter in placed.values():
    if not parameter.name.endswith('bias'):
      sizes[parameter.part] += math.prod(parameter.shape)
  assert sizes == flops.params_by_part(subject.model)
  projection = placed['mtp/params/layers/projection']
  assert tuple(projection.spec) == (None, None, ('fsdp', 'context'))
  ours = placed['mtp/params/layers/moe/gate_up']
  assert ours.spec == placed['params/moe_layers/moe/gate_up'].spec


def test_a_config_without_heads_is_what_it_was():
  fields = decoder_test.CONFIG.to_dict()
  assert fields['mtp'] is None
  of = model_config.ModelConfig.from_dict
  assert of(fields) == of({**fields, 'mtp': {}}) == decoder_test.CONFIG
  assert of({**fields, 'mtp': {'depth': 2}}) == with_heads(decoder_test.CONFIG)
  with pytest.raises(
    ValueError, match='depth must be an integer of at least 1; got 0'
  ):
    of({**fields, 'mtp': {'depth': 0}})
  with pytest.raises(
    ValueError, match='top_k must be an integer of at least 0; got -1'
  ):
    mtp.HeadLossOptions(top_k=-1)
