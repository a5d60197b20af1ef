"""A stage whose masters and moments are in the memory of the host."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.train import loop
from tests.train import adapters_test, loop_test

OPTIONS = dataclasses.replace(
  loop_test.OPTIONS,
  steps=3,
  optimizer=dataclasses.replace(loop_test.OPTIONS.optimizer, name='adam'),
)
SLOW = pytest.mark.slow


def moved(options):
  optimizer = dataclasses.replace(options.optimizer, offload=True)
  return dataclasses.replace(options, optimizer=optimizer)


@pytest.mark.parametrize(
  'mesh, num_experts',
  [
    pytest.param((1, 1, 1), 4, marks=SLOW),
    pytest.param((1, 2, 2), 4, marks=SLOW),
    pytest.param((2, 1, 2), 4, marks=SLOW),
    # Over two of four devices; the others cut the embedding.
    pytest.param((1, 2, 2), 6, marks=SLOW),
  ],
)
def test_it_trains_bit_for_bit(mesh, num_experts, tmp_path, monkeypatch):
  moe = dataclasses.replace(loop_test.MODEL.moe, num_experts=num_experts)
  model = dataclasses.replace(loop_test.MODEL, moe=moe)
  monkeypatch.setattr(loop_test, 'MODEL', model)
  loop_test.placed.cache_clear()
  train = lambda folder, options: loop_test.train(
    folder,
    options=options,
    mesh=mesh,
    initial=loop_test.initial_variables(model),
  )
  have = train(tmp_path / 'moved', moved(OPTIONS))
  want = train(tmp_path / 'here', OPTIONS)
  loop_test.placed.cache_clear()
  jax.tree.map(np.testing.assert_array_equal, have, want)
  curves = [loop_test.curves(tmp_path / name) for name in ('moved', 'here')]
  assert curves[0] == curves[1]


@SLOW
def test_it_resumes_bit_for_bit(tmp_path):
  straight, killed = tmp_path / 'straight', tmp_path / 'killed'
  options = dataclasses.replace(moved(OPTIONS), steps=6)
  want = loop_test.train(straight, options=options)
  with pytest.raises(KeyboardInterrupt):
    stream = loop_test.CountingStream(stop_at=4)
    loop_test.train(killed, options=options, stream=stream)
  have = loop_test.train(killed, options=options)
  assert loop_test.curves(killed) == loop_test.curves(straight)
  jax.tree.map(np.testing.assert_array_equal, have, want)


@SLOW
def test_adapters_are_moved_and_frozen_weights_are_not(tmp_path, monkeypatch):
  model = dataclasses.replace(
    loop_test.MODEL, adapters=model_config.AdapterConfig(attention=3, routed=2)
  )
  monkeypatch.setattr(adapters_test, 'MODEL', model)
  monkeypatch.setattr(loop_test, 'MODEL', model)
  loop_test.placed.cache_clear()
  train = lambda folder, options: loop_test.train(
    folder, options=options, initial=adapters_test._initial()
  )
  options = dataclasses.replace(adapters_test.OPTIONS, steps=3)
  programs = loop.make_programs(moved(options), model, loop_test.placed())
  places = jax.tree.map(lambda leaf: leaf.sharding.memory_kind, programs.like)
  assert set(jax.tree.leaves(places.params)) == {'pinned_host'}
  assert set(jax.tree.leaves(places.base)) == {'device'}
  moments = {
    kind
    for name, kind in trees.flatten_names(places.opt_state).items()
    if 'count' not in name
  }
  assert moments == {'pinned_host'}
  have = train(tmp_path / 'moved', moved(options))
  want = train(tmp_path / 'here', options)
  loop_test.placed.cache_clear()
  jax.tree.map(np.testing.assert_array_equal, have, want)
