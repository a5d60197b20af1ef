"""The closed forms, against literals and against the program itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models import config as model_config
from composer_jax.models import decoder, flops, head
from configs.models import tiny
from tests.models import decoder_test, hlo_flops

B, T = 4, 64
TINY = model_config.ModelConfig.from_dict(tiny.get_config().to_dict())


def test_params_total_equals_what_init_makes():
  for config in (decoder_test.CONFIG, TINY):
    shapes, _ = decoder.abstract(config)
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes['params'])]
    assert flops.params_total(config) == sum(sizes)


def test_params_active_leaves_out_the_experts_a_token_skips():
  config = decoder_test.CONFIG
  inactive = 2 * (6 - 2) * 3 * 16 * 8  # layers, experts, matrices of D by F
  total = flops.params_total(config)
  assert flops.params_active(config) == total - inactive


def test_flops_equal_a_literal_count():
  # Per layer: attention 16*4*(4+4+2+2); router 16*6; three experts of 3*16*8.
  matrices = 32 * 16 + 3 * 768 + 3 * 16 * 24 + 2 * (96 + 3 * 384)
  scores = 2 * 3 * 16 * 4.5  # q k and p v over (8 + 1) / 2 keys
  expected = 2 * (matrices + scores)
  assert flops.flops_per_token(decoder_test.CONFIG, 8) == expected


def _loss(variables, tokens_BT, segments_BT, positions_BT):
  out = decoder.Decoder(TINY).apply(
    variables, tokens_BT, segments_BT, positions_BT
  )
  logprobs_BT, _ = head.target_logprobs(
    variables, out.hidden_BTD, tokens_BT, segments_BT, None, TINY
  )
  return logprobs_BT.sum()


@functools.cache
def _counted(function):
  variables, _ = decoder.abstract(TINY)
  ints_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
  lowered = jax.jit(function).lower(variables, *[ints_BT] * 3)
  text = lowered.compiler_ir('hlo').as_hlo_text()
  copies = B * T * TINY.moe.num_active
  # The grouped matmul loops over blocks of 16 rows of one expert: as many as
  # the copies fill. Dense experts would show up as `num_experts` times that.
  return hlo_flops.count(text, dynamic_trips=copies / 16) / (B * T)


# The kernel computes the masked half of the scores too: as many as a token
# has on average in a row of 2 T - 1.
_USEFUL_AND_MASKED = flops.flops_per_token(TINY, 2 * T - 1)


def test_forward_flops_equal_those_of_the_program():
  np.testing.assert_allclose(_counted(_loss), _USEFUL_AND_MASKED, rtol=0.01)


def test_training_is_three_times_the_forward():
  # The backward pass of attention computes its scores once more.
  scores = 2 * TINY.num_layers * TINY.num_heads * TINY.head_dim * T
  np.testing.assert_allclose(
    _counted(jax.grad(_loss)), 3 * _USEFUL_AND_MASKED + scores, rtol=0.01
  )


def test_a_loop_counts_as_often_as_it_runs():
  def program(x):
    x = jax.lax.fori_loop(0, 5, lambda _, y: y @ y, x)
    return jax.lax.fori_loop(0, x[0, 0].astype(int), lambda _, y: y @ y, x)

  lowered = jax.jit(program).lower(jnp.zeros((3, 3)))
  text = lowered.compiler_ir('hlo').as_hlo_text()
  assert hlo_flops.count(text, dynamic_trips=2) == (5 + 2) * 2 * 27
