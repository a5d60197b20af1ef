"""A model that learnt a little: random routers would hide faults."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.core import batches, records
from composer_jax.models import decoder
from composer_jax.rl import step as steps
from composer_jax.train import state as train_state
from tests.rl import update_test

MODEL, SHAPE = update_test.MODEL, update_test.SHAPE


def sentences(rng):
  """Returns a batch whose next token mostly follows from the last one."""
  B, T = SHAPE.rows, SHAPE.seq_len
  tokens_BT = rng.integers(0, MODEL.vocab_size, (B, T), dtype=np.int32)
  for t in range(1, T):
    rule_B = (3 * tokens_BT[:, t - 1] + 1) % MODEL.vocab_size
    is_noise_B = rng.random(B) < 0.1
    tokens_BT[:, t] = np.where(is_noise_B, tokens_BT[:, t], rule_B)
  return batches.RLBatch(
    tokens_BT=tokens_BT,
    segment_ids_BT=np.ones((B, T), np.int32),
    positions_BT=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
    loss_weights_BT=np.ones((B, T), np.float32),
    # So unlikely that the ratio stays at its cap: the policy gradient is then
    # the gradient of the likelihood.
    rollout_logprobs_BT=np.full((B, T), -50, np.float32),
    advantages_BT=np.ones((B, T), np.float32),
    temperatures_BT=np.ones((B, T), np.float32),
    expert_ids_MBTA=np.full((2, B, T, 2), records.NO_ROUTE, np.uint16),
  )


@pytest.fixture(scope='session')
def functions():
  # The same programs as those of update_test, so the XLA cache has them.
  return steps.build(decoder.Decoder(MODEL), optax.sgd(0.1))


@pytest.fixture(scope='session')
def trained(functions):
  """Training state of a model that learnt a little."""
  state = train_state.create(update_test.draw(0), optax.sgd(0.1))
  rng = np.random.default_rng(0)
  losses = []
  for _ in range(60):
    batch = sentences(rng)
    sums, _ = functions.add_microbatch(functions.policy(state), None, batch)
    num_tokens = batch.loss_weights_BT.sum()
    losses.append(float(sums.loss) / num_tokens)
    # The capped ratio doubles the gradient, so this is a step of rate 1.
    state, _ = functions.apply(state, sums, jnp.float32(5 / num_tokens))
  assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]), losses
  return state
