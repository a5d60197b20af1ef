"""Muon on decoders in each layout equals Muon on one device."""

import functools

import jax
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.models import decoder, placement
from composer_jax.optim import groups
from composer_jax.parallel import topology
from tests import compiling
from tests.parallel import architectures_test

CONFIG = architectures_test.ARCHITECTURES['deepseek_v3']
OPTIONS = groups.OptimizerOptions(
  learning_rate=0.1,
  adam_learning_rate=0.1,
  warmup_steps=0,
  decay_steps=0,
  # These coefficients amplify rounding least.
  muon=groups.MuonChoices(coefficients='keller'),
)


@functools.cache
def _first_update(layout):
  """Returns the first update by name; a layout of None is one device."""
  shapes, axes = (tree['params'] for tree in decoder.abstract(CONFIG))
  places = None
  if layout:
    mesh_shape, table = architectures_test.LAYOUTS[layout]
    mesh = topology.make_mesh(*mesh_shape)
    where = dict(layout=table, mesh=mesh)
    places = placement.variable_shardings(CONFIG, **where)['params']
  transform = groups.optimizer(
    OPTIONS, params=shapes, axes=axes, total_steps=10, shardings=places
  )
  random = np.random.default_rng(0)
  params, gradients = (
    jax.tree.map(lambda s: random.normal(size=s.shape).astype('f4'), shapes)
    for _ in range(2)
  )
  if places:
    params, gradients = (jax.device_put(t, places) for t in (params, gradients))
  step = jax.jit(
    lambda p, g: transform.update(g, transform.init(p), p)[0],
    compiler_options=compiling.QUICKLY,
  )
  return trees.flatten_names(jax.device_get(step(params, gradients)))


def _check(layout):
  expected = _first_update(None)
  for name, update in _first_update(layout).items():
    np.testing.assert_allclose(
      update, expected[name], rtol=0, atol=1e-5, err_msg=name
    )


# The axis `replica` of size one is in the experts' specs.
@pytest.mark.slow
def test_a_decoder_on_the_mesh_of_training_equals_one_device():
  _check('fsdp4_cp2')


@pytest.mark.slow
@pytest.mark.parametrize('layout', ['cp2_ep8', 'data_parallel'])
def test_a_decoder_on_other_meshes_equals_one_device(layout):
  _check(layout)
