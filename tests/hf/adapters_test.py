"""What is exported of a model with adapters are the merged weights."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.hf import exporting, importing
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.train.checkpoints import manager
from tests.hf import checkpoints, tiny
from tests.models import adapters_test


def _placed(shapes):
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda leaf: leaf.update(sharding=here), shapes)


def _imported(fields, folder):
  source = checkpoints.write(
    folder / 'hf', fields, checkpoints.tensors(fields, checkpoints.BFLOAT16)
  )
  importing.convert(source, folder / 'ours')
  return exporting.of_import(folder / 'ours')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['qwen3_moe', 'deepseek_v3'])
def test_an_export_is_the_policy_merged(name, tmp_path):
  origin = _imported(tiny.MODELS[name], tmp_path)
  plain = origin.config
  model = dataclasses.replace(plain, adapters=adapters_test.ALL)
  shapes, _ = decoder.abstract(model)
  base = importing.load_variables(
    origin.imported, _placed(decoder.abstract(plain)[0])
  )
  rng = np.random.default_rng(0)
  trained = jax.tree.map(
    lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), jnp.float32),
    decoder.without_base(shapes),
  )
  saved = manager.Checkpoints(tmp_path / 'rl', keep=1)
  with contextlib.closing(saved):
    saved.save(4, trained)
  exporting.write(
    dataclasses.replace(
      origin,
      weights=tmp_path / 'rl',
      base=origin.weights,
      config=model,
      is_trained=True,
    ),
    tmp_path / 'out',
    dtype='float32',
  )
  importing.convert(tmp_path / 'out', tmp_path / 'again')
  again = importing.load_variables(
    tmp_path / 'again', _placed(decoder.abstract(plain)[0])
  )
  rounded = decoder.policy({**base, **trained})['adapters']
  adapters = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
  want = adapters_test.merged({**base, 'adapters': adapters}, model)
  assert want.keys() == again['params'].keys()
  for path, have in trees.flatten_names(again['params']).items():
    expected = trees.flatten_names(want)[path]
    np.testing.assert_allclose(have, expected, atol=1e-6, err_msg=path)
  for path, bias in trees.flatten_names(
    again.get('selection_bias', {})
  ).items():
    expected = trees.flatten_names(trained['selection_bias'])[path]
    np.testing.assert_array_equal(bias, expected)
  assert model_config.ModelConfig.from_dict(model.to_dict()) == model
