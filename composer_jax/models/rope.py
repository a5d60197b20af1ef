"""Rotary positions (Su et al. 2021, RoFormer) and their stretching (YaRN)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import platforms, rounding
from composer_jax.models import config as model_config


def angles(
  positions_BT: jax.Array, dim: int, config: model_config.RopeConfig
) -> tuple[jax.Array, jax.Array]:
  """Returns float32 cos and sin of shape [B, T, 1, dim / 2].

  Positions are within the document. YaRN's factor on queries and keys (its
  section 3.4) is part of both.
  """
  if platforms.current() != 'cpu':
    return _angles(positions_BT, dim, config)
  # The conditional keeps XLA from recomputing sines and cosines at every
  # rotation, a twentieth of a train step. No position is negative.
  shape = (*positions_BT.shape, 1, dim // 2)
  return jax.lax.cond(
    (positions_BT >= 0).any(),
    lambda: _angles(positions_BT, dim, config),
    lambda: (jnp.ones(shape), jnp.zeros(shape)),
  )


def _angles(positions_BT, dim, config):
  fraction = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
  wavelengths = config.theta**fraction
  angle = positions_BT[..., None, None].astype(jnp.float32) / wavelengths
  if config.yarn is None:
    return jnp.cos(angle), jnp.sin(angle)
  angle *= _yarn_shares(config.theta, config.yarn, dim)
  scale = rotation_scale(config.yarn)
  return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(
  x_BTNH: jax.Array,
  cos_sin: tuple[jax.Array, jax.Array],
  config: model_config.RopeConfig,
) -> jax.Array:
  """Turns pairs of dimensions by the angle of their position, in float32.

  The result has first members of pairs before second ones, interleaved or not;
  the permutation is the same for queries and keys, and changes no score.
  """
  cos, sin = cos_sin
  with jax.named_scope('rope'):
    wide = x_BTNH.astype(jnp.float32)
    if config.interleaved:
      first, second = wide[..., 0::2], wide[..., 1::2]
    else:
      first, second = jnp.split(wide, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return rounding.rounded(jnp.concatenate(turned, axis=-1), x_BTNH.dtype)


def softmax_scale(head_dim: int, config: model_config.RopeConfig) -> float:
  """Returns the factor on q k: 1 / sqrt(H), times YaRN's mscale squared.

  The square is DeepSeek's: queries and keys are each scaled by the factor of
  `mscale_all_dim`.
  """
  scale, yarn = head_dim**-0.5, config.yarn
  if yarn is None or not yarn.mscale_all_dim:
    return scale
  return scale * _mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def _mscale(factor: float, m: float) -> float:
  return 0.1 * m * math.log(factor) + 1.0


def rotation_scale(yarn: model_config.YarnConfig) -> float:
  if yarn.mscale and yarn.mscale_all_dim:
    # Equal values (DeepSeek-V3, Kimi K2) cancel here.
    whole = _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, yarn.mscale) / whole
  return _mscale(yarn.factor, 1.0)


def _yarn_shares(
  theta: float, yarn: model_config.YarnConfig, dim: int
) -> np.ndarray:
  """Returns the share that each frequency keeps, in [1 / factor, 1].

  Peng et al. 2023, section 3.2 ("NTK-by-parts"): a ramp over the dimensions,
  from those that turn `beta_fast` times within the original context to those
  that turn `beta_slow` times.
  """

  def dimension(turns: float) -> float:
    length = yarn.original_max_len / (turns * 2 * math.pi)
    return dim * math.log(length) / (2 * math.log(theta))

  low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
  if yarn.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  if low == high:
    high += 0.001  # A ramp of no length would divide by zero.
  ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
  return (ramp / yarn.factor + (1 - ramp)).astype(np.float32)
