"""Router losses in the training loss, and sums over microbatches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.train import lm_loss

MODEL = model_config.ModelConfig.from_dict(
  {
    'vocab_size': 16,
    'embed_dim': 8,
    'num_layers': 2,
    'num_dense_layers': 0,
    'dense_ffw_dim': 8,
    'norm_eps': 1e-6,
    'tie_embeddings': True,
    'remat': False,
    'compute_dtype': 'float32',
    'attention': {
      'kind': 'gqa',
      'num_heads': 1,
      'num_kv_heads': 1,
      'head_dim': 4,
      'qk_norm': 'none',
      'qkv_bias': False,
      'out_bias': False,
    },
    'rope': {'theta': 1e4, 'interleaved': False, 'yarn': None},
    'moe': {
      'num_experts': 4,
      'num_active': 2,
      'ffw_dim': 4,
      'num_shared': 0,
      'router': 'softmax',
      'num_groups': 1,
      'num_active_groups': 1,
      'renormalize': True,
      'routed_scale': 1.0,
      'aux_loss_weight': 0.0,
      'z_loss_weight': 0.0,
    },
  }
)
BATCH = batches.LMBatch(
  tokens_BT=np.array([[1, 2, 3, 0]], np.int32),
  segment_ids_BT=np.array([[1, 1, 1, 0]], np.int32),
  positions_BT=np.array([[0, 1, 2, 0]], np.int32),
  loss_weights_BT=np.array([[0, 1, 1, 0]], np.float32),
)


def forward(variables, batch, *, model, plan, with_max_logits):
  """Returns statistics of a model with loss 3 at weight 2 and router losses."""
  x = variables['params']['x'] - 1.0
  stats = batches.RouteStats(
    load_ME=jnp.ones((2, 4), jnp.int32),
    aux_loss_M=jnp.stack([2.0 + x, jnp.float32(3.0)]),
    z_loss_M=jnp.stack([jnp.float32(4.0), 9.0 + 10.0 * x]),
    replay_agreement_M=jnp.ones(2),
    replay_replaced_M=jnp.zeros(2),
  )
  output = decoder.DecoderOutput(
    hidden_BTD=x, expert_ids_MBTA=x, agrees_MBT=x, stats=stats
  )
  return 6.0 + 4.0 * x, output


@pytest.mark.parametrize(
  'aux_weight, z_weight, expected, expected_gradient',
  [
    (0.0, 0.0, 3.0, 2.0),
    (0.5, 0.0, 3.0 + 0.5 * 5.0, 2.0 + 0.5 * 1.0),
    (0.0, 0.25, 3.0 + 0.25 * 13.0, 2.0 + 0.25 * 10.0),
    (0.5, 0.25, 3.0 + 0.5 * 5.0 + 0.25 * 13.0, 2.0 + 0.5 + 2.5),
  ],
)
def test_routers_count_by_their_weights(
  monkeypatch, aux_weight, z_weight, expected, expected_gradient
):
  monkeypatch.setattr(lm_loss, 'negative_logprob_sum', forward)
  moe = dataclasses.replace(
    MODEL.moe, aux_loss_weight=aux_weight, z_loss_weight=z_weight
  )
  (value, stats), gradient = jax.value_and_grad(lm_loss.loss, has_aux=True)(
    {'x': jnp.float32(1.0)},
    {},
    BATCH,
    model=dataclasses.replace(MODEL, moe=moe),
    plan=None,
  )
  assert float(value) == expected
  assert float(gradient['x']) == expected_gradient
  assert float(stats.loss) == 3.0
  assert float(stats.aux_loss) == 5.0
  assert float(stats.z_loss) == 13.0


def test_a_microbatch_has_its_share_of_the_losses(monkeypatch):
  """The microbatch has a quarter of the weight and half of the tokens."""
  monkeypatch.setattr(lm_loss, 'negative_logprob_sum', forward)
  moe = dataclasses.replace(MODEL.moe, aux_loss_weight=0.5, z_loss_weight=0.25)
  (value, stats), gradient = jax.value_and_grad(lm_loss.loss, has_aux=True)(
    {'x': jnp.float32(1.0)},
    {},
    BATCH,
    model=dataclasses.replace(MODEL, moe=moe),
    plan=None,
    whole=lm_loss.Totals(loss_weight=jnp.float32(8.0), num_tokens=jnp.int32(6)),
  )
  assert float(stats.loss) == 6.0 / 8
  assert float(stats.aux_loss) == 5.0 / 2
  assert float(stats.z_loss) == 13.0 / 2
  assert float(value) == 0.75 + 0.5 * 2.5 + 0.25 * 6.5
  assert float(gradient['x']) == 4.0 / 8 + 0.5 * 0.5 + 0.25 * 5.0
  assert (int(stats.num_tokens), float(stats.loss_weight)) == (3, 2.0)


def test_microbatches_add_up_but_for_maxima():
  """Maxima are over microbatches, so an overflow of any of them shows."""
  values = jnp.array([1.0, 2.0, 4.0])
  actual = lm_loss.summed(
    lm_loss.LossStats(
      loss=values,
      aux_loss=2 * values,
      z_loss=3 * values,
      loss_weight=4 * values,
      num_tokens=jnp.array([1, 2, 3]),
      load_ME=jnp.array([[[1, 0]], [[2, 5]], [[0, 1]]]),
      max_logits_LN=jnp.array([[[7.0, 1.0]], [[2.0, 8.0]], [[3.0, 3.0]]]),
      rounds_M=jnp.array([[3, 1], [2, 2], [1, 1]]),
    )
  )
  assert [float(x) for x in (actual.loss, actual.aux_loss)] == [7.0, 14.0]
  assert [float(x) for x in (actual.z_loss, actual.loss_weight)] == [21.0, 28.0]
  assert actual.num_tokens == 6
  assert actual.load_ME.tolist() == [[3, 6]]
  assert actual.max_logits_LN.tolist() == [[7.0, 8.0]]
  assert actual.rounds_M.tolist() == [3, 2]


def test_a_model_of_zeros_has_uniform_routers():
  """Then a layer's balancing loss is 1 and its z-loss log(experts)^2."""
  moe = dataclasses.replace(MODEL.moe, aux_loss_weight=0.5, z_loss_weight=0.25)
  shapes, _ = decoder.abstract(MODEL)
  params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes['params'])
  value, stats = jax.jit(
    functools.partial(
      lm_loss.loss, model=dataclasses.replace(MODEL, moe=moe), plan=None
    )
  )(params, {}, BATCH)
  z_loss = 2 * np.log(4) ** 2
  np.testing.assert_allclose(stats.loss, np.log(16), rtol=1e-6)
  np.testing.assert_allclose(stats.aux_loss, 2.0, rtol=1e-6)
  np.testing.assert_allclose(stats.z_loss, z_loss, rtol=1e-6)
  np.testing.assert_allclose(
    value, np.log(16) + 0.5 * 2 + 0.25 * z_loss, rtol=1e-6
  )
