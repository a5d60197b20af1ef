"""Routing against a reference in numpy that sorts."""

import functools
import operator

import jax
import numpy as np
import pytest

from composer_jax.models import config as model_config
from tests.models import routing


def _config(kind, num_experts, num_active, num_groups, num_active_groups, **c):
  return model_config.MoEConfig(
    num_experts=num_experts,
    num_active=num_active,
    ffw_dim=1,
    num_shared=0,
    router=kind,
    num_groups=num_groups,
    num_active_groups=num_active_groups,
    aux_loss_weight=0.0,
    z_loss_weight=0.0,
    **c,
  )


CASES = [
  _config('softmax', 5, 3, 1, 1, renormalize=True, routed_scale=1.7),
  _config('softmax', 3, 3, 1, 1, renormalize=False, routed_scale=1.0),
  _config('sigmoid', 7, 2, 1, 1, renormalize=False, routed_scale=1.0),
  _config('sigmoid', 12, 4, 4, 2, renormalize=True, routed_scale=2.5),
  _config('sigmoid', 6, 4, 3, 2, renormalize=True, routed_scale=1.0),
  _config('sigmoid', 15, 2, 3, 1, renormalize=False, routed_scale=0.5),
]
SEEDS, TOKENS = 24, 19
# The second half has few values, so many ties, and scores below zero. All its
# sums are exact: sigmoids of these logits are 0, 1/2 and 1.
FIRST_EXACT = SEEDS // 2
EXACT_LOGITS = {'softmax': [0, 1, 2], 'sigmoid': [-200, 0, 200]}


def _inputs(config):
  """Draws logits_SZE, bias_SE and valid_SZ; S is the seed."""
  rng = np.random.default_rng(config.num_experts)
  shape = (SEEDS, TOKENS, config.num_experts)
  logits_SZE = 3 * rng.normal(size=shape)
  exact_SZE = rng.choice(EXACT_LOGITS[config.router], shape)
  logits_SZE[FIRST_EXACT:] = exact_SZE[FIRST_EXACT:]
  bias_SE = rng.normal(size=(SEEDS, config.num_experts))
  bias_SE[FIRST_EXACT:] = rng.integers(-12, 5, bias_SE.shape)[FIRST_EXACT:] / 4
  if config.router == 'softmax':
    bias_SE *= 0
  valid_SZ = rng.random((SEEDS, TOKENS)) < 0.8
  return logits_SZE.astype(np.float32), bias_SE.astype(np.float32), valid_SZ


@functools.cache
def _routed():
  """Routes all cases in one program; returns its inputs and outputs."""

  def route(config, logits_ZE, bias_E, valid_Z):
    if config.router == 'softmax':
      bias_E = None
    return routing.route(
      logits_ZE, config=config, valid_BT=valid_Z, bias_E=bias_E
    )

  def route_all(inputs):
    return [
      jax.vmap(functools.partial(route, config))(*arrays)
      for config, arrays in zip(CASES, inputs)
    ]

  inputs = [_inputs(config) for config in CASES]
  return inputs, jax.device_get(jax.jit(route_all)(inputs))


def _scores(config, logits_ZE):
  if config.router == 'sigmoid':
    return 0.5 + 0.5 * np.tanh(logits_ZE / 2)
  scores_ZE = np.exp(logits_ZE)
  return scores_ZE / scores_ZE.sum(-1, keepdims=True)


def _choose(config, select_E):
  """Returns the ids, and how close another choice of groups or ids was."""
  size = config.num_experts // config.num_groups
  groups = np.arange(config.num_experts).reshape(-1, size)
  worth = np.array([np.sort(select_E[group])[-2:].sum() for group in groups])
  best = np.argsort(-worth, kind='stable')
  open_experts = np.sort(groups[best[: config.num_active_groups]].ravel())
  order = np.argsort(-select_E[open_experts], kind='stable')
  ranked = open_experts[order]
  gaps = np.abs(np.diff(worth[best]))[config.num_active_groups - 1 :][:1]
  rank_gaps = np.abs(np.diff(select_E[ranked]))[: config.num_active]
  gap = min([*gaps, *rank_gaps])
  return ranked[: config.num_active], gap


def _weigh(config, scores_E, ids_A):
  weights_A = scores_E[ids_A]
  if config.renormalize:
    weights_A = weights_A / max(weights_A.sum(), 1e-18)
  return weights_A * config.routed_scale


@pytest.mark.parametrize('case', range(len(CASES)))
def test_agrees_with_a_reference_that_sorts(case):
  config = CASES[case]
  inputs, outputs = _routed()
  num_close = 0
  for seed in range(SEEDS):
    logits_ZE, bias_E, valid_Z = (array[seed] for array in inputs[case])
    weights_ZA, ids_ZA, stats = jax.tree.map(
      operator.itemgetter(seed), outputs[case]
    )
    scores_ZE = _scores(config, logits_ZE.astype(np.float64))
    for scores_E, ids_A, weights_A in zip(scores_ZE, ids_ZA, weights_ZA):
      expected_A, gap = _choose(config, scores_E + bias_E)
      if gap < 1e-5 and seed < FIRST_EXACT:
        num_close += 1
        continue
      np.testing.assert_array_equal(ids_A, expected_A)
      expected = _weigh(config, scores_E, expected_A)
      np.testing.assert_allclose(weights_A, expected, rtol=2e-5, atol=1e-30)
    _check_statistics(
      config, stats, ids_ZA[valid_Z], logits_ZE[valid_Z], scores_ZE[valid_Z]
    )
  assert num_close < 5


def _check_statistics(config, stats, ids_ZA, logits_ZE, scores_ZE):
  """Of tokens that are no padding."""
  load_E = np.bincount(ids_ZA.ravel(), minlength=config.num_experts)
  np.testing.assert_array_equal(stats.load_E, load_E)
  share_ZE = scores_ZE / np.maximum(scores_ZE.sum(-1, keepdims=True), 1e-18)
  aux_loss = config.num_experts * share_ZE.mean(0) @ load_E / load_E.sum()
  np.testing.assert_allclose(stats.aux_loss, aux_loss, rtol=1e-5)
  lse_Z = np.logaddexp.reduce(logits_ZE.astype(np.float64), axis=-1)
  np.testing.assert_allclose(stats.z_loss, np.mean(lse_Z**2), rtol=1e-5)
