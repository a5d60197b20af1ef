"""Logits, routes and gradients of the decoder are those of transformers.

Every model of `tiny.MODELS` gets the same random weights on both sides. A
batch has whole rows, padded rows and rows packed of several documents, which
transformers sees one by one.
"""

import functools

import numpy as np
import pytest

from tests.hf import models, tiny

LENGTHS = [[13], [5], [6, 1, 4]]
ODD_LENGTHS = [[[1]], [[7], [1], [2, 2]], [[17]]]


@functools.cache
def _ours(name):
  return models.Ours(tiny.MODELS[name])


def _compare(name, seed, lengths):
  fields, ours = tiny.MODELS[name], _ours(name)
  model = models.make(fields, seed)
  variables, table = models.to_ours(model, ours.config, ours.family)
  batch = models.batch(seed, lengths, fields['vocab_size'])
  got = ours.run(variables, table, batch)
  want = models.run_theirs(model, batch)
  want_gradients = models.as_stored(want.gradients)
  np.testing.assert_array_equal(got.expert_ids_MBTA, want.expert_ids_MBTA)
  assert np.abs(want.logits_BTV).max() > 1
  np.testing.assert_allclose(got.logits_BTV, want.logits_BTV, atol=2e-5, rtol=0)
  assert set(got.gradients) == set(want_gradients)
  for parameter, gradient in want_gradients.items():
    error = np.linalg.norm(got.gradients[parameter] - gradient)
    assert error <= 1e-4 * np.linalg.norm(gradient), parameter
  return want


@pytest.mark.parametrize('seed', [0, 1])
@pytest.mark.parametrize(
  'name',
  [
    # These have fewer options than DeepSeek-V3 and qwen3_moe_dense.
    pytest.param(
      n,
      marks=[pytest.mark.slow]
      if n in ('moonlight', 'qwen3_moe', 'olmoe')
      else [],
    )
    for n in tiny.MODELS
  ],
)
def test_logits_routes_and_gradients_are_those_of_transformers(name, seed):
  want = _compare(name, seed, LENGTHS)
  # Every parameter has an effect: no gradient is zero.
  for parameter, gradient in want.gradients.items():
    assert np.abs(gradient).max() > 1e-6, parameter


@pytest.mark.slow
def test_one_token_is_a_batch():
  _compare('deepseek_v3', 2, [[1]])


@pytest.mark.slow
@pytest.mark.parametrize('name', tiny.MODELS)
def test_more_seeds_and_shapes(name):
  for lengths in ODD_LENGTHS:
    _compare(name, 3, lengths)
  for seed in range(4, 24):
    _compare(name, seed, LENGTHS)
