"""A model small enough to serve in tests, without running an initialiser."""

import jax
import numpy as np
import pytest

from composer_jax.models import config as config_lib
from composer_jax.models import decoder


def _config(**overrides) -> config_lib.ModelConfig:
  fields = {
    'vocab_size': 40,
    'embed_dim': 16,
    'num_layers': 3,
    'num_dense_layers': 1,
    'dense_ffw_dim': 24,
    'attention': {
      'kind': 'gqa',
      'num_heads': 4,
      'num_kv_heads': 2,
      'head_dim': 8,
      'qk_norm': 'none',
      'qkv_bias': False,
      'out_bias': False,
    },
    'rope': {'theta': 1e4, 'interleaved': False, 'yarn': None},
    'norm_eps': 1e-6,
    'tie_embeddings': True,
    'remat': False,
    'compute_dtype': 'float32',
    'moe': {
      'num_experts': 4,
      'num_active': 2,
      'ffw_dim': 8,
      'num_shared': 1,
      'router': 'sigmoid',
      'num_groups': 1,
      'num_active_groups': 1,
      'renormalize': True,
      'routed_scale': 1.5,
      'aux_loss_weight': 0.0,
      'z_loss_weight': 0.0,
    },
  }
  fields.update(overrides)
  return config_lib.ModelConfig.from_dict(fields)


def _variables(config: config_lib.ModelConfig, seed: int):
  """Draws every array from a normal, scaled so that layers matter."""
  rng = np.random.default_rng(seed)
  shapes, _ = decoder.abstract(config)
  return jax.tree.map(
    lambda x: (0.3 * rng.normal(size=x.shape)).astype(np.float32), shapes
  )


@pytest.fixture(scope='session')
def make_config():
  return _config


@pytest.fixture(scope='session')
def make_variables():
  return _variables
