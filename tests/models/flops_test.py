"""The closed forms, against literals and against the program itself."""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.kernels.attention import grouped_query as attention_kernel
from composer_jax.kernels.grouped import matmul, schedule
from composer_jax.models import attention, decoder, flops, head
from composer_jax.models import config as model_config
from configs.models import tiny
from tests.kernels.attention import reference
from tests.models import hlo_flops

# No other dimension of the variants below divides by T, a prime.
B, T = 2, 31
GQA = dict(
  kind='gqa',
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  qk_norm='none',
  qkv_bias=False,
  out_bias=False,
)
MLA = dict(
  kind='mla',
  num_heads=4,
  q_lora_dim=12,
  kv_lora_dim=10,
  nope_dim=8,
  rope_dim=6,
  value_dim=4,
  latent_norm_eps=1e-6,
)
MOE = dict(
  num_experts=6,
  num_active=2,
  ffw_dim=8,
  num_shared=1,
  router='sigmoid',
  num_groups=3,
  num_active_groups=2,
  renormalize=True,
  routed_scale=2.0,
  aux_loss_weight=0.0,
  z_loss_weight=0.0,
)


def described(*, attention=GQA, moe=MOE, **fields):
  return model_config.ModelConfig.from_dict(
    dict(
      vocab_size=48,
      embed_dim=16,
      num_layers=3,
      num_dense_layers=1,
      dense_ffw_dim=24,
      norm_eps=1e-6,
      tie_embeddings=True,
      remat=False,
      compute_dtype='float32',
      rope=dict(theta=1e4, interleaved=False, yarn=None),
      attention=attention,
      moe=moe,
    )
    | fields
  )


VARIANTS = {
  'plain': described(),
  'qk_norm_biases_untied': described(
    attention={**GQA, 'qk_norm': 'head', 'qkv_bias': True, 'out_bias': True},
    tie_embeddings=False,
  ),
  'softmax_no_dense_no_shared': described(
    attention={**GQA, 'qk_norm': 'projection'},
    moe={
      **MOE,
      'router': 'softmax',
      'num_active_groups': 3,
      'num_shared': 0,
      'num_active': 3,
    },
    num_dense_layers=0,
  ),
  'mla': described(attention=MLA, moe={**MOE, 'num_shared': 2}),
  'mla_without_q_lora_untied': described(
    attention={**MLA, 'q_lora_dim': None},
    num_dense_layers=2,
    tie_embeddings=False,
  ),
}
each_variant = pytest.mark.parametrize('name', VARIANTS)
# Without --slow: the others.
VARIANTS_ALIKE = ('plain', 'softmax_no_dense_no_shared', 'mla')


def of_config(name):
  module = importlib.import_module(f'configs.models.{name}')
  return model_config.ModelConfig.from_dict(module.get_config().to_dict())


# What papers, model cards and notes say, in billions, to the digits they give,
# and how many of the two embedding tables the active figure counts. Totals
# count both. DeepSeek's and Moonshot's cards say 37B and 32B active: with both
# tables it is 37.6B and, as our own arithmetic says of K2, 32.9B. Figures are
# rounded, but for the 3.353B that Qwen3's card cuts to 3.3B.
PUBLISHED = {
  'olmoe_7b_a1b': ('6.9', '1.3', 2),
  'moonlight_16b_a3b': ('16', '3', 2),
  'qwen3_30b_a3b': ('30.5', '3.3', 2),
  'qwen3_235b_a22b': ('235', '22', 2),
  'deepseek_v3': ('671', '37', 1),
  'kimi_k2': ('1026', '32.9', 2),
}


def params_active(config):
  """Counts the parameters of the layers that one token passes.

  Both embedding tables count whole, though a token reads one row of the first.
  """
  moe = config.moe
  skipped = config.num_moe_layers * (moe.num_experts - moe.num_active)
  return flops.params_total(config) - skipped * (
    3 * config.embed_dim * moe.ffw_dim
  )


@pytest.mark.parametrize('name', PUBLISHED)
def test_counts_are_those_published(name):
  config = of_config(name)
  total, active, tables = PUBLISHED[name]
  skipped = (2 - tables) * config.vocab_size * config.embed_dim
  for counted, said in (
    (flops.params_total(config), total),
    (params_active(config) - skipped, active),
  ):
    digits = len(said.partition('.')[2])
    if (name, said) == ('qwen3_30b_a3b', '3.3'):
      counted -= counted % 10 ** (9 - digits)
    assert f'{counted / 1e9:.{digits}f}' == said


def test_counts_without_embeddings_are_those_published():
  # Moonlight's paper, table 3; Qwen3-30B-A3B's card; Qwen3-235B-A22B's card.
  for name, total, active in (
    ('moonlight_16b_a3b', '15.29', '2.24'),
    ('qwen3_30b_a3b', '29.91', '2.73'),
    ('qwen3_235b_a22b', '233.85', '20.95'),
  ):
    config = of_config(name)
    tables = 2 * config.vocab_size * config.embed_dim
    assert f'{(flops.params_total(config) - tables) / 1e9:.2f}' == total
    assert f'{(params_active(config) - tables) / 1e9:.2f}' == active


def test_kimi_k2_counts_to_the_parameter():
  d, layers = 7168, 61
  attention = d * 1536 + 1536 * 64 * 192 + d * (512 + 64)
  attention += 512 * 64 * (128 + 128) + 64 * 128 * d
  expert = 3 * d * 2048
  norms = layers * (2 * d + 1536 + 512) + d
  expected = {
    'embedding': 2 * 163840 * d,
    'attention': layers * attention,
    'dense_ffw': 3 * d * 18432,
    'router': 60 * d * 384,
    'routed_experts': 60 * 384 * expert,
    'shared_experts': 60 * expert,
    'norms': norms,
  }
  assert flops.params_by_part(of_config('kimi_k2')) == expected
  assert sum(expected.values()) == 1_026_408_209_408
  # The advertised 1.04T counts the dense layer as a mixture too.
  mixture = 385 * expert + d * 384
  all_mixtures = sum(expected.values()) + mixture - expected['dense_ffw']
  assert f'{all_mixtures / 1e12:.3f}' == '1.043'


def test_moe_1_5t_is_what_its_name_says():
  assert f'{flops.params_total(of_config("moe_1_5t")) / 1e12:.1f}' == '1.5'


@each_variant
def test_params_equal_what_init_makes(name):
  config = VARIANTS[name]
  shapes, _ = decoder.abstract(config)
  made = dict.fromkeys(flops.params_by_part(config), 0)
  for path, leaf in trees.flatten_names(shapes['params']).items():
    made[part_of(path)] += leaf.size
  assert flops.params_by_part(config) == made
  assert flops.params_total(config) == sum(made.values())


def part_of(path):
  if 'norm' in path:
    return 'norms'
  for word, part in (
    ('embedding', 'embedding'),
    ('attention/', 'attention'),
    ('ffw/', 'dense_ffw'),
    ('router', 'router'),
    ('shared', 'shared_experts'),
  ):
    if word in path:
      return part
  return 'routed_experts'


def test_flops_equal_a_literal_count():
  # Per layer: attention 16*8*(4+4+2+2); router 16*6; three experts of 3*16*8.
  ffw = 3 * 16 * 24 + 2 * (96 + 3 * 384)
  matrices = 48 * 16 + 3 * 1536 + ffw
  scores = 3 * 4 * (8 + 8) * 32  # q k and p v over all keys of a row
  config = VARIANTS['plain']
  assert flops.forward_per_token(config, 32) == 2 * (matrices + scores)
  # MLA: queries over 12, a latent of 10 and 6 rotated, heads of 8 + 6 and 4.
  attention = 16 * 12 + 12 * 4 * 14 + 16 * 16 + 10 * 4 * 12 + 4 * 4 * 16
  matrices = 48 * 16 + 3 * attention + ffw + 2 * 384  # a second shared expert
  scores = 3 * 4 * (14 + 4) * 32
  config = VARIANTS['mla']
  assert flops.forward_per_token(config, 32) == 2 * (matrices + scores)


@each_variant
def test_causal_counts_the_mean_of_all_positions(name):
  config = VARIANTS[name]
  # The query at position t meets t + 1 keys.
  each = [flops.forward_per_token(config, t + 1) for t in range(T)]
  causal = flops.forward_per_token(config, T, causal=True)
  assert causal == pytest.approx(np.mean(each), rel=1e-12)


def test_training_is_three_forwards_in_both_conventions():
  config = VARIANTS['mla']
  for causal in (False, True):
    forward = flops.forward_per_token(config, T, causal=causal)
    assert flops.train_per_token(config, T, causal=causal) == 3 * forward


def _loss(config, variables, tokens_BT, segments_BT, positions_BT):
  out = decoder.Decoder(config).apply(
    variables, tokens_BT, segments_BT, positions_BT
  )
  logprobs_BT, _ = head.target_logprobs(
    variables, out.hidden_BTD, tokens_BT, segments_BT, None, config
  )
  return logprobs_BT.sum()


def _program(config, transform, *, backend, length=T):
  """Returns the unoptimised HLO that jax makes of B rows."""
  variables, _ = decoder.abstract(config)
  ints_BT = jax.ShapeDtypeStruct((B, length), jnp.int32)
  # The whole softmax: its products do not depend on the data.
  whole = attention_kernel.using(reference.whole)
  with matmul.using(backend), whole:
    function = transform(functools.partial(_loss, config))
    lowered = jax.jit(function).lower(variables, *[ints_BT] * 3)
  return lowered.compiler_ir('hlo').as_hlo_text()


def _forward(function):
  return function


@functools.cache
def _reference(name, transform):
  """Returns the program of a variant with experts as dense products."""
  return _program(VARIANTS[name], transform, backend='ragged')


def _counted(text, **options):
  """Returns operations per token; no loop's end is left to the data."""
  return hlo_flops.count(text, math.nan, **options) / (B * T)


def _meets_keys(*dot):
  """Whether a side or the result has one axis of queries and one of keys."""
  return any(sum(n % T == 0 for n in dims) == 2 for dims in dot)


def _routed(config):
  """Returns the part of routed experts in a token's forward pass."""
  width = config.moe.num_active * config.moe.ffw_dim
  return 2 * config.num_moe_layers * 3 * config.embed_dim * width


def _gates(config):
  """Operations of the one-hot products that pick gates."""
  moe = config.moe
  return 2 * config.num_moe_layers * moe.num_active * moe.num_experts


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(n, marks=[pytest.mark.slow] if n in VARIANTS_ALIKE else [])
    for n in VARIANTS
  ],
)
def test_flops_equal_those_of_a_dense_expert_reference(name):
  config = VARIANTS[name]
  # 'ragged' off TPU is a dense product: it multiplies each of a token's A
  # copies by all E experts, so E times the closed form for that part.
  inactive = (config.moe.num_experts - 1) * _routed(config)
  forward = flops.forward_per_token(config, T) + inactive
  train = flops.train_per_token(config, T) + 3 * inactive
  for transform, expected, gates in (
    (_forward, forward, _gates(config)),
    (jax.grad, train, 3 * _gates(config)),
  ):
    counted = _counted(_reference(name, transform))
    np.testing.assert_allclose(counted, expected, rtol=0.01)
    # Without gates the rest is small enough to miss no matrix of a layer: the
    # smallest, a router, is 0.8 %.
    np.testing.assert_allclose(counted - gates, expected, rtol=0.002)


@each_variant
def test_causal_flops_equal_those_of_the_reference_without_masked_pairs(name):
  config = VARIANTS[name]
  inactive = (config.moe.num_experts - 1) * _routed(config)
  # Pairs of the program's own mask: it computes all and uses these.
  visible = attention.visible_of(jnp.ones((1, T), jnp.int32))
  used = float((visible.end_BT - visible.start_BT).mean()) / T
  for transform, closed, passes in (
    (_forward, flops.forward_per_token, 1),
    (jax.grad, flops.train_per_token, 3),
  ):
    program = _reference(name, transform)
    scores = _counted(program, of=_meets_keys)
    counted = _counted(program) - (1 - used) * scores
    expected = closed(config, T, causal=True)
    np.testing.assert_allclose(counted, expected + passes * inactive, rtol=0.01)
    # All but scores is what no key costs.
    np.testing.assert_allclose(
      used * scores, expected - closed(config, 0), rtol=1e-6
    )


def test_flops_equal_those_of_the_blocked_program():
  config = model_config.ModelConfig.from_dict(tiny.get_config().to_dict())
  # It loops over blocks of rows of one expert: as many as the copies fill.
  length = 32
  copies = B * length * config.moe.num_active
  (rows,), _ = schedule.sizes(copies, config.moe.num_experts)
  blocks = copies / rows
  for transform, expected in (
    (_forward, flops.forward_per_token(config, length)),
    (jax.grad, flops.train_per_token(config, length)),
  ):
    text = _program(config, transform, backend='blocked', length=length)
    counted = hlo_flops.count(text, blocks) / (B * length)
    np.testing.assert_allclose(counted, expected, rtol=0.01)


def test_a_loop_counts_as_often_as_it_runs():
  def program(x):
    x = jax.lax.fori_loop(0, 5, lambda _, y: y @ y, x)
    return jax.lax.fori_loop(0, x[0, 0].astype(int), lambda _, y: y @ y, x)

  lowered = jax.jit(program).lower(jnp.zeros((3, 3)))
  text = lowered.compiler_ir('hlo').as_hlo_text()
  assert hlo_flops.count(text, dynamic_trips=2) == (5 + 2) * 2 * 27
