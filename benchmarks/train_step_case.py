"""Models, batches and optimizers of `train_step`, and their running steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step


def qwen3_17m() -> model_config.ModelConfig:
  """Returns the 17.6M-parameter shape that the Hugging Face peer has too."""
  return model_config.ModelConfig.from_dict(
    dict(
      vocab_size=8192,
      embed_dim=256,
      num_layers=4,
      num_dense_layers=0,
      dense_ffw_dim=512,
      norm_eps=1e-6,
      tie_embeddings=False,
      remat=False,
      compute_dtype='float32',
      numerics='fast',
      attention=dict(
        kind='gqa',
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        qk_norm='head',
        qkv_bias=False,
        out_bias=False,
      ),
      rope=dict(theta=1e4, interleaved=False, yarn=None),
      moe=dict(
        num_experts=8,
        num_active=2,
        ffw_dim=512,
        num_shared=0,
        router='softmax',
        num_groups=1,
        num_active_groups=1,
        renormalize=True,
        routed_scale=1.0,
        aux_loss_weight=0.0,
        z_loss_weight=0.0,
        replay_alpha=0.0,
      ),
    )
  )


def tiny() -> model_config.ModelConfig:
  from configs.models import tiny as tiny_config

  return model_config.ModelConfig.from_dict(tiny_config.get_config().to_dict())


def random_tokens(rows: int, length: int, vocab_size: int) -> np.ndarray:
  generator = np.random.default_rng(0)
  return generator.integers(0, vocab_size, (rows, length), np.int32)


def whole_rows(tokens_BT: np.ndarray) -> batches.LMBatch:
  """Returns a batch of one document a row."""
  return _batch(tokens_BT, tokens_BT.shape[1])


def half_rows(rows: int, length: int, vocab_size: int) -> batches.LMBatch:
  """Returns a batch of two documents a row."""
  return _batch(random_tokens(rows, length, vocab_size), length // 2)


def _batch(tokens_BT, document):
  index_T = np.arange(tokens_BT.shape[1])

  def rows(values_T, dtype):
    return jnp.asarray(np.broadcast_to(values_T, tokens_BT.shape), dtype)

  return batches.LMBatch(
    tokens_BT=jnp.asarray(tokens_BT),
    segment_ids_BT=rows(index_T // document + 1, jnp.int32),
    positions_BT=rows(index_T % document, jnp.int32),
    loss_weights_BT=rows(index_T % document > 0, jnp.float32),
  )


def adam(config: model_config.ModelConfig) -> optax.GradientTransformation:
  """Returns AdamW as torch's default has it, at 3e-4; it clips nothing."""
  options = groups.OptimizerOptions(
    name='adam',
    learning_rate=3e-4,
    adam_learning_rate=3e-4,
    warmup_steps=0,
    decay_steps=0,
    final_ratio=1.0,
    weight_decay=0.01,
    grad_clip=1e9,
    b2=0.999,
  )
  return _optimizer(config, options)


def muon(config: model_config.ModelConfig) -> optax.GradientTransformation:
  options = groups.OptimizerOptions(
    name='muon',
    learning_rate=2e-3,
    adam_learning_rate=2e-3,
    warmup_steps=1,
    decay_steps=1,
    final_ratio=0.1,
  )
  return _optimizer(config, options)


def _optimizer(config, options):
  shapes, axes = decoder.abstract(config)
  return groups.optimizer(
    options, params=shapes['params'], axes=axes['params'], total_steps=10_000
  )


class Trained:
  """A model, its batch and its compiled step; calling it trains.

  Attributes:
    compiled: compiled step, which donates its state.
    losses: losses of the last call, one a step.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    optimizer: optax.GradientTransformation,
    batch: batches.LMBatch,
    steps: int = 1,
  ):
    init = jax.jit(
      lambda key: train_state.create(decoder.init(config, key), optimizer)
    )
    self._state = init(jax.random.key(0))
    self._batch, self._steps = batch, steps
    step = train_step.make(config, optimizer, plan=None, bias_rate=1e-3)
    lowered = jax.jit(step, donate_argnums=0).lower(self._state, batch)
    self.compiled: Any = lowered.compile()
    self.losses: list[float] = []

  def __call__(self) -> float:
    """Trains and returns the number of tokens trained on."""
    metrics = []
    for _ in range(self._steps):
      self._state, step_metrics = self.compiled(self._state, self._batch)
      metrics.append(step_metrics.loss.loss)
    jax.block_until_ready(self._state)
    self.losses = [float(loss) for loss in metrics]
    return float(self._steps * self._batch.tokens_BT.size)
