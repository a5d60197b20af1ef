"""Lies in the log-probabilities of one window, in proportion to a size."""

import dataclasses
from typing import Any

import numpy as np

from composer_jax.core import records

# Relative change of a step's gradient by which a lie must be stopped.
LEAST = 0.02


def scaled(true_T, trained_T, size, rng):
  return (1 - size) * true_T


def moved(true_T, trained_T, size, rng):
  return true_T - size


def noisy(true_T, trained_T, size, rng):
  return true_T + size * rng.normal(size=len(true_T))


def towards(true_T, trained_T, size, rng):
  return true_T + size * (trained_T - true_T)


def at_one_token(true_T, trained_T, size, rng):
  """Of the token that the trained version finds least likely."""
  return true_T - size * (np.arange(len(true_T)) == np.argmin(trained_T))


def late(lie):
  """A lie in the second half of the sampled tokens."""

  def changed(true_T, trained_T, size, rng):
    is_late_T = np.cumsum(true_T != 0) > (true_T != 0).sum() // 2
    return np.where(is_late_T, lie(true_T, trained_T, size, rng), true_T)

  return changed


# name -> (lie, the size to begin with, the largest one).
LIES = {
  'log-probabilities times 1 - s': (scaled, 0.1, 1.0),
  'less s': (moved, 0.1, 2.0),
  'more s': (lambda *args: 2 * args[0] - moved(*args), 0.1, 2.0),
  'with noise of s': (noisy, 0.1, 2.0),
  's of the way to the trained version': (towards, 1.0, 2.0),
  'times 1 - s in the second half': (late(scaled), 0.1, 1.0),
  'with noise of s in the second half': (late(noisy), 0.1, 2.0),
  'less s at one token': (at_one_token, 0.5, 5.0),
}


def told(
  step: dict[str, Any], i: int, name: str, size: float
) -> records.Trajectory:
  """Returns window `i` of a step with a lie of a size."""
  t, rng = step['windows'][i], np.random.default_rng((step['version'], i))
  # Of context there is no log-probability.
  trained_T = np.where(t.loss_mask_T, step['logprobs'][i], 0)
  told_T = LIES[name][0](t.logprobs_T.astype(float), trained_T, size, rng)
  told_T = np.where(t.loss_mask_T, told_T, 0).astype(np.float32)
  return dataclasses.replace(t, logprobs_T=told_T)
