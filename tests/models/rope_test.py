"""Rotary positions: relative, permutable, stretched by YaRN."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models import config as model_config
from composer_jax.models import rope

DIM, THETA = 8, 100.0
PLAIN = model_config.RopeConfig(theta=THETA, interleaved=False, yarn=None)


def yarn(**change):
  fields = dict(
    factor=4.0,
    original_max_len=64,
    beta_fast=4.0,
    beta_slow=1.0,
    mscale=None,
    mscale_all_dim=None,
    truncate=True,
  )
  stretched = model_config.YarnConfig(**(fields | change))
  return model_config.RopeConfig(theta=THETA, interleaved=False, yarn=stretched)


def frequencies(config):
  """Reads them off the angle of position 1, which is below pi."""
  cos, sin = rope.angles(jnp.array([[1]]), DIM, config)
  return np.arctan2(sin, cos)[0, 0, 0], np.hypot(sin, cos)[0, 0, 0]


def test_angles_are_positions_over_wavelengths():
  cos, sin = rope.angles(jnp.array([[0, 3]]), DIM, PLAIN)
  want = np.array([[0] * 4, 3 / THETA ** (np.arange(4) / 4)])
  np.testing.assert_allclose(cos[0, :, 0], np.cos(want), atol=1e-6)
  np.testing.assert_allclose(sin[0, :, 0], np.sin(want), atol=1e-6)


@pytest.mark.parametrize('interleaved', [False, True])
def test_scores_depend_on_the_distance_alone(interleaved):
  config = dataclasses.replace(PLAIN, interleaved=interleaved)
  random = np.random.default_rng(0)
  q, k = random.normal(size=(2, 1, 2, 1, DIM)).astype(np.float32)

  def score(q_position, k_position):
    turned = [
      rope.rotate(
        x[:, :1],
        rope.angles(jnp.array([[position]]), DIM, config),
        config,
      )
      for x, position in ((q, q_position), (k, k_position))
    ]
    return float((turned[0] * turned[1]).sum())

  np.testing.assert_allclose(score(9, 5), score(4, 0), rtol=1e-5)
  assert abs(score(9, 5) - score(9, 6)) > 1e-3


def test_interleaved_pairs_are_neighbours():
  x = np.random.default_rng(1).normal(size=(1, 3, 2, DIM)).astype(np.float32)
  cos_sin = rope.angles(jnp.arange(3)[None], DIM, PLAIN)
  # As complex numbers, times e^(i angle).
  pairs = x[..., 0::2] + 1j * x[..., 1::2]
  want = pairs * (np.asarray(cos_sin[0]) + 1j * np.asarray(cos_sin[1]))
  neighbours = dataclasses.replace(PLAIN, interleaved=True)
  have = rope.rotate(jnp.asarray(x), cos_sin, neighbours)
  np.testing.assert_allclose(have[..., :4], want.real, atol=1e-6)
  np.testing.assert_allclose(have[..., 4:], want.imag, atol=1e-6)
  # The same weights in the other order give the same pairs.
  halves = np.concatenate([x[..., 0::2], x[..., 1::2]], -1)
  np.testing.assert_array_equal(
    rope.rotate(jnp.asarray(halves), cos_sin, PLAIN), have
  )


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
  # Over 64 positions the four dimensions turn 10.2, 3.2, 1.02 and 0.32 times.
  # The ramp begins at the last that turns over 4 times (0.8 -> 0) and ends at
  # the first below once (2.01 -> 3).
  kept, scale = frequencies(yarn())
  plain, one = frequencies(PLAIN)
  shares = [1, 1 - 0.25, 1 - 0.5, 1 / 4]
  np.testing.assert_allclose(kept / plain, shares, rtol=1e-5)
  np.testing.assert_allclose(one, 1, rtol=1e-6)
  np.testing.assert_allclose(scale, 0.1 * math.log(4) + 1, rtol=1e-6)


def test_yarn_without_rounding_of_the_ramp():
  kept, _ = frequencies(yarn(truncate=False))
  plain, _ = frequencies(PLAIN)
  low, high = (
    DIM * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(THETA))
    for turns in (4, 1)
  )
  ramp = np.clip((np.arange(4) - low) / (high - low), 0, 1)
  np.testing.assert_allclose(kept / plain, 1 - ramp * 3 / 4, rtol=1e-5)


@pytest.mark.parametrize(
  'mscale,all_dim,rotation,softmax',
  [
    (None, None, 0.1 * math.log(4) + 1, 1),
    # Equal values cancel on the rotated part (DeepSeek-V3, Kimi K2).
    (1.0, 1.0, 1, (0.1 * math.log(4) + 1) ** 2),
    (
      0.5,
      2.0,
      (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1),
      (0.2 * math.log(4) + 1) ** 2,
    ),
  ],
)
def test_mscale(mscale, all_dim, rotation, softmax):
  config = yarn(mscale=mscale, mscale_all_dim=all_dim)
  _, scale = frequencies(config)
  np.testing.assert_allclose(scale, rotation, rtol=1e-6)
  np.testing.assert_allclose(
    rope.softmax_scale(16, config), softmax / 4, rtol=1e-6
  )


def test_factor_one_stretches_nothing():
  for have, want in zip(
    rope.angles(jnp.arange(9)[None], DIM, yarn(factor=1.0)),
    rope.angles(jnp.arange(9)[None], DIM, PLAIN),
    strict=True,
  ):
    np.testing.assert_array_equal(have, want)
