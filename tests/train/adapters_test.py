"""A stage that trains adapters, its masters and moments in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.train.checkpoints import manager
from tests.train import loop_test

MODEL = dataclasses.replace(
  loop_test.MODEL, adapters=model_config.AdapterConfig(attention=3, routed=2)
)
OPTIONS = dataclasses.replace(
  loop_test.OPTIONS,
  optimizer=dataclasses.replace(
    loop_test.OPTIONS.optimizer, name='adam', state='bfloat16'
  ),
)


def _initial():
  variables = loop_test.initial_variables(MODEL)
  return {
    **variables,
    'params': jax.tree.map(
      lambda x: jnp.asarray(x, jnp.bfloat16), variables['params']
    ),
  }


@pytest.mark.slow
def test_it_resumes_bit_for_bit_without_its_frozen_weights(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(loop_test, 'MODEL', MODEL)
  loop_test.placed.cache_clear()
  train = lambda folder, stream=None: loop_test.train(
    folder, options=OPTIONS, stream=stream, initial=_initial()
  )
  straight, killed = tmp_path / 'straight', tmp_path / 'killed'
  want = train(straight)
  with pytest.raises(KeyboardInterrupt):
    train(killed, loop_test.CountingStream(stop_at=4))
  have = train(killed)
  loop_test.placed.cache_clear()
  assert loop_test.curves(killed) == loop_test.curves(straight)
  jax.tree.map(np.testing.assert_array_equal, have, want)
  assert have.keys() == {'adapters', 'selection_bias'}
  assert {x.dtype.name for x in jax.tree.leaves(have)} == {'float32'}
  moved = trees.flatten_names(have['adapters'])
  first = trees.flatten_names(_initial()['adapters'])
  assert all((x != first[name]).any() for name, x in moved.items())
  stored = manager.Checkpoints(killed / 'checkpoints' / 'cpt', keep=None)
  arrays = stored.record(6)['arrays']
  stored.close()
  assert not any('embedding' in name for name in arrays)
  masters = {r['dtype'] for n, r in arrays.items() if n.startswith('params/')}
  assert masters == {'bfloat16'}
  assert decoder.without_base(want) == want
